"""Calibration images made from a network's BatchNorm statistics, where the user has none.

Gradient descent changes noise with the spectrum of natural images until each BatchNorm sees its running mean and
variance (Cai et al. 2020, arXiv:2001.00281; Yin et al. 2020, arXiv:1912.08795).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from normswap.calibration import natural_noise
from normswap.errors import OptionError, SourceError, explained, spelled
from normswap.layers import affine
from normswap.models.calling import Example
from normswap.models.modes import Progress, hooked, undisturbed

# So many images are made, and so many at a time.
COUNT, BATCH = 128, 32
STEPS, RATE = 30, 0.2


@dataclass(frozen=True, eq=False)
class SyntheticImages:
    """Batches of images that are made, by calling `make`, when they are first read."""

    make: Callable[[], list[Tensor]]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._batches)

    @cached_property
    def _batches(self) -> list[Tensor]:
        return self.make()


def make(
    model: nn.Module, form: Example, size: Sequence[int], *, seed: int, progress: Progress | None = None
) -> list[Tensor]:
    """Batches of images of `size` (C, H, W), or of signals or clips, on the network's device and in its dtype.

    Raises OptionError: no norm keeps statistics, or the network takes more than images; SourceError: it has no
    gradients, or its numbers overflow.
    """
    remedy = f"Give {spelled('calibrate', metavar='DATA')} (images, no labels needed)"
    norms = [m for m in nn.Module.modules(model) if affine.is_batchnorm(m) and affine.refusal(m) is None]
    if not norms:
        raise OptionError("synthetic images cannot be made", "no BatchNorm is left in the network", remedy)
    if not form.only_images or len(size) < 2:
        raise OptionError("synthetic images cannot be made", "the network takes more than images, or none", remedy)
    like = next(p for p in model.parameters() if p.is_floating_point())
    batches: list[Tensor] = []
    total = COUNT // BATCH
    for i in range(total):
        generator = torch.Generator().manual_seed(seed * total + i)
        white = torch.randn(BATCH, *size, generator=generator).to(like.device).requires_grad_()
        level = 1 / natural_noise.coloured(white.detach()).std()
        optimizer = torch.optim.Adam([white], lr=RATE)
        with undisturbed(model), torch.inference_mode(False), torch.enable_grad(), _distances(norms) as distances:
            for step in range(STEPS):
                distances.clear()
                with explained(SourceError, "synthetic images cannot be made", remedy):
                    form.of((natural_noise.coloured(white) * level).to(like)).call(model)
                    loss = torch.stack(distances).mean()
                    (white.grad,) = torch.autograd.grad(loss, white)
                if not bool(torch.isfinite(loss)):
                    raise SourceError("synthetic images cannot be made", "the network's numbers overflow", remedy)
                optimizer.step()
                if progress is not None:
                    progress(i * STEPS + step + 1, total * STEPS)
        batches.append((natural_noise.coloured(white.detach()) * level).to(like))
    return batches


@contextmanager
def _distances(norms: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """In a run each norm appends the mean squared errors of its input's mean and deviation, in running deviations."""
    distances: list[Tensor] = []

    def compare(norm: Any, args: tuple[Tensor, ...]) -> None:
        x = args[0].to(torch.promote_types(args[0].dtype, torch.float32))
        scale, shift = (value.to(x) for value in affine.read(norm, unit_gamma=True))
        variance, mean = torch.var_mean(x, (0, *range(2, x.ndim)), correction=0)
        kept_deviation = affine.statistics(norm)[1].to(variance).sqrt() * scale
        deviation_error = (variance * scale.square() + 1e-12).sqrt() - kept_deviation
        distances.append(((mean * scale + shift).square() + deviation_error.square()).mean())

    with hooked(norm.register_forward_pre_hook(compare) for norm in norms):
        yield distances
