"""README's figures and picture are those of the tables that scripts wrote."""

import json
import re
from collections.abc import Callable

import pytest
from lab.benchmarks.after_the_swap import PICTURE, figures, trained
from PIL import Image
from support.lab_tables import ROOT, text
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


TABLES = (
    "after_training.md",
    "imagenet.md",
    "kinds.md",
    "convert.md",
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
