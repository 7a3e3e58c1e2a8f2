"""The errors: what happened, why, and what to do about it."""

import difflib
import importlib.util
import logging
import shlex
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_TYPED: ContextVar[bool] = ContextVar("typed", default=False)
# On the command line these options have another name than in Python.
_FLAGS = {"purpose": "for", "arch_args": "arch-arg", "dtype": "precision", "size": "input-size"}


class NormswapError(Exception):
    """Base of every error that is the input's fault, not the program's.

    Args:
        what: what is wrong, naming the file, module path or option.
        why: the reason, if it is not already in `what`.
        remedy: what the user can do now.
    """

    def __init__(self, what: str, why: str = "", remedy: str = "") -> None:
        self.what = what
        self.why = why
        self.remedy = remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        text = ": ".join(filter(None, (self.what, self.why)))
        return ". ".join(filter(None, (text, self.remedy)))


def _python(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return f'"{value}"'
    return repr(value)


@contextmanager
def command_line() -> Iterator[None]:
    """Options are spelled as on the command line while this is entered, for Python otherwise."""
    before = _TYPED.set(True)
    try:
        yield
    finally:
        _TYPED.reset(before)


def flag(name: str) -> str:
    """An option as the command line spells it."""
    return f"--{_FLAGS.get(name, name).replace('_', '-')}"


def called(name: str) -> str:
    """An option in a sentence, by the name that the reader knows."""
    if not _TYPED.get():
        return name
    return _FLAGS.get(name, name)


def spelled(name: str, value: object = None, *, metavar: str = "") -> str:
    """An option as the reader has to write it: `--calibrate DATA`, or `calibrate=DATA` (`DATA` is
    the metavar).
    """
    if not _TYPED.get():
        return f"{name}={metavar or _python(value)}"
    if isinstance(value, list):
        return " ".join(spelled(name, item) for item in value)
    shown = metavar or ("" if value is None or value is True else shlex.quote(str(value)))
    return f"{flag(name)} {shown}".rstrip()


def near(name: str, names: Iterable[str], otherwise: str = "", most: int = 3) -> str:
    """Suggest names like the one that is not there, as a remedy."""
    matches = difflib.get_close_matches(name, list(names), most)
    if not matches:
        return otherwise
    return f"Did you mean {' or '.join(matches)}?"


def first_line(error: BaseException) -> str:
    """The error's message cut to one line, or its class when it has none."""
    text = str(error)
    # torch adds lines of its own, and a KeyError spells them out.
    if isinstance(error, KeyError) and "\\n" in text:
        text = str(error.args[0])
    return next(iter(text.strip().splitlines()), type(error).__name__)


@contextmanager
def explained(kind: type[NormswapError], what: str, remedy: str = "") -> Iterator[None]:
    """Turn whatever is raised into an error of this kind, whose reason is its first line."""
    try:
        yield
    except Exception as error:
        raise kind(what, first_line(error), remedy) from None


class SourceError(NormswapError):
    """A model, file or dataset cannot be found, read or understood."""


class TraceError(NormswapError):
    """The model does not run on the example, or something in its forward cannot be seen."""


class PlanError(NormswapError):
    """A plan is malformed, was edited into nonsense, or does not fit the model."""


class OptionError(NormswapError):
    """An option is unknown or out of range for the scheme."""


class RecipeError(NormswapError):
    """A recipe cannot be found or read, or says something that it may not say."""


class RefusedError(NormswapError):
    """The surgery is impossible at some module path, or there is nothing to do."""


class VerificationError(NormswapError):
    """The result does not compute what the source computes."""


class TrainingError(NormswapError):
    """Training has gone wrong: the loss is not finite."""


class OutputError(NormswapError):
    """The output cannot be written."""


def require_packages(what: str, packages: Iterable[str], extra: str) -> None:
    """Check that optional packages are installed.

    Args:
        what: needs them; extra: of normswap, which brings them.

    Raises OptionError: one is not.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            remedy = f"In the clone of normswap: pip install -e '.[{extra}]'"
            raise OptionError(f"{what} needs the package {package}", "it is not installed", remedy)


class WeightsNote(UserWarning):
    """What a user should know of weights that were read: the command line prints it."""


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the warnings and log lines of the libraries off the terminal: errors say it in one line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
