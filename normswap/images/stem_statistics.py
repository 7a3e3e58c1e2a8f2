"""What reaches the first norm of a network that keeps statistics: it tells how images were prepared in training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from normswap.layers import affine
from normswap.models import calling
from normswap.models.modes import evaluating, hooked


class _SeenError(Exception):
    """Ends a forward at the first norm."""


@torch.inference_mode()
def at_first_norm(model: nn.Module, images: Tensor) -> tuple[nn.Module, Tensor] | None:
    """The first norm with statistics of its own, and what reaches it of images (N, C, H, W), as it is in eval mode.

    None where there is none, or the network does not run on them.
    """
    with evaluating(model), _first_norm(model) as seen:
        try:
            calling.form(model).of(images).like(model).call(model)
        except _SeenError:
            pass
        except Exception:  # whatever the network raises: others will say what is wrong
            return None
    return seen[0] if seen else None


@contextmanager
def _first_norm(model: nn.Module) -> Iterator[list[tuple[nn.Module, Tensor]]]:
    """Runs of the network end at its first norm with statistics of its own, which is handed out with its input."""
    seen: list[tuple[nn.Module, Tensor]] = []

    def look(module: nn.Module, args: tuple[object, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            seen.append((module, args[0]))
            raise _SeenError

    with hooked(norm.register_forward_pre_hook(look) for norm in model.modules() if affine.has_moments(norm)):
        yield seen
