"""The command line as a whole: it finds the command that was named, and turns errors into exit
codes.

Exit codes: 0 done; 1 a comparison failed (`verify`, `demo`); 2 bad input, said in one line on
stderr; 130 interrupted.
"""

import copy
import functools
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
import typer.core

import normswap
from normswap.cli import commands
from normswap.errors import NormswapError, OptionError, command_line, quiet

# typer's errors derive from click's ClickException, which newer versions of typer no longer import
# under that name.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]
Clicks = Any
"""Objects of click's, which newer versions of typer hide."""
# As a shell has it: 128 + SIGINT.
_INTERRUPTED = 130
_SETTINGS = {"help_option_names": ["-h", "--help"]}


class Command(typer.core.TyperCommand):
    """One command, whose help shows flags without a value: newer versions of typer write `<bool>`
    behind them.
    """

    def get_params(self, ctx: Clicks) -> Clicks:
        return _without_values(super().get_params(ctx))


class CommandGroup(typer.core.TyperGroup):
    """All commands. One is imported when it is called; --help lists their summaries without an
    import.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        summaries = commands.SUMMARIES.items()
        self.commands = {
            name: typer.core.TyperCommand(name, help=summary) for name, summary in summaries
        }

    def resolve_command(self, ctx: Clicks, args: list[str]) -> Clicks:
        name, _, arguments = super().resolve_command(ctx, args)
        return name, load(str(name)), arguments

    def get_params(self, ctx: Clicks) -> Clicks:
        """Say that flags that are not given are false; typer imports pydantic to find that out, in
        0.1 s.
        """
        params = _without_values(super().get_params(ctx))
        for option in params:
            option.default = option.default or False
        return params


def _without_values(params: Clicks) -> Clicks:
    for option in params:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    return params


def spread(run: Callable[..., int | None]) -> Callable[..., int | None]:
    """Return a command's `run` as typer takes it: called with the options, it gets the dataclasses.

    Options that several commands share are a dataclass, written once. Typer knows only options one
    by one, so it is shown a signature in which each dataclass is replaced by its fields. The
    dataclass's `GROUP` is the heading of the panel in --help below which the options stand that it
    adds.
    """
    records: dict[str, type[Any]] = {}
    options: list[inspect.Parameter] = []
    for argument in inspect.signature(run, eval_str=True).parameters.values():
        kind = argument.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            records[argument.name] = kind
            hints = get_type_hints(kind, include_extras=True)
            options += [
                _option(kind, field, hints[field.name]) for field in fields(kind) if field.init
            ]
        else:
            options.append(
                argument.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=_escaped(kind))
            )

    @functools.wraps(run)
    def flattened(**options: object) -> int | None:
        for name, record in records.items():
            options[name] = record(
                **{field.name: options.pop(field.name) for field in fields(record) if field.init}
            )
        return run(**options)

    flattened.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    flattened.__annotations__ = {option.name: option.annotation for option in options}
    return flattened


def _option(record: type[Any], field: Field[Any], hint: object) -> inspect.Parameter:
    adds = next(base for base in record.__mro__ if field.name in inspect.get_annotations(base))
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    hint = _escaped(hint, getattr(adds, "GROUP", None))
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
    )


def _escaped(hint: object, panel: str | None = None) -> object:
    """Return the option's type with its help's brackets escaped, which rich would take for markup,
    and its panel.
    """
    if get_origin(hint) is not Annotated:
        return hint
    kind, info = get_args(hint)
    info = copy.copy(info)
    info.help = info.help and info.help.replace("[", r"\[")
    info.rich_help_panel = panel or info.rich_help_panel
    return Annotated[kind, info]


@functools.cache
def load(name: str) -> Clicks:
    """Import a command and return it as typer runs it, with examples and the keys of --json below
    its --help.
    """
    module = importlib.import_module(f"{commands.__name__}.{name}_command")
    lines = [
        *(f"normswap {example}" for example in module.EXAMPLES),
        f"Keys of --json: {module.KEYS}",
    ]
    epilog = "\n\n".join(lines).replace("[", r"\[")
    # A terminal breaks the lines of a paragraph where it likes.
    paragraphs = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(module.run.__doc__))
    single = typer.Typer(context_settings=_SETTINGS, add_completion=False)
    single.command(name, cls=Command, epilog=epilog, help=paragraphs)(spread(module.run))
    return typer.main.get_command(single)


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
    """Run one command; returns its exit code. Errors that are the input's fault become one line on
    stderr.
    """
    # OpenMP's waiting threads spin, which costs several times the work where other processes need
    # the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if argv is None:
        argv = sys.argv[1:]
    arguments = list(argv)
    fail = _fail
    if "--debug" in arguments:
        arguments.remove("--debug")
        fail = _fail_with_traceback
    try:
        with quiet(), command_line():
            if "" in arguments:
                raise OptionError(
                    "an argument is empty", remedy="A shell variable that is not set gives one"
                )
            result = app(arguments or ["--help"], prog_name="normswap", standalone_mode=False)
            sys.stdout.flush()
    except _UsageError as error:
        return fail(error.format_message())  # type: ignore[attr-defined]
    except NormswapError as error:
        return fail(str(error))
    except OSError as error:
        _abandon_stdout()
        return fail(
            ": ".join(map(str, filter(None, (error.filename, error.strerror)))) or str(error)
        )
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    return int(result or 0)


def _abandon_stdout() -> None:
    """If stdout takes nothing any more (disk full, pipe closed), do not let the interpreter fail on
    it again.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _fail_with_traceback(message: str) -> int:
    error: BaseException | None = sys.exc_info()[1]
    while error is not None:
        # Errors of one line hide what they were raised for.
        error.__suppress_context__ = False
        error = error.__context__
    traceback.print_exc()
    return _fail(message)


def _version(is_asked: bool) -> None:
    if is_asked:
        print(f"normswap {normswap.__version__}")
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
