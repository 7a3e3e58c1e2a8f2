"""Images made from what a network's BatchNorms remember, for where there are none to calibrate on.

A BatchNorm keeps each channel's mean and variance over the images that the network was trained on. Noise with the
spectrum of natural images is changed by gradient descent until a batch of it has these statistics at every BatchNorm
(distilled data, Cai et al. 2020, arXiv:2001.00281; Yin et al. 2020, arXiv:1912.08795, who add a prior against high
frequencies). The descent changes the white noise before the spectrum is put on: steps of one size are then large where
natural images vary much, and no prior is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normswap.calibration import natural_noise
from normswap.errors import OptionError, SourceError, first_line, spelled
from normswap.layers import affine
from normswap.models.calling import Example
from normswap.models.modes import Progress, evaluating, hooked

COUNT, BATCH = 128, 32  # images
STEPS, RATE = 30, 0.2


def _remedy() -> str:
    """Say what to give in their place."""
    return f"Give {spelled('calibrate', metavar='DATA')} (images, no labels needed)"


def make(
    model: nn.Module,
    form: Example,
    size: Sequence[int],
    *,
    seed: int,
    count: int = COUNT,
    progress: Progress | None = None,
) -> list[Tensor]:
    """Batches (N, C, H, W), or of signals or clips, on the network's device and in its dtype; the network stays.

    Args:
        form: how the network is called.
        size: of one image, (C, H, W).
        progress: called with the batches' steps done, and their total.

    Raises:
        OptionError: no norm of the network keeps statistics, or it takes no images.
        SourceError: it has no gradients, or its numbers overflow.
    """
    norms = [m for m in nn.Module.modules(model) if affine.is_batchnorm(m) and affine.refusal(m) is None]
    if not norms:
        raise OptionError(
            "nothing in the network says what its images were like", "no BatchNorm is left in it", _remedy()
        )
    if len(size) < 2:
        raise OptionError(
            "synthetic images are made for networks that take images", f"this one takes {size}", _remedy()
        )
    like = next(p for p in model.parameters() if p.is_floating_point())
    counts = [len(part) for part in torch.arange(count).tensor_split(-(-count // BATCH))]
    made = []
    with evaluating(model), _without_gradients(model), _remembering(norms) as distances:
        for i, number in enumerate(counts):
            white = natural_noise.white(number, size, seed * len(counts) + i).to(like.device)
            level = 1 / natural_noise.coloured(white).std()
            optimizer = torch.optim.Adam([white.requires_grad_()], lr=RATE)
            for step in range(STEPS):
                distances.clear()
                loss = _loss(model, form.of((natural_noise.coloured(white) * level).to(like)), distances)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if progress is not None:
                    progress(i * STEPS + step + 1, len(counts) * STEPS)
            made.append((natural_noise.coloured(white.detach()) * level).to(like))
    return made


def _loss(model: nn.Module, example: Example, distances: list[Tensor]) -> Tensor:
    """How far the batch's statistics are from those that are kept, the mean over all norms.

    Raises:
        SourceError: it has no gradients, or it is not finite.
    """
    try:
        with torch.enable_grad():
            example.call(model)
    except Exception as error:  # whatever the network raises
        raise SourceError("synthetic images cannot be made", first_line(error), _remedy()) from None
    if not distances or not distances[0].requires_grad:
        raise SourceError("synthetic images cannot be made", "nothing is known of the network's gradients", _remedy())
    loss = torch.stack(distances).mean()
    if not bool(torch.isfinite(loss)):
        raise SourceError("synthetic images cannot be made", "the network's numbers overflow on noise", _remedy())
    return loss


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """No parameter asks for a gradient, for a while."""
    asking = [p for p in model.parameters() if p.requires_grad]
    try:
        for parameter in asking:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)


@contextmanager
def _remembering(norms: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """While the network runs, each norm adds how far what reaches it is from what it remembers.

    Per channel, in units of the deviation, the square of the mean's error and of the deviation's, averaged.
    """
    distances: list[Tensor] = []

    def look(norm: Any, args: tuple[Tensor, ...]) -> None:
        x = args[0].to(torch.promote_types(args[0].dtype, torch.float32))
        scale, shift = (value.to(x) for value in affine.read(norm, unit_gamma=True))
        var, mean = torch.var_mean(x, (0, *range(2, x.ndim)), correction=0)
        off = (var * scale.square() + 1e-12).sqrt() - affine.statistics(norm)[1].to(var).sqrt() * scale
        distances.append(((mean * scale + shift).square() + off.square()).mean())

    with hooked(norm.register_forward_pre_hook(look) for norm in norms):
        yield distances
