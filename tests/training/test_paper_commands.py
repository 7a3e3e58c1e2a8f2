"""The commands of tests/lab/papers.md start, and make an update."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from normswap.layers.scalars import Scale
from normswap.shipped import FOLDER
from normswap.training import recipe_files
from normswap.training.engine import finetune
from normswap.training.sweep import parse_rates

PAGE = Path(__file__).parents[1] / "lab" / "papers.md"
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
IMAGES = FOLDER / "images.tar"
# One update of 16 small images, by small networks.
ONE_UPDATE = (
    f"data.root={IMAGES}",
    f"data.validation={IMAGES}",
    "data.batch_size=16",
    "data.samples=16",
    "data.validation_samples=16",
    "data.workers=0",
    "data.input_size=32",
    "model.weights=random",
    "model.args.num_classes=10",
    "train.epochs=1",
    "train.precision=no",
    "schedule.warmup=0",
    "optim.lr=1e-3",
)
WIDE = ("model.args.depth=10", "model.args.width=1")
NARROW = ("model.name=resnet18", "model.args.channels=[8,8,16,16]")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries that train
@pytest.mark.parametrize("command", COMMANDS, ids=lambda line: line.rpartition("-o ")[2])
def test_the_command_makes_an_update(command: str, tmp_path: Path) -> None:
    program, verb, *words = shlex.split(command)
    assert (program, verb in ("sweep", "finetune")) == ("normswap", True)

    # What the words say of rates and runs is the sweep's; the rest is the recipe's.
    if verb == "sweep":
        assert len(parse_rates(words[words.index("--lr") + 1])) > 3
        name = words[0]
    else:
        name = words[words.index("--recipe") + 1]
    overrides = [word for word in words if "=" in word]
    small = NARROW if "model.name" in command else WIDE
    recipe = recipe_files.load_recipe(name, [*overrides, *small, *ONE_UPDATE])

    result = finetune(None, recipe, tmp_path / "run", device="cpu", track="none")

    assert result.updates == 1
    # Scalars of 0 learn at once; a last convolution of 0 would leave them there.
    scalars = [module.alpha for module in result.model.modules() if type(module) is Scale]
    assert all(bool(torch.isfinite(alpha) & (alpha != 0)) for alpha in scalars)
    assert scalars or "skipinit" not in (recipe.convert.to if recipe.convert else "")
