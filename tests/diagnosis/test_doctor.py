"""The doctor names a fault that is planted in a trained network, and none in healthy ones."""

import copy
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from support import needs, zoo_networks
from support.command_line import MODEL, Capture, run_json
from support.sampled_tables import quick
from support.trained_networks import NETWORKS
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import normswap
from normswap.diagnosis import drift, weight_moments
from normswap.diagnosis.findings import Case, Diagnosis, sites_of
from normswap.graph.inspection import inspect
from normswap.images.datasets import make_loader
from normswap.storage.checkpoint import open_model
from normswap.surgery.network import Network

# Changes a network in place.
Plant = Callable[[nn.Module], None]
ZOO = [kind for kind in zoo_networks.KINDS if kind != "vit"]


def opened(name: str) -> nn.Module:
    if name not in NETWORKS:
        return zoo_networks.trained(name)
    needs.need("shared files", NETWORKS[name].exists(), str(NETWORKS[name]))
    return open_model(str(NETWORKS[name]))


def example(name: str) -> torch.Tensor | None:
    return {"one_d": torch.randn(2, 96, 32), "three_d": torch.randn(2, 3, 4, 16, 16)}.get(name)


def diagnosed(model: nn.Module, name: str = "", **options: Any) -> Diagnosis:
    return normswap.diagnose(model, inputs=example(name), **options)


def norms(model: nn.Module) -> list[Any]:
    return [
        module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]


def norm_at(model: nn.Module, depth: float) -> Any:
    """The norm at a depth of the network from 0 to 1."""
    all_norms = norms(model)
    return all_norms[int(depth * (len(all_norms) - 1))]


def fill(name: str, value: float, part: slice = slice(None)) -> Plant:
    """Fill some channels of a tensor of the norm in the middle."""

    def plant(model: nn.Module) -> None:
        with torch.no_grad():
            getattr(norm_at(model, 0.5), name)[part] = value

    return plant


def everywhere(**values: Any) -> Plant:
    def plant(model: nn.Module) -> None:
        for norm in norms(model):
            vars(norm).update(values)

    return plant


def another_eps(model: nn.Module) -> None:
    norm_at(model, 0.5).eps = 1e-2


def reset(model: nn.Module) -> None:
    for norm in norms(model):
        norm.reset_running_stats()


def reset_one(model: nn.Module) -> None:
    norm_at(model, 0.5).reset_running_stats()


def exchanged(model: nn.Module) -> None:
    """Two inner norms of one width have each other's statistics."""
    all_norms = norms(model)
    first, second = next(
        pair
        for pair in itertools.product(all_norms[1:], all_norms[3:])
        if pair[0] is not pair[1] and len(pair[0].weight) == len(pair[1].weight) > 15
    )

    for name in ("running_mean", "running_var"):
        kept = getattr(first, name).clone()
        getattr(first, name).copy_(getattr(second, name))
        getattr(second, name).copy_(kept)


def stale(model: nn.Module) -> None:
    """Statistics of the weights that the training began with."""
    fresh = copy.deepcopy(model)
    for module in fresh.modules():
        if isinstance(module, nn.modules.conv._ConvNd | nn.modules.batchnorm._BatchNorm):
            module.reset_parameters()
    for norm in norms(fresh):
        norm.momentum = None
    fresh.train()(torch.randn(64, 3, 64, 64))
    for norm, old in zip(norms(model), norms(fresh), strict=True):
        norm.running_mean.copy_(old.running_mean)
        norm.running_var.copy_(old.running_var)


def shuffled(model: nn.Module) -> None:
    """The channels of every norm's statistics are in another order."""
    for norm in norms(model):
        order = torch.arange(len(norm.running_mean)).roll(3)
        norm.running_mean.copy_(norm.running_mean[order].clone())
        norm.running_var.copy_(norm.running_var[order].clone())


def twice(model: nn.Module) -> None:
    """A second norm behind one of them, with statistics that fit."""
    path = next(path for path, module in model.named_modules() if path.endswith("1.bn2"))
    norm: Any = model.get_submodule(path)
    second = nn.BatchNorm2d(norm.num_features)
    with torch.no_grad():
        second.running_mean.copy_(norm.bias)
        second.running_var.copy_(norm.weight.square())
    model.set_submodule(path, nn.Sequential(norm, second.eval()))


def one_for_two(model: nn.Module) -> None:
    block = model.get_submodule("layer1.0")
    block.bn2 = block.bn1  # type: ignore[assignment]


def aliased(model: nn.Module) -> None:
    block: Any = model.get_submodule("layer1.0")
    block.bn2.running_mean = block.bn1.running_mean


def untracked(model: nn.Module) -> None:
    for norm in norms(model):
        norm.running_mean = norm.running_var = norm.num_batches_tracked = None
        norm.track_running_stats = False


def awake(model: nn.Module) -> None:
    norm_at(model, 0.5).train()


def thawed(model: nn.Module) -> None:
    for norm in norms(model)[:5]:
        norm.requires_grad_(False)
    model.train()


def mixed_up(model: nn.Module) -> None:
    norm = norm_at(model, 0.3)
    mean = norm.running_mean.clone()
    norm.running_mean.copy_(norm.running_var)
    norm.running_var.copy_(mean)


def fused(model: nn.Module) -> None:
    for (conv_path, conv), (path, norm) in itertools.pairwise([*model.named_modules()]):
        if isinstance(norm, nn.BatchNorm2d):
            model.set_submodule(conv_path, fuse_conv_bn_eval(conv, norm))  # type: ignore[type-var]
            model.set_submodule(path, nn.Identity())


def stuck(model: nn.Module) -> None:
    """Momentum 0 during a training, which left statistics of other weights behind."""
    stale(model)
    everywhere(momentum=0.0)(model)


FAULTS: dict[str, tuple[Plant, str]] = {
    "NaN in a variance": (fill("running_var", float("nan"), part=slice(0, 1)), "not-finite"),
    "infinite mean": (fill("running_mean", float("inf"), part=slice(2, 3)), "not-finite"),
    "NaN in a gamma": (fill("weight", float("nan"), part=slice(0, 1)), "not-finite"),
    "mean and variance exchanged": (mixed_up, "negative-variance"),
    "one negative variance": (
        fill("running_var", -0.1, part=slice(0, 1)),
        "negative-variance",
    ),
    "variances of 0": (fill("running_var", 0.0), "zero-variance"),
    "half of the variances are 0": (
        fill("running_var", 0.0, part=slice(0, None, 2)),
        "zero-variance",
    ),
    "variances far below eps": (fill("running_var", 1e-12), "zero-variance"),
    "gammas of 0": (fill("weight", 0.0), "dead-gammas"),
    "half of the gammas are 0": (fill("weight", 0.0, part=slice(0, None, 2)), "dead-gammas"),
    "another eps everywhere": (everywhere(eps=1e-3), "eps"),
    "another eps in one norm": (another_eps, "eps"),
    "momentum 0": (stuck, "momentum"),
    "Keras' momentum": (everywhere(momentum=0.99), "momentum"),
    "statistics never updated": (reset, "never-updated"),
    "one norm never updated": (reset_one, "never-updated"),
    "swapped statistics": (exchanged, "swapped-statistics"),
    "stale statistics": (stale, "stale-statistics"),
    "shuffled channels": (shuffled, "stale-statistics"),
    "a second norm": (twice, "double-norm"),
    "one norm at two places": (one_for_two, "shared-norm"),
    "one buffer in two norms": (aliased, "shared-norm"),
    "no running statistics": (untracked, "no-statistics"),
    "one norm in training mode": (awake, "training-mode"),
    "a frozen norm thawed": (thawed, "thawed"),
    "norms that were fused away": (fused, "fused"),
}


def half_updated(model: nn.Module) -> None:
    norm = norm_at(model, 0.5)
    half = len(norm.running_mean) // 2
    norm.running_mean[half:] = 0.0
    norm.running_var[half:] = 1.0


@torch.no_grad()
def not_loaded(model: nn.Module) -> None:
    """Three convolutions and their norms are new, as after `load_state_dict(strict=False)`."""
    torch.manual_seed(0)
    convs = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    for conv, norm in [*zip(convs, norms(model), strict=True)][9:12]:
        conv.reset_parameters()
        norm.reset_parameters()


@pytest.mark.parametrize(
    ("plant", "name"),
    [(half_updated, "never-updated"), (not_loaded, "not-loaded")],
)
def test_what_was_never_updated_is_told_apart(plant: Plant, name: str) -> None:
    model = opened("demo")
    plant(model)
    assert diagnosed(model, "demo").faults[0].name == name


@torch.no_grad()
def test_channels_whose_weights_have_decayed_are_no_fault() -> None:
    """As in EfficientNet-Lite: nothing reaches them, and their variance is 0 for that reason."""
    model = opened("demo")
    conv: Any = model.get_submodule("layer2.0.conv1")
    norm: Any = model.get_submodule("layer2.0.bn1")
    dead = slice(0, len(norm.weight) // 3)
    norm.running_var[dead] = 0.0
    assert [finding.name for finding in diagnosed(model, "demo").faults] == ["zero-variance"]
    conv.weight[dead] *= 1e-8
    norm.running_mean[dead] = 0.0
    assert diagnosed(model, "demo").faults == ()


@pytest.mark.parametrize("groups", [1, 2])
@torch.no_grad()
def test_decayed_filters_of_transposed_convolutions_are_told_by_what_they_make(groups: int) -> None:
    """Their weights come input by input."""
    torch.manual_seed(0)
    up: Any = nn.ConvTranspose2d(16, 16, 2, 2, groups=groups)
    model: Any = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), up, nn.BatchNorm2d(16)
    )
    for _ in range(20):
        model.train()(torch.randn(16, 3, 8, 8))
    up.weight[:, :2] *= 1e-8  # of each group
    group_size = 16 // groups
    dead = [channel for channel in range(16) if channel % group_size < 2]
    model[4].running_var[dead] = 0.0
    faults = normswap.diagnose(model.eval(), inputs=torch.randn(2, 3, 8, 8)).faults

    assert "zero-variance" not in [fault.name for fault in faults]


@torch.no_grad()
def settled(net: Any, side: int = 12, times: int = 60) -> Any:
    """The network itself, with the statistics that noise has in it."""
    torch.manual_seed(0)
    for _ in range(times):
        net.train()(torch.randn(8, 3, side, side))
    return net.eval()


def names(model: nn.Module) -> list[str]:
    diagnosis = normswap.diagnose(model, inputs=torch.randn(2, 3, 12, 12))
    return [fault.name for fault in diagnosis.faults]


@pytest.mark.parametrize("excess", [-1.0, -1e-7, 1e-7, 0.9e-5])
def test_a_variance_is_negative_where_it_has_no_root_with_eps(excess: float) -> None:
    """Without a doubt: the network answers with NaN in this very case."""
    net = settled(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)))
    net[1].running_var[5] = excess - net[1].eps

    found = names(net)

    is_broken = bool(net(torch.randn(2, 3, 12, 12)).isnan().any())
    assert ("negative-variance" in found) is is_broken is (excess < 0)


def behind_a_relu() -> Any:
    net: Any = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.BatchNorm2d(32), nn.Conv2d(32, 4, 1)
    )
    nn.init.constant_(net[0].bias[:6], -9.0)
    return settled(net), net[2]


def behind_a_dead_norm() -> Any:
    """Six channels never fire, and the depthwise convolution behind them gives its biases alone."""
    net: Any = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.BatchNorm2d(32),
        nn.ReLU6(),
        nn.Conv2d(32, 32, 3, groups=32),
        nn.BatchNorm2d(32),
        nn.ReLU6(),
        nn.Conv2d(32, 4, 1),
    )
    nn.init.constant_(net[1].weight[:6], 1e-3)
    nn.init.constant_(net[1].bias[:6], -0.5)

    return settled(net), net[4]


@pytest.mark.parametrize("make", [behind_a_relu, behind_a_dead_norm])
@torch.no_grad()
def test_channels_that_nothing_reaches_are_no_fault(make: Callable[[], Any]) -> None:
    """Mean and variance are rightly 0 but for a bias, and recalibrating would measure the same."""
    net, norm = make()
    norm.running_var[:6] = 0.0
    assert names(net) == []
    norm.running_var[6:12] = 0.0
    assert names(net) == ["zero-variance"]


class Twice(nn.Module):
    """One norm for an image and its mirror image: behind one layer, or behind two."""

    def __init__(self, first: nn.Module, second: nn.Module, channels: int = 8) -> None:
        super().__init__()
        self.first = first
        self.second = second
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.norm(self.first(x))
        mirror_image = self.norm(self.second(x.flip(-1)))
        return image.mean((2, 3)) + mirror_image.mean((2, 3))


def test_one_norm_behind_two_layers_is_shared() -> None:
    assert names(settled(Twice(nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)))) == ["shared-norm"]


@functools.cache
def frozen_in_training(*, is_long: bool) -> tuple[nn.Module, list[torch.Tensor]]:
    """A network that tells six noisy pictures apart, and pictures.

    It was trained on with frozen statistics: a little, or long.
    """
    torch.manual_seed(0)
    kinds = torch.randn(6, 3, 12, 12)

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(6, (64,))
        return kinds[labels] * torch.rand(64, 1, 1, 1) * 2 + torch.randn(64, 3, 12, 12), labels

    layers: list[nn.Module] = []
    for fan_in in (3, 16, 16):
        layers += [nn.Conv2d(fan_in, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 144, 6))

    stages = [(False, 1e-3, 300), (True, 5e-3, 60)]
    if is_long:
        stages.append((True, 1e-2, 300))
    for frozen, rate, steps in stages:
        optimizer = torch.optim.Adam(net.parameters(), rate)
        for _ in range(steps):
            x, y = draw()
            optimizer.zero_grad()
            nn.functional.cross_entropy(net.train(not frozen)(x), y).backward()
            optimizer.step()

    return net.eval(), [draw()[0] for _ in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("with_images", [False, True])
@pytest.mark.parametrize("is_long", quick([False, True], [False]))
def test_a_training_that_ended_with_frozen_statistics_is_no_fault(
    *, with_images: bool, is_long: bool
) -> None:
    """Its statistics are not those of its weights: both explanations are named, nothing is sure."""
    net, images = frozen_in_training(is_long=is_long)
    diagnosis = normswap.diagnose(net, inputs=images[0][:2], images=images if with_images else None)

    assert diagnosis.faults == ()
    assert "Either the training ended with frozen statistics" in diagnosis.notes[0]
    assert "measure before and after" in diagnosis.notes[0]


@pytest.mark.parametrize(("times", "works"), [(10.0, True), (40.0, False)])
def test_statistics_may_be_frozen_unless_outputs_of_norms_explode(
    times: float, *, works: bool
) -> None:
    """Without images, outputs may be up to 30 times as large as normalized ones."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    images = torch.randn(16, 3, 12, 12)
    with torch.no_grad():
        variance = network[0](images).var((0, 2, 3))
        network[1].running_var.copy_(variance / times**2)  # type: ignore[operator,union-attr]
    network.eval()
    case = Case(
        Network(network, inputs=images),
        anatomy=None,
        sites=sites_of(network, None),
        name="net",
        data="data",
    )

    assert drift._may_be_frozen(case) == works


def test_what_was_not_looked_at_without_images_is_said() -> None:
    assert "normswap doctor MODEL --data IMAGES" in diagnosed(opened("demo")).notes[0]


def faulty(fault: str, name: str) -> tuple[Diagnosis, str]:
    """Plant a fault, and diagnose; returns the diagnosis and the name that it must give.

    Channels in another order look like statistics that were frozen in training, until answers to
    images are seen.
    """
    plant, expected = FAULTS[fault]
    model = opened(name)
    plant(model)
    images = None
    if fault == "shuffled channels":
        images = make_loader(model, "demo", workers=0, samples=96, batch_size=12)
    return diagnosed(model, name, images=images), expected


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.one_in(2)
def test_a_planted_fault_is_named_first(fault: str) -> None:
    diagnosis, expected = faulty(fault, "demo")
    assert [finding.name for finding in diagnosis.faults][:1] == [expected]
    assert diagnosis.faults[0].paths
    assert diagnosis.faults[0].mend


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", sorted(FAULTS.keys() - {"another eps everywhere", "another eps in one norm"})
)
def test_it_is_named_in_another_network(fault: str) -> None:
    diagnosis, expected = faulty(fault, "resnet18_narrow")
    assert [finding.name for finding in diagnosis.faults][:1] == [expected]


class Pyramid(nn.Sequential):
    """Three convolutions, of which the last is the head of two levels, with a norm for each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stem, down, head, stem_norm, fine_norm, coarse_norm = self
        fine = stem_norm(stem(x)).relu()
        return fine_norm(head(fine)).mean((2, 3)) + coarse_norm(head(down(fine))).mean((2, 3))


@torch.no_grad()
def of_timm(name: str, **options: Any) -> nn.Module:
    """Weights as drawn, gammas and betas as after a training, and the statistics of noise."""
    net = timm.create_model(name, num_classes=10, **options)
    for norm in norms(net):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, std=0.2)
    return settled(net, side=64, times=40)


def siamese() -> nn.Module:
    conv = nn.Conv2d(3, 8, 3)
    return settled(Twice(conv, conv))


def called_twice() -> nn.Module:
    same = nn.Identity()
    return settled(Twice(same, same, 3))


def pyramid() -> nn.Module:
    convs = [nn.LazyConv2d(16, 3, stride) for stride in (1, 2, 1)]
    return settled(Pyramid(*convs, *map(nn.BatchNorm2d, 3 * [16])))


ALONE: dict[str, Callable[[], nn.Module]] = {
    "dead channels behind a ReLU": lambda: behind_a_relu()[0],
    "dead channels behind a norm": lambda: behind_a_dead_norm()[0],
    "siamese": siamese,
    "called twice": called_twice,
    "pyramid": pyramid,
    "pre-activation": lambda: of_timm(
        "resnetv2_50", layers=(1, 1, 1, 1), channels=(16, 16, 32, 32)
    ),
    "inverted residuals": lambda: of_timm("mobilenetv2_050"),
    "squeeze and excitation": lambda: of_timm("mobilenetv3_small_050"),
    "concatenation": lambda: of_timm("densenet121", block_config=(2, 2), growth_rate=8),
    "ghost": lambda: of_timm("ghostnet_050"),
    "VGG without norms": lambda: open_model("vgg11", weights="random"),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [*NETWORKS, *ZOO, *ALONE])
def test_a_healthy_network_has_no_fault(name: str) -> None:
    model = ALONE[name]() if name in ALONE else opened(name)
    inputs = torch.randn(2, 3, 64, 64) if name in ALONE else example(name)
    assert normswap.diagnose(model, inputs=inputs).faults == ()


@pytest.mark.slow
def test_a_network_that_was_folded_and_got_its_norms_back_has_no_fault() -> None:
    """Its convolutions have absorbed the norms, so their biases tell nothing of statistics."""
    folded = normswap.convert(opened("demo"), "folded")
    assert diagnosed(folded.model).faults == ()
    assert diagnosed(normswap.convert(folded, "batchnorm").model).faults == ()


def test_an_untrained_network_was_not_loaded() -> None:
    faults = diagnosed(timm.create_model("resnet18", channels=(8, 8, 8, 8)).eval()).faults
    assert [fault.name for fault in faults] == ["not-loaded"]


def test_the_command_ends_with_1_where_something_is_wrong(capfd: Capture, tmp_path: Any) -> None:
    well = run_json(capfd, "doctor", MODEL)
    assert (well["faults"], well["norms"]) == (0, 22)
    model = opened("demo")
    reset(model)
    torch.save(model.state_dict(), tmp_path / "reset.pth")
    ill = run_json(capfd, "doctor", MODEL, "--weights", str(tmp_path / "reset.pth"), code=1)
    assert ill["findings"][0]["name"] == "never-updated"
    assert f"normswap recalibrate {MODEL}" in ill["findings"][0]["mend"]


@pytest.mark.parametrize("training", [True, False])
def test_frozen_norms_are_counted_while_their_statistics_move(*, training: bool) -> None:
    model = opened("demo")
    thawed(model)
    model.train(training)

    faults = [fault for fault in diagnosed(model).faults if fault.name == "thawed"]
    assert len(faults) == training
    for fault in faults:
        assert f"frozen in 5 of {len(norms(model))}" in fault.evidence


@pytest.mark.parametrize("how", ["momentum", "no statistics"])
def test_statistics_that_cannot_move_are_not_said_to(how: str) -> None:
    model = opened("demo")
    thawed(model)
    for norm in norms(model)[:5]:
        norm.momentum = 0.0
        if how == "no statistics":
            norm.running_mean = norm.running_var = norm.num_batches_tracked = None
            norm.track_running_stats = False
    assert "thawed" not in {fault.name for fault in diagnosed(model).faults}


def test_a_broken_shift_of_a_norm_that_nobody_calls_is_remarked_on() -> None:
    model = opened("demo")
    model.spare = nn.BatchNorm2d(4)
    with torch.no_grad():
        model.spare.bias[0] = math.nan
    assert any("spare" in note for note in diagnosed(model).notes)


def test_what_a_relu_leaves_of_a_normal_distribution_is_predicted() -> None:
    """Of N(0, 1) the mean is 1 / sqrt(2 pi), the variance 1/2 less its square.

    Three inputs of weight 2 multiply the mean by 6, and the variance by 12.
    """
    conv = nn.Conv2d(3, 4, 1)
    nn.init.constant_(conv.weight, 2.0)
    nn.init.constant_(conv.bias, 1.0)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), conv, nn.BatchNorm2d(4)).eval()

    traced = inspect(model, torch.randn(2, 3, 8, 8)).traced
    mean, variance = weight_moments.predicted_moments(traced)["3"]

    of_relu = 1 / (2 * math.pi) ** 0.5
    assert mean.tolist() == pytest.approx([1 + 6 * of_relu] * 4, rel=0.01)
    assert variance.tolist() == pytest.approx([12 * (0.5 - of_relu**2)] * 4, rel=0.05)
