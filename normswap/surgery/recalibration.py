"""Recalibrate: the same network with BatchNorm statistics of other images, as one more step of its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from normswap import copying
from normswap.calibration.population import norms_of
from normswap.errors import RefusedError
from normswap.models import network_input
from normswap.models.calling import Inputs
from normswap.models.default_device import cpu_by_default
from normswap.models.modes import Progress
from normswap.plan import Step
from normswap.surgery.carrying_out import Conversion, carry_out
from normswap.surgery.made_images import Batches, ImageMaker
from normswap.surgery.network import Network


@cpu_by_default()
def recalibrate(
    model: nn.Module | Network,
    batches: Batches,
    *,
    inputs: Inputs = None,
    size: Sequence[int] | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
    **record: object,
) -> Conversion:
    """`model`, which is not changed, with population statistics estimated on `batches` (`population`).

    Args:
        batches: images (N, C, H, W), (images, labels), or what `inputs` may be, in batches of one size, or a function
            that gives them.
        inputs: as in `convert`: what the change is measured on, and how the network is called; by default noise.
        size: (C, H, W) of the noise.
        progress: called after each batch with the batches done and their total.
        record: what the plan shall remember of the data: data, samples, batch_size.

    Statistics that are broken (NaN, a variance below zero) are no obstacle, as new ones take their place.

    Raises:
        RefusedError: no BatchNorm with running statistics.
        SourceError: unusable images, or batches of less than two.
    """
    if isinstance(batches, str | ImageMaker):
        raise RefusedError("cannot recalibrate without images", "statistics of noise are no network's")
    broken = [] if isinstance(model, Network) else _broken(model)
    if broken and not isinstance(model, Network):
        model = _reset(model, broken)
    network = Network.of(model, inputs=inputs, size=size, seed=seed, calibrate=batches, progress=progress)
    norms_of(network.module)
    done = carry_out(network, Step("recalibrate", record, ()))
    if not broken:
        return done
    note = f"the statistics of {len(broken)} norms were broken ({', '.join(broken[:3])}); the report is about 0 and 1"
    return replace(done, notes=(*done.notes, note))


def _broken(model: nn.Module) -> list[str]:
    modules = nn.Module.named_modules(model) if isinstance(model, nn.Module) else ()
    return [path for path, module in modules if network_input.has_broken_statistics(module)]


def _reset(model: nn.Module, paths: list[str]) -> nn.Module:
    """A copy with mean 0 and variance 1 in place of statistics that cannot be run; they are measured anew anyway."""
    other = copying.duplicate(model, {})
    for path in paths:
        norm = other.get_submodule(path)
        norm.get_buffer("running_mean").zero_()
        norm.get_buffer("running_var").fill_(1.0)
    return other
