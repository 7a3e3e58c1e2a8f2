"""What an approximate conversion may be expected to keep before it is made: what networks of the same kind kept.

The figures are the shipped table's, made by a script from tests/benchmarks/kinds.md: of small networks trained on
CIFAR-10, a range over few of them and no bound. What the user's own images say (`held_out.Kept`) counts for more.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from normswap import schemes
from normswap.analysis.network_kind import Kind
from normswap.plan import Body, Step

WHERE = "tests/benchmarks/kinds.md"
ENOUGH = 99.0  # percent: 95, and the four points that a row moved when its signs were chosen on other noise
NO_IMAGES = ("none", "synthetic")  # rows of the tables for which nobody took images
Span = tuple[float, float]


@dataclass(frozen=True)
class Expected:
    """What networks of one kind kept, in percent of the accuracy, the least and the most; None: never measured.

    Args:
        way: the scheme, and those of its options that are not the default.
        networks: which ones, by their names in the table.
        without: without images; `made`: with some that are made from the network's statistics.
        images: how many images the best-fed row had, and `fitted` what was kept with them.
    """

    kind: Kind
    way: str
    networks: tuple[str, ...]
    without: Span | None
    made: Span | None
    images: int
    fitted: Span | None

    @property
    def enough(self) -> bool:
        """Whether one may do without images, as far as is known."""
        return self.without is not None and self.without[0] >= ENOUGH

    def __str__(self) -> str:
        if self.without is None:
            return f"{self.way} without images has not been measured on networks with {self.kind.value}"
        more = f", {_span(self.made)} with synthetic ones" if self.made else ""
        more += f", {_span(self.fitted)} with {self.images} images" if self.fitted else ""
        on = f"networks with {self.kind.value} ({', '.join(self.networks)}; CIFAR-10)"
        return f"as {self.way}, {on} kept {_span(self.without)} of their accuracy without images{more}"


def _span(span: Span) -> str:
    return f"{span[0]:g} %" if span[0] == span[1] else f"{span[0]:g} to {span[1]:g} %"


@functools.cache
def table() -> Body:
    """Made by a script from the tables of tests/benchmarks, which also say how they were made."""
    return dict(json.loads(resources.files("normswap.analysis").joinpath("measured_costs.json").read_text("utf-8")))


def networks(kind: Kind) -> tuple[str, ...]:
    """Those of this kind in the table."""
    return tuple(table()["kinds"]["by_kind"].get(kind.value, {}).get("on", ()))


def figures(kind: Kind, way: str) -> Mapping[str, Span]:
    """By the number of images ("none"): the least and the most that was kept; with residual blocks of all ResNets."""
    found = dict(table()["kinds"]["by_kind"].get(kind.value, {}).get("figures", {}).get(way, {}))
    if kind is Kind.RESIDUAL:
        for how, (low, high) in table()["kept"]["figures"].get(way, {}).items():
            how = how.removesuffix(" images")
            known = found.get(how, (low, high))
            found[how] = (min(low, known[0]), max(high, known[1]))
    return {how: (span[0], span[1]) for how, span in found.items()}


def without_images(kind: Kind, scheme: str, options: Mapping[str, object]) -> Expected | None:
    """What to expect of a conversion that is not given images; None where there is nothing that images could fit.

    Args:
        options: those that were given.
    """
    chosen = schemes.own(schemes.resolve(scheme, dict(options)))
    if schemes.get(scheme).fit is None or schemes.exact(Step(scheme, chosen, ())):
        return None
    usual = schemes.get(scheme).options
    way = " ".join([scheme, *(f"--{n.replace('_', '-')} {v}" for n, v in chosen.items() if v != usual[n])])
    known = figures(kind, way)
    most = max((int(how) for how in known if how not in NO_IMAGES), default=0)
    return Expected(kind, way, networks(kind), known.get("none"), known.get("synthetic"), most, known.get(str(most)))
