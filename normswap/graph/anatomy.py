"""The result of `inspect` as records: norms with their roles, residual blocks, and the graph they
were read from.

Which of its modules a conversion may change, patterns say. A pattern is a dotted path in which `*`,
`?` and `[...]` stand for anything, dots too (as in `fnmatch`). It names a module and all below it:
`layer3`, `layer3.*.bn1`, `*.downsample`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, fx, nn

from normswap.errors import OptionError, near, spelled
from normswap.graph.tracing import LINEAR, Traced
from normswap.layers import affine
from normswap.layers.known_norms import Statistics
from normswap.layers.placeholders import Chain
from normswap.plan import Body
from normswap.provenance import Provenance


@dataclass(frozen=True)
class Norm:
    """One normalization layer (the module, however often it is called).

    Args:
        kind: the name of its class.
        block: the path of the block that it belongs to.
        statistics: their source in eval mode.
        called: how often forward calls it.
        averages: a BatchNorm that is fitted to images can replace it.
    """

    path: str
    kind: str
    channels: int
    role: str
    block: str | None
    statistics: Statistics
    called: int
    averages: bool

    @property
    def is_batchnorm(self) -> bool:
        """Whether it normalizes with population statistics in eval mode."""
        return self.statistics is Statistics.POPULATION


@dataclass(frozen=True)
class AffineMap:
    """A called module that is y = act(s x + t) per channel in eval mode: a norm, or a layer of an
    earlier conversion.

    Args:
        holds_statistics: it is a norm, or has a norm's statistics, and may become a plain scale and
            shift.
        refusal: why s and t cannot be read and moved; None where they can.
    """

    path: str
    module: nn.Module = field(repr=False, compare=False)
    holds_statistics: bool
    refusal: str | None


@dataclass(frozen=True)
class Block:
    """One residual sum, y = skip + branch.

    Args:
        path: the module whose forward adds; several sums in one module are told apart as `path+2`,
            `path+3` ...
        stage: the path of the stage it belongs to.
        skip: `identity`, `projection` (has a convolution) or `other` (pooling, padding).
        order: `post` (an activation follows the sum), `pre` (the branch begins with norm or
            activation) or `linear`.
        tail: path of the innermost module that returns the branch's value, where a scalar goes;
            None if no module does.
        norms: norms on the branch and on the skip, in order of the forward pass.
        last: the branch's last norm.
        gate: the module that multiplies the branch by a function of itself (squeeze-excite and the
            like).
        drop_path: the module that drops the branch at random in training.
    """

    path: str
    stage: str
    skip: str
    order: str
    tail: str | None
    norms: tuple[str, ...]
    last: str | None
    gate: str | None
    drop_path: str | None
    total: fx.Node = field(repr=False, compare=False)
    branch: fx.Node = field(repr=False, compare=False)


@dataclass(frozen=True)
class Anatomy:
    """The result of `inspect`.

    Args:
        blocks: the residual blocks in order of the forward pass.
        norms: every norm, in order of the forward pass; unreached ones last.
        maps: every module that is an affine map in eval mode, in order of the forward pass.
        refusals: (path, reason) of what could not be looked into.
        classifier: path of the last linear layer before the output.
        dropout: the place of the dropout before it: a module path, or that of a `drop_rate`
            attribute.
        traced: the graph that all this was read from.
        features: whether features come out, such as an encoder's, and no scores of classes.
        widths: the numbers of channels of the linear layers that give outputs.
        outside: paths of the modules that a conversion leaves as they are (`restrict`).
        provenance: where the network is from, what was done to it, and the norms it once had.
    """

    blocks: tuple[Block, ...]
    norms: tuple[Norm, ...]
    refusals: tuple[tuple[str, str], ...]
    classifier: str | None
    dropout: str | None
    traced: Traced = field(repr=False, compare=False)
    maps: tuple[AffineMap, ...] = ()
    features: bool = False
    widths: frozenset[int] = frozenset()
    outside: frozenset[str] = frozenset()
    provenance: Provenance = field(default_factory=Provenance, repr=False, compare=False)

    def takes_part(self, path: str) -> bool:
        """Whether what sits at the path of a module, or of a block, may be converted."""
        return path.partition("+")[0] not in self.outside

    @property
    def included_blocks(self) -> tuple[Block, ...]:
        """The blocks that may be converted."""
        return tuple(block for block in self.blocks if self.takes_part(block.path))

    def current_path(self, original: str) -> str:
        """The path that the place of a norm has now: a `Chain` calls its first layer `inner`."""
        while isinstance(self.traced.modules.get(original), Chain):
            original = f"{original}.inner"
        return original

    def original_path(self, path: str) -> str:
        """The path in the source of the norm at `path`, which may be one layer of a `Chain`."""
        parts = path.split(".")
        while (
            parts
            and parts[-1] in ("inner", "then")
            and ".".join(parts) not in self.provenance.original_paths
        ):
            parts.pop()
        return ".".join(parts)

    def kept_moments(self, path: str) -> tuple[Tensor, Tensor] | None:
        """Mean and deviation per channel of the output of the norm that stood at `path`, if they
        are known.
        """
        original = self.original_path(path)
        norms = self.provenance.norms
        names = ("running_mean", "weight", "bias", "output_mean", "output_std")
        mean, gamma, beta, out_mean, out_std = (norms.get(f"{original}.{name}") for name in names)
        if mean is None:
            return None
        if out_mean is not None and out_std is not None:
            return out_mean.double(), out_std.double()
        return affine.output_moments(mean, gamma, beta)


def restrict(anatomy: Anatomy, only: Sequence[str] = (), skip: Sequence[str] = ()) -> Anatomy:
    """The same anatomy, where only the modules named by `only`, without those named by `skip`, take
    part.

    Raises OptionError: a pattern names no norm, block or linear layer.
    """
    modules = anatomy.traced.modules
    homes = {id(modules[block.path.partition("+")[0]]) for block in anatomy.blocks}
    homes |= {id(modules[norm.path]) for norm in anatomy.norms}
    paths = [
        path
        for path, module in modules.items()
        if id(module) in homes or isinstance(module, LINEAR)
    ]
    for option, patterns in (("only", only), ("skip", skip)):
        for pattern in patterns:
            if not any(matches(pattern, path) for path in paths):
                what = (
                    f"{spelled(option, pattern)} names no norm, block or linear layer of the"
                    " network"
                )
                above = {
                    path[:end] for path in paths for end in range(len(path)) if path[end] == "."
                }
                remedy = near(
                    pattern, sorted({*paths, *above}), "`normswap inspect` lists their paths"
                )
                raise OptionError(what, remedy=remedy)
    skipped = _named(modules, skip)
    taken = _named(modules, only)
    outside = {
        path
        for path, module in modules.items()
        if id(module) in skipped or (only and id(module) not in taken)
    }
    return replace(anatomy, outside=frozenset(outside))


def _named(modules: Mapping[str, nn.Module], patterns: Sequence[str]) -> set[int]:
    return {
        id(module)
        for path, module in modules.items()
        if any(matches(pattern, path) for pattern in patterns)
    }


def naming(paths: Iterable[str], others: Sequence[str]) -> list[str]:
    """Few patterns that name all of `paths` and, where that can be, none of `others`."""
    found: list[str] = []
    for path in paths:
        ends = [end for end, letter in enumerate(path) if letter == "."]
        candidates = [*(path[:end] for end in ends), *(f"*{path[end:]}" for end in ends[-1:])]
        if not any(matches(pattern, path) for pattern in found):
            found.append(
                next(
                    (c for c in candidates if not any(matches(c, other) for other in others)), path
                )
            )
    return found


def patterns(options: Body) -> dict[str, list[str]]:
    """The patterns among a scheme's options as lists; raises OptionError: one is no string."""
    by_option: dict[str, list[str]] = {}
    for name in ("only", "skip"):
        value = options.get(name) or []
        listed: list[Any] = [value]
        if isinstance(value, Iterable) and not isinstance(value, str):
            listed = list(value)
        if not all(isinstance(pattern, str) for pattern in listed):
            raise OptionError(
                f"{spelled(name, value)} is no pattern of paths",
                remedy="For instance layer3, or *.bn1",
            )
        if listed:
            by_option[name] = listed
    return by_option


def matches(pattern: str, path: str) -> bool:
    """Whether the pattern names `path`, or a module above it."""
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")
