"""What is proved is true: known-bad results are rejected at the tolerances we ship, and blindness
is reported.
"""

import copy
import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from pydantic import TypeAdapter
from support.lived_in_networks import lived_in, run, step
from torch import Tensor, nn

import normswap
from normswap.errors import NormswapError, PlanError, VerificationError
from normswap.plan import AbsorbMode, Absorption, Edit, Step
from normswap.proof import allowance, comparison, doubles, running
from normswap.proof.verdict import Error, Kept, Report
from normswap.surgery import applying, carrying_out, conversion
from normswap.surgery.network import Network
from normswap.surgery.verification import verify

Harm = Callable[[Any, Any], None]
PATH = "layer2.1"  # the block that the mutants harm


def inputs(seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, side, side, generator=generator) for side in (48, 33)]


@functools.cache
def source() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=10, channels=(8, 16, 24, 32))
    return lived_in(model, torch.randn(4, 3, 48, 48, dtype=torch.float64)).float()


def result(harm: Harm, double: bool = False) -> nn.Module:
    """The source under SkipInit, then harmed; with `double` the whole surgery in float64."""
    converted = applying.apply_step(source(), step(source(), "skipinit")[0], double=double)
    with torch.no_grad():
        harm(converted.get_submodule(PATH), source().get_submodule(PATH + ".bn1"))
    return converted


def compared(harm: Harm, exact: bool = True, double: bool = True) -> Report:
    network = Network(source(), inputs())
    precise = doubles.compare_double(network, lambda: result(harm, True)) if double else None
    return comparison.compare_networks(network, result(harm), exact=exact, precise=precise)


def none(block: Any, norm: Any) -> None:
    """No harm."""


def _eps(block: Any, norm: Any) -> None:
    ratio = ((norm.running_var + norm.eps) / (norm.running_var + 1e-3)).sqrt()
    block.conv1.weight *= ratio.view(-1, 1, 1, 1)
    block.conv1.bias.copy_(norm.bias + (block.conv1.bias - norm.bias) * ratio)


def _gamma(block: Any, norm: Any) -> None:
    block.conv1.weight /= torch.where(norm.weight == 0, 1, norm.weight).view(-1, 1, 1, 1)


def _sign(block: Any, norm: Any) -> None:
    block.conv1.weight *= norm.weight.sign().view(-1, 1, 1, 1)


def _permuted(block: Any, norm: Any) -> None:
    order = torch.arange(len(norm.weight)).roll(1)
    block.conv1.weight.copy_(block.conv1.weight[order])
    block.conv1.bias.copy_(block.conv1.bias[order])


def _transposed(block: Any, norm: Any) -> None:
    block.conv2.weight.copy_(block.conv2.weight.transpose(0, 1).contiguous())


MUTANTS: dict[str, Harm] = {
    "wrong eps": _eps,
    "gamma not taken": _gamma,
    "gamma's sign lost": _sign,
    "bias dropped": lambda block, norm: block.conv1.bias.zero_(),
    "mean dropped": lambda block, norm: block.conv1.bias.copy_(norm.bias),
    "channels permuted": _permuted,
    "filters transposed": _transposed,
    "one channel scaled by 1 %": lambda block, norm: block.conv2.weight[7].mul_(1.01),
    "alpha off by 1 %": lambda block, norm: block.bn2.alpha.mul_(1.01),
    "alpha forgotten": lambda block, norm: block.bn2.alpha.fill_(1),
    "not a number": lambda block, norm: block.conv2.weight[0].fill_(float("nan")),
    "infinite": lambda block, norm: block.conv2.bias[0].fill_(float("inf")),
}


def test_the_right_result_passes() -> None:
    report = compared(none)
    assert report.passed
    assert report.remarks == ()
    assert [(error.precision, error.size) for error in report.logits] == [
        ("float64", (2, 3, 48, 48)),
        ("float32", (2, 3, 48, 48)),
        ("float32", (2, 3, 33, 33)),
    ]
    assert report.tolerance["float64"] == 1e-12
    assert report.tolerance["float32"] <= 1.1e-5


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.one_in(2)
def test_mutants_are_rejected(name: str) -> None:
    assert not compared(MUTANTS[name]).passed
    assert not compared(MUTANTS[name], double=False).passed, "float32 alone should see it"


@pytest.mark.parametrize("name", ["not a number", "infinite"])
def test_not_even_an_approximate_scheme_may_give_nan(name: str) -> None:
    report = compared(MUTANTS[name], exact=False)
    assert not report.passed
    assert report.worst.relative_l2 == float("inf")


def test_an_approximate_scheme_passes_with_its_error() -> None:
    report = compared(MUTANTS["alpha off by 1 %"], exact=False)
    assert report.passed
    assert 1e-4 < report.worst.relative_l2 < 0.1


def test_float64_sees_what_float32_cannot() -> None:
    def slightly(block: Any, norm: Any) -> None:
        block.bn2.alpha.mul_(1 + 1e-9)

    assert compared(slightly, double=False).passed
    assert not compared(slightly).passed


def test_another_shape_never_passes() -> None:
    wide: Any = result(none)
    wide.reset_classifier(11)
    for exact in (True, False):
        assert not verify(source(), wide, inputs(), exact=exact).passed


@pytest.mark.slow
def test_sites_say_where() -> None:
    report = compared(MUTANTS["one channel scaled by 1 %"])
    error = {site.site: site.relative_l2 for site in report.sites}
    assert list(error) == [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]
    clean = [site for site, value in error.items() if value < 1e-5]
    assert clean == ["layer1.0", "layer1.1", "layer2.0"]


EDITS: dict[str, Callable[[Edit], Edit | None]] = {
    "alpha off by 1 %": lambda e: _with(e, "Scale", alpha=lambda a: a * 1.01),
    "gain off": lambda e: _with(e, "Folded", gain=lambda g: g * 0.99),
    "gamma left out": lambda e: dataclasses.replace(
        e, takes=tuple(Absorption(AbsorbMode.AFTER_UNIT) for _ in e.takes)
    ),
    "norm not taken": lambda e: (
        dataclasses.replace(e, args={}, reads=(), takes=()) if e.layer == "Folded" else e
    ),
    "norm not removed": lambda e: None if e.path.endswith("bn1") else e,
    "norm removed twice": lambda e: (
        dataclasses.replace(e, layer="Vacant", args={}) if e.layer == "Folded" else e
    ),
    "another's norm": lambda e: dataclasses.replace(
        e, reads=tuple(r.replace("bn1", "bn2") for r in e.reads)
    ),
    "norm kept as an affine map too": lambda e: (
        dataclasses.replace(e, layer="ChannelAffine") if e.layer == "Vacant" else e
    ),
}


def _with(edit: Edit, layer: str, **changes: Callable[[Any], Any]) -> Edit:
    if edit.layer != layer or not changes.keys() <= edit.args.keys():
        return edit
    return dataclasses.replace(
        edit, args={**edit.args, **{key: new(edit.args[key]) for key, new in changes.items()}}
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", EDITS)
def test_plans_edited_into_nonsense_are_rejected(name: str) -> None:
    planned, _ = step(source(), "skipinit")
    edits = tuple(edit for old in planned.edits if (edit := EDITS[name](old)))
    assert edits != planned.edits
    with pytest.raises((VerificationError, PlanError)):
        carrying_out.carry_out(
            Network(source(), inputs()), Step("skipinit", planned.options, edits)
        )
    assert carrying_out.carry_out(Network(source(), inputs()), planned).report.passed


def test_dead_branches_are_reported() -> None:
    torch.manual_seed(0)
    fresh = timm.create_model("resnet18", num_classes=10, channels=(8, 16, 24, 32))
    report = conversion.convert(fresh, "folded", inputs=inputs()).report
    assert [line.split(":")[0] for line in report.remarks] == [
        f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)
    ]


def test_one_image_is_warned_of_nothing() -> None:
    assert verify(source(), copy.deepcopy(source()), torch.randn(1, 3, 48, 48)).remarks == ()


def test_an_input_that_moves_nothing_is_reported() -> None:
    model = copy.deepcopy(source())
    model.get_submodule("fc").get_parameter("weight").data.mul_(1e-6)
    report = conversion.convert(model, "folded", inputs=inputs()).report
    assert report.remarks[0].startswith("the input moves the output")
    quiet = copy.deepcopy(source())
    quiet.get_submodule("fc").weight.data.mul_(1e-6)  # type: ignore[union-attr]
    quiet.get_submodule("fc").bias.data.mul_(1e-6)  # type: ignore[union-attr]
    assert conversion.convert(quiet, "folded", inputs=inputs()).report.remarks == (), (
        "small answers that move are fine"
    )


def test_a_nan_source_is_rejected() -> None:
    model = copy.deepcopy(source())
    model.get_submodule("layer1.0.conv1").get_parameter("weight").data[0].fill_(float("nan"))
    with pytest.raises(NormswapError):
        conversion.convert(model, "folded", inputs=inputs())


def test_a_source_that_overflows_in_its_own_precision_is_rejected() -> None:
    """Finite in float64, infinite in float16: nothing was measured in the user's precision."""
    model = copy.deepcopy(source()).half()
    model.get_submodule("fc").get_parameter("weight").data.mul_(6e4)
    x = 100 * inputs()[0].half()
    assert not bool(torch.isfinite(run(model, x)).all())
    with pytest.raises(VerificationError):
        conversion.convert(model, "folded", inputs=x)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_precisions(dtype: torch.dtype) -> None:
    model = copy.deepcopy(source()).to(dtype)
    xs = [x.to(dtype) for x in inputs()]
    good = conversion.convert(model, "skipinit", inputs=xs)
    assert good.report.passed
    broken: Any = copy.deepcopy(good.model)
    broken.layer2[1].bn2.alpha.data *= 1.5
    precise = doubles.compare_double(Network(model, xs), lambda: copy.deepcopy(broken).double())
    assert not comparison.compare_networks(
        Network(model, xs), broken, precise=precise, traced=False
    ).passed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name", ["gamma not taken", "gamma's sign lost", "bias dropped", "channels permuted"]
)
@pytest.mark.one_in(2)
def test_half_precision_refuses_a_wrong_result_without_float64(
    name: str, dtype: torch.dtype
) -> None:
    """Allowed is three times what the format's own rounding costs the source, here against a copy
    in float64.
    """
    model = copy.deepcopy(source()).to(dtype)
    wide = copy.deepcopy(model).double()

    def rounding(x: Tensor) -> float:
        right = run(wide, x.double())
        return float((right - run(model, x)).norm() / right.norm())

    xs = sorted(
        (x.to(dtype) for x in inputs()), key=rounding, reverse=True
    )  # the most, not the last, is allowed
    good: Any = applying.apply_step(model, step(model, "skipinit")[0])
    found = verify(model, good, xs)
    assert found.passed
    assert found.tolerance[str(dtype)[6:]] == pytest.approx(3 * rounding(xs[0]), rel=1e-6)
    with torch.no_grad():
        MUTANTS[name](good.get_submodule(PATH), model.get_submodule(PATH + ".bn1"))
    assert not verify(model, good, xs).passed


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_number_that_was_rounded_well_by_chance_refuses_nothing(dtype: torch.dtype) -> None:
    """Twenty regressions of one number on one input: some are rounded to nearly what they are in
    float64.
    """
    for seed in range(20):
        torch.manual_seed(seed)
        head = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))
        model = lived_in(
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), head),
            torch.randn(4, 3, 9, 9).double(),
        ).to(dtype)
        assert conversion.convert(
            model, "folded", inputs=torch.randn(1, 3, 9, 9).to(dtype)
        ).report.passed


class Cancelled(nn.Module):
    """A convolution whose output is lifted by `by`, and let down again: so many digits are lost."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return ((self.conv(x) + self.by) - self.by).flatten(1)


@pytest.mark.parametrize(("by", "said"), [(64.0, 1), (0.0, 0)])
def test_where_rounding_alone_costs_much_half_precision_is_said_to_prove_little(
    by: float, said: int
) -> None:
    torch.manual_seed(0)
    model = Cancelled(by).bfloat16().eval()
    x = torch.randn(2, 3, 9, 9).bfloat16()
    wide = run(copy.deepcopy(model).double(), x.double())

    assert (float((wide - run(model, x)).norm() / wide.norm()) > 0.1) == bool(said)

    remarks = [
        line for line in verify(model, copy.deepcopy(model), x).remarks if "bfloat16 alone" in line
    ]

    assert len(remarks) == said


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_rounding_costs_in_half_precision_is_finite_however_wrong_a_result_is(
    dtype: torch.dtype,
) -> None:
    """Inputs that differ in the last digit are compared at the same outputs; infinity would allow
    any error.
    """
    model = copy.deepcopy(source()).to(dtype)
    x = inputs()[0].to(dtype)
    network = Network(model, [x])
    outputs = running.run(model, network.calls[0])[0]
    error = Error("logits", str(dtype).removeprefix("torch."), tuple(x.shape), 0.9, 0.9)
    cost = allowance.cost_of_half(model, network.calls[0], outputs, error, has_double=True, seed=0)
    assert 0 < cost < 0.1


@pytest.mark.slow
def test_reports_survive_json() -> None:
    reader = TypeAdapter(Report)
    error = Error("logits", "float32", (1, 3, 8, 8), 0.1, 0.2, 1.0)
    full = Report(
        False, True, "x", (error,), (error,), {"float32": 1.0}, ("remark",), Kept(0.5, 0.1, 8)
    )
    for report in (compared(none), compared(MUTANTS["not a number"]), full):
        assert reader.validate_json(json.dumps(dataclasses.asdict(report))) == report


def test_measuring_leaves_no_trace() -> None:
    model = copy.deepcopy(source()).train()
    converted = result(none).train()
    model.get_submodule("layer1").eval()
    modes = [module.training for module in model.modules()]
    comparison.compare_networks(Network(model, inputs()), converted)
    with pytest.raises(VerificationError, match="does not run on"):
        verify(model, converted, [torch.randn(2, 5, 8, 8)])
    assert [module.training for module in model.modules()] == modes
    assert all(module.training for module in converted.modules())
    assert not any(module._forward_hooks for net in (model, converted) for module in net.modules())


class Two(nn.Module):
    """Returns a dictionary, and accepts one size only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 26 * 26, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.bn(self.conv(x))
        return {"maps": x, "logits": self.fc(torch.flatten(x, 1))}


def test_odd_outputs_and_inputs() -> None:
    torch.manual_seed(0)
    model = lived_in(Two(), torch.randn(4, 1, 28, 28, dtype=torch.float64)).float()
    assert [x.images.shape for x in running.noise(model, (1, 28, 28))] == [(2, 1, 28, 28)]
    assert conversion.convert(model, "folded", input_size=(1, 28, 28)).report.passed
    wrong = applying.apply_step(model, step(model, "folded")[0])
    wrong.get_submodule("conv").get_parameter("bias").data += 1e-3
    assert not verify(model, wrong, input_size=(1, 28, 28)).passed
    with pytest.raises(VerificationError, match="does not run"):
        running.noise(model, (1, 100, 100))


class Chaotic(nn.Module):
    """Its output depends on the last digits of its input."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * torch.sin(1e8 * self.conv(x))


def test_chaos_is_no_excuse_where_float64_does_not_decide() -> None:
    torch.manual_seed(0)
    model = Chaotic()
    wrong = Chaotic(gain=2.0)
    wrong.load_state_dict(model.state_dict())
    wrong.conv.bias.data += 1e-3  # type: ignore[union-attr]
    x = torch.randn(2, 1, 8, 8)

    assert not verify(model, wrong, inputs=x).passed

    precise = doubles.compare_double(Network(model, x), lambda: copy.deepcopy(wrong).double())
    assert not comparison.compare_networks(
        Network(model, x), wrong, precise=precise, traced=False
    ).passed
    assert not verify(copy.deepcopy(model).double(), wrong.double(), inputs=x.double()).passed


class Picky(nn.Module):
    """Takes images of 32 pixels only, and says so as some networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != 32:
            raise KeyError(x.shape[-1])
        return self.norm(self.conv(x))


@pytest.mark.parametrize("sides", [(32,), (48, 32)])
def test_a_result_that_does_not_run_is_said_whatever_it_raises(sides: tuple[int, ...]) -> None:
    """On the second size, too, where it runs on the first."""
    source = nn.Conv2d(3, 4, 3).eval()
    result = Picky().eval()
    if len(sides) == 1:
        result.forward = {}.__getitem__  # type: ignore[method-assign]
    with pytest.raises(VerificationError, match=r"the result does not run on .*"):
        verify(source, result, [torch.randn(2, 3, side, side) for side in sides[::-1]])


@pytest.mark.parametrize(("least", "sides"), [(0, [64, 97]), (65, [97]), (98, [128])])
def test_noise_of_two_sizes_where_the_network_takes_the_first(least: int, sides: list[int]) -> None:
    class Least(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[-1] < least:
                raise ValueError(x.shape)
            return super().forward(x)

    assert [x.images.shape[-1] for x in running.noise(Least(3, 4, 3), (3, 128, 128))] == sides


@pytest.mark.one_in(2)
@pytest.mark.parametrize("then", ["folded", "unfold"])
def test_a_stream_that_is_rescaled_is_judged_at_the_outputs(then: str) -> None:
    """Residual scaling gives a v1 block another scale, and what comes after it may take it back."""
    torch.manual_seed(0)
    model = timm.create_model("resnet18", channels=(4, 4, 8, 8), num_classes=5).eval()

    scaled = normswap.convert(model, "residual-scale", input_size=(3, 64, 64))
    after = normswap.convert(scaled, then, input_size=(3, 64, 64))

    assert scaled.report.verdict == "PROVED"
    assert after.report.verdict == "PROVED"
    assert any(site.relative_l2 > 1e-3 for site in scaled.report.sites)
