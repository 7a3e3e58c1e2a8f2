"""The verdict on a result: it is right, or the source is one that nothing can equal, or the result is wrong."""

from __future__ import annotations

import torch

from normswap.errors import VerificationError
from normswap.models.default_device import cpu_by_default
from normswap.surgery import comparison
from normswap.surgery.network import Network
from normswap.surgery.report import Report
from normswap.surgery.running import Outputs, run


def require_passed(network: Network, report: Report, scheme: str) -> None:
    """Check that the report says that the result is right.

    Args:
        network: the source, which is looked at where the result is not right.

    Raises:
        VerificationError: the source gives no finite numbers, or others each time; or the result is wrong.
    """
    if report.passed:
        return
    _check_source(network)
    worst = max(report.logits, key=lambda error: error.relative_l2 / report.tolerance[error.precision])
    raise VerificationError(
        f"the result of {scheme} is wrong: relative L2 error {worst.relative_l2:.1e} at the logits ({worst.precision})",
        f"allowed: {report.tolerance[worst.precision]:.0e}" if report.exact else "it is not finite",
        "Nothing was written; if the plan was not edited by hand, this is a bug of normswap",
    )


@cpu_by_default()
def _check_source(network: Network) -> None:
    for example in network.calls:
        try:
            one, two = (run(network.module, example)[0] for _ in range(2))
        except Exception:  # a second size of noise, which the network need not take
            continue
        if not _is_finite(one):
            shown = all(bool(torch.isfinite(tensor).all()) for tensor in example.tensors())
            held = f"on {network.described}" if shown else "there are such numbers in the inputs"
            remedy = "Its weights are too large, or it needs other inputs: `inputs=`" if shown else ""
            raise VerificationError("the network itself gives NaN or infinite numbers", held, remedy)
        precision = str(network.dtype).removeprefix("torch.")
        same = max(comparison.FLOAT32_TOLERANCE, torch.finfo(network.dtype).eps)  # what is allowed cannot decide it
        if comparison.worst(precision, example.images, one, two).relative_l2 > same:
            remedy = "Let it draw none in eval mode: `if self.training`"
            what = "the network gives another answer each time it is run on the same input"
            raise VerificationError(what, "its forward draws random numbers, or keeps a state", remedy)


def _is_finite(outputs: Outputs) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in outputs.values())
