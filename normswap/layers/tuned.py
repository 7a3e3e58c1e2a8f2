"""A convolution that absorbs the norm behind it in tune mode: gamma and beta go on learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from normswap.layers.folded import FoldFactors, folded
from normswap.layers.planned_layer import PlannedLayer
from normswap.layers.reparametrized import TunedConv2d
from normswap.layers.site_norm import Floats, Record, SiteNorm
from normswap.plan import AbsorbMode, Absorption

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Tuned(PlannedLayer):
    """A `TunedConv2d` in place of a convolution and the norm behind it."""

    @classmethod
    def replacing(
        cls,
        old: nn.Conv2d,
        *reads: nn.Module,
        like: Tensor,
        takes: Sequence[Absorption],
        mean: Floats = None,
        std: Floats = None,
        settings: Record = None,
        **fold_factors: Unpack[FoldFactors],
    ) -> nn.Module:
        """Return the convolution in tune mode.

        Args:
            old: The convolution.
            reads: The norm behind it, and the neighbours that are folded.
            like: An empty tensor of the model's dtype; if that is float64, so is the result.
            takes: `NORM` for the norm, another mode for each neighbour that is folded.
            mean: The measured mean of the norm's input, where no norm stands (`SiteNorm`).
            std: The measured deviation of the norm's input, where no norm stands.
            settings: Eps, momentum and number of batches that the norm had before.
            fold_factors: Options of `folded`.
        """
        norms: list[nn.Module] = []
        neighbours: list[nn.Module] = []
        neighbour_takes: list[Absorption] = []
        for module, absorption in zip(reads, takes, strict=True):
            if absorption.way is AbsorbMode.NORM:
                norms.append(module)
            else:
                neighbours.append(module)
                neighbour_takes.append(absorption)

        (norm,) = norms
        conv = folded(old, neighbours, like=like, takes=neighbour_takes, **fold_factors)
        live = SiteNorm.replacing(norm, like=like, mean=mean, std=std, settings=settings)
        live.to(conv.weight)

        # The attributes move, as no constructor takes all that a convolution may carry.
        new = TunedConv2d.__new__(TunedConv2d)
        new.__dict__.update(vars(conv))
        new.gamma = live.weight
        new.beta = live.bias
        new.norm_eps = live.eps
        new.register_buffer("running_mean", live.running_mean)
        new.register_buffer("running_var", live.running_var)
        return new
