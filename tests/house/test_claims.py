"""README's figures and picture are those of the tables that scripts wrote."""

import json
import re
from collections.abc import Callable

import pytest
from lab.benchmarks.after_the_swap import PICTURE, figures, trained
from PIL import Image
from support.lab_tables import ROOT, number, row_of, table, text
from support.readme_figures import SENTENCES, measured

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("sentence", SENTENCES, ids=lambda sentence: sentence.__name__)
def test_readme_has_the_sentence_of_the_tables(sentence: Callable[[], str]) -> None:
    assert sentence() in " ".join(README.split())


def test_readme_has_the_figures_of_the_tables_beside_those_of_the_peers() -> None:
    rows = [line for line in README.splitlines() if re.match(r"\| [^|]* \| \[", line)]
    assert rows == measured()


def test_the_picture_of_readme_is_of_the_table_of_today() -> None:
    """`after_the_swap.py` writes the drawn figures into the picture; it would draw the same now."""
    with Image.open(PICTURE) as picture:
        drawn = json.loads(picture.text["figures"])  # type: ignore[attr-defined]
    assert drawn == [*figures(), trained()], "run python tests/lab/benchmarks/after_the_swap.py"


def test_the_page_on_int8_says_what_equalization_gains() -> None:
    channel = row_of("equalization.md", network="lite0", int8_weights="per channel")
    tensor = row_of("equalization.md", network="lite0", int8_weights="per tensor")
    moves: list[float] = []
    for row in table("equalization.md"):
        if row["network"] != "lite0":
            moves.append(abs(number(row["gain, points"])))

    page = " ".join((ROOT / "docs" / "int8.md").read_text(encoding="utf-8").split())

    assert (
        f"this keeps a top-1 of {channel['int8 folded']} % of {channel['fp32']} %, and one scale"
        f" per tensor keeps {tensor['int8 folded']} %. Cross-layer equalization (Nagel et al. 2019)"
        f" would give {channel['int8 equalized']} % and {tensor['int8 equalized']} %, and would"
        f" move the top-1 of three smaller networks by {max(moves)} points at most"
    ) in page


def _ends(task: str, way: str) -> float:
    return number(row_of("after_training.md", task=task, way=way)["at the end"])


def _points(difference: float) -> str:
    return f"{abs(difference):.1f}"


def test_the_results_say_where_nf_ends() -> None:
    clipped, as_it_is = (
        {
            task: _ends(task, f"nf, 500 images, {how}") - _ends(task, "BatchNorm")
            for task in ("labels", "teacher", "shifted", "preact", "depthwise")
        }
        for how in ("clipped", "as it is")
    )
    for below in (clipped, as_it_is):
        assert [task for task in below if round(below[task], 1) < -1] == ["shifted"]
    assert (
        "With rates from 0.0002 on it ends within 1 point of BatchNorm on four of five tasks,"
        " clipped to 1 or as it is. On the shifted domain it ends"
        f" {_points(clipped['shifted'])} points below it clipped, and"
        f" {_points(as_it_is['shifted'])} as it is."
    ) in _results()


def test_the_results_say_what_learning_how_far_to_normalize_gains() -> None:
    def beside(way: str, other: str) -> list[float]:
        tasks = ("labels", "two", "shifted", "segmentation")
        return [_ends(task, way) - _ends(task, other) for task in tasks]

    learned = beside("groupnorm, its eps learned", "groupnorm")
    salu = beside("affine, then SALU", "groupnorm")
    # It was to be built if it gained half a point on two of the four.
    assert all(sum(gain >= 0.5 for gain in gains) < 2 for gains in (learned, salu))
    below = beside("affine, then SALU", "tune")
    assert (
        f"ends {_points(max(learned))} points above to {_points(min(learned))} below `groupnorm` on"
        " four tasks"
    ) in _results()
    assert (
        f"ends {_points(min(salu))} to {_points(max(salu))} above `groupnorm`, and"
        f" {_points(max(below))} to {_points(min(below))} below `tune`"
    ) in _results()


def _results() -> str:
    return " ".join((ROOT / "docs" / "results.md").read_text(encoding="utf-8").split())


TABLES = (
    "after_training.md",
    "imagenet.md",
    "kinds.md",
    "convert.md",
    "equalization.md",
    "int8.md",
    "int8_without_vnni.md",
    "operators.md",
    "robot_policy.md",
)


def test_tables_say_what_they_were_made_with() -> None:
    for name in TABLES:
        head = text(name)
        assert re.search(r"^Command: `python tests/\S+\.py", head, re.M), name
        assert re.search(r"commit [0-9a-f]{7,}.*, \d{4}-\d\d-\d\d; load [\d.]+", head), name
        assert re.search(r"torch \d.*timm \d.*Python \d", head), name
