"""The examples at the end of every --help: two at least, that the command's own parser takes."""

from __future__ import annotations

import pkgutil
import re
import shlex
from typing import Any

import pytest
import typer

from normswap.cli import app as application
from normswap.cli import commands
from normswap.training import recipe_files

COMMANDS = sorted(info.name.removesuffix("_command") for info in pkgutil.iter_modules(commands.__path__))


def listed(command: str, capfd: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The examples that --help prints, split as a shell would."""
    assert application.main([command, "--help"]) == 0
    _, _, text = capfd.readouterr().out.partition("Examples:\n")
    return [shlex.split(line) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_parse(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    examples = listed(command, capfd)
    parsers: Any = typer.main.get_command(application.app)
    assert len(examples) >= 2
    for program, name, *words in examples:
        assert (program, name) == ("normswap", command)
        with parsers.commands[command].make_context(name, list(words)) as context:
            assert context.params
        recipes = [word for word in words if re.fullmatch(r"(cifar10|finetune|imagenet)_\w+", word)]
        assert {*recipes} <= {*recipe_files.names()}
