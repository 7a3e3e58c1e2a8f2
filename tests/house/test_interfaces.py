"""Interfaces have limits; lines have none.

A user carries names, commands and options. A maintainer carries the arrows between rooms. Whoever
raises a limit says in the commit which user asked for it.
"""

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path

from support import forked
from test_house import Edges, house, reach

import normswap
from normswap.cli.app import load
from normswap.cli.commands import SUMMARIES

ROOT = Path(normswap.__file__).parent
# What reads, converts, proves and saves works without the rooms that only use the results.
KERNEL = ("surgery", "storage", "schemes", "calibration", "folding", "graph", "models", "layers")
OUTSIDE_THE_KERNEL = {"exporting", "training", "diagnosis", "reporting", "benchmarking", "cli"}
LIMITS = {
    "public names": 33,
    "commands": 18,
    # The 43rd is the b of `residual-scale`, which the papers leave to choose.
    "options of convert": 43,
    "options of export": 30,
    # Five of them lead to `reading`, where every JSON and YAML is read with bounds, and one to
    # `copying`, with which `--for opacus` looks at every layer. `reading` asks `errors` for our
    # words of what pydantic demands. Two rooms came: `sites`, which
    # eleven rooms read, and `proof`, with thirteen arrows to and from it. Four
    # rooms copy networks by `copying`, which keeps what torch's deepcopy loses. `benchmarking`
    # judges what it times by `proof`'s words.
    "arrows between rooms": 167,
    # The proof's measure, allowance and verdict are a file each, and so are the record of a site,
    # what learns, and what another program's deploying asks of a layer.
    "files that convert loads": 75,
}


def room_of(name: str) -> str:
    return name.split(".")[0]


def arrows(edges: Edges) -> set[tuple[str, str]]:
    """Pairs of rooms of which the first imports the second, however often."""
    return {
        (room_of(name), room_of(target))
        for name, targets in edges.items()
        for target in targets
        if name and room_of(name) != room_of(target)
    }


def files_that_convert_loads() -> int:
    def loaded() -> list[str]:
        for name in of_normswap():
            del sys.modules[name]
        importlib.import_module("normswap").__getattr__("convert")
        return of_normswap()

    return len(forked.result_of(loaded))


def of_normswap() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == "normswap"]


def counted() -> dict[str, int]:
    return {
        "public names": len(dir(normswap)),
        "commands": len(SUMMARIES),
        "options of convert": len(load("convert").params),
        "options of export": len(load("export").params),
        "arrows between rooms": len(arrows(house())),
        "files that convert loads": files_that_convert_loads(),
    }


def over(numbers: dict[str, int], limits: dict[str, int]) -> list[str]:
    return [
        f"{name}: {number}, limit {limits[name]}"
        for name, number in numbers.items()
        if number > limits[name]
    ]


def rooms_above(edges: Edges, kernel: Iterable[str]) -> dict[str, set[str]]:
    """For each file of the kernel, the rooms outside it that importing the file leads to."""
    found = {}
    for name in edges:
        if room_of(name) in kernel:
            above = {room_of(one) for one in reach(edges, name)} & OUTSIDE_THE_KERNEL
            if above:
                found[name] = above
    return found


def test_interfaces_are_within_their_limits() -> None:
    assert over(counted(), LIMITS) == []


def test_the_kernel_imports_nothing_that_only_uses_it() -> None:
    assert rooms_above(house(), KERNEL) == {}


def test_what_grows_is_seen() -> None:
    assert over({"doors": 3}, {"doors": 2}) == ["doors: 3, limit 2"]
    assert over({"doors": 2}, {"doors": 2}) == []


def test_an_arrow_out_of_the_kernel_is_seen() -> None:
    edges = {"graph.one": {"layers.two"}, "layers.two": {"training.three"}, "training.three": set()}

    assert arrows(edges) == {("graph", "layers"), ("layers", "training")}
    assert rooms_above(edges, ("graph",)) == {"graph.one": {"training"}}
