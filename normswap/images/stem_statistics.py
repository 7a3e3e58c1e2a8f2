"""What reaches the first norm of a network that keeps statistics: it tells how images were prepared in training."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor, nn

from normswap.layers import affine
from normswap.models import calling
from normswap.models.modes import hooked, undisturbed


class _SeenError(Exception):
    """Ends a forward at the first norm."""


@torch.inference_mode()
def at_first_norm(model: nn.Module, images: Tensor) -> tuple[nn.Module, Tensor] | None:
    """The first norm with statistics of its own, and what reaches it of images (N, C, H, W), as it is in eval mode.

    None where there is none, or the network does not run on them.
    """
    reached: list[tuple[nn.Module, Tensor]] = []

    def look(module: nn.Module, args: tuple[object, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            reached.append((module, args[0]))
            raise _SeenError

    norms = [module for module in model.modules() if affine.has_moments(module)]
    hooks = hooked(norm.register_forward_pre_hook(look) for norm in norms)
    # The end at the norm is suppressed, and whatever the network raises: others will say it.
    with suppress(Exception), undisturbed(model), hooks:
        calling.form(model).of(images).like(model).call(model)
    return reached[0] if reached else None
