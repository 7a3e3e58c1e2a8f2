"""What `inspect` saw, as records: norms with their roles, residual blocks, and the graph they were read from."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from normswap.graph.tracing import Traced
from normswap.provenance import Provenance


@dataclass(frozen=True)
class Norm:
    """One normalization layer (the module, however often it is called)."""

    path: str
    kind: str
    channels: int
    role: str
    block: str | None


@dataclass(frozen=True)
class Block:
    """One residual sum, y = skip + branch.

    Args:
        path: the module whose forward adds; several sums in one module are told apart as `path+2`, `path+3` ...
        stage: the path of the stage it belongs to.
        skip: `identity`, `projection` (has a convolution) or `other` (pooling, padding).
        order: `post` (an activation follows the sum), `pre` (the branch begins with norm or activation) or `linear`.
        tail: path of the innermost module that returns the branch's value, the seat for a scalar; None if a
            function of the block itself does.
        norms: norms on the branch and on the skip, in order of the forward pass.
        last: the branch's last norm.
        gate: the module that multiplies the branch by a function of itself (squeeze-excite and the like).
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
    """What `inspect` saw.

    Args:
        blocks: the residual blocks in order of the forward pass.
        norms: every norm, in order of the forward pass; unreached ones last.
        refusals: (path, reason) of what could not be looked into.
        classifier: path of the last linear layer before the output.
        dropout: the seat of the dropout before it: a module path, or that of a `drop_rate` attribute.
        traced: the graph that all this was read from.
        outside: paths of the modules that a conversion leaves as they are (see `selection`).
        provenance: where the network is from, what was done to it, and the norms it once had.
    """

    blocks: tuple[Block, ...]
    norms: tuple[Norm, ...]
    refusals: tuple[tuple[str, str], ...]
    classifier: str | None
    dropout: str | None
    traced: Traced = field(repr=False, compare=False)
    outside: frozenset[str] = frozenset()
    provenance: Provenance = field(default_factory=Provenance, repr=False, compare=False)

    def takes_part(self, path: str) -> bool:
        """Whether what sits at the path of a module, or of a block, may be converted."""
        return path.partition("+")[0] not in self.outside

    def part(self) -> tuple[Block, ...]:
        """The blocks that may be converted."""
        return tuple(block for block in self.blocks if self.takes_part(block.path))

    def block(self, path: str) -> Block:
        return next(block for block in self.blocks if block.path == path)
