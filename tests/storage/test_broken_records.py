"""Plans, headers, recipes with one thing changed at random.

The command does its work, or says one line, exits with 2 and writes nothing.
"""

import contextlib
import io
import json
import shutil
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings, strategies as st
from support.hostile_files import mutated
from support.model_sources import record_of, rewrite, small

from normswap import convert
from normswap.cli.app import main
from normswap.errors import NormswapError, RecipeError
from normswap.storage import checkpoint
from normswap.training import recipe_files

JUNK = (
    None,
    True,
    -1,
    0,
    7,
    1.5,
    1e300,
    float("nan"),
    "",
    "x",
    "conv1",
    "a b\nc",
    [],
    [1],
    ["x"],
    {},
    {"x": 1},
)
few = settings(max_examples=25, derandomize=True, database=None)


def run_command(*words: str) -> tuple[int, str]:
    """Exit code and stderr of one command."""
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return code, err.getvalue()


def check_one_line(code: int, error: str) -> None:
    """The command was done, or refused in one line."""
    assert code in (0, 2)
    if code == 2:
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert error.endswith("\n")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.save(small(), tmp_path_factory.mktemp("data") / "source")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.save(
        convert(small(), "skipinit", input_size=(3, 33, 33)),
        tmp_path_factory.mktemp("data") / "out",
    )


@pytest.mark.slow
@few
@given(st.data())
def test_plans(source: Path, converted: Path, data: st.DataObject) -> None:
    body = data.draw(mutated(record_of(converted)["plan"], JUNK))
    with tempfile.TemporaryDirectory() as name:
        plan = Path(name) / "plan.json"
        out = Path(name) / "out"
        plan.write_text(json.dumps(body), encoding="utf-8")
        code, error = run_command("convert", str(source), "--from-plan", str(plan), "-o", str(out))
        check_one_line(code, error)
        assert sorted(path.name for path in Path(name).iterdir()) == (
            ["plan.json"] if code else ["out", "plan.json"]
        )


@pytest.mark.slow
@few
@given(st.data())
def test_recipes(data: st.DataObject) -> None:
    """Of any shipped recipe: it is one still, or refused as one that is not."""
    name = data.draw(st.sampled_from(recipe_files.names()))
    body = data.draw(mutated(yaml.safe_load(recipe_files.text(name)), JUNK))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(yaml.safe_dump(body), encoding="utf-8")
        with contextlib.suppress(RecipeError):
            recipe_files.load_recipe(file)


@settings(few, max_examples=10)
@given(st.data())
def test_training_by_recipes(source: Path, data: st.DataObject) -> None:
    """The images are not there, so that whatever the recipe says, nothing is done."""
    body = data.draw(mutated(yaml.safe_load(recipe_files.text("cifar10_recover_bn")), JUNK))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        out = Path(folder) / "out"
        file.write_text(yaml.safe_dump(body), encoding="utf-8")
        code, error = run_command(
            "finetune", str(source), "--recipe", str(file), "--data", "nowhere", "-o", str(out)
        )
        assert code == 2
        check_one_line(code, error)
        assert [path.name for path in Path(folder).iterdir()] == ["recipe.yaml"]


FIELDS = (
    "arch",
    "plan",
    "source",
    "sha256",
    "pretrained_cfg",
    "report",
    "hashes",
    "tensors",
    "version",
)


@pytest.mark.parametrize("field", [*FIELDS, "arch.name", "arch.kwargs", "arch.builder"])
@pytest.mark.one_in(3)
def test_every_field_of_a_header_is_looked_at(converted: Path, tmp_path: Path, field: str) -> None:
    """Whatever stands there: a network, or a refusal, which the command line says in a line."""
    shutil.copytree(converted, tmp_path / "broken")
    for junk in JUNK:
        body = record_of(converted)
        *above, name = field.split(".")
        (body[above[0]] if above else body)[name] = junk
        rewrite(tmp_path / "broken", header=body)
        with contextlib.suppress(NormswapError):
            checkpoint.load(tmp_path / "broken")
