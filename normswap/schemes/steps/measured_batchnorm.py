"""BatchNorms in a network that never had any, or whose record is lost, with statistics measured on images.

gamma = sqrt(var + eps), beta = mean: in eval mode nothing changes, whatever the statistics are; in training mode the
norms are alive.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from normswap.calibration import channel_moments
from normswap.calibration.fit_task import FitTask
from normswap.errors import RefusedError, VerificationError, spelled
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.layers import measured_norm
from normswap.layers.known_norms import BatchNorm
from normswap.layers.placeholders import Chain
from normswap.layers.site_norm import SiteNorm
from normswap.plan import Outcome, Step
from normswap.schemes import Scheme
from normswap.schemes.parts.norm_places import norm_places
from normswap.schemes.parts.tokenwise import require_no_tokenwise_norms

EPS, MOMENTUM = 1e-5, 0.1  # torch's


def plan(anatomy: Anatomy, *, where: str = "activation") -> PlanBuilder:
    """Plan a BatchNorm after each convolution that `where` names (`norm_places`).

    Raises:
        RefusedError: there is none.
    """
    builder = PlanBuilder(anatomy)
    for path in norm_places(builder, where):
        builder.replace(path, "MeasuredNorm", eps=EPS, momentum=MOMENTUM)
        builder.settle(path, Outcome("norms measured", "gets a norm after it, with statistics measured on images"))
    if not builder.replacements:
        require_no_tokenwise_norms(anatomy, "there is no place for a BatchNorm")
        reaches = "an activation" if where == "activation" else "another layer"
        raise RefusedError(
            "there is no place for a BatchNorm",
            f"no convolution that is called once and has no norm yet reaches {reaches}",
            f"'{spelled('where', 'conv')}' takes every convolution that another layer reads",
        )
    return builder


def fit(task: FitTask) -> tuple[str, ...]:
    """Measure the statistics of each norm; `settle` then makes it the identity."""
    assert task.batches is not None
    norms = {path: norm for path, _, norm in _parts(task.result, task.step)}
    seen = channel_moments.measure(task.result, norms, task.batches, task.progress)
    for path, norm in norms.items():
        if path not in seen.moments:
            continue
        stored, moments = cast(BatchNorm, norm), seen.moments[path]
        stored.running_mean.copy_(moments.mean)
        stored.running_var.copy_(moments.variance)
        if not bool(torch.isfinite(stored.running_var).all()):
            raise VerificationError(f"the variance after {path} is more than {stored.running_var.dtype} holds")
        norm.train(
            task.source.training
        )  # a convolution that was merged from branches may say of itself that it is in training
    settle(task.source, task.result, task.step)
    return (f"the statistics of {len(norms)} norms were measured on {seen.images} images",)


def settle(source: nn.Module, result: nn.Module, step: Step) -> None:
    """Let every norm undo its statistics, in the precision that `result` has."""
    for path, conv, norm in _parts(result, step):
        measured_norm.settle(cast(_ConvNd, source.get_submodule(path)), conv, norm)


def _parts(result: nn.Module, step: Step) -> list[tuple[str, _ConvNd, SiteNorm]]:
    chains = [(edit.path, cast(Chain, result.get_submodule(edit.path))) for edit in step.edits]
    return [(path, cast(_ConvNd, chain.inner), cast(SiteNorm, chain.then)) for path, chain in chains]


SCHEME = Scheme(
    plan,
    paper="Ioffe & Szegedy 2015, arXiv:1502.03167, section 3",
    needs_data=True,
    fit=fit,
    settle=settle,
)
