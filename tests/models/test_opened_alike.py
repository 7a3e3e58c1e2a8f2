"""Laws of opening: which of several statements counts, and that a network is the same each time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.model_sources import ARGS, hugging_face, origin, same, small, write_folder
from torch import nn

import normswap
from normswap.errors import SourceError
from normswap.models import network_input
from normswap.models.weight_files import read
from normswap.models.zoo import open_source

# What training scripts call the averaged weights, and the others.
AVERAGED = ("state_dict_ema", "model_ema", "ema")
PLAIN = ("state_dict", "model", "model_state_dict", "module")


@pytest.mark.filterwarnings("ignore:.*which was taken")
@pytest.mark.parametrize("averaged", AVERAGED)
def test_averaged_weights_are_taken_wherever_they_stand(averaged: str, tmp_path: Path) -> None:
    wanted, other = {"weight": torch.ones(2)}, {"weight": torch.zeros(2)}

    for plain, order in itertools.product(PLAIN, (1, -1)):
        entries: list[tuple[str, object]] = [(plain, other), (averaged, wanted), ("epoch", 3)]
        content = dict(entries[::order])
        torch.save(content, tmp_path / "a.pth")

        assert torch.equal(read(tmp_path / "a.pth")["weight"], torch.ones(2)), (plain, order)


# Each argument as a config.json has it, and as the user has it.
GIVEN: dict[str, tuple[object, object]] = {
    "num_classes": (10, 4),
    "in_chans": (3, 1),
    "drop_rate": (0.1, 0.2),
    "channels": ([8, 16, 32, 64], [8, 8, 16, 16]),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_the_user_gives_counts_more_than_the_file(name: str, tmp_path: Path) -> None:
    """Alone, and beside all others."""
    stated = {key: of_file for key, (of_file, _) in GIVEN.items()}
    write_folder(tmp_path / "net", {}, model_args=stated)

    for names in ([name], [*GIVEN]):
        given: dict[str, Any] = {key: GIVEN[key][1] for key in names}
        keywords = {key: given.pop(key) for key in ("num_classes", "in_chans") if key in given}
        model = open_source(
            f"local-dir:{tmp_path / 'net'}", weights="random", arch_args=given, **keywords
        )

        arch = origin(model).arch
        assert arch is not None
        assert arch.kwargs == {**stated, **given, **keywords}


def _of_timm(folder: Path) -> str:
    write_folder(folder, dict(small().state_dict()))
    return str(folder)


SOURCES: dict[str, Callable[[Path], str]] = {
    "timm": _of_timm,
    "transformers": lambda folder: f"hf:{hugging_face(folder)}",
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_new_head_is_the_same_whatever_was_drawn_before(kind: str, tmp_path: Path) -> None:
    """Else the source of a conversion would have other tensors each time that it is opened."""
    place = SOURCES[kind](tmp_path / "net")
    opened = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        opened.append(open_source(place, num_classes=7))

    first, second = opened
    assert same(second, dict(first.state_dict()))
    assert origin(second) == origin(first)


@pytest.mark.parametrize("classes", [{}, {"num_classes": 7}])
def test_a_new_head_excuses_no_other_tensor_that_does_not_fit(
    classes: dict[str, int], tmp_path: Path
) -> None:
    """A stem of other channels stayed random if a new head was asked for, and nothing said so."""
    place = SOURCES["transformers"](tmp_path / "net")
    with pytest.raises(SourceError, match=r"of another shape: .*embedder"):
        open_source(place, in_chans=1, **classes)


def test_a_weights_file_has_nothing_of_the_builders_own_weights(tmp_path: Path) -> None:
    """timm's trained weights have a license, a repository and a test size."""
    torch.save(small().state_dict(), tmp_path / "a.pth")

    opened = open_source(str(tmp_path / "a.pth"), arch="resnet18", num_classes=10, arch_args=ARGS)

    for record in (origin(opened).pretrained_cfg, vars(opened)["pretrained_cfg"]):
        assert not {"license", "hf_hub_id", "tag", "test_input_size", "url"} & {
            key for key, value in record.items() if value
        }


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 3e38])
def test_an_odd_variance_that_a_channel_may_have_is_not_broken(value: float) -> None:
    """That of a dead channel is 0."""
    norm = nn.BatchNorm2d(4)
    assert norm.running_var is not None
    norm.running_var[1] = value

    assert not network_input.has_broken_statistics(norm)


def test_a_network_with_a_dead_channel_is_converted() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()).eval()
    norm: Any = network[1]
    norm.running_var[1] = 0.0
    network[0].get_parameter("weight").data[1] = 0.0

    done = normswap.convert(network, "folded", inputs=torch.rand(2, 3, 8, 8))

    assert done.report.verdict == "PROVED"
