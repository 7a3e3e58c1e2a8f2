"""What others have written reaches the terminal, a card and a page as text, whatever it holds."""

import ast
import json
import os
import pty
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from hypothesis import given, strategies as st
from support import forked
from support.command_line import Capture
from support.model_sources import small

import normswap
from normswap.cli import progress, tables, terminal
from normswap.cli.app import main
from normswap.errors import LeftBehindNote, printable
from normswap.plan import Arch, Plan, Step
from normswap.provenance import Provenance
from normswap.reporting import page
from normswap.storage import checkpoint, model_card

# Sets the title, colours, clears the screen, goes a line up, turns the order around, forges a line.
HOSTILE = "\x1b]0;title\x07\x1b[31m\x9b2J\x1bM\u202eevil\u2066\r\n\x08# forged [red]bold[/red]<b>"
DEMO = "demo"
ROOT = Path(normswap.__file__).parent


def obeyed(text: str) -> set[str]:
    """The characters that a terminal, or a reader of lines, would act on."""
    return {character for character in text if printable(character, lines=True) != character}


@pytest.mark.slow
@given(st.text())
def test_a_printable_text_shows_all_that_is_visible_and_nothing_else(text: str) -> None:
    shown = printable(text)
    assert printable(shown) == shown
    assert not obeyed(shown)
    assert "\n" not in shown
    visible = [character for character in text if character.isprintable()]
    remaining = iter(shown)
    assert all(character in remaining for character in visible)


@pytest.mark.parametrize("text", ["resnet18.a1_in1k", "± 0.1 %", "日本語", "a\u00a0b"])
def test_usual_names_stay_as_they_are(text: str) -> None:
    assert printable(text) == text


def calls(file: Path) -> set[str]:
    nodes = [
        node
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]
    return {node.func.id for node in nodes if isinstance(node.func, ast.Name)}


def test_every_text_for_the_terminal_passes_one_place() -> None:
    found = {
        str(file.relative_to(ROOT)): calls(file) & {"print", "Text", "print_exc"}
        for file in ROOT.rglob("*.py")
    }
    assert {name: names for name, names in found.items() if names} == {
        "cli/terminal.py": {"print", "Text"}
    }


def test_tables_facts_and_lines(capsys: Capture) -> None:
    tables.facts((HOSTILE, HOSTILE), ("list", [HOSTILE]))
    tables.table(HOSTILE, ("column", "other"), [(HOSTILE, 1.0)])
    tables.listing(HOSTILE, [HOSTILE])
    tables.next_step("inspect", HOSTILE)
    terminal.say(HOSTILE)
    terminal.remark([HOSTILE])
    terminal.say_json({HOSTILE: HOSTILE})
    captured = capsys.readouterr()
    assert not obeyed(captured.out + captured.err)
    assert "\n# forged" not in captured.out + captured.err


def spins() -> None:
    with progress.working(HOSTILE):
        pass


def spins_on() -> None:
    with progress.working("working") as tell:
        tell(HOSTILE)


def advances() -> None:
    with progress.bar(HOSTILE) as advance:
        advance(1, 2)


def trains() -> None:
    with progress.training_bar() as (_, say):
        say(HOSTILE)


@pytest.mark.parametrize("show", [spins, spins_on, advances, trains])
def test_bars_and_spinners(
    show: Callable[[], None], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    def console() -> Console:
        return Console(stderr=True, force_terminal=True, width=200, color_system="standard")

    monkeypatch.setattr(progress, "_console", console)
    show()

    shown = capsys.readouterr().err
    assert not any(part in shown for part in ("\x1b]0;", "\x9b", "\u202e", "\x1bM", "\x08"))
    assert "[red]bold[/red]" in shown


@pytest.mark.parametrize(
    "command",
    [
        ("inspect", HOSTILE),
        ("inspect", f"hf-hub:{HOSTILE}"),
        ("convert", DEMO, "--to", HOSTILE),
        ("convert", DEMO, f"--{HOSTILE}"),
        (HOSTILE,),
        ("convert", DEMO, "--from-plan", HOSTILE),
        ("finetune", DEMO, "--recipe", HOSTILE),
        ("finetune", DEMO, "--recipe", "finetune_imagenet_skipinit", f"optim.lr={HOSTILE}"),
        ("evaluate", DEMO, "--data", HOSTILE),
        ("--debug", "inspect", HOSTILE),
    ],
)
def test_an_error_is_one_line_of_visible_characters(
    command: tuple[str, ...], capsys: Capture
) -> None:
    assert main(command) == 2
    captured = capsys.readouterr()
    assert not obeyed(captured.out + captured.err)
    assert captured.err.splitlines()[-1].startswith("error: ")
    if "--debug" not in command:
        assert len(captured.err.splitlines()) == 1


def test_names_in_a_directory(here: Path, capsys: Capture) -> None:
    name = HOSTILE.replace("/", "")
    checkpoint.save(small(), here / name, arch=Arch("resnet18", {}))
    for command in (("inspect", name), ("verify", name), ("convert", name, "--to", "folded")):
        main(command)
        captured = capsys.readouterr()
        assert not obeyed(captured.out + captured.err)


@pytest.mark.slow
def test_inspect_of_a_file_with_hostile_metadata(here: Path, capsys: Capture) -> None:
    assert main(["export", DEMO, "-o", "net.onnx"]) == 0
    model = onnx.load("net.onnx")
    for prop in model.metadata_props:
        prop.value = HOSTILE
    model.graph.node[0].op_type = HOSTILE
    onnx.save(model, "net.onnx")
    sidecar = here / "net.onnx.preprocess.json"
    body = json.loads(sidecar.read_text(encoding="utf-8"))
    sidecar.write_text(json.dumps({**body, HOSTILE: HOSTILE, "output": HOSTILE}), encoding="utf-8")
    capsys.readouterr()

    main(["inspect", "net.onnx"])

    captured = capsys.readouterr()
    assert not obeyed(captured.out + captured.err)


def test_a_terminal_gets_no_escape_sequence_of_a_name(here: Path) -> None:
    """A terminal's own: there, rich styles what it prints."""
    name = HOSTILE.replace("/", "")
    checkpoint.save(normswap.convert(small(), "skipinit"), here / name)
    master, slave = pty.openpty()

    def inspect() -> int:
        for number in range(3):
            os.dup2(slave, number)
        sys.stdin = os.fdopen(0, encoding="utf-8")
        sys.stdout = os.fdopen(1, "w", encoding="utf-8")
        sys.stderr = os.fdopen(2, "w", encoding="utf-8")
        code = main(["inspect", name])
        sys.stdout.flush()
        sys.stderr.flush()
        return code

    child = forked.started(inspect)
    os.close(slave)
    received = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:
            break
        if not part:
            break
        received += part
    os.close(master)
    assert forked.ended(child) == 0
    text = received.decode(errors="replace")
    assert "evil" in text
    assert not any(part in text for part in ("\x1b]0;", "\x9b", "\u202e", "\x1bM", "\x08#"))


def test_notes_on_killed_runs(here: Path, capsys: Capture, monkeypatch: Any) -> None:
    def warn(*_: object, **__: object) -> int:
        warnings.warn(HOSTILE, LeftBehindNote, stacklevel=1)
        return 0

    monkeypatch.setattr("normswap.cli.app.app", warn)
    assert main(["inspect", DEMO]) == 0
    shown = capsys.readouterr().err
    assert shown.startswith("note: ")
    assert not obeyed(shown)
    assert len(shown.splitlines()) == 1


def hostile_record() -> Provenance:
    step = Step("skipinit", {"alpha": HOSTILE}, ())
    cfg = {"num_classes": 3, "license": HOSTILE}
    return Provenance(Arch(HOSTILE, {}), HOSTILE, HOSTILE, cfg, Plan((step,)))


def test_a_card_has_the_headings_of_its_template_alone() -> None:
    report = normswap.convert(small(), "skipinit").report
    plain = model_card.render(Provenance(Arch("net", {}), "net", "ab", {}), report)
    hostile_report = SimpleNamespace(
        exact=False,
        inputs=HOSTILE,
        logits=report.logits,
        worst=report.worst,
        kept=None,
        unmeasured=HOSTILE,
        steps_before=0,
    )
    card: Any = hostile_report
    text = model_card.render(hostile_record(), card, license=HOSTILE)

    assert not obeyed(text)
    assert len(headings(text)) == len(headings(plain))
    assert text.count("\n---\n") == plain.count("\n---\n")
    outside_code = text.split("---\n", 2)[2].split("`")[::2]
    assert not any("<b>" in part.replace(r"\<", "") for part in outside_code)


def headings(card: str) -> list[str]:
    return [line for line in card.splitlines() if line.startswith("#")]


@pytest.mark.parametrize("source", ["a`b", "`", "a``b`c", "x\n\n# heading\n\n<img src=x>"])
def test_a_source_stays_within_its_span_of_code(source: str) -> None:
    """A span ends at as many backticks in a row as it began with."""
    card = model_card.render(Provenance(Arch("net", {}), source, None, {}), None)
    (line,) = [line for line in card.splitlines() if line.startswith("- Source: ")]
    runs = re.findall("`+", line)
    assert headings(card) == ["# net", "## Use"]
    assert runs[0] == runs[-1]
    assert runs[0] not in runs[1:-1]


def test_a_page_shows_what_others_wrote_as_text() -> None:
    assert page._shown(HOSTILE) == printable(HOSTILE)
    assert "\u202e" not in page._marked(HOSTILE)
    assert "&lt;b&gt;" in page._marked(HOSTILE)


FULL = "/dev/full"


@pytest.mark.skipif(not Path(FULL).exists(), reason="no device that is full")
def test_what_is_written_is_no_failure_where_stdout_takes_nothing(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(FULL, "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["convert", DEMO, "--to", "skipinit", "-o", "out"]) == 0
    assert (here / "out" / "model.safetensors").is_file()
    assert "note: all is written, but stdout takes no text" in capsys.readouterr().err

    with open(FULL, "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["inspect", DEMO]) == 2
    assert "No space left" in capsys.readouterr().err


def test_closed_streams_stay_closed_to_what_is_written(here: Path) -> None:
    """A file that is opened would get the number of stdout, and what is printed would be in it."""

    def convert() -> int:
        for number in range(3):
            os.close(number)
        sys.stdin = sys.stdout = sys.stderr = None  # type: ignore[assignment]
        sys.argv = ["normswap", "convert", DEMO, "--to", "skipinit", "-o", "out"]
        return main()

    assert forked.ended(forked.started(convert)) == 0
    assert sorted(path.name for path in here.iterdir()) == ["out"]
    checkpoint.load(here / "out")
