"""`normswap.verify`: how far one network is from another."""

from collections.abc import Sequence

from torch import nn

from normswap.models import network_input
from normswap.models.calling import Inputs
from normswap.proof.comparison import compare_networks
from normswap.proof.verdict import Report
from normswap.surgery.network import Network
from normswap.surgery.reverification import decided_by_plan


def verify(
    source: nn.Module | Network,
    result: nn.Module,
    inputs: Inputs = None,
    *,
    input_size: Sequence[int] | None = None,
    exact: bool = True,
    seed: int | None = None,
) -> Report:
    """Measure how far `result` is from `source`, in their own precision. Neither is changed.

    Args:
        source: The network that `result` is compared with, or a `Network` record of it.
        result: The network that is measured.
        inputs: The inputs that both run on: a tensor, a tuple of arguments, a dict of keywords, or
            a list of batches of these. By default they are N(0, 1) noise.
        input_size: The largest size (C, H, W) of the noise. By default it is the network's own.
        exact: Whether both should compute the same. If not, the report passes if the numbers are
            finite.
        seed: The seed of the noise.

    Returns:
        The errors by precision and input size, the errors that are allowed, and the verdict.
    """
    network = Network.of(source, inputs=inputs, size=input_size, seed=seed)
    module = network_input.require_module(result)
    report = compare_networks(network, module, exact=exact, traced=False)
    return decided_by_plan(network, module, report, traced=False)
