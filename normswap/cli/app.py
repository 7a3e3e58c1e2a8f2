"""The command line as a whole: it finds its commands, one file each in `commands`, and turns errors into exit codes.

Exit codes: 0 done; 1 a comparison failed (`verify`, `demo`); 2 bad input, said in one line on stderr; 130 interrupted.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Annotated

import typer
import typer.core

import normswap
from normswap.cli import commands
from normswap.cli.help_page import Clicks
from normswap.cli.interruption import INTERRUPTED, ends_imports
from normswap.cli.printing import between_words
from normswap.errors import NormswapError, OptionError, command_line

# typer's errors derive from click's, which newer versions of typer no longer import under that name.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]  # ClickException


class _Group(typer.core.TyperGroup):
    """Of a --help that is not given typer finds out by pydantic that it is false; that takes 0.1 s to import."""

    def get_help_option(self, ctx: Clicks) -> Clicks:
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option


_START = """\
normswap moves a pretrained vision network to another normalization scheme
and keeps the function it learned.

  normswap demo                         the whole way on a small network
  normswap inspect demo                 its blocks and norms (or: resnet50 ...)
  normswap advise demo --batch-size 2   which scheme to choose, and why
  normswap convert demo --to skipinit   another scheme (normswap schemes)
  normswap export demo -o demo.onnx     no norm left, checked in ONNX Runtime

normswap --help lists all commands, normswap COMMAND --help what one takes."""

app = typer.Typer(
    name="normswap",
    cls=_Group,
    help="Move a pretrained vision network to another normalization scheme, keeping the function it learned.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors that are the input's fault become one line on stderr."""
    # OpenMP's threads that wait spin; where another process wants the cores that costs several times the work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        with ends_imports(), _quiet(), command_line():
            _register()
            arguments = sys.argv[1:] if argv is None else list(argv)
            if not arguments:
                print(_START)
                return 0
            if "" in arguments:
                raise OptionError("an argument is empty", remedy="A shell variable that is not set gives one")
            arguments = [_at_home(argument) for argument in arguments]
            result = app(arguments, prog_name="normswap", standalone_mode=False)
            sys.stdout.flush()
    except _UsageError as error:
        return _fail(error.format_message())  # type: ignore[attr-defined]
    except NormswapError as error:
        return _fail(str(error))
    except OSError as error:
        _abandon_stdout()
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return result if isinstance(result, int) else 0


def _at_home(argument: str) -> str:
    """The argument with the home directory for a `~/` that no shell replaced: quoted, or behind `=`."""
    option, equals, value = argument.partition("=~/") if "=~/" in argument else ("", "", argument)
    if equals:
        return f"{option}={os.path.expanduser(f'~/{value}')}"
    return os.path.expanduser(value) if value.startswith("~/") else value


def _abandon_stdout() -> None:
    """If stdout takes nothing any more (disk full, pipe closed), do not let the interpreter fail on it again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str) -> int:
    print(between_words(f"error: {' '.join(message.split())}", sys.stderr), file=sys.stderr)
    return 2


@contextmanager
def _quiet() -> Iterator[None]:
    """Neither warnings nor log lines of the libraries underneath."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"normswap {normswap.__version__}")
        raise typer.Exit


@app.callback()
def _normswap(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


def _discover() -> list[ModuleType]:
    """Every file of `commands`, in the order of --help."""
    names = [info.name for info in pkgutil.iter_modules(commands.__path__, f"{commands.__name__}.")]
    return sorted((importlib.import_module(name) for name in names), key=lambda command: int(command.ORDER))


@functools.cache
def _register() -> None:
    """Only when a command line is at hand: a scheme of somebody else's, whose options `convert` takes, may not load."""
    for command in _discover():
        command.register(app)
