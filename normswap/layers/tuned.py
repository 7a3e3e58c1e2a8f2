"""A convolution that absorbs the norm behind it in tune mode: gamma and beta go on learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from normswap.layers.folded import FoldFactors, folded
from normswap.layers.planned_layer import PlannedLayer
from normswap.layers.reparametrized import TunedConv2d
from normswap.layers.site_norm import KnownMoments, SiteNorm
from normswap.plan import AbsorbMode, Absorption

if TYPE_CHECKING:
    from typing_extensions import Unpack


class TunedOptions(FoldFactors, KnownMoments, total=False):
    """The keyword arguments of `Tuned.replacing`: how a convolution is folded, and its norm.

    `gain`, `in_gain`, `bake` and `centred` are options of `folded`. `mean`, `std` and `settings`
    are options of `SiteNorm.replacing`.
    """


class Tuned(PlannedLayer):
    """A `TunedConv2d` in place of a convolution and the norm behind it."""

    @classmethod
    def replacing(
        cls,
        old: nn.Conv2d,
        *reads: nn.Module,
        like: Tensor,
        takes: Sequence[Absorption],
        **options: Unpack[TunedOptions],
    ) -> nn.Module:
        """Return the convolution in tune mode: gamma and beta learn, statistics are frozen.

        Args:
            old: The convolution.
            reads: The norm behind it, and the neighbours that are folded.
            like: An empty tensor of the model's dtype. If that is float64, so is the result.
            takes: How each of `reads` is absorbed, in their order. It is `AbsorbMode.NORM` for the
                norm, and another mode for a neighbour that is folded.
            options: Options of `folded` and of `SiteNorm.replacing`.
        """
        # The norm becomes part of the layer; the neighbours are folded into its weight.
        norms: list[nn.Module] = []
        neighbours: list[nn.Module] = []
        neighbour_takes: list[Absorption] = []
        for module, absorption in zip(reads, takes, strict=True):
            if absorption.way is AbsorbMode.NORM:
                norms.append(module)
            else:
                neighbours.append(module)
                neighbour_takes.append(absorption)

        # The options are divided: those of the norm, and those of folding.
        (norm,) = norms
        measured = KnownMoments(
            mean=options.pop("mean", None),
            std=options.pop("std", None),
            settings=options.pop("settings", None),
        )
        factors = cast(FoldFactors, options)
        conv = folded(old, neighbours, like=like, takes=neighbour_takes, **factors)
        batchnorm = SiteNorm.of_any_size(norm, like=like, **measured)
        batchnorm.to(conv.weight)

        # A convolution may carry more attributes than a constructor takes, such as hooks, so all of
        # them are moved to an instance that no constructor has filled.
        new = TunedConv2d.__new__(TunedConv2d)
        new.__dict__.update(vars(conv))
        new.gamma = batchnorm.weight
        new.beta = batchnorm.bias
        new.norm_eps = batchnorm.eps
        new.register_buffer("running_mean", batchnorm.running_mean)
        new.register_buffer("running_var", batchnorm.running_var)
        return new
