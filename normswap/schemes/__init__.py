"""The schemes: every file is one, its options are records in `parts/options.py`; `normswap.register_scheme` adds more.

A scheme's file has a docstring (first line: the help text; then the algebra and what is lost), a function
`plan(anatomy, *, options) -> PlanBuilder`, and `SCHEME`, a record that says all else about it. What `--for` adds stands
in `purposes`, steps that are no targets in `steps`, what several schemes share in `parts`.
Imports: `folding`, `calibration` and what is above; no scheme imports torch before it is asked for.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from normswap import plugins
from normswap.errors import OptionError, spelled
from normswap.plan import Step
from normswap.schemes.parts import cards
from normswap.schemes.parts.options import EVERY, OPTIONS, Option, check_given

if TYPE_CHECKING:  # torch takes a second to import, and the command line needs none of it
    from torch import nn

    from normswap.calibration.fit_task import FitTask
    from normswap.folding.plan_builder import PlanBuilder

Options: TypeAlias = dict[str, Any]
_TARGETS, _PURPOSES, _STEPS = "normswap.schemes", "normswap.schemes.purposes", "normswap.schemes.steps"


Planner: TypeAlias = "Callable[..., PlanBuilder]"
"""plan(anatomy, *, options): a scheme names its options one by one, which no type but this says."""


FitFunction: TypeAlias = "Callable[[FitTask], Iterable[str] | None]"
"""Sets values of the result from data, in place; returns what the user should know."""


@dataclass(frozen=True)
class Scheme:
    """All that is to be known of a scheme.

    Args:
        plan: plan(anatomy, **options) -> PlanBuilder: what would be done, and why not.
        paper: where it is from.
        exact: whether the function is kept, if it depends on the options: said by them.
        fit: fit(task) sets values of the result from data, in place, and may return what the user should know
            (`FitTask`); a batch is a call, `batch.call(task.source)` (`calling.Example`).
        fits_without_images: whether `fit` has something to do without the user's images, too.
        needs_data: whether it cannot do without them.
        fitting_target: fitting_target(step): the step after which the source has the result's rescaling, to be fitted
            to.
        settle: settle(source, result, step): of a scheme that measures on images what the function does not depend on
            (and so is exact though it has a `fit`): sets the rest, in place, so that the function is kept. Made-up
            images are refused.
        starts_from: the scheme that a network without norms must be brought to first.
        on_branches: it puts something at the end of residual branches, which must not end in a factor of their own.
        may_do_nothing: a plan without edits is one, too.
        decay: which parameters its paper lets decay, a policy of `param_groups`; most spare scalars, as `kim2022` does.
        options: records of its options, each a keyword of `plan`; of a registered scheme by default the keywords of
            `plan` with their defaults.
        doc: its docstring.
        name: as the command line spells it.
    """

    plan: Planner
    paper: str = ""
    exact: bool | Callable[[Options], bool] = True
    fit: FitFunction | None = None
    fits_without_images: bool = False
    needs_data: bool | Callable[[Options], bool] = False
    fitting_target: Callable[[Step], Step] | None = None
    settle: Callable[[nn.Module, nn.Module, Step], None] | None = None
    starts_from: str | None = None
    on_branches: bool = False
    may_do_nothing: bool = False
    decay: str = "kim2022"
    options: tuple[Option, ...] = ()
    doc: str | None = None
    name: str = ""

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return inspect.cleandoc(self.doc or self.name).split("\n")[0]

    @property
    def defaults(self) -> Options:
        """Its options with their defaults."""
        return {option.name: option.default for option in self.options}

    def is_exact(self, options: Options) -> bool:
        """Whether the function is kept with these options, which are complete."""
        return self.exact(options) if callable(self.exact) else self.exact

    def requires_data(self, options: Options) -> bool:
        """Whether there is no conversion without images, with these options."""
        return self.needs_data(options) if callable(self.needs_data) else self.needs_data


@dataclass(frozen=True)
class Chosen:
    """A scheme with all its options, those of every scheme too."""

    scheme: Scheme
    options: Options

    @property
    def own(self) -> Options:
        """The options without those that every scheme has."""
        return {name: value for name, value in self.options.items() if name not in EVERY}

    @property
    def exact(self) -> bool:
        """Whether the function is kept."""
        return self.scheme.is_exact(self.options)

    @property
    def fits(self) -> bool:
        """Whether values are fitted to data, if there are some."""
        return self.scheme.fit is not None and (self.measures or not self.exact)

    @property
    def measures(self) -> bool:
        """Whether its data give what the function does not depend on."""
        return self.scheme.settle is not None

    @property
    def requires_data(self) -> bool:
        """Whether there is no conversion without images."""
        return self.scheme.requires_data(self.options)

    @property
    def exact_instead(self) -> str | None:
        """The option that makes do without images, if there is one."""
        return next((spelled(option.name, word) for option in self.scheme.options for word in option.choices
                     if not self.scheme.requires_data({**self.options, option.name: word})), None)  # fmt: skip


_registered: dict[str, Scheme] = {}


def register_scheme(name: str, scheme: Scheme) -> Scheme:
    """Add a target of your own, for `normswap.convert(model, to=name)` and `--to name`.

    An installed package names the module that does this among its entry points `normswap.schemes`.

    Returns:
        The scheme, under its name.

    Raises:
        OptionError: there is a scheme of that name, or it is none.
    """
    if not isinstance(scheme, Scheme):
        raise OptionError(f"scheme {name}: a Scheme is wanted, not something of type {type(scheme).__name__}")
    if name in (*_files(_TARGETS), *_files(_PURPOSES), *_registered, "unfold"):
        raise OptionError(f"there is a scheme '{name}' already", remedy="Give yours another name")
    options = scheme.options or tuple(_of_signature(scheme.plan))
    _registered[name] = replace(scheme, name=name, options=options, doc=scheme.doc or scheme.plan.__doc__)
    return _registered[name]


def _of_signature(plan: Planner) -> Iterator[Option]:
    """The keywords of a plan as options of the type of their defaults."""
    for keyword in inspect.signature(plan).parameters.values():
        if keyword.kind is keyword.KEYWORD_ONLY:
            kind = type(keyword.default)
            yield Option(keyword.name, kind if kind in (int, float, bool) else str, keyword.default)


def names() -> list[str]:
    """The schemes that one can convert to, as the command line spells them."""
    plugins.load("normswap.schemes")
    return sorted([*_files(_TARGETS), *_registered])


def purpose_names() -> list[str]:
    """The purposes by name."""
    return _files(_PURPOSES)


def _files(folder: str) -> list[str]:
    modules = pkgutil.iter_modules(importlib.import_module(folder).__path__)
    return sorted(info.name.replace("_", "-") for info in modules if not info.ispkg)


def get(name: str) -> Scheme:
    """The scheme, purpose or step of that name.

    Raises:
        OptionError: there is none; near names are suggested.
    """
    for folder in (_TARGETS, _PURPOSES, _STEPS):
        if name in _files(folder):
            module = importlib.import_module(f"{folder}.{name.replace('-', '_')}")
            scheme: Scheme = module.SCHEME
            options = OPTIONS.get(name) or tuple(_of_signature(scheme.plan))
            return replace(scheme, name=name, options=options, doc=module.__doc__)
    if name not in names():
        raise _unknown(name)
    return _registered[name]


def card(name: str) -> Scheme:
    """The record of a target, without its functions where these would import torch.

    Raises:
        OptionError: there is none.
    """
    if name not in _files(_TARGETS):
        return get(name)
    module = f"{_TARGETS}.{name.replace('-', '_')}"
    scheme = cards.record(module, "SCHEME", {"Scheme": Scheme})
    assert isinstance(scheme, Scheme)
    return replace(scheme, name=name, options=OPTIONS.get(name, ()), doc=cards.docstring(module))


def check_target(name: str) -> None:
    """Check that one can convert to the scheme.

    Raises:
        OptionError: one cannot convert to that.
    """
    if name in purpose_names():
        use = f"{spelled('to', metavar='SCHEME')}' with '{spelled('purpose', name)}"
        raise OptionError(f"{name} is no scheme", "it is what a network is for", f"Say '{use}'")
    if name != "unfold" and name not in names():
        raise _unknown(name)


def check_purpose(name: str | None) -> None:
    """Check that the purpose is known.

    Raises:
        OptionError: there is none of that name.
    """
    if name is not None and name not in purpose_names():
        raise OptionError(f"unknown purpose {name!r}", remedy=spelled("purpose", metavar="|".join(purpose_names())))


def _unknown(name: str) -> OptionError:
    known = sorted([*names(), "unfold"])
    near = difflib.get_close_matches(str(name), known, 1)
    hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(known)}"
    return OptionError(f"unknown scheme {name!r}", remedy=hint)


def chosen(name: str, options: Options) -> Chosen:
    """The scheme with all its options: its defaults, overruled by these.

    Raises:
        OptionError: an option the scheme does not have, or a value that it may not have.
    """
    scheme = get(name)
    check_given(name, scheme.options, options)
    return Chosen(scheme, {**scheme.defaults, **options})


def check_options(name: str, options: Options) -> None:
    """Check options of a target, without what it computes with.

    Raises:
        OptionError: as `chosen`.
    """
    check_given(name, card(name).options, options)


def of(step: Step) -> Chosen:
    """The scheme and the options that a step was planned with."""
    return chosen(step.scheme, step.options)


def resolve(name: str, options: Options) -> Options:
    """All options of the scheme: its defaults, overruled by these.

    Raises:
        OptionError: as `chosen`.
    """
    return chosen(name, options).options


def all_options() -> dict[str, tuple[Option, list[str]]]:
    """Every option by name, with the schemes that have it."""
    names_of: dict[str, tuple[Option, list[str]]] = {}
    plugins.load("normswap.schemes")
    for name, options in {**OPTIONS, **{name: scheme.options for name, scheme in _registered.items()}}.items():
        for option in options:
            names_of.setdefault(option.name, (option, []))[1].append(name)
    return names_of


def changed(scheme: str, options: Options) -> Options:
    """The options that are not the scheme's defaults; all of them, if nobody knows the scheme any more."""
    try:
        known = get(scheme).defaults
    except OptionError:
        known = {}
    return {name: value for name, value in options.items() if name not in known or known[name] != value}


def exact(step: Step) -> bool:
    """Whether the step keeps the function."""
    return of(step).exact
