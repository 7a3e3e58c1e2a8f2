"""Files of networks that take and give more than one tensor: by name, and every output is that of
the torch network.
"""

import copy
import json
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from support.input_forms import (
    SIZE,
    Boxes,
    Keyword,
    Listed,
    Record,
    Unpacked,
    batches,
    resnet,
    scaled,
    trunk,
)
from support.sampled_tables import crossed, quick
from torch import Tensor, nn

import normswap
from normswap.errors import NormswapError, VerificationError
from normswap.exporting import checks, exporter, formats
from normswap.exporting.signature import Signature
from normswap.models.calling import Example, named_tensors

X = batches(1)[0]
ENDINGS = {"onnx": "onnx", "openvino": "xml", "pt2": "pt2"}


NETWORKS: dict[str, tuple[Any, Any, list[str], list[str]]] = {
    "two arguments": (
        lambda: Unpacked(trunk()),
        (X[:, :2], X[:, 2:]),
        ["colours", "grey"],
        ["output_0", "output_1"],
    ),
    "a record": (lambda: Record(trunk()), ({"image": X},), ["image"], ["logits"]),
    "keywords": (lambda: Keyword(trunk()), {"pixel_values": X}, ["pixel_values"], ["logits"]),
    "a list": (lambda: Listed(trunk()), (list(X),), ["images_0"], ["output_0_scores"]),
    "transformers": (
        resnet,
        {"pixel_values": X},
        ["pixel_values"],
        ["logits", "hidden_states_0", "hidden_states_1", "hidden_states_2"],
    ),
}


def tensors(value: Any) -> list[Tensor]:
    return [tensor for _, tensor in named_tensors(value)]


def called(model: nn.Module, inputs: Any) -> list[Tensor]:
    with torch.no_grad():
        return tensors(model(**inputs) if isinstance(inputs, dict) else model(*inputs))


def one(inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return {name: value[:1] for name, value in inputs.items()}
    return tuple(one(part) if isinstance(part, dict) else part[:1] for part in inputs)


class Clashing(nn.Module):
    """Gives outputs whose names become equal to each other's, and to the input's, in a file."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"a_b_2": x, "a": {"b": 2 * x}, "a_b": 3 * x, "x": 4 * x, "output_x": 5 * x}


def test_every_output_has_a_name_of_its_own() -> None:
    """Of `a_b_2`, `a.b` and `a_b`, the last was to become a second `a_b_2`, and was lost."""
    model = Clashing()
    images = torch.ones(1, 3)

    names = Signature.of(model, Example((images,))).outputs

    assert len(set(names)) == 5
    assert names[:2] == ("a_b_2", "a_b")
    assert "x" not in names


@crossed("form, name", ENDINGS, NETWORKS)
@pytest.mark.one_in(2)
def test_all_that_goes_in_and_comes_out(name: str, form: str, tmp_path: Path) -> None:
    make, inputs, names, outputs = NETWORKS[name]
    model = make()
    file = tmp_path / f"net.{ENDINGS[form]}"
    done = normswap.export(model, file, inputs=inputs)

    assert done.figures.count == 8
    assert not [kind for kind in done.nodes if "norm" in kind.lower()]

    body = json.loads(done.sidecar.read_text(encoding="utf-8"))
    assert [put["name"] for put in body["inputs"]] == names
    assert [put["name"] for put in body["outputs"]] == outputs

    given = tensors(one(inputs))
    wanted = called(model, one(inputs))
    assert [put["shape"] for put in body["inputs"]] == [list(t.shape) for t in given]

    got = formats.get(form).open(file)(*given)
    got = got if isinstance(got, tuple) else (got,)
    assert len(got) == len(wanted) == len(outputs)

    for a, b in zip(wanted, got, strict=True):
        assert a.shape == b.shape
        assert float((a - b).norm() / a.norm()) < 1e-5


@pytest.mark.slow
def test_onnx_names_them(tmp_path: Path) -> None:
    import onnxruntime

    make, (colours, grey), names, outputs = NETWORKS["two arguments"]
    model = make()
    done = normswap.export(model, tmp_path / "net.onnx", inputs=(colours, grey), dynamic_batch=True)
    session = onnxruntime.InferenceSession(done.file)
    assert [put.name for put in session.get_inputs()] == names
    got = session.run(outputs, {"grey": grey[:3].numpy(), "colours": colours[:3].numpy()})
    for a, b in zip(called(model, (colours[:3], grey[:3])), got, strict=True):
        assert float((a - torch.from_numpy(b)).norm() / a.norm()) < 1e-5
    assert done.figures.agreement is None
    assert done.figures.output in outputs


@pytest.mark.one_in(2)
@pytest.mark.parametrize("wrap", [Keyword, Listed])
def test_images_reach_a_network_that_takes_them_otherwise(wrap: Any, tmp_path: Path) -> None:
    """Without a word about inputs: images in, and out what the plain network answers, alone or in a
    list.
    """
    normswap.export(wrap(trunk()), tmp_path / "a.pt2", input_size=SIZE)
    normswap.export(trunk(), tmp_path / "b.pt2", input_size=SIZE)
    one, two = (formats.get("pt2").open(tmp_path / name) for name in ("a.pt2", "b.pt2"))
    assert torch.equal(one(X[0])[None] if wrap is Listed else one(X[:1]), two(X[:1]))


class Two(nn.Module):
    """Boxes and their scores, as a face detector gives them."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.boxes = nn.LazyLinear(10)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.trunk(x)
        return {"boxes": self.boxes(scores).view(-1, 2, 5), "scores": scores}


def two() -> nn.Module:
    model = Two(trunk()).eval()
    model(X[:1])
    return model


class Beside(nn.Module):
    """A small difference of large numbers, beside what training wants, as YOLO gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = trunk()
        self.other = copy.deepcopy(self.trunk)
        random = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for tensor in self.other.parameters():
                tensor.mul_(1 + 1e-4 * torch.randn(tensor.shape, generator=random))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
        one = self.trunk(x)
        two = self.other(x)
        return one - two, {"training": {"one": one, "two": two}}


@pytest.mark.slow
def test_an_answer_beside_nested_tensors_may_stray_as_far_as_its_rounding(tmp_path: Path) -> None:
    done = normswap.export(Beside().eval(), tmp_path / "a.onnx", input_size=SIZE)

    # The file is farther off than a network that does not enlarge rounding may be.
    assert 1e-5 < done.figures.relative_l2 < done.figures.tolerance


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dynamic", [False, True])
def test_all_that_a_network_gives_of_images(dynamic: bool, tmp_path: Path) -> None:
    """Nothing is said about inputs; the sidecar tells of the images, and of everything that comes
    out.
    """
    model = two()
    done = normswap.export(model, tmp_path / "a.onnx", input_size=SIZE, dynamic_batch=dynamic)
    assert done.figures.inputs == "smooth noise, seed 0"
    assert done.noise_only
    assert done.figures.count == 4

    x = X[: 3 if dynamic else 1]
    given = onnxruntime.InferenceSession(done.file).run(None, {"x": x.numpy()})
    for found, wanted in zip(given, called(model, (x,)), strict=True):
        assert float((torch.from_numpy(found) - wanted).norm() / wanted.norm()) < 1e-5
    beside = json.loads(done.sidecar.read_text(encoding="utf-8"))

    assert [one["name"] for one in beside["outputs"]] == ["boxes", "scores"]
    assert beside["outputs"][0]["shape"] == [None if dynamic else 1, 2, 5]
    assert len(beside["normalize"]["mean"]) == 3

    images = [(X, torch.zeros(8)), X[8:], X[:4]]
    done = normswap.export(
        model, tmp_path / "b.onnx", input_size=SIZE, dynamic_batch=dynamic, images=images
    )

    assert (done.figures.inputs, done.figures.count) == ("given inputs", 12)


@pytest.mark.parametrize("place", [0, 1])
def test_a_wrong_output_is_seen(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, inputs, _, outputs = NETWORKS["two arguments"]
    form = formats.get("pt2").functions
    opened = form.open

    def off(file: Path) -> Any:
        runs = opened(file)
        return lambda *given: tuple(
            t * (1 + 1e-3 * (i == place)) for i, t in enumerate(runs(*given))
        )

    monkeypatch.setattr(form, "open", off)
    with pytest.raises(VerificationError, match=f"computes something else: .* at {outputs[place]}"):
        normswap.export(make(), tmp_path / "a.pt2", inputs=inputs)
    assert not list(tmp_path.iterdir())


PAIR = (X[:, :2], X[:, 2:])
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (
        lambda: Unpacked(trunk()),
        {"input_size": SIZE},
        "takes more than images: it takes 2 tensors. Say what each is: '--input NAME=SHAPE'",
    ),
    (lambda: Unpacked(trunk()), {"inputs": (X,)}, "does not run on 1x3x24x24"),
    (
        lambda: Unpacked(trunk()),
        {"inputs": PAIR, "softmax": True},
        "softmax is for images in and one answer out",
    ),
    (
        lambda: Unpacked(trunk()),
        {"inputs": PAIR, "dtype": "int8"},
        "int8 is for images in and one answer out",
    ),
    *(
        (two, {"input_size": SIZE, **options}, "does not give one tensor: it gives a dict")
        for options in (
            {"normalize": True},
            {"softmax": True},
            {"dtype": "int8", "calibrate": X, "images": X[:4]},
        )
    ),
    (
        lambda: Listed(trunk()),
        {"inputs": (list(X),), "dynamic_batch": True},
        "number of samples cannot be free",
    ),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_cannot_be_is_said(case: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "folded", lambda *_: pytest.fail("folded before it was refused"))
    make, options, message = REFUSED[case]
    file = tmp_path / "a.onnx"
    with pytest.raises(NormswapError, match=message) as caught:
        normswap.export(make(), file, **options)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", quick(ENDINGS, ["onnx"]))
def test_a_number_of_boxes_that_hangs_on_the_image(form: str, tmp_path: Path) -> None:
    file = tmp_path / f"a.{ENDINGS[form]}"
    model = Boxes(trunk())
    pictures = list(scaled(X))
    done = normswap.export(model, file, inputs=(pictures,))

    assert done.figures.agreement is None

    runs = formats.get(form).open(file)
    seen = set()
    for x in pictures:
        for a, b in zip(called(model, ([x],)), runs(x), strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
            seen.add(len(a))

    assert len(seen) > 1


@pytest.mark.parametrize(("singly", "parts"), [(False, [1, 3, 4, 2]), (True, [1] * 10)])
def test_batches_are_split_to_the_size_of_a_file(singly: bool, parts: list[int]) -> None:
    images = torch.arange(10.0).view(10, 1, 1, 1)
    batches = [(images[:4], torch.arange(4)), (images[4:8], None), (images[8:], None)]
    made = [*checks.split(batches, singly=singly)]
    assert [len(x) for x, _ in made] == parts
    assert torch.cat([x for x, _ in made]).equal(images)
    assert torch.cat([y for _, y in made if y is not None]).equal(torch.arange(4))


@pytest.mark.parametrize(("label", "hits"), [(1, 100.0), (0, 0.0), (None, None)])
def test_the_hits_of_a_single_image_are_counted(label: int | None, hits: float | None) -> None:
    scores = torch.tensor([[0.0, 1.0]])
    reference = checks.Reference(nn.Flatten(), checks.Signature.of_images(nn.Flatten(), "logits"))
    labels = None if label is None else torch.tensor([label])
    found = checks.check(
        reference, lambda _images: scores, [(scores[..., None, None], labels)], dtype="int8"
    )
    assert found.top1 == hits
