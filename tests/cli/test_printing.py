"""What commands print and ask for, by the parts that do it."""

import dataclasses
from pathlib import Path

import pytest

from normswap.cli import progress, result_tables, tables
from normswap.cli.commands import recalibrate_command
from normswap.cli.commands.export_command import Written
from normswap.exporting.settings import FileSettings
from normswap.training.engine import TrainingProgress


def test_a_log_has_a_line_for_each_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.training() as (show, _):
        for update in range(1, 9):
            show(TrainingProgress(update, 8, update / 4, 2.0, 10.0, 0.1, 1.0, None))
    said = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in said] == ["1.00/2", "2.00/2"]


def test_facts_begin_at_the_margin(capsys: pytest.CaptureFixture[str]) -> None:
    tables.facts(("name", "value"), ("longer name", "another"))
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "name         value", "longer name  another"
    ]  # fmt: skip


def test_what_is_said_of_many_paths_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    dead = [f"layer{i}: it is dead" for i in range(5)]
    tables.listing("note", [*dead[:4], "a.b: it lives: yes", "run this", "run that", dead[4]])
    assert capsys.readouterr().out.splitlines() == [
        "note: layer0, layer1, layer2, 2 more: it is dead",
        "note: a.b: it lives: yes",
        "note: run this",
        "note: run that",
    ]


def test_the_command_has_the_defaults_of_the_function() -> None:
    asked, default = Written(output=Path("net.onnx")), FileSettings()
    shared = {field.name for field in dataclasses.fields(Written)} & {
        field.name for field in dataclasses.fields(FileSettings)
    }
    assert shared >= {"format", "dtype", "dynamic_batch", "normalize", "softmax"}
    assert {name: getattr(asked, name) for name in shared} == {name: getattr(default, name) for name in shared}


def test_recalibrating_wants_images_of_the_part_that_is_trained_on() -> None:
    """Where the other commands take those that are evaluated on, if any."""
    fields = {field.name: field for field in dataclasses.fields(recalibrate_command.Domain)}
    assert fields["data"].default is dataclasses.MISSING
    assert fields["split"].default == "train"
    assert dataclasses.fields(recalibrate_command.Before)


@pytest.mark.parametrize(("dry", "words"), [(True, "would convert"), (False, "converted")])
def test_what_was_not_done_is_not_said_to_be(dry: bool, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    step = {
        "scheme": "folded",
        "options": {},
        "edits": [],
        "report": None,
        "outcomes": {},
        "left": {},
        "alphas": {},
        "notes": [],
        "renames": [],
    }
    result_tables.print_step("demo", step, dry=dry)
    assert capsys.readouterr().out.startswith(f"{words}  demo to folded")


@pytest.mark.parametrize(
    ("values", "text"), [([1], "1"), ([1, 2, 3, 4], "1 2 3 4"), ([1, 2, 3, 4, 5], "1 2 3 4 ... (5 in all)"), ([], "")]
)
def test_of_many_values_the_first_are_shown(values: list[int], text: str) -> None:
    assert tables.few(values) == text
