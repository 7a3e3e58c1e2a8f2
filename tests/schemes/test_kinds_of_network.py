"""Kinds of network: a trained one of the zoo, fitted and not; rescaling; held-out images."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import zoo_networks
from support.sampled_tables import quick
from torch import Tensor, nn

from normswap import shipped
from normswap.cli.app import main
from normswap.graph.inspection import inspect
from normswap.images.datasets import make_loader
from normswap.models.calling import Example
from normswap.proof.comparison import compare_networks
from normswap.proof.held_out import HeldOutSplit, measured
from normswap.surgery import conversion
from normswap.surgery.network import Network


@pytest.fixture(scope="module")
def images() -> tuple[Tensor, Tensor]:
    """The demo's 500 test images at 32 px, shuffled, and their classes."""
    loader = make_loader(zoo_networks.PREPROCESSING, str(shipped.FOLDER / "images.tar"), workers=0)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    pictures, labels = (torch.cat(part)[order] for part in zip(*loader, strict=True))
    return pictures, labels


@pytest.mark.slow
@pytest.mark.parametrize("to", quick(["groupnorm", "layernorm"], ["groupnorm"]))
def test_most_of_what_a_group_is_divided_by_is_eps_by_default(
    to: str, images: tuple[Tensor, Tensor]
) -> None:
    """Without images that keeps more than half of it does (kinds.md)."""
    model = zoo_networks.trained("depthwise")
    pictures = images[0][:100]
    far = [
        l2(model, conversion.convert(model, to, inputs=pictures[:2], **way).model, pictures)
        for way in ({"relative_eps": 1}, {})
    ]
    assert far[1] < 0.7 * far[0]


def l2(one: nn.Module, two: nn.Module, pictures: Tensor) -> float:
    with torch.inference_mode():
        a = one(pictures).double()
        b = two(pictures).double()
    return float((a - b).norm() / a.norm())


def test_samples_are_held_out_whole() -> None:
    """Two arguments, or lists, are parted alike; what cannot be parted is held out call by call."""
    x = torch.arange(10.0)[:, None]
    dealt = HeldOutSplit([Example((x,), {"y": list(-x), "gain": 2.0})], torch.device("cpu"))
    (seen,) = dealt

    assert seen.args[0].flatten().tolist() == [0, 1, 2, 4, 5, 6, 8, 9]
    assert [float(y) for y in seen.kwargs["y"]] == [-0.0, -1, -2, -4, -5, -6, -8, -9]
    assert (
        dealt.held[0].args[0].flatten().tolist()
        == [-float(y) for y in dealt.held[0].kwargs["y"]]
        == [3, 7]
    )

    table = torch.zeros(3)
    dealt = HeldOutSplit([Example((x + i, table)) for i in range(5)], torch.device("cpu"))
    assert [float(one.args[0][0]) for one in dealt] == [0, 1, 2, 4]
    assert [float(one.args[0][0]) for one in dealt.held] == [3]


class Ends(nn.Module):
    """One convolution, and what a case makes of it."""

    def __init__(self, end: Callable[[Tensor], Any], channels: int = 6) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1)
        self.end = end

    def forward(self, x: Tensor) -> Any:
        return self.end(self.conv(x))


@pytest.mark.parametrize(
    ("end", "channels", "answer"),
    [
        (lambda x: x, 6, "the largest of 6 on axis 1"),
        (lambda x: x.mean((2, 3)), 6, "the largest of 6 on axis 1"),
        (lambda x: x.flatten(2).transpose(1, 2), 6, "the largest of 6 on axis 2"),
        (lambda x: x.flatten(1), 1, None),
        (lambda x: [x, x[:, :, ::2, ::2]], 6, None),
        (lambda x: torch.sigmoid(x).mean((2, 3)), 6, "the largest of 6 on axis 1"),
        (lambda x: nn.functional.relu(x + 1), 6, None),
        (lambda x: {"a": x.mean((2, 3)), "b": x.amax((2, 3))}, 6, "the largest of 6 on axis 1 of "),
    ],
    ids=["map", "classes", "tokens", "wave", "pyramid", "bounded", "features", "two"],
)
def test_an_answer_is_told_from_a_wave_and_from_features(
    end: Any, channels: int, answer: str | None
) -> None:
    torch.manual_seed(0)
    one = Ends(end, channels).eval()
    x = torch.randn(40, 3, 8, 8)
    two = copy.deepcopy(one)
    with torch.no_grad():
        two.conv.weight.add_(0.3 * torch.randn_like(two.conv.weight))
    kept = measured(one, two, [Example((x[:30],)), Example((x[30:],))], inspect(one, x[:2]))

    assert kept is not None

    error = compare_networks(Network(one, x), two, exact=False).logits[-1]
    assert (error.answer, error.axis, error.agreement) == (
        kept.answer,
        kept.axis,
        pytest.approx(kept.agreement),
    )
    assert (kept.agreement is None) is (answer is None)
    assert kept.answer.startswith(answer or "")
    assert f"axis {kept.axis}" == (answer or "").rpartition(" on ")[2] or kept.axis is None

    if answer and answer[-1].isdigit():
        before, after = (net(x).argmax(int(answer[-1])) for net in (one, two))
        assert kept.agreement == pytest.approx(float((before == after).double().mean()))

    if answer and answer.endswith(" of "):
        shares = {
            name: float((one(x)[name].argmax(1) == two(x)[name].argmax(1)).double().mean())
            for name in "ab"
        }
        least, other = sorted(shares, key=lambda name: shares[name])
        assert kept.agreement == pytest.approx(shares[least])
        assert kept.answer == f"{answer}{least}; {shares[other]:.1%} by {answer}{other}"


def test_only_filters_of_one_channel_among_groups_keep_their_means() -> None:
    """Not those of other groups, nor of an image of one channel."""
    convs = [
        nn.Conv2d(1, 8, 3),
        nn.Conv2d(8, 8, 3, groups=4),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Conv2d(8, 8, 3),
    ]
    parts: list[nn.Module] = []
    for conv in convs:
        parts += [conv, nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()
    planned, _ = conversion.plan_step(inspect(model, torch.randn(2, 1, 16, 16)), "nf", stem="fit")

    assert {edit.path: edit.args["mean"] for edit in planned.edits if "mean" in edit.args} == {
        "0": False,
        "3": False,
        "6": True,
        "9": False,
    }


@pytest.mark.slow
def test_nothing_is_foretold_without_images(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    weights = [
        "support.zoo_networks:depthwise",
        "--weights",
        str(zoo_networks.DATA / "depthwise.safetensors"),
    ]

    command = [
        "convert",
        *weights,
        "--to",
        "groupnorm",
        "--relative-eps",
        "0",
        "--force",
        "-o",
        str(tmp_path / "out"),
    ]
    card = tmp_path / "out" / "README.md"

    assert main(command) == 0

    out = capfd.readouterr().out
    assert "not known: pass --calibrate IMAGES" in out
    assert "accuracy this keeps was not measured" in card.read_text(encoding="utf-8")
    assert not re.search(r"\d %", out + card.read_text(encoding="utf-8"))

    data = ["--calibrate", str(shipped.FOLDER / "images.tar"), "--samples", "40"]
    assert main([*command, *data, "--json"]) == 0

    body = json.loads(capfd.readouterr().out)
    assert body.keys() == {"source", "output", "plan", "steps"}

    report = body["steps"][-1]["report"]
    assert report["kept"]["count"] == 10
    assert all(error["agreement"] is None for error in report["logits"]), "on noise that is no news"
    assert "10 held-out images" in card.read_text(encoding="utf-8")
