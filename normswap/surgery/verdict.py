"""The verdict on a result: it is right, or the source gives no numbers that it could equal, or the result is wrong."""

from __future__ import annotations

import torch

from normswap.errors import VerificationError
from normswap.surgery.network import Network
from normswap.surgery.report import Report
from normswap.surgery.running import run


def require_passed(network: Network, report: Report, scheme: str) -> None:
    """Check that the report says that the result is right.

    Args:
        network: the source, which is looked at where the result is not right.

    Raises:
        VerificationError: the source gives no finite numbers; or the result of the scheme is wrong.
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


def _check_source(network: Network) -> None:
    outputs, _ = run(network.module, network.calls[0])
    if not all(bool(torch.isfinite(value).all()) for value in outputs.values()):
        remedy = "Its weights are too large, or it needs other inputs: `inputs=`"
        raise VerificationError("the network itself gives NaN or infinite numbers", f"on {network.described}", remedy)
