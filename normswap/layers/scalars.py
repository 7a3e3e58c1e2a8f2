"""One number at the end of a residual branch, learned or fixed, and the scalar biases of Fixup."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from normswap.copying import doubled
from normswap.layers import reparametrized
from normswap.layers.folded import FoldOptions, folded
from normswap.layers.placeholders import Chain, Vacant, out_of_place
from normswap.layers.planned_layer import Linearity, OwnLayer, PlannedLayer
from normswap.sites import affine
from normswap.sites.activations import is_activation

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Scale(PlannedLayer, OwnLayer):
    """One learnable scalar on a residual branch: y = alpha * x, or alpha * x + bias.

    This is SkipInit (De & Smith 2020, section 2.2). Appendix F adds one scalar bias between the
    residual sum and the ReLU of a v1 network. A bias at the end of the branch does the same.
    """

    AFFINE = SCALES_BRANCH = True
    OUTCOME = "scalar"
    ROLES = {"alpha": "alpha", "bias": "scalar_bias"}
    # TorchScript reads annotations when it compiles, and those of this file are text by then.
    if TYPE_CHECKING:
        alpha: Tensor

    def __init__(self, alpha: float, *, bias: bool = False, like: Tensor | None = None) -> None:
        super().__init__()
        if like is None:
            like = torch.empty(0)

        self.alpha = nn.Parameter(torch.full((1,), alpha, dtype=like.dtype, device=like.device))
        self.bias = nn.Parameter(torch.zeros_like(self.alpha)) if bias else None

    @property
    def learns(self) -> bool:
        return isinstance(self.alpha, nn.Parameter)

    def forward(self, x: Tensor) -> Tensor:
        y = self.alpha.to(x) * x
        if self.bias is not None:
            y = y + self.bias.to(x)
        return y

    def extra_repr(self) -> str:
        return "bias=True" if self.bias is not None else ""

    def as_affine(self) -> tuple[Tensor, Tensor]:
        scale = self.alpha.detach().double()
        return scale, doubled(self.bias, torch.zeros_like(scale))

    @classmethod
    def replacing(
        cls, old: nn.Module, *, like: Tensor, alpha: float, bias: bool = False, fresh: bool = False
    ) -> nn.Module:
        """Return the scalar that ends a residual branch, in place of the module that ended it.

        If that module is a norm with an activation, the activation is kept in front of the scalar.

        Args:
            old: The module that ends the branch. If it is a `Scale`, its bias is kept.
            like: An empty tensor with the dtype and device of the new tensors.
            alpha: The scalar's value.
            bias: Whether the scalar has a bias.
            fresh: Whether the bias starts at 0 even if `old` has one.
        """
        scale = cls(alpha, bias=bias, like=like)
        if isinstance(old, Scale) and old.bias is not None and scale.bias is not None and not fresh:
            scale.bias.copy_(old.bias)

        act = affine.copied_activation(old)
        if act is None:
            return scale
        # `old` is a norm with this activation. Without the norm, the activation reads a tensor that
        # other layers may read, so it must not work in place. `Vacant` says that a norm stood here.
        return Chain(Vacant(out_of_place(act)), scale)


class FixedScale(Scale):
    """One scalar that does not learn: y = alpha x.

    It is a constant of a residual block y = a x + b f(x), for instance: the factor a or b.
    """

    def __init__(self, alpha: float, *, bias: bool = False, like: Tensor | None = None) -> None:
        super().__init__(alpha, bias=bias, like=like)
        value = self.alpha.detach()
        del self.alpha
        self.register_buffer("alpha", value)


class ScalarBias(PlannedLayer, OwnLayer):
    """One learnable scalar before an activation: y = act(x + bias) (Fixup, Zhang et al. 2019)."""

    AFFINE = True
    ROLES = {"bias": "scalar_bias"}

    def __init__(self, bias: Tensor, act: nn.Module | None = None) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.bias.to(x)
        return self.activated(x)

    def as_affine(self) -> tuple[Tensor, Tensor]:
        return torch.ones_like(self.bias).double(), self.bias.detach().double()

    @classmethod
    def replacing(cls, old: nn.Module, *, like: Tensor) -> ScalarBias:
        """Return a bias of 0, followed by the activation.

        Args:
            old: The activation, or a norm that has one.
            like: An empty tensor with the dtype and device of the bias.
        """
        act = affine.copied_activation(old)
        if is_activation(old):
            act = copy.deepcopy(old)
        return cls(torch.zeros(1).to(like), act)


class Shifted(PlannedLayer):
    """A linear layer that absorbs its neighbours and adds one learnable scalar to its input.

    The scalar is 0 at first.
    """

    @classmethod
    def replacing(
        cls,
        old: Linearity,
        *reads: nn.Module,
        like: Tensor,
        **fold_options: Unpack[FoldOptions],
    ) -> nn.Module:
        """Return a copy of a layer that has absorbed its neighbours and adds a scalar to its input.

        Args:
            old: The linear layer or convolution.
            reads: The neighbours, such as a BatchNorm behind the layer.
            like: An empty tensor of the model's dtype. If that is float64, so is the result.
            fold_options: The options of `folded`.
        """
        new = folded(old, reads, like=like, **fold_options)
        # If `old` adds a learnable scalar to its input already, so does its copy.
        if isinstance(new, reparametrized.InputBiased):
            return new
        return reparametrized.InputBiased.of(new)
