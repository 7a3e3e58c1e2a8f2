"""Exact schemes beyond test_every_scheme.py: round trips, training, residual rules, ghost batches,
NF networks.
"""

import re
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from support.lived_in_networks import batchnorms, distance, lived_in, run, step
from support.narrow_networks import applied, skeleton, source
from support.tiny_modules import ONE, conv, net
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torchvision.ops.misc import FrozenBatchNorm2d

import normswap
from normswap.errors import RefusedError
from normswap.layers import frozen_norm, reparametrized, scalars
from normswap.layers.channelwise import ChannelAffine, ChannelBias
from normswap.layers.scalars import Scale
from normswap.plan import Plan
from normswap.schemes.residual_scale import RULES
from normswap.surgery import applying

GHOST = ("batchnorm", {"ghost_batch": 2})
NEW = [
    GHOST,
    ("frozen-bn", {}),
    ("affine", {}),
    ("tune", {}),
    ("fixup", {}),
    ("weightnorm", {}),
    ("spectralnorm", {}),
    ("residual-scale", {"rule": "arpit"}),
    ("residual-scale", {"rule": "rescale"}),
]
ids = [name + "-".join(["", *map(str, options.values())]) for name, options in NEW]
new = pytest.mark.parametrize(("scheme", "options"), NEW, ids=ids)
V1 = ("resnet18", "resnet26d", "seresnet18", "ecaresnet50t")


def to(model: nn.Module, scheme: str, **options: Any) -> Any:
    planned, builder = step(model, scheme, **options)
    assert builder.refusals == {}
    return applied(model, planned)


def has_layers(model: nn.Module, *kinds: type) -> bool:
    return any(isinstance(module, kinds) for module in model.modules())


@new
@pytest.mark.one_in(4)
def test_round_trip_to_folded(scheme: str, options: dict[str, Any]) -> None:
    """bn -> X -> folded: the function to 1e-12 in float64 and 1e-5 in float32, and nothing of X is
    left.
    """
    for arch in ("resnet18", "seresnet18"):
        model, x, reference = source(arch)
        back = to(to(model, scheme, **options), "folded")
        assert distance(reference, run(back, x)) <= 1e-12
        ours = (
            Scale,
            scalars.ScalarBias,
            frozen_norm.EvalNorm,
            reparametrized.TunedConv2d,
            reparametrized.InputBiased,
        )
        assert not batchnorms(back)
        assert not has_layers(back, *ours)
        assert not any(parametrize.is_parametrized(module) for module in back.modules())
        single = skeleton(arch)
        single.load_state_dict(model.state_dict())
        back = to(to(single.float(), scheme, **options), "folded")
        assert distance(reference, run(back, x.float()).double()) <= 1e-5


@pytest.mark.parametrize("sync", [False, True], ids=["torch", "sync"])
@pytest.mark.parametrize(
    "size", [(6,), (6, 9), (6, 7, 7), (6, 5, 5, 5)], ids=["rows", "series", "maps", "volumes"]
)
def test_frozen_norms_have_any_dimension(size: tuple[int, ...], sync: bool) -> None:
    torch.manual_seed(0)
    linear = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(size) - 1]
    norm = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(size) - 1](8)
    nn.init.normal_(norm.weight)
    norm.running_mean.normal_()  # type: ignore[union-attr]
    model: nn.Module = nn.Sequential(
        linear(6, 8) if len(size) == 1 else linear(6, 8, 3), norm
    ).eval()
    if sync:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    done = normswap.convert(model, "frozen-bn", inputs=torch.randn(2, *size))
    assert done.report.passed
    assert [*done.model[1].parameters()] == []  # type: ignore[index]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rule", ["balduzzi", "rescale"])
@pytest.mark.parametrize("arch", V1)
def test_rules_that_scale_the_sum(arch: str, rule: str) -> None:
    """a != 1: exact, stages end as they did, and y = a skip + b f in every block."""
    model, x, reference = source(arch)
    planned, builder = step(model, "residual-scale", rule=rule)
    assert builder.refusals == {}
    result: Any = applied(model, planned)
    assert distance(reference, run(result, x)) <= 1e-12
    with torch.no_grad():
        before = model.forward_intermediates(x)[1]
        after = result.forward_intermediates(x)[1]
    assert all(distance(a, b) <= 1e-12 for a, b in zip(before[1:], after[1:], strict=True))
    fixed = [module for module in result.modules() if isinstance(module, scalars.FixedScale)]
    assert len(fixed) == 2 * len(builder.anatomy.blocks)
    assert not any("alpha" in name for name, _ in result.named_parameters())
    fresh = applying.apply(skeleton(arch), Plan.from_json(Plan().then(planned).to_json()).steps)
    fresh.load_state_dict(result.state_dict(), strict=True)
    assert torch.equal(run(fresh, x), run(result, x))
    other = to(result, "residual-scale", rule="hanin")
    assert distance(reference, run(other, x)) <= 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_without_a_module_on_the_sum_the_branches_hold_both_factors(rule: str) -> None:
    """Pre-activation: what the stream is at the end of a stage, by the rule's own recursion, up to
    one factor.
    """
    model, x, reference = source("resnetv2_18")
    planned, builder = step(model, "residual-scale", rule=rule)
    result = applied(model, planned)
    assert distance(reference, run(result, x)) <= 1e-12
    found = [m.alpha.item() for m in result.modules() if isinstance(m, scalars.FixedScale)]
    depth = len(builder.anatomy.blocks)
    stages: list[list[tuple[float, float]]] = []
    for number, block in enumerate(builder.anatomy.blocks, 1):
        stages += [] if block.skip == "identity" and stages else [[]]
        stages[-1].append(RULES[rule](number, depth))
    assert max(len(stage) for stage in stages) > 1
    expected = []
    for stage in stages:
        parts = np.array([1.0])  # of the stream: what came in, then what each branch wrote
        for a, b in stage:
            parts = np.append(a * parts, b)
        expected += list(parts[1:] / parts[0])
    assert found == pytest.approx(expected, rel=1e-12)


def test_frozen_is_frozen_and_tune_is_half() -> None:
    model, x, _ = source("resnet18")
    frozen = to(model, "frozen-bn").train()
    before = {name: buffer.clone() for name, buffer in frozen.named_buffers()}
    frozen(x)
    assert all(torch.equal(buffer, before[name]) for name, buffer in frozen.named_buffers())
    assert not any(name.endswith("bn1.weight") for name, _ in frozen.named_parameters())
    tuned = to(model, "tune").train()
    assert distance(run(model, x), tuned.train()(x).detach()) <= 1e-12, (
        "training mode uses the frozen statistics"
    )
    assert "layer1.0.conv1.gamma" in dict(tuned.named_parameters())


def test_what_cannot_scale_its_weight_in_tune_mode_stops_no_other() -> None:
    up = nn.ConvTranspose2d(4, 4, 3)
    model = nn.Sequential(
        up, nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
    ).eval()
    x = torch.randn(4, 4, 8, 8, dtype=torch.float64)
    tuned = to(lived_in(model, x), "tune")
    assert "2.gamma" in dict(tuned.named_parameters())
    assert "1.weight" in dict(tuned.named_parameters()), (
        "a transposed convolution leaves the norm in its place"
    )
    assert distance(run(model, x), run(tuned, x)) <= 1e-12


@pytest.mark.slow
def test_a_trained_input_bias_before_padding_stays() -> None:
    """Zeros at the border are not shifted: only a 1x1 convolution absorbs the scalar."""
    model, x, _ = source("resnet26d")
    result = to(model, "fixup")
    with torch.no_grad():
        for module in result.modules():
            if isinstance(module, reparametrized.InputBiased):
                module.in_bias.fill_(0.1)
    folded = to(result, "folded")
    assert distance(run(result, x), run(folded, x)) <= 1e-12
    assert isinstance(folded.layer2[0].conv2, reparametrized.InputBiasedConv2d)
    assert not isinstance(folded.layer2[0].conv1, reparametrized.InputBiased)
    for scheme in ("weightnorm", "tune", "skipinit", "fixup", "batchnorm"):
        assert distance(run(result, x), run(to(result, scheme), x)) <= 1e-12


def test_dead_filters_live_again() -> None:
    """Weight norm of a network whose branches are zero (as timm creates them): no NaN, and
    gradients.
    """
    model = timm.create_model("resnet18", num_classes=10, channels=(8, 16, 24, 32)).double().eval()
    x: Tensor = torch.randn(2, 3, 33, 33, dtype=torch.float64)
    for scheme in ("weightnorm", "spectralnorm"):
        result = to(model, scheme)
        assert distance(run(model, x), run(result, x)) <= 1e-12
        result.train()(x).sum().backward()
        grads = {name: parameter.grad for name, parameter in result.named_parameters()}
        assert all(grad is not None and bool(torch.isfinite(grad).all()) for grad in grads.values())
        if scheme == "spectralnorm":
            assert bool(grads["layer1.0.conv2.parametrizations.weight.1.alpha"].any())
        else:
            assert bool(grads["layer1.0.conv2.parametrizations.weight.original0"].any())


@pytest.mark.parametrize("scheme", ["skipinit", "fixup", "nf"])
def test_levels_of_a_pyramid_are_no_branches(scheme: str) -> None:
    """The sum of a lateral convolution and an enlarged map (FPN) needs no scalar; the block before
    it has one.
    """

    def forward(m: Any, x: Tensor) -> Tensor:
        y = x + m.bn(m.conv(x))
        return m.lateral(y) + F.interpolate(m.conv2(m.conv3(F.max_pool2d(y, 2))), scale_factor=2.0)

    network = net(forward, **ONE, lateral=conv, conv2=conv, conv3=conv)().eval()
    done = normswap.convert(network, scheme, **({"mean": "keep"} if scheme == "nf" else {}))
    assert done.report.passed


@pytest.mark.parametrize(
    ("padding", "keeps"),
    [(0, False), (1, True), ("valid", False), ("same", True), ((0, 1), True), ((0, 0), False)],
)
def test_an_input_bias_stays_where_zeros_are_padded_behind_it(padding: Any, *, keeps: bool) -> None:
    layer = reparametrized.InputBiased.of(nn.Conv2d(2, 2, 3, padding=padding))
    assert not reparametrized.keeps_input_bias(layer)  # a bias of 0 is none
    nn.init.ones_(layer.in_bias)  # type: ignore[arg-type]
    assert reparametrized.keeps_input_bias(layer) is keeps


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "arch", ["resnet18", "resnet50", "resnetv2_50", "mobilenetv2_035", "regnetx_002"]
)
def test_fixup_puts_one_scalar_bias_before_every_activation(arch: str) -> None:
    """Counted (Zhang et al. 2019): timm's drop_block, an identity, stands between norm and
    activation of a v1 block.

    Norms that read a v2 stream leave a bias per channel instead.
    """
    narrow = {"channels": (16, 32, 64, 128)} if "resnet" in arch else {}
    model = timm.create_model(arch, num_classes=3, **narrow).eval()
    activations = sum(isinstance(module, nn.ReLU | nn.ReLU6) for module in model.modules())
    result = normswap.convert(model, "fixup", input_size=(3, 64, 64)).model
    after_sums = [
        module
        for module in result.modules()
        if isinstance(module, Scale) and module.bias is not None
    ]
    before = [module for module in result.modules() if isinstance(module, scalars.ScalarBias)]
    per_channel = [
        module for module in result.modules() if isinstance(module, ChannelBias | ChannelAffine)
    ]
    assert len(per_channel) == (17 if arch == "resnetv2_50" else 0)
    assert len(before) + len(after_sums) + len(per_channel) == activations


# The norms before and behind a convolution, and why what it has learned cannot go back to them.
UNFOLDABLE = {
    "one before": (1, 0, "a norm before it"),
    "one on either side": (1, 1, "a norm before it"),
    "two behind": (0, 2, "more than one norm"),
}


@pytest.mark.parametrize("name", UNFOLDABLE)
def test_what_was_learned_goes_back_to_one_norm_behind_the_layer_only(name: str) -> None:
    before, behind, why = UNFOLDABLE[name]
    layers: list[nn.Module] = [nn.Conv2d(4, 4, 1), nn.ReLU()]
    layers += [nn.BatchNorm2d(4) for _ in range(before)]
    layers.append(nn.Conv2d(4, 6, 3))
    layers += [nn.BatchNorm2d(6) for _ in range(behind)]
    # No norm folds forward into the last linear layer, the classifier.
    layers += [nn.ReLU(), nn.Conv2d(6, 3, 1)]
    x = torch.randn(4, 4, 9, 9, dtype=torch.float64)
    model = lived_in(nn.Sequential(*layers), x)
    folded = normswap.convert(model, "folded", inputs=x).model
    with torch.no_grad():
        for parameter in folded.parameters():
            parameter.mul_(1.5)

    with pytest.raises(RefusedError, match=why):
        normswap.convert(folded, "unfold", inputs=x, like=model)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_what_a_filter_behind_a_gamma_of_0_has_learned_goes_back(kind: Any) -> None:
    x = torch.randn(4, 4, 9, 9, dtype=torch.float64)
    layers: list[nn.Module] = [
        kind(4, 6, 3, groups=2),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 3, 1),
    ]
    model = lived_in(nn.Sequential(*layers), x)
    gamma = torch.tensor([0.0, 0.5, 0.0, 1e-310, 1.5, 2.0])
    model[1].weight.data.copy_(gamma)
    folded = normswap.convert(model, "folded", inputs=x).model
    # Everything has learned but the first filter. A transposed convolution stores (I, O, ...), by
    # group.
    folded[0].weight.data += 1
    if kind is nn.ConvTranspose2d:
        folded[0].weight.data[:2, 0] = 0
    else:
        folded[0].weight.data[0] = 0

    back = normswap.convert(folded, "unfold", inputs=x, like=model).model

    assert distance(run(folded, x), run(back, x)) < 1e-12
    assert back[1].weight.tolist() == [0.0, 0.5, 1.0, 1.0, 1.5, 2.0]


def test_filters_that_the_source_standardizes_are_not_unfolded_and_named() -> None:
    x = torch.randn(4, 4, 9, 9, dtype=torch.float64)
    layers = [timm.layers.StdConv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 3, 1)]
    model = lived_in(nn.Sequential(*layers), x)
    folded = normswap.convert(model, "folded", inputs=x).model

    with pytest.raises(RefusedError, match=r"0: .*StdConv2d"):
        normswap.convert(folded, "unfold", inputs=x, like=model)


def before_its_norm() -> tuple[Any, Tensor]:
    """A norm that reads the input, and goes into the padded convolution behind but for a shift."""
    x = torch.randn(4, 4, 9, 9, dtype=torch.float64)
    layers: list[nn.Module] = [nn.BatchNorm2d(4), nn.ReLU()]
    layers += [nn.Conv2d(4, 3, 3, padding=1, bias=False)]
    layers += [nn.ReLU(), nn.Conv2d(3, 2, 1)]
    return lived_in(nn.Sequential(*layers), x), x


@pytest.mark.parametrize("scheme", ["affine", "tune"])
def test_a_gamma_that_has_changed_its_sign_goes_back(scheme: str) -> None:
    model, x = before_its_norm()
    model[0].weight.data.copy_(torch.tensor([0.0, 0.5, 1.0, -1.5]))
    trained = normswap.convert(model, scheme, inputs=x).model
    trained[0].weight.data.copy_(torch.tensor([0.3, -0.2, 0.0, -1.0]))

    back = normswap.convert(trained, "unfold", inputs=x, like=model).model

    assert distance(run(trained, x), run(back, x)) < 1e-12


def test_a_bias_that_was_learned_with_no_norm_behind_it_is_named() -> None:
    model, x = before_its_norm()
    folded = normswap.convert(model, "folded", inputs=x).model
    folded[2].bias.data += 1

    with pytest.raises(RefusedError, match=r"2\.bias"):
        normswap.convert(folded, "unfold", inputs=x, like=model)


def test_a_frozen_norm_stays_and_is_said_to_be_frozen_already() -> None:
    layers = [nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 5, 3), FrozenBatchNorm2d(5)]
    model = lived_in(nn.Sequential(*layers), torch.randn(4, 4, 9, 9))

    planned, builder = step(model, "frozen-bn")

    assert [edit.path for edit in planned.edits] == ["1"]
    outcomes = {path: str(outcome) for path, outcome in builder.outcomes.items()}
    assert outcomes == {"1": "frozen", "3": "frozen already"}


@pytest.mark.parametrize(
    ("relative_eps", "figures"), [(0.25, ["0.25", "20%", "80%"]), (3, ["3", "75%", "25%"])]
)
def test_the_note_on_eps_says_its_share_and_what_it_removes(
    relative_eps: float, figures: list[str]
) -> None:
    """Of variance + eps, eps is the share r / (1 + r), for an eps of r times the variance."""
    layers = [nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    model = lived_in(nn.Sequential(*layers), torch.randn(4, 4, 9, 9))

    _, builder = step(model, "groupnorm", relative_eps=relative_eps)

    (note,) = [note for note in builder.notes if "the mean variance" in note]
    assert re.findall(r"[\d.]+%?", note)[:3] == figures
