"""Starts of fresh networks: the papers' formulas, computed here by themselves in float64."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from support.lived_in_networks import distance, lived_in, run
from support.tiny_modules import C, Net, bn, conv as tiny_conv
from timm.layers import ScaledStdConv2d
from timm.models import nfnet
from torch import Tensor, nn

import normswap
from normswap import shipped
from normswap.errors import OptionError, RefusedError
from normswap.graph.inspection import inspect
from normswap.layers.scalars import FixedScale, ScalarBias, Scale
from normswap.schemes import skipinit
from normswap.schemes.nf_start import gamma

shipped.register_networks()
RULES: dict[str, Callable[[int, int], tuple[float, float]]] = {
    "balduzzi": lambda block, depth: (2**-0.5, 2**-0.5),
    "szegedy": lambda block, depth: (1.0, 0.2),
    "hanin": lambda block, depth: (1.0, 0.9**block),
    "arpit": lambda block, depth: (1.0, 1 / depth),
    "rescale": lambda block, depth: (
        (1 - 1 / (block + depth)) ** 0.5,
        (1 / (block + depth)) ** 0.5,
    ),
}
# Brock et al. 2021. Their code and timm have 1.71396, from random numbers.
RELU = math.sqrt(2 / (1 - 1 / math.pi))


def wide_resnet(order: str = "pre", norm: bool = True, depth: int = 22) -> Any:
    torch.manual_seed(0)
    return timm.create_model(
        "wide_resnet_cifar", depth=depth, width=1, order=order, norm=norm
    ).double()


def images(count: int = 4, side: int = 32) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(1)).double()


def swapped(model: nn.Module, scheme: str, **options: Any) -> Any:
    return normswap.convert(model, scheme, inputs=images(), **options).model.eval()


def learn_biases(model: nn.Module) -> None:
    """Give every bias of a layer, and every learned scalar, random numbers."""
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if name.endswith((".bias", ".alpha")):
            nn.init.normal_(parameter)


def by_the_rule(network: Any, x: Tensor, rule: str, layers: Any) -> Tensor:
    """Return the logits of y = a x + b f(x), of a WRN whose norms are the identity.

    Args:
        network: A `WideResNet`, for its blocks and whether they are v1 or v2.
        x: Images.
        rule: The rule that gives a and b.
        layers: Returns the convolution at a path.
    """
    is_pre = isinstance(network.act1, nn.Identity)
    paths = [f"stages.{s}.{b}" for s in range(3) for b in range(len(network.stages[0]))]
    x = layers("conv1")(x)
    if not is_pre:
        x = F.relu(x)
    for number, path in enumerate(paths, 1):
        a, b = RULES[rule](number, len(paths))
        start = F.relu(x) if is_pre else x
        branch = layers(f"{path}.conv2")(F.relu(layers(f"{path}.conv1")(start)))
        skip = x
        if network.get_submodule(path).downsample is not None:
            skip = layers(f"{path}.downsample{'' if is_pre else '.0'}")(start)
        x = a * skip + b * branch
        x = x if is_pre else F.relu(x)
    return layers("fc")((F.relu(x) if is_pre else x).mean((2, 3)))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize("rule", RULES)
def test_reset_residual_scales_are_the_rule_without_compensation(rule: str, order: str) -> None:
    source = wide_resnet(order)
    result = swapped(source, "residual-scale", rule=rule, init="reset")
    for name, weight in source.named_parameters():
        if weight.ndim == 4:
            assert torch.equal(result.get_parameter(name), weight), "the weights are as drawn"

    learn_biases(result)

    assert all(conv.bias is not None for conv in convolutions(result).values())
    logits = by_the_rule(source, images(), rule, result.get_submodule)
    assert distance(run(result, images()), logits.detach()) < 1e-12


def convolutions(model: nn.Module) -> dict[str, nn.Conv2d]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Conv2d)}


def test_the_numbers_of_rules_can_be_given() -> None:
    for rule, factor, third in (("szegedy", 0.1, 0.1), ("hanin", 0.5, 0.125)):
        result = swapped(wide_resnet(), "residual-scale", rule=rule, factor=factor)
        scales = [float(m.alpha) for m in result.modules() if isinstance(m, FixedScale)]
        assert scales[2] == pytest.approx(third)
    with pytest.raises(OptionError, match="factor"):
        swapped(wide_resnet(), "residual-scale", rule="arpit", factor=0.1)


def timms(**config: Any) -> Any:
    """timm's nf_resnet50, less deep, with SkipInit's gain and the usual eps of its filters."""
    whole = nfnet.model_cfgs["nf_resnet50"]
    config = {"std_conv_eps": 1e-6, "skipinit": True, "depths": (2, 3, 1, 1), **config}
    return nfnet.NormFreeNet(replace(whole, **config), num_classes=10).double().eval()


def resnetv2(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"layers": (2, 3, 1, 1), "num_classes": 10}
    options = {"avg_down": True, "zero_init_last": False, **options}
    return timm.create_model("resnetv2_50", **sizes, **options).double()


def test_a_reset_nf_network_is_timms_with_the_same_weights() -> None:
    """They agree to rounding once timm has the paper's gamma, and the stem, which reads images,
    has none.
    """
    result: Any = normswap.convert(resnetv2(), "nf", init="reset", input_size=(3, 64, 64)).model
    reference = timms()
    torch.manual_seed(3)
    for parameter in reference.parameters():
        nn.init.normal_(parameter)

    stated = {}
    for name, value in reference.state_dict().items():
        path = name.replace("skipinit_gain", "drop_path.inner.alpha")
        if path.startswith("stages."):
            _, stage, block, rest = path.split(".", 3)
            path = f"stages.{stage}.blocks.{block}.{rest}"
        stated[path] = value.reshape(result.state_dict()[path].shape)
    result.load_state_dict(stated, strict=False)
    fixed = {name for name, m in result.named_modules() if isinstance(m, FixedScale)}
    assert {name for name in result.state_dict() if name not in stated} == {
        f"{name}.alpha" for name in fixed
    }
    for name, conv in convolutions(reference).items():
        reads_images = name == "stem.conv"
        conv.scale = (1.0 if reads_images else RELU) * conv.weight[0].numel() ** -0.5

    x = images(2, 64)
    assert distance(run(result.eval(), x), run(reference, x)) < 1e-12


def test_a_reset_nf_network_starts_as_the_paper_has_it() -> None:
    source = resnetv2()
    result: Any = normswap.convert(source, "nf", init="reset", input_size=(3, 64, 64)).model

    for name, conv in convolutions(result).items():
        # The classifier is a convolution of 1 x 1, and is standardized in no NF-ResNet.
        if name == "head.fc":
            continue
        assert isinstance(conv, ScaledStdConv2d)
        reads_images = name == "stem.conv"
        assert conv.scale == pytest.approx(
            (1.0 if reads_images else RELU) * conv.weight[0].numel() ** -0.5, rel=1e-12
        )
        assert bool((conv.gain == 1).all())
        assert torch.equal(conv.weight, source.get_parameter(f"{name}.weight"))
        assert conv.bias is not None
        assert not conv.bias.any()

    # 1 + 0.04 after a projection and 0.04 more after each further block; beta is its root.
    at = ["0.blocks.1", "1.blocks.0", "1.blocks.1", "1.blocks.2", "2.blocks.0", "3.blocks.0"]
    expected = [1.04, 1.08, 1.04, 1.08, 1.12, 1.04]
    for path, variance in zip(at, expected, strict=True):
        inverse = result.get_submodule(f"stages.{path}.norm1.then").alpha
        assert float(inverse.detach()) == pytest.approx(variance**-0.5, rel=1e-12)
    gains = [m for m in result.modules() if type(m) is Scale]
    assert [float(gain.alpha.detach()) for gain in gains] == [0.0] * 7


def test_nf_starts_from_blocks_that_begin_with_the_activation() -> None:
    with pytest.raises(RefusedError, match="resnetv2_50"):
        normswap.convert(timm.create_model("resnet18"), "nf", init="reset")
    with pytest.raises(RefusedError, match=r"conv3 is all 0.*zero_init_last"):
        normswap.convert(resnetv2(zero_init_last=True), "nf", init="reset", input_size=(3, 64, 64))
    with pytest.raises(OptionError, match=r"mean.*keep"):
        normswap.convert(resnetv2(), "nf", init="reset", mean="keep", input_size=(3, 64, 64))


@pytest.mark.parametrize("name", ["relu", "silu", "gelu", "elu", "leaky_relu", "tanh"])
def test_gammas_of_activations(name: str) -> None:
    """Beside timm's, which are measured on random numbers; ReLU's has a closed form."""
    act = nn.Tanh() if name == "tanh" else timm.layers.create_act_layer(name)
    assert gamma(act) == pytest.approx(nfnet._nonlin_gamma[name], rel=2e-3)
    assert gamma(nn.ReLU()) == pytest.approx(RELU, rel=1e-13)


@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize("norm", [True, False])
def test_regularized_skipinit_has_biases_on_all_convolutions(order: str, norm: bool) -> None:
    """De & Smith 2020, section 4: also on the stem's, and where there never were norms."""
    source = wide_resnet(order, norm, depth=16)
    result = swapped(source, "regularized-skipinit", alpha=0)
    found = convolutions(result)
    assert len(found) == 15
    assert all(conv.bias is not None for conv in found.values())


def test_a_learned_bias_that_no_norm_can_hold_is_not_unfolded() -> None:
    result = swapped(wide_resnet(depth=10), "regularized-skipinit")
    with torch.no_grad():
        result.stages[0][0].conv2.bias += 1
    with pytest.raises(RefusedError, match=r"conv2\.bias"):
        normswap.convert(result, "unfold", inputs=images())


@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize("norm", [True, False])
def test_reset_fixup_has_scalar_biases_alone(order: str, norm: bool) -> None:
    """One before each convolution, linear layer and activation; the classifier keeps its own."""
    result = swapped(wide_resnet(order, norm, depth=16), "fixup", init="fixup")

    for conv in convolutions(result).values():
        assert conv.bias is None
        assert conv.in_bias.shape == (1,)
    assert result.fc.bias.shape == (10,)
    sizes = [p.numel() for name, p in result.named_parameters() if name.endswith("bias")]
    # 15 convolutions, the classifier, 13 activations: two of each of 6 blocks, and one more.
    assert sorted(sizes) == [1] * (15 + 1 + 13) + [10]
    last = "act2" if order == "pre" else "act1"
    before = [type(m) for name, m in result.named_modules() if name.startswith(last)]
    assert norm or ScalarBias in before


def test_fixups_components_alone() -> None:
    source = wide_resnet(norm=False, depth=16)
    for init, zeros, scaled in (("zeros", True, False), ("scaled", False, True)):
        result = swapped(source, "fixup", init=init)
        block = result.stages[1][1]
        before = source.stages[1][1]
        # Two convolutions in a branch, six branches: 6^(-1/2).
        factor = 6**-0.5 if scaled else 1.0
        assert torch.allclose(block.conv1.weight, factor * before.conv1.weight, rtol=1e-12)
        assert torch.equal(block.conv2.weight, before.conv2.weight * (0 if zeros else 1))
        assert bool(result.fc.weight.any()) is not zeros


def test_fixups_scalar_biases_are_added_where_the_paper_has_them() -> None:
    """One before each convolution and activation, by hand; and they fold with the rest."""

    def body(m: Any, x: Tensor) -> Tensor:
        y = m.relu(m.bn1(m.conv1(x)))
        return (x + m.bn2(m.conv2(y))).relu()

    x = torch.randn(2, C, 8, 8, dtype=torch.float64)
    parts = {
        "conv1": tiny_conv(1),
        "bn1": bn(),
        "relu": nn.ReLU(),
        "conv2": tiny_conv(1),
        "bn2": bn(),
    }
    model = lived_in(Net(body, **parts), x)
    fixup: Any = normswap.convert(model, "fixup", inputs=x).model
    with torch.no_grad():
        for number, parameter in enumerate(fixup.parameters(), 1):
            if parameter.numel() == 1:
                parameter.fill_(number / 7)

    with torch.no_grad():
        y = F.conv2d(x + fixup.conv1.in_bias, fixup.conv1.weight, fixup.conv1.bias)
        y = F.relu(y + fixup.bn1.bias)
        y = F.conv2d(y + fixup.conv2.in_bias, fixup.conv2.weight, fixup.conv2.bias)
        y = F.relu(x + fixup.bn2.alpha * y + fixup.bn2.bias)

    assert distance(y, run(fixup, x)) <= 1e-12
    assert distance(y, run(normswap.convert(fixup, "folded", inputs=x).model, x)) <= 1e-12


@pytest.mark.parametrize("zeros", ["some", "all"])
def test_only_a_branch_whose_last_weights_are_all_zero_cannot_be_reset(zeros: str) -> None:
    """A pruned network has some weights of zero."""
    network = wide_resnet(depth=10)
    weight = network.stages[1][0].conv2.weight
    with torch.no_grad():
        weight.view(-1)[0 if zeros == "all" else 1 :] = 0

    if zeros == "all":
        with pytest.raises(RefusedError, match=r"stages\.1\.0\.conv2 is all 0"):
            swapped(network, "residual-scale", init="reset")
    else:
        result = swapped(network, "residual-scale", init="reset")
        assert torch.equal(result.stages[1][0].conv2.weight, weight)


@pytest.mark.parametrize("bias", [False, True])
def test_a_scalar_that_does_not_fold_stays_before_the_factor_unless_it_has_a_bias(
    bias: bool,
) -> None:
    """No scale passes the sigmoid that ends the branch."""
    scalar = Scale(0.3, bias=bias).double()
    block = Net(lambda m, x: x + m.scalar(m.conv(x).sigmoid()), conv=tiny_conv(), scalar=scalar)
    network: Any = nn.Sequential(tiny_conv(), block).double().eval()
    x = torch.randn(2, C, 8, 8, dtype=torch.float64)

    def reset() -> nn.Module:
        options = {"rule": "szegedy", "factor": 0.2, "init": "reset"}
        return normswap.convert(network, "residual-scale", inputs=x, **options).model

    if bias:
        with pytest.raises(RefusedError, match="1: it has a scalar"):
            reset()
    else:
        with torch.no_grad():
            skip = network[0](x)
            expected = skip + 0.2 * 0.3 * block.conv(skip).sigmoid()
        assert distance(expected, run(reset(), x)) <= 1e-7


def test_a_trained_input_bias_folds_into_a_network_that_loads(tmp_path: Path) -> None:
    """One plan gives one structure, whether the bias of a layer's input is 0 or not."""
    source = timm.create_model("resnet50", layers=(1, 1, 1, 1), channels=(8, 8, 8, 8)).eval()
    done = normswap.convert(source, "fixup", init="fixup", input_size=(3, 48, 48)).model
    with torch.no_grad():
        for name, parameter in done.named_parameters():
            if name.endswith("in_bias"):
                parameter.fill_(0.1)
    folded = normswap.convert(done, "folded", input_size=(3, 48, 48)).model

    loaded = normswap.load(normswap.save(folded, tmp_path / "folded"))

    images = torch.randn(2, 3, 48, 48)
    torch.testing.assert_close(loaded(images), folded.eval()(images))


@pytest.mark.parametrize("channels", [(8, 16), (16, 8)])
@pytest.mark.parametrize("groups", [1, 4])
def test_alpha_of_a_branch_that_ends_in_a_transposed_convolution(
    channels: tuple[int, int], groups: int
) -> None:
    """It is the deviation that the branch has on inputs of the moments that the norm states."""
    torch.manual_seed(0)
    wide, narrow = channels

    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(wide, wide, 1)
            self.norm = nn.BatchNorm2d(wide)
            self.up = nn.ConvTranspose2d(wide, narrow, 2, 2, groups=groups, bias=False)
            self.skip = nn.ConvTranspose2d(wide, narrow, 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.skip(x) + self.up(self.norm(self.first(x)))

    block = Up()
    nn.init.uniform_(block.norm.weight, 0.5, 2.0)
    source = nn.Sequential(nn.Conv2d(3, wide, 3), block).eval()
    anatomy = inspect(source, torch.randn(2, 3, 12, 12))
    (residual,) = anatomy.blocks

    mean, deviation = skipinit._output_moments(anatomy, residual, "1.up")

    maps = block.norm.weight.view(-1, 1, 1) * torch.randn(512, wide, 8, 8)
    measured = block.up(maps).transpose(0, 1).flatten(1)
    assert mean.abs().max() < 1e-12
    torch.testing.assert_close(deviation.float(), measured.std(1), rtol=0.05, atol=0)
