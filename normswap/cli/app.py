"""The command line as a whole: the command that was named, and errors as exit codes.

Exit codes: 0 done; 1 a comparison failed, so a result is wrong; 2 bad input, or nothing proves the
result, said in one line on stderr; 130 interrupted. A command that has written its files is done,
whether or not stdout takes its words.
"""

import copy
import functools
import importlib
import inspect
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, TextIO, get_args, get_origin, get_type_hints

import typer
import typer.core

import normswap
from normswap import schemes, shipped
from normswap.cli import commands, early_checks
from normswap.cli.terminal import (
    abandon_stdout,
    open_standard_streams,
    remark,
    say,
    say_aside,
    say_json,
)
from normswap.cli.words import values_typed
from normswap.errors import (
    LeftBehindNote,
    NormswapError,
    OptionError,
    WrongResultError,
    command_line,
    demanded,
    first_line,
    quiet,
)

# typer's errors derive from click's ClickException, which newer versions of typer no longer import
# under that name.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]
Clicks = Any
"""Objects of click's, which newer versions of typer hide."""
# How typer's parser says that a value is of another type, or out of range.
_INVALID = re.compile(r"Invalid value for '(--[\w-]+)': (Input should be .*)")
# Exit codes beside 0, 1 (a result is wrong) and 2 (bad input). A command that was interrupted has
# that of a shell, 128 + SIGINT, and a bug has one of its own.
_INTERRUPTED = 130
_CRASHED = 3
_SETTINGS = {"help_option_names": ["-h", "--help"]}


def _recipes() -> list[str]:
    """Return the names of the recipes that come with the package, for a shell's completion."""
    files = shipped.recipes().glob("*.yaml")
    return sorted(file.stem for file in files if file.name not in shipped.NO_RECIPES)


# What a shell completes for a placeholder that does not list its words.
_COMPLETED: dict[str, Callable[[], Sequence[str]]] = {
    "SCHEME": lambda: [*schemes.names(), "unfold"],
    "RECIPE": _recipes,
    "NAME|FILE": _recipes,
}


class Command(typer.core.TyperCommand):
    """One command, whose help shows flags without a value.

    Newer versions of typer write `<bool>` behind them.
    """

    # A function of the words of the command line. It returns the names of the options that --help
    # leaves out then.
    left_out: Callable[[Sequence[str]], set[str]] | None = None
    _words: Sequence[str] = ()

    def get_params(self, ctx: Clicks) -> Clicks:
        return _without_values(super().get_params(ctx))

    def parse_args(self, ctx: Clicks, args: list[str]) -> list[str]:
        self._words = tuple(args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Clicks, formatter: Clicks) -> None:
        """Write --help, without the options that do not apply to the words that were typed.

        `left_out` names these options, such as the options of other schemes than --to names.

        Args:
            ctx: The context of the command line, of click's.
            formatter: The object to which click writes the help.
        """
        names = set() if self.left_out is None else self.left_out(self._words)
        options: Clicks = [option for option in self.params if option.name in names]
        for option in options:
            option.hidden = True
        try:
            super().format_help(ctx, formatter)
        finally:
            for option in options:
                option.hidden = False


class CommandGroup(typer.core.TyperGroup):
    """All commands of the program. A command is imported only when it is called.

    --help lists their summaries, for which nothing is imported.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {}
        for name, summary in commands.SUMMARIES.items():
            self.commands[name] = typer.core.TyperCommand(name, help=summary)

    def resolve_command(self, ctx: Clicks, args: list[str]) -> Clicks:
        name, _, arguments = super().resolve_command(ctx, args)
        return name, load(str(name)), arguments

    def get_params(self, ctx: Clicks) -> Clicks:
        """Return the options of the program itself, with False as the default of each.

        All are flags. typer would import pydantic to read such a default, which takes 0.1 s.
        """
        params = _without_values(super().get_params(ctx))
        for option in params:
            option.default = option.default or False
        return params


def _without_values(params: Clicks) -> Clicks:
    """Remove the placeholder of a value, such as `<bool>`, from the help of flags.

    Args:
        params: The list of a command's options and arguments, as click's objects. It is changed in
            place.

    Returns:
        The same list, with all options and arguments.
    """
    for option in params:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    return params


def spread(run: Callable[..., int | None]) -> Callable[..., int | None]:
    """Return a command's `run` in the form that typer takes: with one argument for each option.

    Options that several commands share are a dataclass, written once. Typer knows only options one
    by one, so it is shown a signature in which each dataclass is replaced by its fields. The
    function that is returned builds the dataclasses again and calls `run`. A dataclass's `GROUP` is
    the heading in --help of the options that it adds.

    Args:
        run: The function of a command, whose arguments are options or dataclasses of options.
    """
    records: dict[str, type[Any]] = {}
    options: list[inspect.Parameter] = []
    for argument in inspect.signature(run, eval_str=True).parameters.values():
        kind = argument.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            records[argument.name] = kind
            hints = get_type_hints(kind, include_extras=True)
            for field in _constructor_fields(kind):
                options.append(_option(kind, field, hints[field.name]))
        else:
            options.append(
                argument.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=_escaped(kind))
            )

    # typer calls this function, with the options of all dataclasses one by one.
    @functools.wraps(run)
    def flattened(**options: object) -> int | None:
        # Names that cannot be right are refused now, before a command imports torch.
        early_checks.check(options)
        for name, record in records.items():
            values = {field.name: options.pop(field.name) for field in _constructor_fields(record)}
            options[name] = record(**values)
        return run(**options)

    # typer reads the options from these two attributes.
    flattened.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    flattened.__annotations__ = {option.name: option.annotation for option in options}
    return flattened


def _constructor_fields(record: type[Any]) -> list[Field[Any]]:
    """Return the fields of a dataclass that its constructor takes."""
    return [field for field in fields(record) if field.init]


def _option(record: type[Any], field: Field[Any], hint: object) -> inspect.Parameter:
    """Return a field of a dataclass as an option.

    Args:
        record: The dataclass. `GROUP` of the base class that adds the field is the heading under
            which the option stands in --help.
        field: The field.
        hint: The field's type, with typer's record of the option.
    """
    # A dataclass of options may inherit some. The class that declares the option is looked for.
    owner = next(base for base in record.__mro__ if field.name in inspect.get_annotations(base))
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=_escaped(hint, getattr(owner, "GROUP", None)),
    )


def _escaped(hint: object, panel: str | None = None) -> object:
    """Return an option's type, ready for typer: with its help text, heading and completion.

    Brackets in the help text are escaped, as rich would take them for markup. A type that is not
    Annotated is returned as it is.

    Args:
        hint: The type, with typer's record of the option.
        panel: The heading in --help under which the option stands. None leaves the record's own.
    """
    if get_origin(hint) is not Annotated:
        return hint

    # typer's record of the option is copied, because several commands share it.
    kind, info = get_args(hint)
    info = copy.copy(info)
    if info.autocompletion is None:
        info.autocompletion = _completion(info.metavar or "")
    # rich would take brackets in the help for markup.
    info.help = info.help and info.help.replace("[", r"\[")
    info.rich_help_panel = panel or info.rich_help_panel
    return Annotated[kind, info]


def _completion(metavar: str) -> Callable[[str], list[str]] | None:
    """Return the function by which a shell completes an option's value.

    The result is None if the placeholder lists no words that could be completed.

    Args:
        metavar: The option's placeholder. `fit|keep` has two words; words in capitals stand for
            something else, such as a name or a number.
    """
    # `7|8` completes to 7 and 8, and `auto|NAMES` to auto. A single word such as N completes to
    # nothing, unless `_COMPLETED` has a function for it, as for SCHEME.
    listed = [word for word in metavar.split("|") if not word.isupper()]
    if metavar not in _COMPLETED and not ("|" in metavar and listed):
        return None

    def complete(incomplete: str) -> list[str]:
        words = _COMPLETED[metavar]() if metavar in _COMPLETED else listed
        return [word for word in words if word.startswith(incomplete)]

    return complete


@functools.cache
def load(name: str) -> Clicks:
    """Import a command, and return it as the object that typer runs.

    Its --help ends with examples and the keys of --json.

    Args:
        name: The command, such as `convert`.
    """
    # Below the help, rich would take brackets for markup.
    module = importlib.import_module(f"{commands.__name__}.{name}_command")
    lines = [
        *(f"normswap {example}" for example in module.EXAMPLES),
        f"Keys of --json: {module.KEYS}",
    ]
    epilog = "\n\n".join(lines).replace("[", r"\[")
    # The single line breaks inside a paragraph become blanks, as the help is wrapped again to the
    # width of the terminal.
    paragraphs = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(module.run.__doc__))

    # typer sees the options of the command's dataclasses as parameters of one function (`spread`).
    single = typer.Typer(context_settings=_SETTINGS, add_completion=False)
    single.command(name, cls=Command, epilog=epilog, help=paragraphs)(spread(module.run))
    command = typer.main.get_command(single)
    if isinstance(command, Command):
        command.left_out = getattr(module, "left_out_of_help", None)
    return command


app = typer.Typer(
    name="normswap",
    cls=CommandGroup,
    help=(
        "Move a pretrained vision network to another normalization scheme, keeping the function it"
        " learned. Begin with `normswap demo`, then `normswap convert demo --to skipinit`."
    ),
    pretty_exceptions_enable=False,
    context_settings=_SETTINGS,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code.

    Errors that are the input's fault become one line on stderr.

    Args:
        argv: The words of the command. With None they are those of the process, which then runs
            nothing but this command: its standard streams are opened where they were closed, and a
            bug's traceback is made printable. A bug in a caller's process is raised.
    """
    # OpenMP's waiting threads spin, which costs several times the work where other processes need
    # the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if argv is not None:
        return _run(list(argv))

    open_standard_streams()
    try:
        return _run(sys.argv[1:])
    except Exception as error:
        _print_traceback(error)
        return _CRASHED


def _run(arguments: list[str]) -> int:
    """Run one command, and return its exit code. A bug is raised.

    Args:
        arguments: The words of the command.
    """
    # `fail` prints an error, and returns the exit code of bad input.
    fail = _fail_as_json if "--json" in arguments else _fail
    if "--debug" in arguments:
        arguments.remove("--debug")
        fail = _fail_with_traceback

    # A wrong result is a NormswapError, too, so it is caught before the others.
    try:
        with quiet(), command_line(), _notes_on_stderr():
            if "" in arguments:
                raise OptionError(
                    "an argument is empty", remedy="A shell variable that is not set gives one"
                )
            result = app(arguments or ["--help"], prog_name="normswap", standalone_mode=False)
            sys.stdout.flush()
    except _UsageError as error:
        return fail(_usage(error, arguments))
    except WrongResultError as error:
        fail(str(error))
        return 1
    except NormswapError as error:
        return fail(str(error))
    # Often it is stdout that takes no text any more.
    except OSError as error:
        abandon_stdout()
        parts = [str(part) for part in (error.filename, error.strerror) if part]
        return fail(": ".join(parts) or str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    except Exception as error:
        sentence = _exhausted(error)
        if not sentence:
            raise
        return fail(sentence)
    return int(result or 0)


def _exhausted(error: Exception) -> str:
    """Return what is wrong and what to do if the machine has too little memory, or "" otherwise.

    Args:
        error: What a command raised.
    """
    why = first_line(error)
    # torch's class for a GPU's memory is not imported for its name alone.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"the memory does not suffice: {why}. Take fewer images at a time, or a smaller size"
    # torch's loader raises RuntimeError if one of its processes was killed.
    if "DataLoader worker" in why:
        return (
            f"a process that loads images has died: {why}. Load them in this one (--workers 0, in"
            " training data.workers=0), or give the container more shared memory"
        )
    return ""


@contextmanager
def _notes_on_stderr() -> Iterator[None]:
    """In a `with` block, print on stderr each note on files that a killed run left behind.

    Such a note is a warning (`LeftBehindNote`), and is printed once. Other warnings are dropped.
    """
    printed: set[str] = set()

    # Python calls this function for each warning, with these arguments.
    def print_note(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        # A note is printed once (`printed`), and warnings of other classes are dropped.
        note = str(message)
        if issubclass(category, LeftBehindNote) and note not in printed:
            printed.add(note)
            remark([note])

    # `quiet` puts the usual function back.
    warnings.showwarning = print_note
    yield


def _fail(message: str) -> int:
    """Print an error in one line on stderr, and return exit code 2."""
    say_aside(f"error: {' '.join(message.split())}")
    return 2


def _fail_as_json(message: str) -> int:
    """Print an error as JSON on stdout, for programs, and as a line on stderr; return 2."""
    code = _fail(message)
    # The program that reads stdout may be gone. The line on stderr has said the error already.
    with suppress(OSError):
        say_json({"error": " ".join(message.split())})
    return code


def _usage(error: Any, arguments: Sequence[str]) -> str:
    """Return what is wrong with a command line, with an example if an argument is missing.

    Args:
        error: The error of typer's parser.
        arguments: The words of the command line.
    """
    # The message may be: Invalid value for '--samples': Input should be a valid integer
    message = str(error.format_message())
    invalid = _INVALID.fullmatch(message)
    if invalid:
        # `demanded` says the parser's reason in plainer words.
        option, reason = invalid.groups()
        return f"{_as_typed(option, arguments)} {demanded(reason)}"
    # Or it may be: Missing argument 'MODEL'. An example of the command is added then.
    context = getattr(error, "ctx", None)
    name = getattr(context, "info_name", None)
    if not message.startswith("Missing") or name not in commands.SUMMARIES:
        return message
    module = importlib.import_module(f"{commands.__name__}.{name}_command")
    return f"{message} For example: normswap {module.EXAMPLES[0]}"


def _as_typed(option: str, arguments: Sequence[str]) -> str:
    """Return an option with the value that was typed behind it: `--groups none`."""
    values = values_typed(option, arguments)
    return f"{option} {values[0]!r}" if values else option


def _fail_with_traceback(message: str) -> int:
    """Print a traceback, then an error message, on stderr, and return exit code 2.

    The traceback is that of the error that is being handled in an `except` block.
    """
    error: BaseException | None = sys.exc_info()[1]
    while error is not None:
        # An error that was raised `from None` hides the one that led to it. Both are shown here.
        error.__suppress_context__ = False
        error = error.__context__
    say_aside(traceback.format_exc().rstrip("\n"), lines=True)
    return _fail(message)


def _print_traceback(error: Exception) -> None:
    """Print the traceback of a bug as Python does, with what the error quotes made printable."""
    say_aside("".join(traceback.format_exception(error)).rstrip("\n"), lines=True)


def _version(is_asked: bool) -> None:
    """Print the version and leave, if the option --version is given."""
    if is_asked:
        say(f"normswap {normswap.__version__}")
        raise typer.Exit


@app.callback()
def _normswap(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass
