"""Whatever form a network takes its inputs in, the same work gives the same numbers as on plain
tensors.
"""

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.input_forms import (
    FORMS,
    SIZE,
    Boxes,
    Keyword,
    Listed,
    Unpacked,
    batches,
    resnet,
    scaled,
    trunk,
)
from torch import Tensor, nn

import normswap
from normswap.analysis.block_signals import signal_propagation
from normswap.calibration import sequential_fit
from normswap.errors import NormswapError, SourceError, TraceError
from normswap.images.accuracy import evaluate
from normswap.models import calling
from normswap.models.calling import Example
from normswap.reporting import report
from normswap.storage import checkpoint
from normswap.surgery import reverification
from normswap.surgery.conversion import Conversion
from normswap.surgery.network import Network
from normswap.surgery.recalibration import recalibrate


def same(one: nn.Module, two: nn.Module) -> None:
    """Every tensor of the plain network is that of the one inside."""
    inner = two.state_dict()
    assert one.state_dict().keys() == {name.removeprefix("trunk.") for name in inner}
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, inner[f"trunk.{name}"]), name


@functools.cache
def plain(to: str, mirrored: int, **options: Any) -> Conversion:
    """The fit on plain tensors, which every form is compared with, by `sequential_fit.MIRRORED` and
    options.
    """
    data = batches()
    return normswap.convert(trunk(), to, inputs=data[0][:2], calibrate=data, **options)


FITTED = [("groupnorm", {"groups": 2}), ("nf", {})]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("to", "options"), FITTED)
@pytest.mark.one_in(2)
def test_a_fit_is_that_of_plain_tensors(
    form: str, to: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrap, given = FORMS[form]
    if (
        form == "two arguments"
    ):  # which are not shown in a mirror, nor to noise that a rescaling is chosen on
        monkeypatch.setattr(sequential_fit, "MIRRORED", 0)
        options = {**options, "relative_eps": 0} if to == "groupnorm" else options

    data = batches()
    wanted = plain(to, sequential_fit.MIRRORED, **options)
    calibrate = [given(x) for x in data]
    done = normswap.convert(
        wrap(trunk()), to, inputs=given(data[0][:2]), calibrate=calibrate, **options
    )
    same(wanted.model, done.model)

    assert done.report.kept is not None
    assert wanted.report.kept is not None
    assert done.report.kept.count == wanted.report.kept.count == 8

    if form in ("keywords", "a record"):
        # A name says which of several outputs; of one tensor there is none.
        plain_kept, named_kept = (
            replace(each.report.kept, answer="", axis=None) for each in (wanted, done)
        )
        assert named_kept == plain_kept


@pytest.mark.slow
def test_a_network_of_transformers_is_fitted_alike_by_keywords() -> None:
    data = batches()
    wanted = normswap.convert(resnet(), "groupnorm", inputs=data[0], calibrate=data, relative_eps=0)
    calibrate = [{"pixel_values": x, "labels": LABELS} for x in data]
    inputs = {"pixel_values": data[0]}
    done = normswap.convert(
        resnet(), "groupnorm", inputs=inputs, calibrate=calibrate, relative_eps=0
    )
    for name, tensor in wanted.model.state_dict().items():
        assert torch.equal(tensor, done.model.state_dict()[name]), name


LABELS = torch.zeros(8, dtype=torch.long)
BESIDE: dict[str, Callable[[Any], Any]] = {
    "without labels": lambda batch: batch,
    "labels in a tuple": lambda batch: (
        (*batch, LABELS) if isinstance(batch, tuple) else (batch, LABELS)
    ),
    "labels in a list": lambda batch: (
        [*batch, LABELS] if isinstance(batch, tuple) else [batch, LABELS]
    ),
}


@functools.cache
def recalibrated() -> Conversion:
    return recalibrate(trunk(), batches(), input_size=SIZE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("beside", BESIDE)
def test_statistics_are_those_of_plain_tensors(form: str, beside: str) -> None:
    wrap, given = FORMS[form]
    wanted = recalibrated()
    data = [BESIDE[beside](given(x)) for x in batches()]
    done = recalibrate(wrap(trunk()), data, inputs=given(batches()[0]))
    same(wanted.model, done.model)

    assert done.notes == wanted.notes


@functools.cache
def of_plain_images() -> tuple[nn.Module, nn.Module]:
    data = [(x, LABELS) for x in batches()]
    fitted = normswap.convert(trunk(), "groupnorm", input_size=SIZE, calibrate=data)
    return fitted.model, recalibrate(trunk(), data, input_size=SIZE).model


IMAGES: dict[str, Any] = {"keywords": Keyword, "a list": Listed}


@pytest.mark.parametrize("form", IMAGES)
def test_images_reach_a_network_without_a_word_about_its_inputs(form: str) -> None:
    """As those of a folder do on the command line: by name, or as a list, as its forward says."""
    data = [(x, LABELS) for x in batches()]
    fitted, recalibrated = of_plain_images()
    same(
        fitted,
        normswap.convert(IMAGES[form](trunk()), "groupnorm", input_size=SIZE, calibrate=data).model,
    )
    same(recalibrated, recalibrate(IMAGES[form](trunk()), data, input_size=SIZE).model)


def test_a_tuple_of_as_many_tensors_as_arguments_is_one_batch() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.norm(self.conv(x)).mean((2, 3)) + y

    batch = torch.randn(40, 3, 9, 9), torch.randn(40, 4)
    network = Two().eval()
    one, listed = (
        normswap.convert(network, "groupnorm", inputs=batch, calibrate=data)
        for data in (batch, [batch])
    )

    assert all(
        value.equal(listed.model.state_dict()[name])
        for name, value in one.model.state_dict().items()
    )


@pytest.mark.slow
def test_a_detector_is_fitted() -> None:
    """How much of a fit is kept, its boxes decide, and not the trunk's answers; the fit is the
    same.
    """
    data = [scaled(x) for x in batches()]

    assert len({len(found["scores"]) for found in Boxes(trunk())(list(data[0]))}) > 1

    calibrate = [
        (tuple(x), tuple({"boxes": torch.zeros(0, 4)} for _ in x)) for x in data
    ]  # as its loader collates

    with pytest.MonkeyPatch.context() as whole:
        whole.setattr(sequential_fit, "SHARES", (1.0,))
        wanted = normswap.convert(trunk(), "groupnorm", inputs=data[0][:2], calibrate=data)
        fitted = normswap.convert(
            Boxes(trunk()), "groupnorm", inputs=(list(data[0]),), calibrate=calibrate
        )

    same(wanted.model, fitted.model)
    done = normswap.convert(
        Boxes(trunk()), "groupnorm", inputs=(list(data[0]),), calibrate=calibrate
    )

    assert done.report.passed
    assert done.report.worst.relative_l2 == 1, (
        "another number of boxes is all wrong, not infinitely"
    )
    assert done.report.kept is not None
    assert math.isfinite(done.report.kept.relative_l2)
    assert (
        normswap.convert(Boxes(trunk()), "folded", inputs=(list(data[0]),)).report.worst.relative_l2
        < 1e-5
    )


def test_lists_of_images_of_any_size() -> None:
    data = [[torch.randn(3, 20 + i, 24) for _ in range(4)] for i in range(6)]
    done = normswap.convert(Listed(trunk()), "groupnorm", inputs=data[:1], calibrate=data)

    assert done.report.passed
    assert done.report.kept is not None
    assert done.report.kept.count == 6


def test_images_in_a_list_beside_a_mask_are_not_all_that_goes_in() -> None:
    images = [torch.zeros(3, 8, 8), torch.zeros(3, 8, 8)]
    assert calling.Example((images,)).only_images

    call = calling.Example((images,), {"mask": torch.ones(2)})

    assert not call.only_images
    with pytest.raises(TraceError, match="it takes 3 tensors"):
        call.of(torch.zeros(2, 3, 8, 8))


X = torch.randn(8, *SIZE)
WRONG: list[tuple[Any, Any, Any, str]] = [
    (Keyword, {"pixel_values": X}, [{"pixels": X}], "do not fit the network: .*pixels"),
    (Keyword, {"pixel_values": X}, [{"pixel_values": X * torch.nan}], "values that are not finite"),
    (Keyword, {"pixel_values": X}, [{"pixel_values": "a"}], "batch 0 is no batch of images"),
    (Unpacked, (X[:, :2], X[:, 2:]), [X], "takes more than images: it takes 2 tensors"),
    (Unpacked, (X[:, :2], X[:, 2:]), [(X[:, :2],)], "do not fit the network: .*grey"),
    (
        Unpacked,
        (X[:, :2], X[:, 2:]),
        [(X[:, :2], X[:, 2:]), (X[:, :2], X[:, 1:])],
        "batch 1 has images of size",
    ),
    (
        Listed,
        (list(X),),
        [list(X), list(X[:5])],
        "take another way through the network: .*how many",
    ),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_what_does_not_fit_is_said(case: int) -> None:
    wrap, inputs, data, message = WRONG[case]
    with pytest.raises((SourceError, TraceError), match=message):
        normswap.convert(wrap(trunk()), "groupnorm", inputs=inputs, calibrate=data)


def test_a_single_batch_is_a_list_of_one() -> None:
    for form, (wrap, given) in FORMS.items():
        if form == "a list":  # a tuple of one is a list of batches, as ever
            continue
        one, two = (
            recalibrate(wrap(trunk()), data, inputs=given(X)).model
            for data in ([given(X)], given(X))
        )
        assert all(
            torch.equal(a, b)
            for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True)
        )


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


@pytest.mark.parametrize("form", FORMS)
def test_the_signal_is_that_of_plain_tensors(form: str) -> None:
    wrap, given = FORMS[form]
    wanted = signal_propagation(Network(trunk(), batches()))
    found = signal_propagation(Network(wrap(trunk()), [given(x) for x in batches()]))

    assert [(p.depth, p.variance) for p in found] == [
        (p.depth, pytest.approx(p.variance, rel=1e-5)) for p in wanted
    ]
    for one, other in zip(found, wanted, strict=True):
        for what in ("mean_sq", "branch_variance", "added_variance"):
            assert getattr(one, what) == pytest.approx(getattr(other, what), rel=1e-5)


def labelled(form: str) -> list[Any]:
    """Batches with labels, as a loader of such networks gives them."""
    given = FORMS[form][1]
    answers = [trunk()(x).argmax(1) for x in batches()]
    answers[0][:4] = (answers[0][:4] + 1) % 5  # four are wrong
    pairs = [(given(x), labels) for x, labels in zip(batches(), answers, strict=True)]
    return [(*call, labels) for call, labels in pairs] if form == "two arguments" else pairs


class Tolerant(Keyword):
    """As transformers' do, it takes labels, too."""

    def forward(self, *, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(pixel_values=pixel_values)


def test_accuracy_is_that_of_plain_tensors() -> None:
    plain = [(x, labels) for x, (_, labels) in zip(batches(), labelled("keywords"), strict=True)]
    wanted = evaluate(trunk(), plain)

    assert wanted.top1 == pytest.approx(100 * 28 / 32)

    both: list[tuple[nn.Module, list[Any]]] = [
        (Keyword(trunk()), labelled("keywords")),
        (Keyword(trunk()), plain),
        (Tolerant(trunk()), [{**call, "labels": labels} for call, labels in labelled("keywords")]),
    ]

    for model, data in both:
        found = evaluate(model, data)
        assert (found.top1, found.top5, found.count) == (wanted.top1, wanted.top5, 32)
        assert found.loss == pytest.approx(wanted.loss, rel=1e-6)


class Scores(Unpacked):
    def forward(self, colours: Tensor, grey: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(colours, grey)[0]


def test_accuracy_of_two_arguments_and_what_has_none() -> None:
    assert evaluate(Scores(trunk()), labelled("two arguments")).top1 == pytest.approx(100 * 28 / 32)
    for model, data, message in [
        (Scores(trunk()), [(X[:, :2], X[:, 2:])], "without a label"),
        (Scores(trunk()), [(X, LABELS)], "does not run on"),
        (Listed(trunk()), [(X, LABELS)], "does not give one tensor"),
        (trunk(), [X], "without a label"),
    ]:
        with pytest.raises(NormswapError, match=message):
            evaluate(model, data)


def test_a_report_of_what_takes_two_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a factory of the user's; it is saved, opened again, verified and unfolded; the report
    refuses it.
    """
    code = (
        "from support import input_forms\n\n\ndef make():\n    return"
        " input_forms.Unpacked(input_forms.Trunk())\n"
    )
    (tmp_path / "two.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    safetensors.torch.save_file(Unpacked(trunk()).state_dict(), tmp_path / "two.safetensors")
    source = checkpoint.open_model("two:make", weights=str(tmp_path / "two.safetensors"))
    inputs = FORMS["two arguments"][1](X)
    done = normswap.convert(source, "skipinit", inputs=inputs)
    folder = normswap.save(done, tmp_path / "out")
    again = checkpoint.load(folder, trust_factory=True)

    assert reverification.again(Network(source, inputs), again).passed

    back = normswap.convert(again, "unfold", inputs=inputs)
    assert back.report.passed
    with pytest.raises(NormswapError, match="takes more than images"):
        report.collect(folder, trust_factory=True)


def test_the_dtype_of_a_network_is_that_of_most_numbers() -> None:
    """Not of most tensors: many small ones may have been left in float32."""
    large = nn.Linear(64, 64).half()
    small = [nn.BatchNorm1d(2) for _ in range(8)]

    assert calling.anchor(nn.Sequential(*small, large)).dtype is torch.float16
    assert calling.anchor(nn.Sequential(large, *small)).dtype is torch.float16
