"""The end of every --help: two examples at least, that the command's own parser takes, and the keys of --json."""

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
    text, _, _ = text.partition("\nKeys of --json")
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


def test_old_names_of_options_are_taken_and_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert application.main(["export", "--help"]) == 0
    page = capfd.readouterr().out
    assert "--image-mean R,G,B" in page
    assert "-o, --output FILE" in page
    assert not {"--mean", "--std", "--dtype"} & {word.strip(",") for word in page.split()}


def test_options_stand_under_the_heading_of_their_record(capfd: pytest.CaptureFixture[str]) -> None:
    assert application.main(["convert", "--help"]) == 0
    lines = capfd.readouterr().out.splitlines()
    heads = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert heads[:3] == ["Arguments:", "Options:", "Options of the schemes:"]
    assert heads[-2:] == ["Examples:", "Keys of --json:"]

    def under(option: str) -> str:
        at = next(i for i, line in enumerate(lines) if line.startswith(f"  {option} "))
        return next(line for line in reversed(lines[:at]) if line in heads)

    assert under("--arch") == "How MODEL is opened:"
    assert under("--alpha") == "Options of the schemes:"
    assert under("--to") == "Options:"
    assert under("--image-mean") == "How its images are prepared, where it does not say so:"


def test_every_command_lists_the_keys_of_json() -> None:
    """That they are those of a run, `run_json` checks wherever it runs one."""
    application.main([])
    parsers: Any = typer.main.get_command(application.app)
    for command in COMMANDS:
        assert parsers.commands[command].keys
