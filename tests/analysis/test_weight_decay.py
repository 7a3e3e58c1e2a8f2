"""Who decays: membership against tables worked out by hand, and the laws every grouping obeys."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from support.lived_in_networks import swapped
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

from normswap import schemes
from normswap.analysis import weight_decay
from normswap.analysis.weight_decay import POLICIES, Assignment, param_groups, roles
from normswap.errors import OptionError, TraceError
from normswap.surgery.conversion import convert
from normswap.surgery.network import Network


def counts(assignments: list[Assignment]) -> dict[str, int]:
    """How many tensors have each role."""
    return dict(Counter(assignment.role for assignment in assignments))


# How these were counted, from the papers and not from our output.
#
# ResNet v1 (He et al. 2015, table 1), blocks per stage: 18 has 2+2+2+2 = 8 basic blocks (2 convs, 2
# norms each); 50 has 3+4+6+3 = 16 bottlenecks (3 convs, 3 norms); 101 has 3+4+23+3 = 33; 152 has
# 3+8+36+3 = 50. One norm per conv. Per block the last norm is gamma_last, the others gamma_other.
# Projections (option B) stand where the width changes: 4 with bottlenecks, and 3 with basic blocks,
# whose first stage keeps the stem's 64 channels. One stem norm: gamma_0.
# 18: other 8*1 = 8, last 8, down 3, gamma_0 1: 20 norms; weights 1 + 8*2 + 3 + fc 1 = 21.
# 50: other 16*2 = 32, last 16, down 4, gamma_0 1: 53 norms; weights 1 + 16*3 + 4 + fc 1 = 54.
# 101: other 66, last 33, down 4, gamma_0 1: 104 norms; weights 105.
# 152: other 100, last 50, down 4, gamma_0 1: 155 norms; weights 156.
# ResNeXt-50 and WRN-50-2 have ResNet-50's layers. Biases: a beta per norm, and the classifier's.
#
# ResNet-50 v2 (He et al. 2016): 3 norms before the 3 convs of each block, none in the stem, none on
# the projections, and one at the end: 49. Kim et al.: the first norm of the 4 downsampling blocks
# is gamma_down, so other 16*2 - 4 = 28, last 16, head 1.
#
# ViT-Ti, DeiT-Ti (Dosovitskiy et al. 2020, Touvron et al. 2020): 12 blocks with 2 LayerNorms and 4
# linear maps (qkv, projection, 2 of the MLP), a final LayerNorm, the patch embedding and the
# classifier: 25 norms, 50 weights, 50 biases. Class token and position embedding are spared.
#
# Swin-T (Liu et al. 2021): 2+2+6+2 = 12 blocks as ViT's; a norm after the patch embedding
# (gamma_0), 3 patch mergings with a norm and a linear map without bias, a final norm: 24 + 1 + 3 +
# 1 = 29 norms, 48 + 1 + 3 + 1 = 53 weights, 50 biases. 12 tables of relative position biases are
# spared.
COLUMNS = (
    "weight",
    "gamma_0",
    "gamma_last",
    "gamma_down",
    "gamma_other",
    "gamma_head",
    "beta",
    "bias",
    "embedding",
)
ROWS = {
    "resnet18": (21, 1, 8, 3, 8, 0, 20, 1, 0),
    "resnet50": (54, 1, 16, 4, 32, 0, 53, 1, 0),
    "resnet101": (105, 1, 33, 4, 66, 0, 104, 1, 0),
    "resnet152": (156, 1, 50, 4, 100, 0, 155, 1, 0),
    "resnext50_32x4d": (54, 1, 16, 4, 32, 0, 53, 1, 0),
    "wide_resnet50_2": (54, 1, 16, 4, 32, 0, 53, 1, 0),
    "resnetv2_50": (54, 0, 16, 4, 28, 1, 49, 1, 0),
    "vit_tiny_patch16_224": (50, 0, 0, 0, 24, 1, 25, 50, 2),
    "deit_tiny_patch16_224": (50, 0, 0, 0, 24, 1, 25, 50, 2),
    "swin_tiny_patch4_window7_224": (53, 1, 0, 0, 27, 1, 29, 50, 12),
}
TABLE: dict[str, dict[str, int]] = {}
for _name, _row in ROWS.items():
    _counts = dict(zip(COLUMNS, _row, strict=True))
    TABLE[_name] = {role: count for role, count in _counts.items() if count}
DEEP = ("resnet101", "resnet152", "wide_resnet50_2")
# Kim et al. 2022, Guidelines 1-4, 1T, 3T, 4T.
DECAYING = ("weight", "gamma_last", "gamma_other", "gamma_head")


def decaying(assignments: list[Assignment]) -> set[str]:
    """The roles that decay."""
    return {assignment.role for assignment in assignments if assignment.decay}


def role_counts(assignments: list[Assignment], *, decay: bool) -> Counter[str]:
    return Counter(assignment.role for assignment in assignments if assignment.decay is decay)


def skeleton(name: str, **kwargs: Any) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, **kwargs)


def check(model: nn.Module, groups: list[dict[str, Any]]) -> None:
    """Every trainable parameter in exactly one group, frozen ones in none, the sums equal."""
    grouped: list[nn.Parameter] = []
    for group in groups:
        grouped += group["params"]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]

    assert len(grouped) == len(set(map(id, grouped)))
    assert set(map(id, grouped)) == set(map(id, trainable))
    assert sum(map(torch.numel, grouped)) == sum(map(torch.numel, trainable))


@pytest.fixture
def seen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network is recorded once for all policies, which differ in what they make of the roles."""
    monkeypatch.setattr(weight_decay, "_norm_roles", functools.cache(weight_decay._norm_roles))


@pytest.mark.slow
@pytest.mark.usefixtures("seen_once")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in DEEP)) for name in TABLE],
)
def test_membership_is_the_papers(name: str) -> None:
    model = skeleton(name)
    assigned = roles(model)
    assert counts(assigned) == TABLE[name]
    assert decaying(assigned) == set(TABLE[name]) & set(DECAYING)

    groups = {group["name"]: group for group in param_groups(model, 0.1)}
    expected_count = sum(TABLE[name].get(role, 0) for role in DECAYING)
    assert len(groups["decay"]["params"]) == expected_count
    assert groups["decay"]["weight_decay"] == 0.1
    assert groups["no-decay"]["weight_decay"] == 0.0

    check(model, list(groups.values()))


@pytest.mark.slow
@pytest.mark.usefixtures("seen_once")
def test_nf_gains_do_not_decay_except_with_timm() -> None:
    model = skeleton("nf_resnet50")
    assert role_counts(roles(model), decay=True)["gain"] == 0
    assert role_counts(roles(model, "timm"), decay=True)["gain"] == 53
    assert counts(roles(skeleton("dm_nfnet_f0")))["skipinit_gain"] == 12


def test_the_other_policies() -> None:
    model = skeleton("resnet18")
    assert role_counts(roles(model, "all"), decay=False) == Counter()
    assert decaying(roles(model, "weights-only")) == {"weight"}
    assert decaying(roles(model, "weight")) == {"weight"}
    assert decaying(roles(model, ["weight", "gamma_last"])) == {"weight", "gamma_last"}


NARROW: dict[str, dict[str, Any]] = {  # as deep as they are
    "resnet18": {"channels": (64, 16, 16, 16)},  # the stem's first: no downsample there
    "resnetv2_18": {"channels": (64, 16, 16, 16)},
    "vit_tiny_patch16_224": {"img_size": 32, "embed_dim": 24},
}
TUNED_V2 = {
    "weight": 21,
    "bias": 1,
    "beta": 17,
    "gamma_down": 3,
    "gamma_other": 5,
    "gamma_last": 8,
    "gamma_head": 1,
}
CONVERTED = [
    ("resnet18", "skipinit", {}, {"weight": 21, "bias": 21, "alpha": 8}),
    (
        "resnet18",
        "regularized-skipinit",
        {},
        {"weight": 21, "bias": 21, "alpha": 8, "scalar_bias": 8},
    ),
    ("resnet18", "folded", {}, {"weight": 21, "bias": 21}),
    # v2, ReLU: the scales move on, a shift stays where the 8 first norms stood; scale and shift of
    # the final norm stay
    (
        "resnetv2_18",
        "skipinit",
        {},
        {"weight": 21, "bias": 20, "alpha": 8, "gamma_head": 1, "beta": 9},
    ),
    # norms in every place, or a live gamma on every convolution: the roles are the source's
    ("resnet18", "batchnorm", {"ghost_batch": 2}, TABLE["resnet18"]),
    ("resnet18", "tune", {}, TABLE["resnet18"]),
    # 12 norms of v2 follow no convolution of their own and keep their statistics; 8 go into one
    ("resnetv2_18", "tune", {}, TUNED_V2),
    ("resnet18", "frozen-bn", {}, {"weight": 21, "bias": 1}),
    # as `resnet18` itself: every gamma and beta is in its place
    ("resnet18", "affine", {}, TABLE["resnet18"]),
    # scalar biases before the 21 linear layers, and before the stem's and the branches' inner
    # activations (1 + 8)
    ("resnet18", "fixup", {}, {"weight": 21, "bias": 21, "alpha": 8, "scalar_bias": 38}),
    ("resnet18", "residual-scale", {"rule": "arpit"}, {"weight": 21, "bias": 21}),
    ("resnet18", "weightnorm", {}, {"weight": 21, "bias": 21, "gain": 21}),
    ("resnet18", "spectralnorm", {}, {"weight": 21, "bias": 21, "gain": 21}),
    # every convolution is standardized, with a gain and the mean of its filters; the classifier is
    # not
    (
        "resnet18",
        "nf",
        {"mean": "keep"},
        {"weight": 21, "bias": 21, "gain": 20, "filter_mean": 20, "alpha": 8},
    ),
    (
        "resnet18",
        "centered-weightnorm",
        {"mean": "keep"},
        {"weight": 21, "bias": 21, "gain": 20, "filter_mean": 20},
    ),
    ("resnet18", "groupnorm", {"relative_eps": 0}, TABLE["resnet18"]),
    ("resnet18", "layernorm", {"relative_eps": 0}, TABLE["resnet18"]),
    ("resnet18", "instancenorm", {}, TABLE["resnet18"]),
    # an alpha in every place; the convolutions before absorb means
    ("resnet18", "dyt", {}, TABLE["resnet18"] | {"bias": 21, "tanh_alpha": 20}),
    # gamma stays; beta goes into the biases of qkv and fc1, but that of the last norm
    ("vit_tiny_patch16_224", "rmsnorm", {}, TABLE["vit_tiny_patch16_224"] | {"beta": 1}),
    # gamma goes, too
    (
        "vit_tiny_patch16_224",
        "folded",
        {},
        {"weight": 50, "bias": 50, "embedding": 2, "gamma_head": 1, "beta": 1},
    ),
]


def converted(name: str, scheme: str, options: dict[str, Any]) -> nn.Module:
    """Return a narrow network after a conversion of `CONVERTED`."""
    side = NARROW[name].get("img_size", 48)
    source = timm.create_model(name, **NARROW[name])
    return convert(source, scheme, input_size=(3, side, side), **options).model


@pytest.mark.usefixtures("seen_once")
@pytest.mark.parametrize(("name", "scheme", "options", "expected"), CONVERTED)
@pytest.mark.one_in(6)
def test_converted_networks(
    name: str, scheme: str, options: dict[str, Any], expected: dict[str, int]
) -> None:
    model = converted(name, scheme, options)

    assigned = roles(model)

    assert counts(assigned) == expected
    assert decaying(assigned) == set(DECAYING) & set(expected)
    for policy in POLICIES:
        check(model, param_groups(model, 0.1, policy))


@pytest.mark.parametrize(("name", "scheme", "options", "expected"), CONVERTED)
@pytest.mark.one_in(8)
def test_a_converted_network_in_float64_has_the_same_roles(
    name: str, scheme: str, options: dict[str, Any], expected: dict[str, int]
) -> None:
    """And on a GPU: the norms that are put back to find the roles are where the network is."""
    model = converted(name, scheme, options)
    assert counts(roles(model.double())) == expected


class Rows(nn.Module):
    """A residual network of one dimension, or of three, whose norms have the three roles."""

    def __init__(self, conv: type[nn.Module], norm: type[nn.Module]) -> None:
        super().__init__()
        self.conv1 = conv(2, 8, 3, padding=1, bias=False)
        self.bn1 = norm(8)
        self.block = Block(conv, norm)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.bn1(self.conv1(x)).relu())
        answer: Tensor = self.fc(x.flatten(2).mean(2))
        return answer


class Block(nn.Module):
    def __init__(self, conv: Any, norm: Any) -> None:
        super().__init__()
        self.conv1 = conv(8, 8, 3, padding=1, bias=False)
        self.bn1 = norm(8)
        self.conv2 = conv(8, 8, 3, padding=1, bias=False)
        self.bn2 = norm(8)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (x + branch).relu()


@pytest.mark.parametrize("scheme", ["affine", "tune", "dyt", "groupnorm", "layernorm"])
@pytest.mark.parametrize("dimensions", [1, 3])
def test_roles_are_those_of_the_norms_whatever_the_input(scheme: str, dimensions: int) -> None:
    """A record of a network has its inputs, which no default fits."""
    conv, norm = {1: (nn.Conv1d, nn.BatchNorm1d), 3: (nn.Conv3d, nn.BatchNorm3d)}[dimensions]
    source = Rows(conv, norm).eval()
    inputs = torch.randn(4, 2, *[6] * dimensions)
    before = {each.path: each.role for each in roles(source, network=Network(source, inputs))}

    done = convert(source, scheme, inputs=inputs)

    after = {each.path: each.role for each in roles(done.model, network=done.network)}
    assert "gamma_unknown" not in after.values()
    for path, role in after.items():
        if role.startswith("gamma"):
            owner = path.rpartition(".")[0].removesuffix(".inner").removesuffix(".then")
            norm_path = owner.replace("conv", "bn")  # `tune` puts a norm into its convolution.
            assert role == before[f"{norm_path}.weight"]


@pytest.mark.parametrize("scheme", ["groupnorm", "layernorm", "dyt"])
def test_gammas_of_two_layers_in_the_place_of_a_norm_have_its_role(scheme: str) -> None:
    """Where no convolution comes before a norm, a layer levels the channels before the new one."""
    source = timm.create_model("resnetv2_18", **NARROW["resnetv2_18"])
    done = convert(source, scheme, input_size=(3, 48, 48))
    found = {each.path: each.role for each in roles(done.model, network=done.network)}
    assert any(path.endswith(".then.weight") for path in found)
    assert "gamma_unknown" not in found.values()
    assert found["stages.1.blocks.0.norm1.then.weight"] == "gamma_down"


def test_what_the_network_spares_never_decays_whatever_layer_has_it() -> None:
    """timm names the weights of linear layers, too, which make up position biases."""
    model = skeleton("swinv2_tiny_window8_256")
    found = {each.path: each for each in roles(model)}
    named = [path for path in found if "cpb_mlp" in path]
    assert any(path.endswith(".weight") for path in named)
    assert not any(found[path].decay for path in named)


def test_every_scheme_has_a_row_here() -> None:
    assert {scheme for _, scheme, _, _ in CONVERTED} == set(schemes.names())


@pytest.mark.slow
def test_a_channel_affine_decays_by_the_role_of_the_norm_it_replaced() -> None:
    model = timm.create_model("resnetv2_18", act_layer="silu")
    done = convert(model, "folded", input_size=(3, 32, 32)).model

    by_path = {assignment.path: assignment for assignment in roles(done)}
    assert by_path["stages.1.blocks.0.norm1.weight"].role == "gamma_down"
    assert not by_path["stages.1.blocks.0.norm1.weight"].decay
    assert by_path["stages.1.blocks.1.norm1.weight"].role == "gamma_other"
    assert by_path["norm.weight"].role == "gamma_head"
    assert "gamma_unknown" not in counts(list(by_path.values()))

    done.__dict__.pop("_normswap_provenance")
    assert counts(roles(done))["gamma_unknown"] > 0
    assert "gamma_unknown" not in decaying(roles(done))


SHALLOW: dict[str, dict[str, Any]] = {
    "resnet18": {"layers": (1, 1, 1, 1)},
    "resnetv2_18": {"layers": (1, 1, 1, 1)},
    "nf_resnet26": {},
    "vit_tiny_patch16_224": {"depth": 2},
}


@pytest.mark.slow
@settings(
    max_examples=10,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    name=st.sampled_from([*SHALLOW]),
    policy=st.sampled_from(POLICIES),
    layer_decay=st.none() | st.floats(0.5, 1.0),
    scalars=st.none() | st.floats(0.01, 1.0),
    lr=st.none() | st.floats(1e-4, 1.0),
    frozen=st.sets(st.integers(0, 50)),
)
def test_every_parameter_in_exactly_one_group(
    name: str,
    policy: str,
    layer_decay: float | None,
    scalars: float | None,
    lr: float | None,
    frozen: set[int],
) -> None:
    model = skeleton(name, **SHALLOW[name])
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number not in frozen)

    groups = param_groups(
        model, 0.1, policy, lr=lr, layer_decay=layer_decay, scalar_lr_scale=scalars
    )

    check(model, groups)
    for group in groups:
        assert ("lr" in group) == (lr is not None)
        assert not {"lr", "lr_scale"} <= group.keys()


def test_optimizers_take_the_groups_and_decay_the_right_ones() -> None:
    model = swapped(timm.create_model("resnet18", channels=(8, 16, 32, 64)), "skipinit", alpha=0.5)
    groups = param_groups(model, 0.1, lr=1.0)
    before = {path: parameter.detach().clone() for path, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(groups, lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()

    for assignment in roles(model):
        shrunk = before[assignment.path] * (0.9 if assignment.decay else 1.0)
        torch.testing.assert_close(model.get_parameter(assignment.path).detach(), shrunk)

    for opt in ("sgd", "adamw", "lamb"):
        made = create_optimizer_v2(param_groups(model, 0.1), opt=opt, lr=0.1, weight_decay=0.0)
        assert sorted(group["weight_decay"] for group in made.param_groups) == [0.0, 0.1]
        check(model, made.param_groups)


def test_layers_have_timms_rates() -> None:
    groups = param_groups(skeleton("resnet50"), layer_decay=0.5, lr=2.0)
    rates = {group["lr"] for group in groups}
    assert max(rates) == 2.0
    assert {rate / 2 for rate in rates} <= {0.5**layer for layer in range(20)}
    assert len(rates) > 10


def test_gammas_of_a_network_that_cannot_be_traced_do_not_decay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(network: Network) -> None:
        raise TraceError("no")

    monkeypatch.setattr(Network, "anatomy", property(refuse))
    model = skeleton("resnet18")
    check(model, param_groups(model))
    assert counts(roles(model)) == {"weight": 21, "gamma_unknown": 20, "beta": 20, "bias": 1}
    assert decaying(roles(model)) == {"weight"}


def test_shared_and_parametrized_weights() -> None:
    norm = nn.BatchNorm2d(4)
    model = nn.Sequential(
        nn.Conv2d(4, 4, 1),
        norm,
        torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1)),
        norm,
    )
    assert counts(roles(model)) == {"weight": 2, "bias": 2, "gamma_other": 1, "beta": 1, "gain": 1}
    check(model, param_groups(model))


@pytest.mark.parametrize(
    ("sizes", "decays"),
    [
        ([], False),
        ([1], False),
        ([4], False),
        ([1, 1], False),
        ([1, 4], False),
        ([4, 1], False),
        ([1, 1, 7], False),
        ([1, 4, 1, 1], False),
        ([2, 2], True),
        ([1, 4, 7], True),
        ([4, 1, 7, 1], True),
    ],
)
@pytest.mark.parametrize("holder", [lambda: nn.Conv2d(3, 4, 1), nn.Module])
def test_a_parameter_of_ones_own_decays_if_two_of_its_sides_are_above_one(
    holder: Callable[[], nn.Module], sizes: list[int], decays: bool
) -> None:
    block = holder()
    block.register_parameter("own", nn.Parameter(torch.ones(sizes)))

    (found,) = [each for each in roles(block) if each.path == "own"]

    assert (found.role, found.decay) == ("weight" if decays else "vector", decays)


@pytest.mark.slow
@given(sizes=st.lists(st.sampled_from([1, 1, 4, 7]), max_size=5))
def test_what_has_one_number_for_each_channel_is_no_weight(sizes: list[int]) -> None:
    """Whatever its shape: a class token (1, 1, C), a scale (1, C, 1, 1)."""
    block = nn.Conv2d(3, 4, 1)
    block.own = nn.Parameter(torch.ones(sizes))

    (decays,) = (assignment.decay for assignment in roles(block) if assignment.path == "own")

    long_sides = [size for size in sizes if size > 1]
    assert decays is (len(long_sides) > 1)


@pytest.mark.parametrize(
    ("arguments", "token"),
    [
        ({"policy": "kim"}, "kim2022"),
        ({"policy": ["weight", "gamma"]}, "gamma_last"),
        ({"policy": "weight,bias"}, "gamma_last"),
        ({"policy": ""}, "kim2022"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"weight_decay": float("nan")}, "weight_decay"),
        ({"layer_decay": 0.0}, "layer_decay"),
        ({"lr": -0.1}, "lr"),
        ({"lr": 1.0, "scalar_lr_scale": -0.1}, "scalar_lr_scale"),
        ({"weight_decay": float("inf")}, "weight_decay"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], token: str) -> None:
    with pytest.raises(OptionError, match=token):
        param_groups(nn.Linear(2, 2), **arguments)
