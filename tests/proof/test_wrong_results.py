"""The gates let nothing wrong through: an error that float32 cannot see, a wrong way back, a file
that is off.
"""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from support.lived_in_networks import distance, lived_in, run
from support.model_sources import ARGS
from support.scheme_rows import EXACT, Row
from torch import Tensor, nn

from normswap import convert, provenance, save, schemes, verify
from normswap.errors import VerificationError
from normswap.exporting import checks
from normswap.exporting.checks import Reference
from normswap.exporting.signature import Signature
from normswap.graph import inspection
from normswap.images.accuracy import agreement
from normswap.layers.folded import Folded
from normswap.models import calling
from normswap.models.calling import Example
from normswap.plan import Arch, Step
from normswap.proof import doubles, held_out, running
from normswap.proof.distance import between
from normswap.provenance import Provenance
from normswap.surgery import applying
from normswap.surgery.network import Network

SIZE = (3, 33, 33)


def reference_of(model: nn.Module) -> Reference:
    return Reference(model, Signature.of_images(model, "logits"))


class Biased(nn.Module):
    """Convolutions with a bias before their norms, as in VGG."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.bn = nn.BatchNorm2d(6, eps=1e-3)
        self.mid = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.mid_bn = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x)).relu()
        return self.head(self.mid_bn(self.mid(x)).relu().mean((2, 3)))


def biased() -> nn.Module:
    torch.manual_seed(0)
    model = lived_in(Biased(), torch.randn(4, *SIZE, dtype=torch.float64)).float()
    return provenance.attach(model, Provenance(Arch("test_wrong_results:Biased", {}, "factory")))


def residual() -> nn.Module:
    torch.manual_seed(0)
    return lived_in(
        timm.create_model("resnet18", num_classes=10, **ARGS), torch.randn(4, *SIZE).double()
    ).float()


@torch.no_grad()
def slightly(model: nn.Module) -> None:
    """A change that float32 rounds away."""
    for parameter in model.parameters():
        parameter.mul_(1 + 1e-9)


def test_convert_sees_in_float64_what_float32_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    right = residual()
    made = Folded.replacing

    def wrong(*given: Any, **args: Any) -> Any:
        new: Any = made(*given, **args)
        slightly(new)
        return new

    report = convert(right, "folded", input_size=SIZE).report
    assert 0 < next(e.relative_l2 for e in report.logits if e.precision == "float64") < 1e-13
    monkeypatch.setattr(Folded, "replacing", wrong)
    with pytest.raises(VerificationError, match="float64"):
        convert(right, "folded", input_size=SIZE)


@pytest.mark.parametrize("make", [biased, residual])
def test_unfold_gives_the_weights_that_were_there(make: Callable[[], nn.Module]) -> None:
    """And the function; where a gamma is 0, the weights are lost. Biases before a norm may go to
    its beta.
    """
    source = make()
    back = convert(
        convert(source, "folded", input_size=SIZE).model, "unfold", input_size=SIZE
    ).model
    x = torch.randn(2, *SIZE, dtype=torch.float64)
    seen = 0

    assert (
        distance(run(copy.deepcopy(source).double(), x), run(copy.deepcopy(back).double(), x))
        < 1e-6
    )

    for name, tensor in source.state_dict().items():
        if tensor.ndim == 4:
            gamma = source.get_submodule(_norm_of(name)).get_parameter("weight")
            assert torch.allclose(
                back.state_dict()[name][gamma != 0], tensor[gamma != 0], rtol=1e-5, atol=1e-7
            ), name
            seen += 1
        elif not name.endswith(".bias"):
            assert torch.equal(back.state_dict()[name], tensor), name

    assert seen >= 2


def _norm_of(weight: str) -> str:
    path = weight.removesuffix(".weight")
    return {"mid": "mid_bn"}.get(
        path, path.replace("conv", "bn").replace("downsample.0", "downsample.1")
    )


@pytest.mark.parametrize("harm", ["a digit that float32 has not", "a bias", "a sign"])
def test_a_wrong_unfold_is_refused(monkeypatch: pytest.MonkeyPatch, harm: str) -> None:
    folded = convert(biased(), "folded", input_size=SIZE).model
    inverted = Folded.invert

    def wrong(old: Any, *given: Any, **args: Any) -> None:
        inverted(old, *given, **args)
        if harm == "a bias":
            old.bias.mul_(1.01)
        elif harm == "a sign":
            old.weight[2:3].neg_()
        else:
            slightly(old)

    monkeypatch.setattr(Folded, "invert", wrong)
    with pytest.raises(VerificationError, match="unfold"):
        convert(folded, "unfold", input_size=SIZE)


def widely(model: nn.Module, row: Row) -> tuple[Step, nn.Module]:
    options = schemes.chosen(row.scheme, row.options).options
    step = Step(
        row.scheme,
        options,
        schemes.get(row.scheme).plan(inspection.inspect(model), **options).edits(),
    )
    return step, applying.apply_step(model, step, double=True)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("row", EXACT, ids=str)
def test_a_result_in_float64_by_parts_is_the_whole_one(row: Row) -> None:
    """What the step makes was made in float64, and is lent to the network that was made in float32,
    layer by layer.
    """
    model = residual()
    x = torch.randn(2, *SIZE)
    step, wide = widely(model, row)
    result = applying.apply_step(model, step)
    example = Example((x,)).map_floats(Tensor.double)
    before = {name: tensor.clone() for name, tensor in result.state_dict().items()}
    found = running.by_parts(result, example, *applying.doubles(model, result, step))

    assert found is not None

    rounded = running.outputs_double(result, example)[""]
    assert distance(run(wide, x.double()), found[""]) < 1e-14

    if any(
        not torch.equal(t, t.float().double())
        for t in wide.state_dict().values()
        if t.is_floating_point()
    ):
        assert distance(found[""], rounded) > 1e-9

    now = result.state_dict()
    assert all(torch.equal(now[name], tensor) for name, tensor in before.items())


class Looking(nn.Module):
    """Its forward reads a tensor of its convolution by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        reach = self.conv.weight.new_ones(()) * self.head.bias.sum()
        return self.head(self.bn(self.conv(x)).relu().mean((2, 3))) * reach


class Again(nn.Module):
    """Its layers run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(2):
            x = self.bn(self.conv(x)).relu()
        return x.mean((2, 3))


@pytest.mark.parametrize("kind", [Looking, Again])
def test_where_parts_say_something_else_the_whole_decides(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = lived_in(kind(), torch.randn(4, *SIZE).double()).float()
    step = widely(model, Row("folded"))[0]
    result = applying.apply_step(model, step)

    def parts(example: Example) -> Any:
        return running.by_parts(result, example, *applying.doubles(model, result, step))

    x = torch.randn(2, *SIZE)
    made = []

    def whole() -> nn.Module:
        made.append(applying.apply_step(model, step, double=True))
        return made[0]

    off = {"": torch.full((1, 2 if kind is Looking else 4), 1.0, dtype=torch.float64)}
    for by in (parts, lambda example: None, lambda example: off):
        precise = doubles.compare_double(Network(model, x), whole, by)
        assert precise is not None
        assert precise.error.relative_l2 < 1e-14
    assert len(made) >= 2


class Adapted(nn.Linear):
    """A linear layer with another one inside, which runs first."""

    def __init__(self) -> None:
        super().__init__(5, 5)
        self.low = nn.Linear(5, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        low = self.low(x)
        return super().forward(x) + low


def test_linear_layers_inside_each_other_have_their_own_weights_in_float64() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), Adapted(), nn.Linear(5, 3))
    x = torch.randn(4, 5)
    found = running.by_parts(model, Example((x,)).map_floats(Tensor.double))
    assert found is not None
    assert distance(run(copy.deepcopy(model).double(), x.double()), found[""]) < 1e-14


def test_what_the_making_of_a_layer_rounds_stays_rounded() -> None:
    """The layer is made while a forward runs in which all is widened."""
    model = nn.Sequential(nn.Linear(5, 5))
    x = torch.randn(4, 5, dtype=torch.float64)
    weight = torch.randn(5, 5, dtype=torch.float64)

    def made() -> nn.Module:
        layer = nn.Linear(5, 5).double()
        layer.weight.data = weight.to(torch.float32).double()
        layer.bias.data = torch.full((5,), 0.5, dtype=torch.float32).double() / 3
        return layer

    found = running.by_parts(model, Example((x,)), {model[0]: made})
    assert found is not None
    wanted = x.numpy() @ weight.numpy().astype("float32").astype("float64").T + 0.5 / 3
    assert distance(torch.from_numpy(wanted), found[""]) < 1e-14


class Scores(nn.Module):
    """The pixels are the scores; a weight, for a network should have one."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x.flatten(1)


def off(by: float) -> Callable[[Tensor], Tensor]:
    return lambda x: (1 + by) * x.flatten(1)


@pytest.mark.parametrize(
    ("dtype", "costs", "right", "wrong"),
    [
        ("fp32", None, 5e-6, 1e-4),
        ("int8", None, 0.5, 1.1),
        *(
            (half, costs, 2.8 * costs, 3.5 * costs)
            for half in ("fp16", "bf16")
            for costs in (1e-3, 1e-2)
        ),
        ("fp16", 1e-7, 5e-6, 1e-4),
    ],
)
def test_exported_files_may_be_off_by_what_their_precision_costs(
    dtype: str, costs: float | None, right: float, wrong: float
) -> None:
    """In half precision three times what rounding costs the network in PyTorch passes, whatever
    that is.
    """
    x = torch.randn(8, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    rounded = None if costs is None else off(costs)
    reference = replace(reference_of(Scores()), rounded=rounded)
    found = checks.check(reference, off(right), [(x, None)], dtype=dtype)
    assert found.relative_l2 == pytest.approx(right, rel=0.1)
    with pytest.raises(VerificationError, match="computes something else"):
        checks.check(reference, off(wrong), [(x, None)], dtype=dtype)


class NearInput(Scores):
    """Subtracts a number near its input, which enlarges the rounding of the input."""

    near = 1

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x - 1).flatten(1)


class NearWeight(Scores):
    """Subtracts a number near its weight, which enlarges the rounding of the weight."""

    near = 0

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight - 1) + x.flatten(1)


@pytest.mark.parametrize("kind", [NearInput, NearWeight])
def test_a_file_may_be_off_by_what_another_last_digit_changes(
    kind: type[NearInput] | type[NearWeight],
) -> None:
    """Float32 and float64 agree here, so their distance alone says nothing about rounding."""
    model = kind()
    steps = torch.randint(1, 64, (8, 3, 2, 2), generator=torch.Generator().manual_seed(0))
    x = kind.near + steps / 1024
    exact = (steps / 1024).flatten(1)
    assert torch.equal(model.double()(x.double()), exact.double())
    last_digit = 4 * torch.finfo(torch.float32).eps

    def file(by: float) -> Callable[[Tensor], Tensor]:
        return lambda images: (images - kind.near).flatten(1) + by * last_digit

    found = checks.check(reference_of(model.float()), file(3), [(x, None)])
    assert found.relative_l2 > 1e-5
    assert found.verdict == "PROVED"
    with pytest.raises(VerificationError):
        checks.check(reference_of(model), file(6), [(x, None)])


def test_probabilities_in_half_precision_may_be_off_by_what_rounding_costs_them() -> None:
    """Not by a bound on it, which for scores of 20 lets everything pass."""
    x = 20 * torch.rand(64, 3, 2, 2, generator=torch.Generator().manual_seed(0)) - 10

    def rounded(by: float) -> Callable[[Tensor], Tensor]:
        return lambda x: ((1 + by) * x.flatten(1)).softmax(1)

    reference = replace(reference_of(Scores()), softmax=True, rounded=rounded(1e-3))
    found = checks.check(reference, rounded(2e-3), [(x, None)], dtype="fp16")
    assert found.tolerance < 0.02
    with pytest.raises(VerificationError):
        checks.check(reference, rounded(8e-3), [(x, None)], dtype="fp16")


def test_agreement_counts_places_of_maps() -> None:
    """Two images of 2 x 3 pixels, of which one pixel changes its class."""

    class Map(Scores):
        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x

    x = torch.randn(2, 4, 2, 3)

    def other(x: Tensor) -> Tensor:
        scores = x.clone()
        scores[0, (x[0, :, 0, 0].argmax() + 1) % 4, 0, 0] = x[0, :, 0, 0].max() + 1
        return scores

    reference = replace(reference_of(Map()), anatomy=SimpleNamespace(widths={4}, features=False))
    found = checks.check(reference, other, [(10 * x, None)], dtype="int8")
    assert (found.answers, found.unit, found.count) == (12, "pixels", 2)
    assert found.agreement == pytest.approx(11 / 12)
    assert (
        checks.check(reference_of(Map()), other, [(10 * x, None)], dtype="int8").agreement is None
    ), "features"


def test_probabilities_are_held_to_what_their_scores_may_be_off_by() -> None:
    """|dp| / |p| <= 2 max |dz|: scores of up to 20 that are off by 1e-5 of it pass, ten times that
    is wrong.
    """
    x = 20 * torch.rand(64, 3, 2, 2, generator=torch.Generator().manual_seed(0)) - 10
    x[0, 0, 0, 0] = 20
    sign = torch.randn(64, 12, generator=torch.Generator().manual_seed(1)).sign()

    def moved(by: float) -> Callable[[Tensor], Tensor]:
        return lambda x: (x.flatten(1).double() + by * sign).softmax(1)

    reference = replace(reference_of(Scores()), softmax=True)
    checks.check(reference, moved(0.9 * 20e-5), [(x, None)])
    for wrong in (moved(30 * 20e-5), lambda x: x.flatten(1)):
        with pytest.raises(VerificationError):
            checks.check(reference, wrong, [(x, None)])


def test_agreement_is_the_share_of_equal_answers() -> None:
    x = torch.eye(4).reshape(4, 4, 1, 1) + 0.1

    def other(x: Tensor) -> Tensor:
        scores = x.flatten(1).clone()
        scores[0, 1] += 1.5
        return scores

    labels = torch.tensor([1, 1, 2, 0])
    found = checks.check(reference_of(Scores()), other, [(x, labels)], dtype="int8")
    assert (found.agreement, found.source_top1, found.top1, found.count) == (0.75, 50.0, 75.0, 4)
    assert agreement(torch.tensor([0, 1, 2, 3]), torch.tensor([1, 1, 2, 3])) == 0.75
    rows = Example((torch.eye(3),))
    unlike = between(rows, {"": torch.eye(3)}, {"": torch.eye(4)[:3]}, precision="float32")
    assert unlike.agreement is None, "answers of other classes"

    class Other(Scores):
        def forward(self, x: Tensor) -> Tensor:
            return self.weight * other(x)

    assert verify(Scores(), Other(), x, exact=False).logits[0].agreement == 0.75


class Picks(nn.Module):
    """The samples whose first number is above a bound, as a detector gives the boxes that it is
    sure of.
    """

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))
        self.bound = bound

    def forward(self, x: Tensor) -> Tensor:
        x = self.weight * x.flatten(1)
        return x[x[:, 0] > self.bound]


def test_who_keeps_another_number_of_boxes_is_as_far_off_as_one_who_gives_nothing() -> None:
    x = torch.linspace(-1, 1, 20).reshape(20, 1, 1, 1).expand(-1, 2, 1, 1)
    kept = held_out.measured(Picks(0.0), Picks(0.5), [Example((x,))])
    assert kept is not None
    assert (kept.agreement, kept.relative_l2, kept.count) == (None, 1.0, 20)
    kept = held_out.measured(Picks(0.0), Picks(0.0), [Example((x,)), Example((x[12:],))])
    assert kept is not None
    assert (kept.agreement, kept.relative_l2, kept.count) == (1.0, 0.0, 28)


class Borrows(nn.Module):
    """Uses a weight of a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.flatten(1), self.inner.weight, self.inner.bias)


def test_float64_reaches_weights_of_layers_that_are_not_called() -> None:
    torch.manual_seed(0)
    model = Borrows().requires_grad_(False)
    x = torch.randn(2, 3, 2, 2, dtype=torch.float64)
    expected = copy.deepcopy(model).double()(x)
    assert distance(expected, running.outputs_double(model, Example((x,)))[""]) < 1e-14
    assert model.inner.weight.dtype == torch.float32


def test_there_is_no_float64_on_apples_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*size: int, dtype: torch.dtype, device: torch.device) -> None:
        if device.type == "mps" and dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")  # torch's words

    monkeypatch.setattr(torch, "empty", empty)
    kinds = {"cpu": True, "cuda": True, "mps": False, "xpu": True}
    for kind, known in kinds.items():
        anchor = SimpleNamespace(device=torch.device(kind), dtype=torch.float32)
        monkeypatch.setattr(calling, "anchor", lambda model, anchor=anchor: anchor)
        assert Network(nn.Identity()).has_double is known


def test_one_number_is_no_choice(tmp_path: Path) -> None:
    """A network with one output, a regression or a yes or no, has no largest score: nothing is said
    to agree.
    """
    x = torch.randn(8, 5)
    one = torch.nn.Linear(5, 1)
    two = torch.nn.Linear(5, 1)

    assert verify(one, two, x, exact=False).logits[0].agreement is None

    kept = held_out.measured(one, two, [Example((x,))])
    assert kept is not None
    assert (kept.agreement, kept.least) == (None, None)

    found = checks.check(reference_of(one), lambda images: one(images).detach(), [(x, None)])
    assert (found.agreement, found.top1) == (None, None)
    assert found.points_lost is None

    parts = (
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 1),
    )
    done = convert(nn.Sequential(*parts).eval(), "folded", input_size=(3, 9, 9))
    save(done, tmp_path / "one")
    (row,) = re.findall(
        r"^\| float64 .*$", (tmp_path / "one" / "README.md").read_text(encoding="utf-8"), re.M
    )

    assert row.endswith("|  |")
