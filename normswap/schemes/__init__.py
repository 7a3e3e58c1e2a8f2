"""The schemes: each file plans one or a few of them, and `catalogue.py` lists them all.

A scheme is a function `plan(anatomy, *, options) -> PlanBuilder`, perhaps a `fit`, and its record
in the catalogue. `normswap.register_scheme` adds one from outside.
"""

import inspect
from collections.abc import Iterable
from dataclasses import replace

from normswap import plugins
from normswap.errors import OptionError, near, spelled
from normswap.plan import Step
from normswap.schemes.catalogue import PURPOSES as PURPOSES, STEPS as STEPS, TARGETS
from normswap.schemes.scheme import (
    Chosen as Chosen,
    Option,
    Options as Options,
    Scheme as Scheme,
    check_given,
)

UNFOLD = (
    "The source's own BatchNorm again, with what was learned since: the way back from an exact"
    " scheme."
)
_registered: dict[str, Scheme] = {}


def register_scheme(name: str, scheme: Scheme) -> Scheme:
    """Add a target of your own, for `normswap.convert(model, to=name)` and `--to name`.

    An installed package names the module that does this among its entry points `normswap.schemes`.

    Args:
        name: The word by which the target is asked for.
        scheme: The record of the target. See `Scheme`.

    Returns:
        The record, under its name.

    Raises:
        OptionError: There is a scheme of that name, or `scheme` is no record of one.
    """
    if not isinstance(scheme, Scheme):
        raise OptionError(
            f"scheme {name}: a Scheme is wanted, not something of type {type(scheme).__name__}"
        )
    if name in {*TARGETS, *PURPOSES, *STEPS, *_registered, "unfold"}:
        raise OptionError(f"there is a scheme '{name}' already", remedy="Give yours another name")

    # A record without options or a summary gets them from the plan function: an option from each
    # keyword-only argument, and the summary from the docstring's first line.
    parameters = inspect.signature(scheme.plan).parameters.values()
    keywords = [keyword for keyword in parameters if keyword.kind is keyword.KEYWORD_ONLY]
    options = tuple(
        Option(keyword.name, _kind_of(keyword.default), keyword.default) for keyword in keywords
    )
    summary = scheme.summary or (inspect.getdoc(scheme.plan) or name).split("\n")[0]
    _registered[name] = replace(
        scheme, name=name, options=scheme.options or options, summary=summary
    )

    return _registered[name]


def _kind_of(default: object) -> type:
    """Return the type of an option with this default: int, float or bool, or str for any other."""
    kind = type(default)
    if kind in (int, float, bool):
        return kind
    return str


def names() -> list[str]:
    """Return the names of the schemes that one can convert to, as `--to` takes them."""
    # Installed packages register their schemes when their entry points are loaded.
    plugins.load("normswap.schemes")
    return sorted([*TARGETS, *_registered])


def get(name: str) -> Scheme:
    """Return the record of a scheme, by its name.

    The name is that of a target (`--to`), of a purpose (`--for`), or of a step that a conversion
    adds by itself.

    Raises:
        OptionError: No scheme has this name. The message lists the names.
    """
    shipped = {**TARGETS, **PURPOSES, **STEPS}
    if name in shipped:
        return replace(shipped[name], name=name)
    if name not in names():
        raise _unknown(name)
    return _registered[name]


def check_target(name: str) -> None:
    """Check that `name` is a scheme that one can convert to.

    Raises:
        OptionError: There is no such scheme, or the name is a purpose, which `--for` takes.
    """
    if name in PURPOSES:
        use = f"{spelled('to', metavar='SCHEME')}' with '{spelled('purpose', name)}"
        raise OptionError(f"{name} is no scheme", "it is what a network is for", f"Say '{use}'")
    if name != "unfold" and name not in names():
        raise _unknown(name)


def check_purpose(name: str | None) -> None:
    """Check that a purpose, which says what a network is for (`--for`), is known.

    Args:
        name: The name of the purpose. None, for no purpose, is accepted.

    Raises:
        OptionError: The purpose is not known.
    """
    if name is not None and name not in PURPOSES:
        raise OptionError(
            f"unknown purpose {name!r}", remedy=spelled("purpose", metavar="|".join(PURPOSES))
        )


def _unknown(name: str) -> OptionError:
    """Return the error for a name that no scheme has."""
    targets = sorted([*names(), "unfold"])
    remedy = near(str(name), targets, f"Known: {', '.join(targets)}", 1)
    return OptionError(f"unknown scheme {name!r}", remedy=remedy)


def chosen(name: str, options: Options) -> Chosen:
    """Return a scheme with all its options: the given ones, and the defaults of the others.

    Args:
        name: The name of the scheme.
        options: The given options.

    Raises:
        OptionError: There is no such scheme or option, or an option does not take its value.
    """
    scheme = get(name)
    values = check_given(name, scheme.options, options)
    # `only` and `skip` are options of every scheme, and are not among the values.
    return Chosen(scheme, {**options, **values})


def of(step: Step) -> Chosen:
    """Return the scheme that a step was planned with, and its options."""
    return chosen(step.scheme, step.options)


def are_exact(steps: Iterable[Step]) -> bool:
    """Whether all steps of a plan are of schemes that keep the function of the network.

    Raises:
        OptionError: The scheme of a step is not registered in this process.
    """
    return all(of(step).exact for step in steps)


def are_exact_if_known(steps: Iterable[Step]) -> bool | None:
    """Whether all steps keep the network's function, or None if a scheme is not registered."""
    try:
        return are_exact(steps)
    except OptionError:
        return None


def all_options() -> dict[str, tuple[Option, list[str]]]:
    """Return every option by name, with the names of the schemes that have it.

    If schemes describe an option of the same name differently, the returned option has the choices
    and the help texts of all of them.
    """
    options_by_name: dict[str, tuple[Option, list[str]]] = {}
    # Installed packages register their schemes when their entry points are loaded.
    plugins.load("normswap.schemes")
    for name, scheme in {**TARGETS, **_registered}.items():
        for option in scheme.options:
            # The option as the schemes so far describe it together, and the names of these schemes.
            merged, scheme_names = options_by_name.get(option.name, (option, []))
            if option.help not in merged.help:
                choices = tuple(dict.fromkeys((*merged.choices, *option.choices)))
                help_text = f"{merged.help}; {name}: {option.help}"
                merged = replace(merged, choices=choices, help=help_text)
            options_by_name[option.name] = (merged, [*scheme_names, name])
    return options_by_name


def described() -> str:
    """Return a text with a line for each option of each scheme, for `help(normswap.convert)`."""
    lines = ""
    for name, scheme in TARGETS.items():
        for option in scheme.options:
            lines += f"        {name}: {option.name}={option.default!r}, {option.help}\n"
    return lines


def changed(scheme: str, options: Options) -> Options:
    """Return the options whose values are not the scheme's defaults.

    If the scheme is not known, all options are returned.

    Args:
        scheme: The name of the scheme.
        options: The options to choose from.
    """
    try:
        defaults = get(scheme).defaults
    except OptionError:
        return options

    differing: dict[str, object] = {}
    for name, value in options.items():
        if name not in defaults or defaults[name] != value:
            differing[name] = value
    return differing
