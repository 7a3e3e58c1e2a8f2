"""Every scheme under its sets of options: the rows of the tables in tests/schemes."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """One scheme under one set of options, and whether it keeps the function; exact rows meet every
    architecture.
    """

    scheme: str
    options: dict[str, Any] = field(default_factory=dict)
    exact: bool = True
    norms: bool = False  # whether there are BatchNorms, of another kind, in the result

    def __str__(self) -> str:
        return "-".join([self.scheme, *(f"{key}={value}" for key, value in self.options.items())])


ROWS = (
    Row("folded"),
    Row("skipinit"),
    Row("skipinit", {"alpha": 0}, exact=False),
    Row("skipinit", {"alpha": "inv-sqrt-depth"}, exact=False),
    Row("regularized-skipinit", {"dropout": 0.6}),
    Row("batchnorm", {"ghost_batch": 2}, norms=True),
    Row("frozen-bn", norms=True),
    Row("affine"),
    Row("tune"),
    Row("fixup"),
    Row("fixup", {"init": "fixup"}, exact=False),
    Row("residual-scale", {"rule": "szegedy"}),
    Row("weightnorm"),
    Row("spectralnorm"),
    Row("nf", {"mean": "keep"}),
    Row("centered-weightnorm", {"mean": "keep"}),
    Row("groupnorm", exact=False),
    Row("groupnorm", {"groups": 2, "relative_eps": 0}, exact=False),
    Row("layernorm", exact=False),
    Row("instancenorm", exact=False),
    Row("dyt", exact=False),
    Row("regularized-skipinit", {"alpha": "0"}, exact=False),
)
EXACT = [row for row in ROWS if row.exact]
