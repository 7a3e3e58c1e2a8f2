"""Every option of `convert` beside every other: two that are right alone are right together, or a line says why not.

The function is compared by itself, not by the report: what was written is loaded and run, in float64, beside the
network that the command was given.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

import pytest
import timm
import torch
from commands import MODEL, made_or_refused, options_of
from crossed import sampled

import normswap
from normswap.cli.options import parse

EXACT = {"folded", "skipinit", "regularized-skipinit", "batchnorm", "frozen-bn", "affine", "fixup", "residual-scale"}


class Option(NamedTuple):
    """One option with a value.

    Args:
        words: as they are typed.
        scheme: the scheme that it is of; none: any.
        writes: whether a directory is left.
        changes: whether the network is another than MODEL, or is not to compute the same.
    """

    words: tuple[str, ...]
    scheme: str = ""
    writes: bool = True
    changes: bool = False

    def __str__(self) -> str:
        return " ".join(self.words).lstrip("-").replace(" ", "=")


OPTIONS = (
    Option(("--ghost-batch", "4"), "batchnorm"),
    Option(("--mean", "keep"), "nf"),
    Option(("--stem", "fit"), "nf"),
    Option(("--depthwise", "fit"), "nf"),
    Option(("--bend", "0.5"), "dyt", changes=True),
    Option(("--init", "keep"), "fixup"),
    Option(("--groups", "2"), "groupnorm", changes=True),
    Option(("--group-size", "4"), "groupnorm", changes=True),
    Option(("--steady", "0"), "groupnorm", changes=True),
    Option(("--alpha", "match"), "skipinit"),
    Option(("--alpha", "inv-sqrt-depth"), "skipinit", changes=True),
    Option(("--dropout", "0.4"), "regularized-skipinit"),
    Option(("--rule", "szegedy"), "residual-scale"),
    Option(("--branches", "keep"), "folded"),
    Option(("--only", "layer2*")),
    Option(("--skip", "layer1*")),
    Option(("--for", "federated")),
    Option(("--for", "opacus")),
    Option(("--calibrate", "demo", "--samples", "8"), "groupnorm", changes=True),
    Option(("--seed", "3")),
    Option(("--device", "cpu")),
    Option(("--dry-run",), writes=False),
    Option(("--plan", "p.json")),
    Option(("--force",)),
    Option(("--weights", "random"), changes=True),
    Option(("--arch", "resnet18")),
    Option(("--num-classes", "3"), changes=True),
    Option(("--in-chans", "1"), changes=True),
    Option(("--input-size", "3,48,48")),
    Option(("--image-mean", "0.4,0.4,0.4")),
    Option(("--image-std", "0.2,0.2,0.2")),
    Option(("--crop-pct", "1.0")),
    Option(("--interpolation", "bilinear")),
)


# what every pair has, and what other tests are for
APART = {"--to", "--output", "--json", "--samples"}
APART |= {"--arch-arg", "--trust-factory", "--from-plan", "--like", "--where"}


def test_every_option_is_among_them() -> None:
    assert {one.words[0] for one in OPTIONS} == options_of("convert") - APART


def together(one: Option, two: Option) -> bool:
    """Whether two options can be typed in one command: not twice the same, nor of two schemes."""
    return one.words[0] != two.words[0] and (not (one.scheme and two.scheme) or one.scheme == two.scheme)


PAIRS = [(one, two) for one, two in itertools.combinations(OPTIONS, 2) if together(one, two)]


def answers(model: torch.nn.Module, channels: int) -> torch.Tensor:
    images = torch.randn(2, channels, 64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.inference_mode():
        out: torch.Tensor = model.eval().double()(images)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("pair", sampled(PAIRS, 24), ids=lambda pair: f"{pair[0]} {pair[1]}")
def test_two_options_of_convert(
    pair: tuple[Option, Option],
    here: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    scheme = next((one.scheme for one in pair if one.scheme), "skipinit")
    words = [word for one in pair for word in one.words]
    result = made_or_refused(capfd, here, "convert", MODEL, "--to", scheme, *words, "-o", "out")
    if result is None:
        return
    (step,) = (step for step in result["steps"] if step["scheme"] == scheme)
    for one in pair:  # none is lost beside the other
        name, value = one.words[0].lstrip("-").replace("-", "_"), one.words[-1]
        if one.scheme and name != "calibrate":
            assert step["options"][name] == parse(value)
        elif name in ("only", "skip"):
            assert step["options"][name] == [value]
    assert (here / "out").exists() == all(one.writes for one in pair) == (result["output"] is not None)
    assert (here / "p.json").exists() == any(one.words[0] == "--plan" for one in pair)
    if not (here / "out").exists():
        return
    model = normswap.load(here / "out")
    source = timm.create_model(f"local-dir:{MODEL}", pretrained=True) if not any(one.changes for one in pair) else None
    got = answers(model, 1 if any(one.words[0] == "--in-chans" for one in pair) else 3)
    assert got.isfinite().all()
    assert got.shape[1] == (3 if any(one.words[0] == "--num-classes" for one in pair) else 10)
    if source is not None and scheme in EXACT:
        wanted = answers(source, 3)
        assert (got - wanted).norm() < 1e-5 * wanted.norm()
