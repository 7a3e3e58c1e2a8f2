"""Recipes: where they are, and how one is read, overridden and checked. No torch here.

The shipped ones are the YAML files of `recipes/` (see `shipped`).
"""

from __future__ import annotations

import difflib
import io
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from normswap import shipped
from normswap.errors import RecipeError
from normswap.training.recipe import Part, Recipe

_OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_0-9]+)*=")
_SUFFIXES = (".yaml", ".yml")


def names() -> list[str]:
    """List the shipped recipes."""
    return sorted(file.stem for file in shipped.recipes().glob("*.yaml"))


def text(name: str) -> str:
    """Return a shipped recipe as it is written, comments and all.

    Raises:
        RecipeError: there is none of that name; near ones are suggested.
    """
    if name not in names():
        near = difflib.get_close_matches(name, names(), 3, 0.6)
        hint = f"Did you mean {' or '.join(near)}?" if near else "`normswap recipes` lists them."
        raise RecipeError(f"no recipe is called {name!r}", remedy=hint)
    return (shipped.recipes() / f"{name}.yaml").read_text(encoding="utf-8")


def split(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return a MODEL, if there is one among the words of a command line, and its KEY=VALUE overrides.

    Raises:
        RecipeError: two words are no overrides, or two are of one key.
    """
    overrides = [word for word in words if _OVERRIDE.match(word)]
    models = [word for word in words if not _OVERRIDE.match(word)]
    if len(models) > 1:
        raise RecipeError(f"{models[1]!r} is neither the MODEL (that is {models[0]}) nor KEY=VALUE")
    keys = [word.partition("=")[0] for word in overrides]
    for key in keys:
        if keys.count(key) > 1:
            raise RecipeError(f"{key} is given {keys.count(key)} times", remedy="Give it once")
    return (models[0] if models else None), overrides


def load_recipe(name_or_file: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe of that name, or in that file, with `KEY=VALUE` overrides such as `optim.lr=0.05`.

    A name without a slash or a YAML suffix is a shipped recipe's, if there is one.

    Returns:
        The recipe, checked key by key.

    Raises:
        RecipeError: not found, not YAML, an unknown key, a wrong type or a value out of range; it names key and file.
    """
    label, content = _found(str(name_or_file))
    return check(_parsed(content, label), label, overrides)


def require_recipe(recipe: object) -> None:
    """Check that this is a recipe.

    Raises:
        RecipeError: it is its name, or something else.
    """
    if not isinstance(recipe, Recipe):
        remedy = "normswap.load_recipe(NAME or FILE) gives one; `normswap recipes` lists the names"
        raise RecipeError(f"a recipe is wanted, not {recipe!r:.80}", remedy=remedy)


def check(tree: object, label: str, overrides: Sequence[str] = ()) -> Recipe:
    """Make a recipe from plain values.

    Args:
        label: what errors call it.

    Raises:
        RecipeError: as `load_recipe`.
    """
    if not isinstance(tree, Mapping):
        raise RecipeError(f"{label} is no recipe", "expected keys such as `summary`, `model`, `data`, `optim`")
    for override in overrides:
        tree = _overridden(tree, override)
    try:
        return Recipe.model_validate_json(
            json.dumps(tree, default=str), strict=True
        )  # strict: true is no 1, and "1" neither
    except ValidationError as error:
        raise RecipeError(label, "; ".join(_problems(error))) from None


def dump(recipe: Recipe) -> str:
    """Return the recipe as YAML for `load_recipe`, every key with its value: defaults may change, a record must not."""
    out = io.StringIO()
    _yaml().dump(recipe.model_dump(mode="json"), out)
    return out.getvalue()


def flat(recipe: Recipe) -> dict[str, object]:
    """Return every key of the recipe by its dotted name, as on the command line."""
    return dict(_flat(recipe.model_dump(mode="json")))


def _flat(tree: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def differences(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """List the keys of two flat recipes that differ, with both values."""
    keys = sorted(before.keys() | now.keys())
    return [f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in keys if before.get(key) != now.get(key)]


def _yaml() -> YAML:
    """Return a reader of YAML 1.2, where `no` is a word and `1e-4` a number; it refuses a key that stands twice."""
    yaml = YAML(typ="safe", pure=True)
    vars(yaml).update(default_flow_style=False, sort_base_mapping_type_on_output=False)  # a key a line, as they come
    return yaml


def _parsed(content: str, label: str) -> object:
    try:
        return _yaml().load(content)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise RecipeError(f"{label} is not YAML", f"{where}{error.problem or error.context}") from None
    except YAMLError as error:  # characters that YAML does not allow
        raise RecipeError(f"{label} is not YAML", str(error).splitlines()[0]) from None


def _found(name: str) -> tuple[str, str]:
    path = Path(name)
    if path.suffix not in _SUFFIXES and path.name == name and (name in names() or not path.is_file()):
        return f"recipe {name}", text(name)
    try:
        return str(path), path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise RecipeError(f"{path} is no text in UTF-8") from None
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {path}", error.strerror or str(error)) from None


def _overridden(tree: Mapping[str, object], override: str) -> dict[str, object]:
    """`tree` with one key set; groups on the way to it are made where they are missing or null."""
    key, sign, value = override.partition("=")
    steps = key.strip().split(".")
    if not sign or not all(steps):
        raise RecipeError(f"{override!r} is not KEY=VALUE", remedy="For instance optim.lr=0.05 or data.root=PATH")
    plain = _parsed(value, f"the value of {override!r}")
    changed = dict(tree)
    inner = changed
    for done, step in enumerate(steps[:-1], 1):
        below = inner.get(step)
        if not isinstance(below, Mapping | None):
            raise RecipeError(f"{override!r}: {'.'.join(steps[:done])} is {below!r}, no group of keys")
        group = dict(below or {})
        inner[step], inner = group, group
    inner[steps[-1]] = plain
    return changed


def _problems(error: ValidationError) -> Iterator[str]:
    for problem in error.errors(include_url=False):
        path = [str(step) for step in problem["loc"]]
        key, kind = ".".join(path), problem["type"]
        if kind == "extra_forbidden":
            yield f"unknown key {key}{_hint(key)}"
        elif kind == "value_error":  # _fits_together names the key itself
            yield str(problem["ctx"]["error"])
        elif kind == "missing":
            yield f"{key} is missing"
        else:
            message = problem["msg"].removeprefix("Input ").replace("should be", "must be")
            yield f"{key} {message[:1].lower()}{message[1:]} (it is {problem['input']!r})"


def _hint(key: str) -> str:
    """Return the known key most like `key`, or those that stand beside it."""
    known = list(keys())
    home, _, last = key.rpartition(".")
    near = difflib.get_close_matches(key, known, 1, 0.8) or [name for name in known if name.rpartition(".")[2] == last]
    if near:
        return f" (did you mean {' or '.join(near[:3])}?)"
    beside = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == home]
    return f" ({home or 'a recipe'} has {', '.join(beside)})" if beside else ""


def keys(part: type[Part] = Recipe, prefix: str = "") -> Iterator[str]:
    """List every key that a recipe may have, dotted."""
    for name, field in part.model_fields.items():
        yield f"{prefix}{name}"
        group = _group(field.annotation)
        if group is not None:
            yield from keys(group, f"{prefix}{name}.")


def _group(annotation: object) -> type[Part] | None:
    """Return the group of keys that a field holds, if it holds one (or null)."""
    union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    candidates = typing.get_args(annotation) if union else (annotation,)
    return next((one for one in candidates if isinstance(one, type) and issubclass(one, Part)), None)
