"""Recipes: where they are, and how one is read, overridden and checked. No torch here.

The shipped ones are the YAML files of `recipes/` (see `shipped`).
"""

import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from ruamel.yaml import YAML

from normswap import reading, shipped
from normswap.errors import RecipeError, demanded, near
from normswap.training.recipe import Part, Recipe

_OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_0-9]+)*=")
_SUFFIXES = (".yaml", ".yml")
_TYPES = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true|false",
    dict: "mapping",
    tuple: "list",
}


def names() -> list[str]:
    """Return the names of the recipes that come with the package, in alphabetical order."""
    files = shipped.recipes().glob("*.yaml")
    return sorted(file.stem for file in files if file.name not in shipped.NO_RECIPES)


def text(name: str) -> str:
    """Return the text of a shipped recipe, with its comments.

    Raises:
        RecipeError: No shipped recipe has this name.
    """
    if name not in names():
        remedy = near(name, names(), "`normswap recipes` lists them.", 1)
        raise RecipeError(f"no recipe is called {name!r}", remedy=remedy)
    return (shipped.recipes() / f"{name}.yaml").read_text(encoding="utf-8")


def split(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the MODEL among the words of a command line, or None, and the KEY=VALUE overrides.

    Raises:
        RecipeError: Two words are no overrides. Only one such word, the MODEL, is allowed.
    """
    # An override is optim.lr=0.05, for instance. Any other word is taken for the MODEL.
    overrides = [word for word in words if _OVERRIDE.match(word)]
    models = [word for word in words if not _OVERRIDE.match(word)]
    if len(models) > 1:
        raise RecipeError(f"{models[1]!r} is neither the MODEL (that is {models[0]}) nor KEY=VALUE")
    return next(iter(models), None), overrides


def load_recipe(name_or_file: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return a recipe, checked key by key.

    Args:
        name_or_file: The name of a shipped recipe, or a file. A name without a slash or a YAML
            suffix is a shipped recipe's, if there is one.
        overrides: `KEY=VALUE` overrides such as `optim.lr=0.05`.

    Raises:
        RecipeError: The recipe is not found or not YAML, or has an unknown key, a wrong type or a
            value out of range. The message names key and file.
    """
    # A bare name that is neither a shipped recipe nor a file counts as a wrong name of a recipe.
    path = Path(name_or_file)
    is_bare_name = path.suffix not in _SUFFIXES and path.name == str(name_or_file)
    if is_bare_name and (path.name in names() or not path.is_file()):
        return check(_parsed(text(path.name), f"recipe {path}"), f"recipe {path}", overrides)

    try:
        content = reading.file_text(path, reading.MOST_BYTES_OF_YAML)
    except reading.UnreadableError as error:
        raise RecipeError(f"cannot read the recipe {path}", str(error)) from None
    return check(_parsed(content, str(path)), str(path), overrides)


def check(tree: object, label: str, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe that plain values describe.

    Args:
        tree: The values, as YAML has them.
        label: The name of the recipe in error messages.
        overrides: `KEY=VALUE` overrides such as `optim.lr=0.05`.

    Raises:
        RecipeError: A key is unknown, or a value is not of its type or out of its range.
    """
    if not isinstance(tree, Mapping):
        raise RecipeError(
            f"{label} is no recipe", "expected keys such as `summary`, `model`, `data`, `optim`"
        )
    for override in overrides:
        tree = _overridden(tree, override)

    try:
        # NaN and infinity pass here: pydantic refuses them, in a message that names the key.
        reading.check_plain(tree, finite=False)
        # Strict validation takes neither true nor "1" for 1. A date, which YAML has, becomes text.
        recipe = Recipe.model_validate_json(json.dumps(tree, default=str), strict=True)
        # The arguments of optimizers and schemes are not typed, so pydantic lets NaN pass in them.
        reading.check_plain(tree)
        return recipe
    except reading.UnreadableError as error:
        raise RecipeError(label, str(error)) from None
    except ValidationError as error:
        raise RecipeError(label, "; ".join(_problems(error))) from None


def dump(recipe: Recipe) -> str:
    """Return the recipe as YAML for `load_recipe`, with every key, as defaults may change later."""
    # Groups of keys are written in block style, and the keys stay in their order.
    yaml = YAML(typ="safe", pure=True)
    vars(yaml).update(default_flow_style=False, sort_base_mapping_type_on_output=False)
    out = io.StringIO()
    yaml.dump(recipe.model_dump(mode="json"), out)
    return out.getvalue()


def flat(recipe: Recipe | Mapping[str, object], above: str = "") -> dict[str, object]:
    """Return every value of a recipe by its dotted key, as on the command line.

    Args:
        recipe: The recipe, or a group of its keys.
        above: The text before the keys of a group. Empty at the top.
    """
    values = recipe.model_dump(mode="json") if isinstance(recipe, Recipe) else recipe
    keys: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            keys |= flat(value, f"{above}{name}.")
        else:
            keys[f"{above}{name}"] = value
    return keys


def every_key(group: type[Part] = Recipe, above: str = "") -> Iterator[dict[str, object]]:
    """Yield every key of a recipe: its dotted name, what it takes, its default and its help.

    Args:
        group: The recipe, or a group of its keys.
        above: The text before the keys of a group. Empty at the top.
    """
    for name, field in group.model_fields.items():
        # A group of keys has the type `Clip`, for instance, or `Clip | None`.
        kinds = (field.annotation, *get_args(field.annotation))
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Part)]
        if inner:
            yield from every_key(inner[0], f"{above}{name}.")
            continue

        default = None if field.is_required() else field.get_default(call_default_factory=True)
        takes = "|".join(_takes(field.annotation))
        yield {
            "key": f"{above}{name}",
            "takes": takes,
            "default": default,
            "help": field.description,
        }


def _takes(kind: Any) -> list[str]:
    """Return the allowed words of a key, or the names of its allowed types.

    Args:
        kind: The type of the key, such as `Literal["no", "bf16"]` or `float | None`.
    """
    # The types inside Annotated, a union or None are taken one by one. None is not named.
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is Literal:
        return list(map(str, arguments))
    if origin is Annotated:
        return _takes(arguments[0])
    if origin in (Union, UnionType):
        words: list[str] = []
        for argument in arguments:
            words += _takes(argument)
        return words
    if kind is NoneType:
        return []
    return [_TYPES[origin or kind]]


def differences(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return a sentence for each key whose value differs in two recipes, with both values.

    Args:
        before: The earlier recipe, as values by dotted key (`flat`).
        now: The recipe of today, likewise.
    """
    keys = sorted(before.keys() | now.keys())
    changed = [key for key in keys if before.get(key) != now.get(key)]
    return [f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in changed]


def _parsed(content: str, label: str) -> object:
    """Return the plain data of a YAML text.

    Args:
        content: The text.
        label: The file's name, for the message.

    Raises:
        RecipeError: The text is not YAML.
    """
    try:
        return reading.parse_yaml(content)
    except reading.UnreadableError as error:
        raise RecipeError(f"{label} is not YAML", str(error)) from None


def _overridden(tree: Mapping[str, object], override: str) -> dict[str, object]:
    """Return a tree of keys in which one key is overridden. Groups that are missing are made.

    Args:
        tree: The keys of a recipe. A group of keys is a mapping.
        override: The key with its new value, such as `optim.lr=0.05`.

    Raises:
        RecipeError: The override is not KEY=VALUE, its value is not YAML, or a step of the key is
            no group of keys.
    """
    key, sign, value = override.partition("=")
    steps = key.strip().split(".")
    if not sign or not all(steps):
        raise RecipeError(
            f"{override!r} is not KEY=VALUE", remedy="For instance optim.lr=0.05 or data.root=PATH"
        )

    # The groups on the way to the key are copied, so that `tree` stays as it is.
    changed = dict(tree)
    inner = changed
    for step in steps[:-1]:
        below = inner.get(step)
        if not isinstance(below, Mapping | None):
            raise RecipeError(f"{override!r}: {step} is {below!r}, no group of keys")
        inner[step] = group = dict(below or {})
        inner = group

    inner[steps[-1]] = _parsed(value, f"the value of {override!r}")
    return changed


def _problems(error: ValidationError) -> Iterator[str]:
    """Yield a sentence about each thing that is wrong with a recipe."""
    for problem in error.errors(include_url=False):
        # The location is ("optim", "lr"), for instance.
        path = [str(step) for step in problem["loc"]]
        key = ".".join(path)
        kind = problem["type"]

        if kind == "extra_forbidden":
            hint = near(
                key,
                [str(row["key"]) for row in every_key()],
                "`normswap recipes --keys` lists all",
                most=1,
            )
            yield f"unknown key {key} ({hint})"
        elif kind == "value_error":
            yield str(problem["ctx"]["error"])
        elif kind == "missing":
            yield f"{key} is missing"
        else:
            # `demanded` says pydantic's message in plainer words, such as `must be a whole number`.
            message = demanded(problem["msg"])
            yield f"{key} {message[:1].lower()}{message[1:]} (it is {problem['input']!r:.200})"
