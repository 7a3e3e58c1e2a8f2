"""Whatever form a network takes its inputs in, the same work gives the same numbers as on plain tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lived import lived_in
from torch import Tensor, nn

import normswap
from normswap.calibration import lockstep
from normswap.errors import NormswapError, SourceError, TraceError
from normswap.models import calling
from normswap.models.calling import Example
from normswap.surgery.recalibration import recalibrate

SIZE = (3, 24, 24)


class Trunk(nn.Module):
    """A residual network in miniature, and its scores of five classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.one, self.norm1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.two, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        branch = self.norm2(self.two(self.norm1(self.one(x)).relu()))
        return self.head((x + branch).relu().mean((2, 3)))


class Keyword(nn.Module):
    """Called by name, gives a dict."""

    def __init__(self, trunk: Trunk) -> None:
        super().__init__()
        self.trunk = trunk

    def forward(self, *, pixel_values: Tensor) -> dict[str, Tensor]:
        return {"logits": self.trunk(pixel_values)}


class Record(Keyword):
    """Takes a dict as its one argument."""

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        return {"logits": self.trunk(batch["image"])}


class Listed(Keyword):
    """Takes a list of images, gives a list of dicts, as detectors do."""

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:  # type: ignore[override]
        assert isinstance(images, list)
        return [{"scores": row} for row in self.trunk(torch.stack(images))]


class Unpacked(Keyword):
    """Takes two arguments, which together are an image."""

    def forward(self, colours: Tensor, grey: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = self.trunk(torch.cat([colours, grey], 1))
        return logits, logits.softmax(-1)


def trunk() -> Trunk:
    torch.manual_seed(0)
    return lived_in(Trunk(), torch.randn(8, *SIZE, dtype=torch.float64)).float()  # type: ignore[return-value]


FORMS: dict[str, tuple[Callable[[Trunk], nn.Module], Callable[[Tensor], Any]]] = {
    "keywords": (Keyword, lambda x: {"pixel_values": x}),
    "a record": (Record, lambda x: ({"image": x},)),
    "a list": (Listed, lambda x: (list(x),)),
    "two arguments": (Unpacked, lambda x: (x[:, :2], x[:, 2:])),
}


def batches(count: int = 4, each: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(each, *SIZE, generator=generator) for _ in range(count)]


def same(one: nn.Module, two: nn.Module) -> None:
    """Every tensor of the plain network is that of the one inside."""
    inner = two.state_dict()
    assert one.state_dict().keys() == {name.removeprefix("trunk.") for name in inner}
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, inner[f"trunk.{name}"]), name


FITTED = [("groupnorm", {}), ("groupnorm", {"groups": 2, "steady": 0.0}), ("nf", {})]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("to", "options"), FITTED)
def test_a_fit_is_that_of_plain_tensors(
    form: str, to: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrap, given = FORMS[form]
    if form == "two arguments":  # which are not shown in a mirror, nor to noise that a gauge is chosen on
        monkeypatch.setattr(lockstep, "MIRRORED", 0)
        options = {**options, "steady": 0.0} if to == "groupnorm" else options
    data = batches()
    wanted = normswap.convert(trunk(), to, inputs=data[0][:2], calibrate=data, **options)
    calibrate = [given(x) for x in data]
    done = normswap.convert(wrap(trunk()), to, inputs=given(data[0][:2]), calibrate=calibrate, **options)
    same(wanted.model, done.model)
    assert done.report.kept is not None
    assert wanted.report.kept is not None
    assert done.report.kept.count == wanted.report.kept.count == 8
    if form in ("keywords", "a record"):
        assert done.report.kept == wanted.report.kept


def grouped(net: Trunk) -> Trunk:
    for path in ("norm", "norm1", "norm2"):
        setattr(net, path, nn.GroupNorm(2, 8))
    return net


@pytest.mark.parametrize("form", ["keywords", "a list"])
def test_norms_are_estimated_as_on_plain_tensors(form: str) -> None:
    wrap, given = FORMS[form]
    data = batches()
    wanted = normswap.convert(grouped(trunk()), "folded", inputs=data[0][:2], calibrate=data)
    calibrate = [given(x) for x in data]
    done = normswap.convert(wrap(grouped(trunk())), "folded", inputs=given(data[0][:2]), calibrate=calibrate)
    same(wanted.model, done.model)


LABELS = torch.zeros(8, dtype=torch.long)
BESIDE: dict[str, Callable[[Any], Any]] = {
    "without labels": lambda batch: batch,
    "labels in a tuple": lambda batch: (*batch, LABELS) if isinstance(batch, tuple) else (batch, LABELS),
    "labels in a list": lambda batch: [*batch, LABELS] if isinstance(batch, tuple) else [batch, LABELS],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("beside", BESIDE)
def test_statistics_are_those_of_plain_tensors(form: str, beside: str) -> None:
    wrap, given = FORMS[form]
    wanted = recalibrate(trunk(), batches(), size=SIZE)
    data = [BESIDE[beside](given(x)) for x in batches()]
    done = recalibrate(wrap(trunk()), data, inputs=given(batches()[0]))
    same(wanted.model, done.model)
    assert done.notes == wanted.notes


IMAGES: dict[str, Any] = {"keywords": Keyword, "a list": Listed}


@pytest.mark.parametrize("form", IMAGES)
def test_images_reach_a_network_without_a_word_about_its_inputs(form: str) -> None:
    """As those of a folder do on the command line: by name, or as a list, as its forward says."""
    data = [(x, LABELS) for x in batches()]
    wanted = normswap.convert(trunk(), "groupnorm", size=SIZE, calibrate=data)
    done = normswap.convert(IMAGES[form](trunk()), "groupnorm", size=SIZE, calibrate=data)
    same(wanted.model, done.model)
    same(recalibrate(trunk(), data, size=SIZE).model, recalibrate(IMAGES[form](trunk()), data, size=SIZE).model)
    assert normswap.convert(IMAGES[form](trunk()), "groupnorm", size=SIZE, calibrate="noise").report.passed


class Boxes(Listed):
    """As many things as it sees; how many there are depends on the last digit."""

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:  # type: ignore[override]
        rows = self.trunk(torch.stack(images))
        return [{"scores": row[row > 0], "labels": torch.where(row > 0)[0]} for row in rows]


def scaled(x: Tensor) -> Tensor:
    """Images of such different contrast that another number of scores is positive."""
    return x * torch.logspace(-2, 1.5, len(x))[:, None, None, None]


def test_a_detector_is_fitted() -> None:
    data = [scaled(x) for x in batches()]
    assert len({len(found["scores"]) for found in Boxes(trunk())(list(data[0]))}) > 1
    wanted = normswap.convert(trunk(), "groupnorm", inputs=data[0][:2], calibrate=data)
    calibrate = [(tuple(x), tuple({"boxes": torch.zeros(0, 4)} for _ in x)) for x in data]  # as its loader collates
    done = normswap.convert(Boxes(trunk()), "groupnorm", inputs=(list(data[0]),), calibrate=calibrate)
    same(wanted.model, done.model)
    assert done.report.passed
    assert done.report.worst.relative_l2 == 1, "another number of boxes is all wrong, not infinitely"
    assert done.report.kept is not None
    assert done.report.kept.relative_l2 <= 1
    assert normswap.convert(Boxes(trunk()), "folded", inputs=(list(data[0]),)).report.worst.relative_l2 < 1e-5


def test_lists_of_images_of_any_size() -> None:
    data = [[torch.randn(3, 20 + i, 24) for _ in range(4)] for i in range(6)]
    done = normswap.convert(Listed(trunk()), "groupnorm", inputs=data[:1], calibrate=data)
    assert done.report.passed
    assert done.report.kept is not None
    assert done.report.kept.count == 6


X = torch.randn(8, *SIZE)
WRONG: list[tuple[Any, Any, Any, str]] = [
    (Keyword, {"pixel_values": X}, [{"pixels": X}], "do not fit the network: .*pixels"),
    (Keyword, {"pixel_values": X}, [{"pixel_values": X * torch.nan}], "values that are not finite"),
    (Keyword, {"pixel_values": X}, [{"pixel_values": "a"}], "batch 0 is no batch of images"),
    (Unpacked, (X[:, :2], X[:, 2:]), [X], "takes more than images: it takes 2 tensors"),
    (Unpacked, (X[:, :2], X[:, 2:]), [(X[:, :2],)], "do not fit the network: .*grey"),
    (Unpacked, (X[:, :2], X[:, 2:]), [(X[:, :2], X[:, 2:]), (X[:, :2], X[:, 1:])], "batch 1 has images of size"),
    (Listed, (list(X),), [list(X), list(X[:5])], "take another way through the network: .*how many"),
    (Unpacked, (X[:, :2], X[:, 2:]), "noise", "takes more than images"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_what_does_not_fit_is_said(case: int) -> None:
    wrap, inputs, data, message = WRONG[case]
    with pytest.raises((SourceError, TraceError), match=message):
        normswap.convert(wrap(trunk()), "groupnorm", inputs=inputs, calibrate=data)


def test_a_single_batch_is_a_list_of_one() -> None:
    for form, (wrap, given) in FORMS.items():
        if form == "a list":  # a tuple of one is a list of batches, as ever
            continue
        one, two = (recalibrate(wrap(trunk()), data, inputs=given(X)).model for data in ([given(X)], given(X)))
        assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def test_how_a_network_is_called() -> None:
    def said(model: nn.Module) -> tuple[int, list[str], bool]:
        found = calling.form(model)
        return len(found.args), list(found.kwargs), found.listed

    assert said(trunk()) == (1, [], False)
    assert said(Keyword(trunk())) == (0, ["pixel_values"], False)
    assert said(Listed(trunk())) == (1, [], True)
    assert said(Unpacked(trunk())) == (2, [], False)
    named: Any = copy.deepcopy(trunk())
    named.main_input_name = "x"
    assert said(named) == (1, [], False)
    assert Example((X,), {"gain": 2.0}).read((X, LABELS))[1] is LABELS
    with pytest.raises(NormswapError, match="a list of records"):
        Example(([{"image": X[0]}],)).of(X)
