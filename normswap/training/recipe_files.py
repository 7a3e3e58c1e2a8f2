"""Recipes: where they are, and how one is read, overridden and checked. No torch here.

The shipped ones are the YAML files of `recipes/`: in a checkout beside the package, installed within it.
"""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

import normswap
from normswap.errors import RecipeError
from normswap.training import strict_yaml
from normswap.training.recipe import Recipe
from normswap.training.recipe_part import Part

_OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_0-9]+)*=")
_SUFFIXES = (".yaml", ".yml")
_PLAIN = {  # pydantic's words, shorter
    "missing": "is missing",
    "float_parsing": "is no number",
    "float_type": "is no number",
    "int_parsing": "is no whole number",
    "int_type": "is no whole number",
    "int_from_float": "is no whole number",
    "bool_parsing": "is neither true nor false",
    "bool_type": "is neither true nor false",
    "string_type": "is no text",
    "model_type": "is no group of keys",
    "model_attributes_type": "is no group of keys",
    "dict_type": "is no group of keys",
    "tuple_type": "is no list",
}


def folder() -> Path:
    """Where the shipped recipes are."""
    package = Path(normswap.__file__).parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def names() -> list[str]:
    """The shipped recipes."""
    return sorted(file.stem for file in folder().glob("*.yaml"))


def text(name: str) -> str:
    """A shipped recipe as it is written, comments and all.

    Raises:
        RecipeError: there is none of that name; near ones are suggested.
    """
    if name not in names():
        near = difflib.get_close_matches(name, names(), 3, 0.6)
        hint = f"Did you mean {' or '.join(near)}?" if near else "`normswap recipes` lists them."
        raise RecipeError(f"no recipe is called {name!r}", remedy=hint)
    return (folder() / f"{name}.yaml").read_text(encoding="utf-8")


def split(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """A MODEL, if there is one among the words of a command line, and its KEY=VALUE overrides.

    Raises:
        RecipeError: two words are no overrides.
    """
    overrides = [word for word in words if _OVERRIDE.match(word)]
    models = [word for word in words if not _OVERRIDE.match(word)]
    if len(models) > 1:
        raise RecipeError(f"{models[1]!r} is neither the MODEL (that is {models[0]}) nor KEY=VALUE")
    return (models[0] if models else None), overrides


def load_recipe(name_or_file: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of that name, or in that file, with `KEY=VALUE` overrides such as `optim.lr=0.05`.

    A name without a slash or a YAML suffix is a shipped recipe's, if there is one.

    Raises:
        RecipeError: not found, not YAML, an unknown key, a wrong type or a value out of range; it names key and file.
    """
    label, content = _found(str(name_or_file))
    try:
        tree = strict_yaml.load(content)
    except ValueError as error:
        raise RecipeError(f"{label} is not YAML", str(error)) from None
    return check(tree, label, overrides)


def check(tree: object, label: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from plain values.

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
        return Recipe.model_validate_json(json.dumps(tree), strict=True)  # strict: true is no 1, and "1" neither
    except ValidationError as error:
        raise RecipeError(label, "; ".join(_problems(error))) from None


def dump(recipe: Recipe) -> str:
    """The recipe as YAML for `load_recipe`, every key with its value: defaults may change, a record must not."""
    return strict_yaml.dump(recipe.model_dump(mode="json"))


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
    try:
        plain = strict_yaml.load(value)
    except ValueError as error:
        raise RecipeError(f"the value of {override!r} is not YAML", str(error)) from None
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
        elif kind in _PLAIN:
            given = "" if kind == "missing" else f" (it is {problem['input']!r})"
            yield f"{key} {_PLAIN[kind]}{given}"
        else:
            message = problem["msg"].removeprefix("Input ").replace("should be", "must be")
            yield f"{key} {message[:1].lower()}{message[1:]} (it is {problem['input']!r})"


def _hint(key: str) -> str:
    """The known keys most like `key`, by its last word."""
    known = list(keys())
    home, _, last = key.rpartition(".")
    beside = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == home}
    near = [beside[word] for word in difflib.get_close_matches(last, beside, 1)]
    near = near or [one for one in known if one.rpartition(".")[2] == last]
    if near:
        return f" (did you mean {' or '.join(near[:3])}?)"
    return f" ({home or 'a recipe'} has {', '.join(beside)})" if beside else ""


def keys(part: type[Part] = Recipe, prefix: str = "") -> Iterator[str]:
    """Every key that a recipe may have, dotted."""
    for name, field in part.model_fields.items():
        yield f"{prefix}{name}"
        group = _group(field.annotation)
        if group is not None:
            yield from keys(group, f"{prefix}{name}.")


def _group(annotation: object) -> type[Part] | None:
    """The group of keys that a field holds, if it holds one (or null)."""
    union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    candidates = typing.get_args(annotation) if union else (annotation,)
    return next((one for one in candidates if isinstance(one, type) and issubclass(one, Part)), None)
