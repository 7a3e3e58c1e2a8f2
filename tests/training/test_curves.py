"""Learning curves: read from what runs wrote, drawn, and written as tables."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from commands import as_documented
from PIL import Image

from normswap.cli.app import main
from normswap.errors import OutputError, SourceError
from normswap.training import curves

HEADER = "epoch,update,lr,train_loss,top1,top5,ema_top1,images_per_s,seconds,val_loss"
ROWS = ("0,0,0.01,,71.5,99,,,,1", "1,78,0.02,0.9,78,99,77.5,1000,20,1", "2,156,0,0.7,79,99,80.25,900,22,1")


def run(folder: Path, *rows: str, header: str = HEADER) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("\n".join([header, *(rows or ROWS)]) + "\n")
    return folder


def test_runs_are_read_by_their_own_names(tmp_path: Path) -> None:
    places = [run(tmp_path / "one" / "a"), run(tmp_path / "two" / "a"), run(tmp_path / "two" / "b")]
    assert [one.name for one in curves.read(places[1:])] == ["a", "b"]
    assert [one.name for one in curves.read(places)] == ["one/a", "two/a", "two/b"]
    assert [one.name for one in curves.read([places[0], places[0]])] == ["a (1)", "a (2)"]
    assert curves.read([places[0] / "metrics.csv"])[0].name == "a"


def test_a_run_has_its_rows_and_its_best_epoch(tmp_path: Path) -> None:
    (found,) = curves.read([run(tmp_path / "a")])
    assert [row["top1"] for row in found.rows] == [71.5, 78.0, 79.0]
    assert found.rows[0]["train_loss"] is None
    assert found.best() == (2.0, 80.25), "the moving average counts"
    assert curves.read([run(tmp_path / "just-begun", ROWS[0])])[0].best() == (0.0, 71.5)


@pytest.mark.parametrize(
    ("header", "row", "message"),
    [
        ("epoch,loss", "1,2", "no column train_loss, top1"),
        (HEADER, "1,78,0.02,abc,78,99,77.5,1000,20,1", "could not convert string to float: 'abc'"),
    ],
)
def test_what_is_no_table_of_metrics(tmp_path: Path, header: str, row: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        curves.read([run(tmp_path / "a", row, header=header)])


def test_folders_that_are_no_run(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"is no run: there is no metrics\.csv"):
        curves.read([tmp_path])
    with pytest.raises(SourceError, match="none is no run: no such folder"):
        curves.read([tmp_path / "none" / "metrics.csv"])


def test_the_command_draws_and_writes_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = run(tmp_path / "a"), run(tmp_path / "b", ROWS[0], "1,78,0.02,nan,10,50,,1000,20,inf")
    picture, table = tmp_path / "plot.png", tmp_path / "table.csv"
    assert main(["curves", str(a), str(b), "-o", str(picture), "--csv", str(table), "--json"]) == 0
    body = as_documented(capsys.readouterr().out, "curves")
    assert body["files"] == [str(picture), str(table)]
    assert [one["best"] for one in body["runs"]] == [{"epoch": 2.0, "top1": 80.25}, {"epoch": 0.0, "top1": 71.5}]
    assert body["runs"][1]["rows"][1]["train_loss"] is None, "JSON has no nan"
    with Image.open(picture) as image:
        colours = {tuple(pixel) for _, pixel in image.convert("RGB").getcolors(1 << 20) or []}
    assert {(0, 114, 178), (213, 94, 0)} <= colours, "a curve in each of the first two colours"
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["epoch"], row["top1"]) for row in rows] == [
        ("a", "0", "71.5"), ("a", "1", "78"), ("a", "2", "79"), ("b", "0", "71.5"), ("b", "1", "10")]  # fmt: skip
    assert rows[0]["train_loss"] == ""


def test_the_command_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curves", str(run(tmp_path / "a"))]) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.strip().startswith("a "))
    assert line.split() == ["a", "2", "0.7000", "71.50", "79.00", "80.25", "2"]
    assert out.endswith("next: normswap evaluate RUN/best --data IMAGES\n")


def test_the_next_step_is_the_network_of_the_best_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place, top1 in ((Path("a"), 78), (Path("b"), 90), (Path("c"), 84)):
        (run(place, ROWS[0], f"1,78,0.02,0.7,{top1},99,,1000,20,1") / "best").mkdir()
    assert main(["curves", "a", "b", "c"]) == 0
    assert capsys.readouterr().out.endswith("next: normswap evaluate b/best --data IMAGES\n")


def test_the_table_for_latex_is_the_table_that_is_printed(tmp_path: Path) -> None:
    file = tmp_path / "table.tex"
    assert main(["curves", str(run(tmp_path / "a_1")), "--latex", str(file)]) == 0
    lines = file.read_text().splitlines()
    assert lines[4] == r"a\_1 & 2 & 0.7000 & 71.50 & 79.00 & 80.25 & 2 \\"
    assert (lines[1], lines[3], lines[5]) == (r"\toprule", r"\midrule", r"\bottomrule")
    assert main(["curves", str(tmp_path / "a_1"), "--latex", str(file)]) == 2


def test_files_are_not_replaced_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, table = str(run(tmp_path / "a")), tmp_path / "table.csv"
    table.write_text("mine")
    assert main(["curves", a, "--csv", str(table)]) == 2
    assert table.read_text() == "mine"
    assert main(["curves", a, "--csv", str(table), "--force"]) == 0
    assert main(["curves", a, "-o", str(tmp_path / "plot.xyz")]) == 2
    assert "no picture format 'xyz'" in capsys.readouterr().err
    with pytest.raises(OutputError):
        curves.write_csv(curves.read([a]), tmp_path / "none" / "out.csv")


def test_curves_need_no_torch(tmp_path: Path) -> None:
    code = f"import sys; from normswap.training import curves; curves.read([{str(run(tmp_path / 'a'))!r}]); "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_runs_of_eight_seeds_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Long names that differ at their ends, in the table and inside the picture; numbers are rounded, not cut."""
    name = "imagenet-groupnorm-with-group-size-16-and-distillation-lr-0.0125-seed"
    places = [run(tmp_path / f"{name}-{i}", "0,0,0.01,,71.5,99,,,,1", "1,8,0,0.31719,78,99,,9,2,1") for i in range(8)]
    for ending in ("svg", "png"):
        assert main(["curves", *map(str, places), "-o", str(tmp_path / f"eight.{ending}")]) == 0
    out = capsys.readouterr().out
    assert out.count("0.3172") == 16
    together = "".join(out.split())
    assert all(together.count(f"-{i}") for i in range(8))
    drawn = Image.open(tmp_path / "eight.png").convert("L")
    left, _, right, _ = drawn.point(lambda value: 255 * (value < 250)).getbbox()
    assert left > 0
    assert right < drawn.width
    for i in range(8):
        assert f"{name}-{i}" in (tmp_path / "eight.svg").read_text()
