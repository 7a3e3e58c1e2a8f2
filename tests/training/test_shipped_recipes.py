"""The shipped recipes: their commands can be run, their networks train, and they come with the
package.
"""

import functools
import json
import math
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.command_line import as_documented
from support.sampled_tables import sampled

import normswap
from normswap import schemes
from normswap.cli.app import main
from normswap.shipped import FOLDER
from normswap.training import recipe_files
from normswap.training.sweep import parse_rates

CHECKOUT = Path(__file__).parents[2]
WANTED = {
    *(f"finetune_imagenet_{to}" for to in ("skipinit", "nf", "groupnorm")),
    *(
        f"cifar10_recover_{to}"
        for to in ("bn", "skipinit", "regularized_skipinit", "nf", "groupnorm", "fixup")
    ),
    *(f"de_smith_table1_skipinit_{alpha}" for alpha in ("alpha1", "inv_sqrt_depth", "alpha0")),
    "de_smith_table1_bn",
    "de_smith_table1_sqrt2",
    "pets_kim2022",
    "demo_train",
    "recover_unlabelled",
}
NAMES = recipe_files.names()


def header(name: str) -> str:
    """The comment a recipe begins with, without its marks; continued lines are joined."""
    lines = [line for line in recipe_files.text(name).splitlines() if line.startswith("#")]
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines).replace(
        "\\\n", " "
    )


def commands(name: str) -> list[list[str]]:
    """The words of the commands in a recipe's header."""
    found = [line.strip() for line in header(name).splitlines() if line.startswith("    normswap ")]
    return [shlex.split(line.partition("#")[0])[1:] for line in found]


def test_all_are_there() -> None:
    assert set(NAMES) == WANTED


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_a_header_are_right(name: str) -> None:
    """Known options, keys that the recipe may have, and the recipe's own name."""
    found = commands(name)
    assert found

    for command, *words in found:
        options = re.findall(r"--[a-z-]+|-o", " ".join(words))
        known = help_of(command)
        assert [option for option in options if option not in known] == []

        values = [words[i + 1] for i, word in enumerate(words[:-1]) if word.startswith("-")]
        free = [word for word in words if not word.startswith("-") and word not in values]
        assert name in words

        model, overrides = recipe_files.split([word for word in free if word != name])
        recipe = recipe_files.load_recipe(name, overrides)
        assert model or recipe.model, "something to train"
        assert recipe.data.root
        if recipe.convert:
            schemes.chosen(recipe.convert.to, recipe.convert.options)

        if command == "sweep":
            assert len(parse_rates(words[words.index("--lr") + 1])) > 3


def test_the_variants_of_table_2_have_options_of_their_schemes() -> None:
    """The header names them as words to add to its command."""
    for words in (
        [
            "convert.to=regularized-skipinit",
            "convert.options.alpha=0",
            "convert.options.dropout=0.2",
        ],
        ["convert.to=fixup", "convert.options.init=fixup"],
    ):
        recipe = recipe_files.load_recipe("finetune_imagenet_skipinit", words)
        assert recipe.convert
        assert schemes.chosen(recipe.convert.to, recipe.convert.options)
        assert " ".join(word for word in words if "alpha" not in word) in " ".join(
            header("finetune_imagenet_skipinit").split()
        )


@functools.cache
def help_of(command: str) -> str:
    words = [sys.executable, "-m", "normswap", command, "--help"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


TINY = (
    "model.name=resnet18",
    "model.weights=random",
    "model.args={channels: [8, 8, 16, 16], num_classes: 10}",
)
SMALL = {
    "finetune": TINY,
    "cifar10": (*TINY, "data.augment.padding=2"),
    "pets": TINY,
    "demo": TINY,
    "recover": TINY,
    "de": ("model.args.depth=10", "model.args.width=1"),
}


@pytest.mark.filterwarnings("ignore")  # of the libraries that train
@pytest.mark.parametrize("name", sampled(NAMES, every=3))
@pytest.mark.one_in(4)
def test_two_updates(name: str, tmp_path: Path) -> None:
    from normswap.training.engine import finetune

    # Not smaller: at 16 px layer4 sees 1 x 1 maps, and torch's gradient of its first convolution
    # was NaN now and then.
    given = [
        f"data.root={FOLDER / 'images.tar'}",
        f"data.validation={FOLDER / 'images.tar'}",
        "data.batch_size=16",
        "data.samples=32",
        "data.validation_samples=16",
        "data.workers=0",
        "data.input_size=32",
        "train.epochs=1",
        "schedule.warmup=0.5",
        "optim.lr=1e-4",
    ]
    recipe = recipe_files.load_recipe(name)
    if recipe.convert and recipe.convert.calibrate:  # takes its time
        needed = recipe.convert.to == "nf" or "cifar10" in name
        given.append("convert.samples=20" if needed else "convert.calibrate=false")
    plan = recipe_files.load_recipe(name, [*SMALL[name.split("_")[0]], *given])
    result = finetune(None, plan, tmp_path / "run", device="cpu", track="none")
    assert result.updates == 2
    assert result.rows[-1]["train_loss"] is not None
    assert recipe_files.load_recipe(tmp_path / "run" / "recipe.yaml").summary == recipe.summary
    again = normswap.load(result.last)
    assert (
        recipe.convert is None
        or recipe.convert.to in ("groupnorm", "folded")
        or not has_batchnorm(again)
    )


def has_batchnorm(model: object) -> bool:
    return any("BatchNorm" in type(layer).__name__ for layer in model.modules())  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_sweep_of_real_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "model.args.depth=10",
        "model.args.width=1",
        f"data.root={FOLDER / 'images.tar'}",
        "data.batch_size=16",
        f"data.validation={FOLDER / 'images.tar'}",
        "data.samples=32",
        "data.validation_samples=16",
        "data.workers=0",
        "data.input_size=8",
        "train.epochs=1",
    ]

    command = [
        "sweep",
        "de_smith_table1_skipinit_alpha0",
        *words,
        "--lr",
        "0.01,1e30",
        "--device",
        "cpu",
    ]

    assert main([*command, "-o", str(tmp_path / "s"), "--json"]) == 0

    body = json.loads(capsys.readouterr().out)
    # Two updates teach nothing.
    assert [(one["lr"], one["state"]) for one in body["trials"]] == [
        (0.01, "at chance"),
        (1e30, "diverged"),
    ]
    assert [line["lost"] for line in body["lines"]] == [1, 1]
    assert body["trials"][0]["train_loss"] == pytest.approx(math.log(10), rel=0.3)
    assert (Path(body["trials"][0]["folder"]) / "metrics.csv").is_file()


def test_recipes_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--json"]) == 0
    assert [row["name"] for row in as_documented(capsys.readouterr().out, "recipes")] == sorted(
        WANTED
    )
    assert main(["recipes"]) == 0
    assert "demo_train" in capsys.readouterr().out
    assert main(["recipes", "demo_train"]) == 0
    assert capsys.readouterr().out == recipe_files.text("demo_train")
    assert main(["recipes", "demo_train", "--json"]) == 0
    assert as_documented(capsys.readouterr().out, "recipes")["recipe"]["data"]["batch_size"] == 128
    assert main(["recipes", "demo_trian"]) == 2
    assert "Did you mean demo_train?" in capsys.readouterr().err


@pytest.mark.slow
def test_a_wheel_has_the_recipes_and_finds_them(tmp_path: Path) -> None:
    """Unpacked as pip would, and run where the checkout is out of sight."""
    source = tmp_path / "source"
    source.mkdir()
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=CHECKOUT, capture_output=True, text=True, check=True
    ).stdout

    for name in filter(None, tracked.split("\0")):
        if (CHECKOUT / name).is_file() and not name.startswith("tests/"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((CHECKOUT / name).read_bytes())

    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(tmp_path),
        ".",
    ]
    subprocess.run(build, cwd=source, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "site")
    packed_files = {file.name for file in (tmp_path / "site" / "normswap" / "recipes").iterdir()}

    assert packed_files == {
        *(f"{name}.yaml" for name in WANTED),
        "wide_resnet.py",
        "zoo.py",
        "zoo.yaml",
        "finetune.sky.yaml",
        "zoo_jobs.sh",
        "finetune.sbatch",
    }

    code = (
        "from normswap import shipped; from normswap.training import recipe_files as r; "
        "print(shipped.recipes(), len(r.names()))"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            f"import sys; sys.path[:0] = {[str(tmp_path / 'site'), *sys.path]!r}; {code}",
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )

    assert done.stdout.split() == [
        str(tmp_path / "site" / "normswap" / "recipes"),
        str(len(WANTED)),
    ]
