"""`convert` as editors and type checkers see it: each scheme with its own options.

A name that they do not know, of a scheme that somebody has registered or held in a variable, takes the options of every
scheme by keyword, and its own as `**options`, a dict whose values have no type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypedDict, overload

from torch import nn

from normswap.models.calling import Inputs
from normswap.models.modes import Progress
from normswap.surgery.carrying_out import Conversion
from normswap.surgery.network import Batches, Network

if TYPE_CHECKING:
    from typing_extensions import Unpack

class EveryOption(TypedDict, total=False):
    """Of every scheme: see `conversion.convert`."""

    inputs: Inputs
    input_size: Sequence[int] | None
    seed: int | None
    calibrate: Batches | None
    progress: Progress | None
    only: str | Sequence[str]
    skip: str | Sequence[str]
    purpose: Literal["federated", "opacus"] | None

# --- made from the options' records by tests/surgery/test_typed_convert.py

class BatchnormOptions(EveryOption, total=False):
    """Of `batchnorm`."""

    where: Literal["norms", "activation", "conv"]
    like: str | nn.Module
    ghost_batch: int

class CenteredWeightnormOptions(EveryOption, total=False):
    """Of `centered-weightnorm`."""

    mean: Literal["fit", "keep"]
    stem: Literal["fit", "keep"]
    depthwise: Literal["fit", "keep"]

class DytOptions(EveryOption, total=False):
    """Of `dyt`."""

    bend: float

class FixupOptions(EveryOption, total=False):
    """Of `fixup`."""

    init: Literal["keep", "fixup"]

class FoldedOptions(EveryOption, total=False):
    """Of `folded`."""

    branches: Literal["merge", "keep"]

class GroupnormOptions(EveryOption, total=False):
    """Of `groupnorm`."""

    groups: int
    group_size: int
    steady: float

class LayernormOptions(EveryOption, total=False):
    """Of `layernorm`."""

    steady: float

class NfOptions(EveryOption, total=False):
    """Of `nf`."""

    mean: Literal["fit", "keep"]
    stem: Literal["fit", "keep"]
    depthwise: Literal["fit", "keep"]

class RegularizedSkipinitOptions(EveryOption, total=False):
    """Of `regularized-skipinit`."""

    alpha: Literal["match", "inv-sqrt-depth"] | float
    dropout: float

class ResidualScaleOptions(EveryOption, total=False):
    """Of `residual-scale`."""

    rule: Literal["balduzzi", "szegedy", "hanin", "arpit", "rescale"]

class SkipinitOptions(EveryOption, total=False):
    """Of `skipinit`."""

    alpha: Literal["match", "inv-sqrt-depth"] | float

class TypedConvert(Protocol):
    """`convert`, with the options of each scheme."""

    @overload
    def __call__(
        self, model: nn.Module | Network | Conversion, to: Literal["batchnorm"], **options: Unpack[BatchnormOptions]
    ) -> Conversion: ...
    @overload
    def __call__(
        self,
        model: nn.Module | Network | Conversion,
        to: Literal["centered-weightnorm"],
        **options: Unpack[CenteredWeightnormOptions],
    ) -> Conversion: ...
    @overload
    def __call__(
        self, model: nn.Module | Network | Conversion, to: Literal["dyt"], **options: Unpack[DytOptions]
    ) -> Conversion: ...
    @overload
    def __call__(
        self, model: nn.Module | Network | Conversion, to: Literal["fixup"], **options: Unpack[FixupOptions]
    ) -> Conversion: ...
    @overload
    def __call__(
        self, model: nn.Module | Network | Conversion, to: Literal["folded"], **options: Unpack[FoldedOptions]
    ) -> Conversion: ...
    @overload
    def __call__(
        self, model: nn.Module | Network | Conversion, to: Literal["groupnorm"], **options: Unpack[GroupnormOptions]
    ) -> Conversion: ...
    @overload
    def __call__(
        self, model: nn.Module | Network | Conversion, to: Literal["layernorm"], **options: Unpack[LayernormOptions]
    ) -> Conversion: ...
    @overload
    def __call__(
        self, model: nn.Module | Network | Conversion, to: Literal["nf"], **options: Unpack[NfOptions]
    ) -> Conversion: ...
    @overload
    def __call__(
        self,
        model: nn.Module | Network | Conversion,
        to: Literal["regularized-skipinit"],
        **options: Unpack[RegularizedSkipinitOptions],
    ) -> Conversion: ...
    @overload
    def __call__(
        self,
        model: nn.Module | Network | Conversion,
        to: Literal["residual-scale"],
        **options: Unpack[ResidualScaleOptions],
    ) -> Conversion: ...
    @overload
    def __call__(
        self, model: nn.Module | Network | Conversion, to: Literal["skipinit"], **options: Unpack[SkipinitOptions]
    ) -> Conversion: ...
    @overload
    def __call__(
        self,
        model: nn.Module | Network | Conversion,
        to: Literal["affine", "frozen-bn", "instancenorm", "rmsnorm", "spectralnorm", "tune", "weightnorm", "unfold"],
        **options: Unpack[EveryOption],
    ) -> Conversion: ...
    @overload
    def __call__(
        self, model: nn.Module | Network | Conversion, to: str, **options: Unpack[EveryOption]
    ) -> Conversion: ...

convert: TypedConvert
