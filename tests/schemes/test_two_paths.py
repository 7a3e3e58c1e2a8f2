"""A network whose forward takes another path at another size is converted as any other.

Both paths are recorded, so each layer has a call in each record, and is called once by a forward.
"""

from collections.abc import Callable

import pytest
import torch
from support.hand_written_networks import Net, PostAct, PreAct
from support.lived_in_networks import distance, lived_in, run
from torch import Tensor, nn

import normswap
from normswap.plan import Edit
from normswap.surgery.conversion import plan_steps
from normswap.surgery.network import Network

SMALL = (2, 3, 33, 33)
LARGE = (1, 3, 65, 65)


class TwoPaths(Net):
    """A network that mirrors large images."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] > 40:
            x = x.flip(-1)
        return super().forward(x)


def source(kind: Callable[[type[nn.Module]], nn.Module], block: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return lived_in(kind(block), torch.randn(4, 3, 33, 33, dtype=torch.float64))


def edits(network: Network, scheme: str) -> list[Edit]:
    planned: list[Edit] = []
    for step, _ in plan_steps(network, scheme):
        planned += step.edits
    return planned


@pytest.mark.parametrize("block", [PreAct, PostAct])
@pytest.mark.parametrize(
    "scheme",
    ["dyt", "fixup", "groupnorm", "nf", "regularized-skipinit", "residual-scale", "skipinit"],
)
def test_its_plan_is_that_of_one_path(scheme: str, block: type[nn.Module]) -> None:
    images = torch.randn(SMALL, dtype=torch.float64)
    one = Network.of(source(Net, block), inputs=images)
    two = Network.of(source(TwoPaths, block), inputs=images)

    assert edits(two, scheme) == edits(one, scheme)

    assert len(two.anatomy.traced.alternatives) == 1
    assert not one.anatomy.traced.alternatives


@pytest.mark.parametrize("scheme", ["skipinit", "residual-scale"])
def test_its_function_stays_on_both_paths(scheme: str) -> None:
    network = source(TwoPaths, PostAct)

    result = normswap.convert(network, scheme, input_size=SMALL[1:])

    assert result.report.verdict == "PROVED"
    for size in (SMALL, LARGE):
        images = torch.randn(size, dtype=torch.float64)
        assert distance(run(network, images), run(result.model, images)) <= 1e-12
