"""Reading recipes: overrides, and errors of one line that name the key and the file."""

import subprocess
import sys
from pathlib import Path

import pytest

from normswap.errors import RecipeError
from normswap.training import recipe_files
from normswap.training.recipe import (
    Clip,
    Convert,
    Distill,
    Ema,
    Optim,
    Recipe,
    RecipeNetwork,
    Train,
)

GOOD = """\
# a comment
summary: For the tests
model: {name: resnet18, args: {channels: [8, 16, 32, 64]}}
optim:
  lr: 1e-4
train: {precision: no}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD, encoding="utf-8")
    return path


def test_a_file_is_read_by_the_rules_of_yaml_1_2(file: Path) -> None:
    recipe = recipe_files.load_recipe(file)
    assert recipe.optim.lr == 1e-4
    assert recipe.train.precision == "no"
    assert recipe.model is not None
    assert recipe.model.args == {"channels": [8, 16, 32, 64]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("true", True),
        ("~", None),
        ("1e-4", 1e-4),
        ("'1'", "1"),
        ("[1, a]", [1, "a"]),
        ("2^-4", "2^-4"),
    ],
)
def test_scalars(text: str, value: object) -> None:
    options = recipe_files.check(
        {"summary": "", "convert": {"to": "x"}}, "", [f"convert.options.y={text}"]
    ).convert
    assert options is not None
    assert options.options["y"] == value
    assert type(options.options["y"]) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1\n", "line 3: "),
        ("a: 1\na: 2\n", 'line 2: found duplicate key "a"'),
        ("a:\n  b: 1\n  b: 2\n", 'line 3: found duplicate key "b"'),
        ("summary: ''\n1: a", "unknown key 1"),
        ("a: !!python/object/apply:os.system [ls]", "line 1: could not determine a constructor"),
        ("a: \x00", "unacceptable character #x0000"),
        ("\ta: 1", "line 1: "),
    ],
)
def test_what_is_not_yaml_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        recipe_files.load_recipe(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        1e-05,
        5e-324,
        1e300,
        0.1,
        1.0,
        -0.0,
        3,
        True,
        None,
        "no",
        "1e5",
        "1",
        "",
        "null",
        "ü",
        "2026-01-01",
        "0x1F",
        "1_000",
        [1, 2.5],
        {"a": {"b": []}},
    ],
)
def test_what_is_dumped_is_read_again(tmp_path: Path, value: object) -> None:
    recipe = recipe_files.check(
        {"summary": "", "convert": {"to": "x", "options": {"y": value}}}, "test"
    )
    (tmp_path / "dumped.yaml").write_text(recipe_files.dump(recipe), encoding="utf-8")
    again = recipe_files.load_recipe(tmp_path / "dumped.yaml")
    assert again == recipe
    assert again.convert is not None
    assert type(again.convert.options["y"]) is type(value)


def test_a_date_is_read_as_text(tmp_path: Path) -> None:
    file = tmp_path / "dated.yaml"
    file.write_text(
        "summary: 2026-01-31\nconvert: {to: x, options: {since: 2025-02-28}}\n", encoding="utf-8"
    )

    recipe = recipe_files.load_recipe(file)

    assert recipe.summary == "2026-01-31"
    assert recipe.convert is not None
    assert recipe.convert.options == {"since": "2025-02-28"}


def test_overrides_are_yaml_and_make_the_groups_they_need(file: Path) -> None:
    given = [
        "optim.lr=0.05",
        "train.epochs=10",
        "data.root=/a=b",
        "convert.to=skipinit",
        "convert.options.alpha=0",
    ]
    recipe = recipe_files.load_recipe(
        file, [*given, "optim.clip.mode=norm", "data.augment.scale=[0.1,1]", "model.name=resnet34"]
    )

    assert (recipe.optim.lr, recipe.train.epochs, recipe.data.root) == (0.05, 10.0, "/a=b")
    assert recipe.convert is not None
    assert recipe.convert.options == {"alpha": 0}
    assert recipe.optim.clip == Clip(mode="norm", value=0.01)
    assert recipe.data.augment.scale == (0.1, 1.0)
    assert recipe.model is not None
    assert (recipe.model.name, recipe.model.args) == ("resnet34", {"channels": [8, 16, 32, 64]}), (
        "the rest stays"
    )
    assert (
        recipe_files.load_recipe(file, ["optim.clip.value=1", "optim.clip=null"]).optim.clip is None
    )


WRONG = [
    ("optim.lrr=1", "unknown key optim.lrr (Did you mean optim.lr?)"),
    ("lr=1", "unknown key lr ("),
    ("data.hflip=1", "unknown key data.hflip (Did you mean data.augment.hflip?)"),
    ("zebra=1", "unknown key zebra (`normswap recipes --keys` lists all)"),
    ("optim.lr=fast", "optim.lr must be a number (it is 'fast')"),
    ("optim.lr=-1", "optim.lr must be above 0 (it is -1)"),
    ("optim.lr=.nan", "optim.lr must be a finite number (it is nan)"),
    ("data.batch_size=1.5", "data.batch_size must be a whole number (it is 1.5)"),
    ("data.batch_size=true", "data.batch_size must be a whole number (it is True)"),
    ("optim.lr='0.1'", "optim.lr must be a number (it is '0.1')"),
    ("train.compile=1", "train.compile must be true or false (it is 1)"),
    ("optim.name=3", "optim.name must be a text (it is 3)"),
    ("train.compile=maybe", "train.compile must be true or false (it is 'maybe')"),
    ("train=3", "train must be an object (it is 3)"),
    ("model.args=3", "model.args must be an object (it is 3)"),
    ("optim.clip.mode=foo", "optim.clip.mode must be 'agc', 'norm' or 'value' (it is 'foo')"),
    ("data.augment.scale=3", "data.augment.scale must be a list (it is 3)"),
    ("data.augment.scale=[1,2]", "data.augment.scale.1 must be at most 1 (it is 2)"),
    ("convert.options.alpha=0", "convert.to is missing"),
    ("schedule.warmup=1", "schedule.warmup 1.0 is not shorter than train.epochs"),
]


@pytest.mark.parametrize(("override", "message"), WRONG, ids=[override for override, _ in WRONG])
def test_errors_name_the_key_and_the_file(file: Path, override: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_files.load_recipe(file, [override])
    assert str(caught.value).startswith(f"{file}: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("override", ["x", "=1", "a..b=1", "optim.lr=[1", "optim.lr.x=1"])
def test_overrides_that_make_no_sense_name_themselves(file: Path, override: str) -> None:
    with pytest.raises(RecipeError, match=override.replace("[", r"\[").replace(".", r"\.")):
        recipe_files.load_recipe(file, [override])


def test_every_key_is_listed_with_what_it_takes() -> None:
    rows = {row["key"]: row for row in recipe_files.every_key()}
    with_every_group = Recipe(
        summary="",
        model=RecipeNetwork(name=""),
        convert=Convert(to=""),
        optim=Optim(clip=Clip()),
        train=Train(ema=Ema()),
        distill=Distill(),
    )

    assert rows.keys() == recipe_files.flat(with_every_group).keys()
    assert all(row["help"] for row in rows.values())
    assert (rows["train.precision"]["takes"], rows["data.samples"]["takes"]) == (
        "no|bf16|fp16",
        "whole number",
    )


def test_every_error_of_a_recipe_is_told(file: Path) -> None:
    with pytest.raises(
        RecipeError,
        match=r"optim\.lr must be a number.*; train\.seed must be a whole number",
    ):
        recipe_files.load_recipe(file, ["optim.lr=x", "train.seed=y"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"summary: [", "is not YAML: line 1"),
        (b"", "is no recipe: expected keys"),
        (b"- a\n", "is no recipe: expected keys"),
        (b"optim: {lr: 0.1}\n", ": summary is missing"),
        (b"\xff\xfe", "cannot read the recipe"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        recipe_files.load_recipe(file)
    assert str(file) in str(caught.value)
    assert message in str(caught.value)


def test_files_and_names_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"cannot read the recipe .*none\.yaml: .*No such file"):
        recipe_files.load_recipe(tmp_path / "none.yaml")
    with pytest.raises(RecipeError, match=r"cannot read the recipe .*: .*Is a directory"):
        recipe_files.load_recipe(tmp_path)
    with pytest.raises(
        RecipeError, match=r"no recipe is called 'demo_trian'\. Did you mean demo_train"
    ):
        recipe_files.load_recipe("demo_trian")
    with pytest.raises(RecipeError, match="`normswap recipes` lists them"):
        recipe_files.text("zzzzzz")


def test_a_shipped_name_wins_over_a_file_and_a_file_over_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (recipe_files.names()[0], "mine"):
        Path(name).write_text("summary: My own\n", encoding="utf-8")
    assert recipe_files.load_recipe(recipe_files.names()[0]).summary != "My own"
    for name in ("mine", f"./{recipe_files.names()[0]}"):
        assert recipe_files.load_recipe(name).summary == "My own"


def test_recipes_are_read_without_torch() -> None:
    code = (
        "import sys; from normswap.training import recipe_files\n"
        "for name in recipe_files.names(): recipe_files.load_recipe(name)\n"
        "sys.exit('torch' in sys.modules or 'timm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
