"""The errors: what happened, why, and what to do about it.

A message names options as its reader writes them: `--calibrate` on the command line, `calibrate=`
in Python.
"""

import difflib
import importlib.util
import logging
import re
import shlex
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

# Whether messages are for somebody who has typed a command line. Otherwise they are for a caller in
# Python.
_TYPED: ContextVar[bool] = ContextVar("typed", default=False)
# The names on the command line of options that have another name in Python.
_FLAGS = {"purpose": "for", "arch_args": "arch-arg", "dtype": "precision", "size": "input-size"}


class NormswapError(Exception):
    """Base of every error that is the input's fault, not the program's.

    Args:
        what: The fault. It names the file, the module path or the option.
        why: The reason, if `what` does not say it already.
        remedy: The user's next step.
    """

    def __init__(self, what: str, why: str = "", remedy: str = "") -> None:
        self.what = what
        self.why = why
        self.remedy = remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        sentence = ": ".join(filter(None, (self.what, self.why)))
        return ". ".join(filter(None, (sentence, self.remedy)))


@contextmanager
def command_line() -> Iterator[None]:
    """Inside a `with` block, write options in messages as on the command line: `--calibrate DATA`.

    Outside of the block, messages write them as in Python: `calibrate=DATA`.
    """
    before = _TYPED.set(True)
    try:
        yield
    finally:
        _TYPED.reset(before)


def flag(name: str) -> str:
    """Return an option as the command line spells it: `arch_args` is `--arch-arg`."""
    return f"--{_FLAGS.get(name, name).replace('_', '-')}"


def called(name: str) -> str:
    """Return an option's name for use in a sentence, as the reader of the message knows it.

    On the command line some options have another name than in Python (`dtype` is `precision`).
    """
    if not _TYPED.get():
        return name
    return _FLAGS.get(name, name)


def spelled(name: str, value: object = None, *, metavar: str = "") -> str:
    """Return an option as the reader of a message has to write it.

    On the command line it is `--calibrate DATA`, and in Python `calibrate=DATA`.

    Args:
        name: The option's name in Python.
        value: The value to write behind the name. A list repeats the option.
        metavar: A placeholder to write instead of a value, such as `DATA`.
    """
    # Is the message for somebody who calls normswap from Python?
    if not _TYPED.get():
        return f"{name}={metavar or _as_python(value)}"
    if isinstance(value, list):
        return " ".join(spelled(name, item) for item in value)

    # A switch (True) and an option to be named without a value are written as the flag alone.
    shown = metavar
    if not metavar and value is not None and value is not True:
        shown = shlex.quote(str(value))
    return f"{flag(name)} {shown}".rstrip()


def _as_python(value: object) -> str:
    """Return a value as Python code, or an empty text for None."""
    if value is None:
        return ""
    if isinstance(value, str):
        return f'"{value}"'
    return repr(value)


def near(name: str, names: Iterable[str], otherwise: str = "", most: int = 3) -> str:
    """Return a remedy that suggests the names most like `name`.

    Args:
        name: The name that the user gave and that does not exist.
        names: The names that do exist.
        otherwise: The remedy if no name is alike.
        most: How many names are suggested at most.
    """
    # Only the beginning of a very long name is compared, because comparing takes time.
    matches = difflib.get_close_matches(name[:100], list(names), most)
    if not matches:
        return otherwise
    return f"Did you mean {' or '.join(matches)}?"


def first_few(items: Iterable[str], most: int = 5) -> str:
    """Return the first items of a list, and how many more there are.

    Args:
        items: The items to list, such as names of tensors.
        most: How many are shown at most.
    """
    listed = list(items)
    shown = ", ".join(listed[:most])
    if len(listed) > most:
        shown += f" and {len(listed) - most} more"
    return shown


def by_reason(reasons: Mapping[str, str], whole: str, most: int = 3) -> str:
    """Return a text that says why each of several modules is refused: `a, b: REASON; c: ...`.

    The modules are named by their paths. Those with the same reason stand together.

    Args:
        reasons: The reason for each module, by its path.
        whole: The words for the network itself, which are shown in place of its empty path.
        most: How many reasons, and how many paths of each, are shown at most.
    """
    paths: dict[str, list[str]] = {}
    for path, reason in reasons.items():
        paths.setdefault(reason, []).append(path or whole)

    shown = list(paths.items())[:most]
    parts = [f"{first_few(group, most)}: {reason}" for reason, group in shown]
    shown_paths = sum(len(group) for _, group in shown)
    not_shown = sum(len(group) for group in paths.values()) - shown_paths
    if not_shown:
        parts.append(f"and {not_shown} more")
    return "; ".join(parts)


# Each of pydantic's demands on a value, as a pattern, and the words that replace it.
_DEMANDS = (
    (r"input should be a valid integer\b.*", "must be a whole number"),
    (r"input should be a valid number\b.*", "must be a number"),
    (r"input should be a finite number", "must be a finite number"),
    (r"input should be a valid string", "must be a text"),
    (r"input should be a valid boolean\b.*", "must be true or false"),
    (r"input should be a valid (?:array|list|tuple)", "must be a list"),
    (r"input should be (?:an object|a valid dictionary)", "must be an object"),
    (r"input should be greater than or equal to (\S+)", r"must be at least \1"),
    (r"input should be less than or equal to (\S+)", r"must be at most \1"),
    (r"input should be greater than (\S+)", r"must be above \1"),
    (r"input should be less than (\S+)", r"must be below \1"),
    (r"input should be (.*)", r"must be \1"),
    (r"field required", "is missing"),
)


def demanded(reason: str) -> str:
    """Return a message of pydantic in plainer words, such as `must be a whole number`.

    Args:
        reason: pydantic's message, such as `Input should be a valid integer`. If no pattern fits,
            it is returned as it is.
    """
    for pattern, words in _DEMANDS:
        found = re.fullmatch(pattern, reason, re.IGNORECASE | re.DOTALL)
        if found:
            return found.expand(words)
    return reason


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's class if it has no message."""
    message = str(error)
    # The text of a KeyError is the repr of its argument, in which a line break is written "\n". So
    # the argument itself is read.
    if isinstance(error, KeyError) and "\\n" in message:
        message = str(error.args[0])
    return next(iter(message.strip().splitlines()), type(error).__name__)


def printable(text: str, *, lines: bool = False) -> str:
    r"""Return the text with each invisible character replaced by its escape: `\x1b`, `\u202e`.

    The name of a file or a layer, a key of a record and the message of an error may hold anything:
    a sequence that a terminal obeys, a mark that turns the order of the letters around, a line
    break that begins another line.

    Args:
        text: A text that others may have written.
        lines: Whether line breaks and tabs stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(_visible(character, lines=lines) for character in text)


def _visible(character: str, *, lines: bool) -> str:
    """Return a character, or its escape if the character is not visible.

    Args:
        character: The character.
        lines: Whether line breaks and tabs are returned as they are.
    """
    if character.isprintable() or (lines and character in "\n\t"):
        return character
    # A blank, such as a no-break space, is harmless: it moves neither the cursor nor other letters.
    if unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode("ascii")


@contextmanager
def explained(kind: type[NormswapError], what: str, remedy: str = "") -> Iterator[None]:
    """Turn any error inside a `with` block into one of class `kind`.

    Args:
        kind: The class of the new error. Its reason is the first line of the old error.
        what: The fault.
        remedy: The user's next step.
    """
    try:
        yield
    # What is called inside is a user's network or another library, which may raise anything.
    except Exception as error:
        raise kind(what, first_line(error), remedy) from None


class SourceError(NormswapError):
    """A model, file or dataset cannot be found, read or understood."""


class TraceError(NormswapError):
    """The network does not run on an example input, or its forward cannot be recorded."""


class PlanError(NormswapError):
    """A plan is malformed, was edited into nonsense, or does not fit the model."""


class OptionError(NormswapError):
    """An option is unknown, or its value is not allowed."""


class RecipeError(NormswapError):
    """A recipe cannot be found or read, or one of its keys or values is not allowed."""


class RefusedError(NormswapError):
    """The surgery is impossible at some module path, or there is nothing to do."""


class VerificationError(NormswapError):
    """It cannot be shown that the result of a conversion computes what its source computes."""


class WrongResultError(VerificationError):
    """The result was compared, and it is wrong. A command then ends with exit code 1."""


class TrainingError(NormswapError):
    """Training has gone wrong: the loss is not finite."""


class OutputError(NormswapError):
    """The output cannot be written."""


def require_packages(what: str, packages: Iterable[str], extra: str) -> None:
    """Raise OptionError if one of several optional packages is not installed.

    Args:
        what: The feature that needs the packages, as the error names it.
        packages: The names under which Python imports the packages.
        extra: The extra of normswap's installation that brings the packages.

    Raises:
        OptionError: A package is not installed.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            remedy = f"In the clone of normswap: pip install -e '.[{extra}]'"
            raise OptionError(f"{what} needs the package {package}", "it is not installed", remedy)


class WeightsNote(UserWarning):
    """A warning about weights that were read. The command line prints it for the user."""


class NewHeadNote(WeightsNote):
    """A warning that the head of a network is new, with random values."""


class LeftBehindNote(UserWarning):
    """A warning about files of a process that was killed. The command line prints it."""


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the warnings and log lines of libraries off the terminal.

    The errors of this package say in one line what the user needs to know. Only warnings of class
    `LeftBehindNote`, about files of a process that was killed, are still shown.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", LeftBehindNote)
            yield
    finally:
        logging.disable(before)
