"""Recalibrate: the same network with BatchNorm statistics of other images, as one more step of its plan."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from normswap.calibration.population import norms_of
from normswap.errors import RefusedError
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

    Raises:
        RefusedError: no BatchNorm with running statistics.
        SourceError: unusable images, or batches of less than two.
    """
    if isinstance(batches, str | ImageMaker):
        raise RefusedError("cannot recalibrate without images", "statistics of noise are no network's")
    network = Network.of(model, inputs=inputs, size=size, seed=seed, calibrate=batches, progress=progress)
    norms_of(network.module)
    return carry_out(network, Step("recalibrate", record, ()))
