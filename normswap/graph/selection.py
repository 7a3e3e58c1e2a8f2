"""Which modules a conversion may change: dotted paths, chosen by patterns.

A pattern is a dotted path in which `*`, `?` and `[...]` stand for anything, dots too (as in `fnmatch`). It names a
module and all below it: `layer3`, `layer3.*.bn1`, `*.downsample`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from normswap.errors import OptionError, near, spelled
from normswap.graph.inspection import Anatomy
from normswap.graph.tracing import LINEAR
from normswap.plan import Body


def restrict(anatomy: Anatomy, only: Sequence[str] = (), skip: Sequence[str] = ()) -> Anatomy:
    """The same anatomy, where only the modules named by `only`, without those named by `skip`, take part.

    Raises OptionError: a pattern names no norm, block or linear layer.
    """
    modules = anatomy.traced.modules
    homes = {id(modules[block.path.partition("+")[0]]) for block in anatomy.blocks}
    homes |= {id(modules[norm.path]) for norm in anatomy.norms}
    paths = [path for path, module in modules.items() if id(module) in homes or isinstance(module, LINEAR)]
    for option, patterns in (("only", only), ("skip", skip)):
        for pattern in patterns:
            if not any(matches(pattern, path) for path in paths):
                what = f"{spelled(option, pattern)} names no norm, block or linear layer of the network"
                above = {path[:end] for path in paths for end in range(len(path)) if path[end] == "."}
                remedy = near(pattern, sorted({*paths, *above}), "`normswap inspect` lists their paths")
                raise OptionError(what, remedy=remedy)
    skipped, taken = _named(modules, skip), _named(modules, only)
    outside = {path for path, module in modules.items() if id(module) in skipped or (only and id(module) not in taken)}
    return replace(anatomy, outside=frozenset(outside))


def _named(modules: Mapping[str, nn.Module], patterns: Sequence[str]) -> set[int]:
    return {id(module) for path, module in modules.items() if any(matches(pattern, path) for pattern in patterns)}


def naming(paths: Iterable[str], others: Sequence[str]) -> list[str]:
    """Few patterns that name all of `paths` and none of `others`."""
    found: list[str] = []
    for path in paths:
        if not any(matches(pattern, path) for pattern in found):
            above = [path[:end] for end in range(len(path)) if path[end] == "."]
            same_name = [f"*.{path.rpartition('.')[2]}"] if above else []
            candidates = (*above, *same_name, path)
            found.append(next(pattern for pattern in candidates if not any(matches(pattern, o) for o in others)))
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
            raise OptionError(f"{spelled(name, value)} is no pattern of paths", remedy="For instance layer3, or *.bn1")
        if listed:
            by_option[name] = listed
    return by_option


def matches(pattern: str, path: str) -> bool:
    """Whether the pattern names `path`, or a module above it."""
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")
