"""What a fit aims at, on networks so small that NumPy's least squares gives the answer."""

import copy
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from support import zoo_networks
from support.lived_in_networks import distance, run
from support.model_sources import small
from support.sampled_tables import quick
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator

from normswap import shipped
from normswap.calibration import least_squares, sampling, sequential_fit
from normswap.calibration.least_squares import RIDGES, Folds
from normswap.images.datasets import make_loader
from normswap.layers.per_sample import leveling
from normswap.layers.scalars import Scale
from normswap.schemes.groupnorm import absolute_eps
from normswap.sites.site import site_of
from normswap.surgery import applying, conversion

CHANNELS = 4
Array = Any


@pytest.fixture(autouse=True)
def no_mirror_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracles see the images as they are."""
    monkeypatch.setattr(sequential_fit, "MIRRORED", 0)


class Sum(nn.Module):
    """skip + scale(norm(conv(before(x)))), perhaps a ReLU: all 1x1, so that a place is a row."""

    def __init__(self, *, skip: bool, relu: bool, per_sample: bool = False) -> None:
        super().__init__()
        self.skip = nn.Conv2d(CHANNELS, CHANNELS, 1) if skip else None
        self.before = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.norm: nn.Module = nn.GroupNorm(2, CHANNELS) if per_sample else nn.BatchNorm2d(CHANNELS)
        self.scale: nn.Module = nn.Identity()
        self.act = nn.ReLU() if relu else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        arm = None if self.skip is None else self.skip(x)
        y = self.scale(self.norm(self.conv(self.before(x))))
        return self.act(y if arm is None else arm + y)


def source(*, skip: bool, relu: bool) -> Sum:
    torch.manual_seed(0)
    model: Any = Sum(skip=skip, relu=relu).double().eval()
    with torch.no_grad():
        model.norm.running_mean.normal_()
        model.norm.running_var.uniform_(0.5, 2)
        model.norm.weight.copy_(torch.tensor([1.5, -0.7, 0.4, 2.0]))
        model.norm.bias.normal_()
    return model


def pixels(count: int = 24) -> Tensor:
    return torch.randn(
        count, CHANNELS, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def rows(x: Tensor) -> Array:
    return x.movedim(1, -1).reshape(-1, x.shape[1]).numpy()


def least(x: Array, y: Array) -> tuple[Array, Array]:
    """W and b of y = W x + b, by NumPy."""
    found = np.linalg.lstsq(np.hstack([x, np.ones((len(x), 1))]), y, rcond=None)[0]
    return found[:-1].T, found[-1]


@pytest.mark.parametrize("relu", [False, True])
def test_a_branch_makes_up_for_the_stream(relu: bool) -> None:
    """The skip has gone wrong by D, and the branch reads the same: conv' = conv - D / s is exact,
    and is found.
    """
    theirs = source(skip=True, relu=relu)
    ours: Any = copy.deepcopy(theirs)
    with torch.no_grad():
        ours.before.weight.copy_(torch.eye(CHANNELS).view(CHANNELS, CHANNELS, 1, 1))
        ours.before.bias.zero_()
        ours.skip.weight.add_(0.3 * torch.randn_like(ours.skip.weight))
        ours.skip.bias.add_(0.5)
    broken = distance(run(theirs, pixels()), run(ours, pixels()))
    sequential_fit.refit(theirs, ours, list(pixels().split(8)), only=lambda path: path == "conv")
    assert broken > 0.1
    assert distance(run(theirs, pixels()), run(ours, pixels())) < 1e-3


def test_a_wide_patch_is_seen_at_more_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The images together give LEAST_FOR_EACH rows for each number in it, also where that is more
    than others get.
    """
    counts: list[int] = []

    def noted(
        layer: Any, x: Tensor, y: Tensor, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        counts.append(count)
        return sampling.patches(layer, x, y, count, generator)

    monkeypatch.setattr(sequential_fit, "patches", noted)
    monkeypatch.setattr(sequential_fit, "MOST_ROWS", 1)
    model = nn.Sequential(nn.Conv2d(CHANNELS, 4, 3)).double().eval()
    sequential_fit.refit(model, copy.deepcopy(model), [pixels(10)])
    assert counts == [math.ceil(sequential_fit.LEAST_FOR_EACH * 9 * CHANNELS / 10)]


def ridged(x: Array, y: Array, prior: Array, ridge: float) -> tuple[Array, Array]:
    """W and b of y = W x + b, W drawn towards a prior: NumPy's least squares on rows with others
    below them.
    """
    x0 = x.mean(0)
    y0 = y.mean(0)
    m = np.square(x - x0).sum() / x.size
    root = np.sqrt(len(x) * ridge * m) * np.eye(x.shape[1])
    weight = np.linalg.lstsq(
        np.vstack([x - x0, root]), np.vstack([y - y0, root @ prior.T]), rcond=None
    )[0].T
    return weight, y0 - weight @ x0


def crossed(x: Array, y: Array, prior: Array, *, biases: bool = True) -> float:
    """The ridge whose weights, fitted to the even images, err least on the odd ones, before the
    error rises.

    Args:
        x, y: (images, rows, f) and (images, rows, o).
        biases: are part of what is fitted; else only the errors' variance counts.
    """
    even = tuple(value[0::2].reshape(-1, value.shape[2]) for value in (x, y))
    odd = tuple(value[1::2].reshape(-1, value.shape[2]) for value in (x, y))

    def error(ridge: float) -> float:
        weight, bias = ridged(*even, prior, ridge)
        wrong = odd[1] - odd[0] @ weight.T - bias
        return float(np.square(wrong if biases else wrong - wrong.mean(0)).sum(1).mean())

    errors = [error(ridge) for ridge in RIDGES]
    return next(
        (RIDGES[i] for i in range(len(RIDGES) - 1) if errors[i] <= errors[i + 1]), RIDGES[-1]
    )


@pytest.mark.parametrize("skip", [False, True])
def test_a_layer_is_fitted_to_numpys_least_squares(skip: bool) -> None:
    """With a ridge; behind a sum, to what the result's other arm lacks as well."""
    theirs = source(skip=skip, relu=True)
    ours: Any = copy.deepcopy(theirs)
    x = pixels()
    s = (theirs.norm.weight / (theirs.norm.running_var + theirs.norm.eps).sqrt()).detach()  # type: ignore[operator]
    t = (theirs.norm.bias - theirs.norm.running_mean * s).detach()  # type: ignore[operator]
    with torch.no_grad():
        ours.before.weight[2:] = 0  # half of what the layer reads is gone: no weight is exact
        if skip:
            ours.skip.bias.add_(0.5)
        seen = rows(ours.before(x))
        other = rows(ours.skip(x)) if skip else np.zeros_like(seen)
        whole = rows(
            (theirs.skip(x) if theirs.skip else 0) + theirs.norm(theirs.conv(theirs.before(x)))
        )
    target = (whole - other - t.numpy()) / s.numpy()
    prior = theirs.conv.weight.detach()[:, :, 0, 0].numpy()
    ridge = crossed(*(value.reshape(len(x), -1, CHANNELS) for value in (seen, target)), prior)
    weight, bias = ridged(seen, target, prior, ridge)
    sequential_fit.refit(theirs, ours, list(x.split(8)), only=lambda path: path == "conv")
    found = ours.conv.weight.detach()[:, :, 0, 0].numpy(), ours.conv.bias.detach().numpy()
    for value, best in zip(found, (weight, bias), strict=True):
        assert np.abs(value - best).max() < 1e-6 * np.abs(best).max()


@pytest.mark.parametrize("eps", [1e-5, 0.7])
@pytest.mark.parametrize("factor", [None, 0.25])
def test_a_norm_makes_up_for_the_stream(factor: float | None, eps: float) -> None:
    """Where a scale stands between norm and sum, the norm makes up for the difference over it."""
    theirs = source(skip=True, relu=True)
    if factor is not None:
        theirs.scale = Scale(factor, bias=False, like=torch.empty(0, dtype=torch.float64))
    ours: Any = copy.deepcopy(theirs)
    ours.norm = nn.GroupNorm(2, CHANNELS, eps).double()
    with torch.no_grad():
        ours.skip.weight.mul_(0.5)
        ours.skip.bias.add_(1)
        x = pixels()
        reached = nn.functional.group_norm(ours.conv(ours.before(x)), 2, eps=eps)
        branch = theirs.norm(theirs.conv(theirs.before(x)))
        asked = branch + (theirs.skip(x) - ours.skip(x)) / (factor or 1)  # type: ignore[misc]
    sequential_fit.refit(theirs, ours, list(x.split(8)), only=lambda path: path == "norm")
    for channel in range(CHANNELS):
        gamma, beta = least(rows(reached)[:, [channel]], rows(asked)[:, [channel]])
        assert ours.norm.weight[channel].item() == pytest.approx(gamma.item(), rel=1e-6)
        assert ours.norm.bias[channel].item() == pytest.approx(beta.item(), rel=1e-6)


def test_the_ridge_is_the_one_that_errs_least_on_the_other_half_biases_and_all() -> None:
    """The halves differ in their means, so a choice without biases would be another one."""
    differs = 0
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(10, 1, 1, 6, generator=generator, dtype=torch.float64)
        x[1::2] += 2 * torch.randn(6, generator=generator, dtype=torch.float64)
        y = (x @ torch.randn(6, 3, generator=generator, dtype=torch.float64)).relu()
        y = y + torch.randn(y.shape, generator=generator, dtype=torch.float64)
        prior = torch.randn(1, 3, 6, generator=generator, dtype=torch.float64)
        folds = Folds()
        # Images go to the halves in turn, in whatever batches they come.
        for batch in zip(x.split(1 + seed % 10), y.split(1 + seed % 10), strict=True):
            folds.add(*batch)
        problem = (x[:, 0].numpy(), y[:, 0].numpy(), prior[0].numpy())
        assert least_squares.regress(folds, prior).ridge == crossed(*problem)
        differs += crossed(*problem) != crossed(*problem, biases=False)
    assert differs > 5


@pytest.mark.parametrize(("relative_eps", "share"), [(0.25, 0.2), (1, 0.5), (3, 0.75), (9, 0.9)])
def test_the_share_of_eps_is_what_was_asked_for_in_every_group(
    relative_eps: float, share: float
) -> None:
    """Samples give the variance over a group and the share of eps in what it is divided by."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8).double().eval()
    norm.running_mean.normal_()  # type: ignore[union-attr]
    norm.running_var.uniform_(0.05, 0.4)  # type: ignore[union-attr]
    norm.running_var[4:] *= 100  # type: ignore[index]
    eps = absolute_eps(site_of(norm), relative_eps)
    scale, offset = leveling(norm, 2)
    spread = torch.randn(20_000, 8, dtype=torch.float64) * norm.running_var.sqrt()  # type: ignore[union-attr]
    values = scale * (spread + norm.running_mean) + offset
    for group in (slice(0, 4), slice(4, 8)):
        assert float(eps / (eps + values[:, group].var())) == pytest.approx(share, abs=0.01)
        assert float(values[:, group].mean(0).abs().max()) < 0.05 * float(values[:, group].std())


@pytest.mark.slow
@pytest.mark.parametrize("kind", quick(["preact", "plain"], ["preact"]))
def test_what_is_fitted_answers_as_the_source_and_what_is_not_does_not(kind: str) -> None:
    """Trained networks, and 300 images that were not seen."""
    loader = make_loader(zoo_networks.PREPROCESSING, str(shipped.FOLDER / "images.tar"), workers=0)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    images = torch.cat([pictures for pictures, _ in loader])[order]
    model = zoo_networks.trained(kind)
    done = conversion.convert(model, "nf", calibrate=list(images[:64].split(16)))
    bare = applying.apply_step(model, done.plan.steps[-1])
    with torch.inference_mode():
        said, ours, not_fitted = (one(images[200:]).argmax(1) for one in (model, done.model, bare))
    kept, lost = ((answer == said).double().mean() for answer in (ours, not_fitted))
    assert kept > 0.8
    assert lost < 0.4


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("groupnorm", {"relative_eps": 0}),
        pytest.param("groupnorm", {"only": ["layer2*"]}, marks=pytest.mark.slow),
        ("dyt", {"skip": ["layer1*"]}),
        pytest.param("nf", {"only": ["layer3*"]}, marks=pytest.mark.slow),
    ],
)
def test_a_fit_adds_no_tensor_that_the_plan_does_not_know(to: str, options: dict[str, Any]) -> None:
    """As a bias for a convolution that has none: what is saved could not be loaded."""
    model = small(channels=(8, 8, 8, 8))
    images = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    fitted = conversion.convert(model, to, inputs=images[:2], calibrate=[images], **options)
    (step,) = fitted.plan.steps
    assert fitted.model.state_dict().keys() == applying.apply_step(model, step).state_dict().keys()


def test_a_layer_without_a_bias_is_fitted_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reaches it is shifted, which a bias would make up for: by NumPy, through zero."""
    monkeypatch.setattr(least_squares, "RIDGES", (1e-12,))
    theirs: Any = source(skip=False, relu=False)
    theirs.conv.bias = None
    ours: Any = copy.deepcopy(theirs)
    with torch.no_grad():
        ours.before.bias.add_(0.7)
        x = ours.before(pixels())
        y = theirs.conv(theirs.before(pixels()))
    sequential_fit.refit(theirs, ours, list(pixels().split(8)), only=lambda path: path == "conv")
    wanted = np.linalg.lstsq(rows(x), rows(y), rcond=None)[0].T
    assert ours.conv.bias is None
    assert np.allclose(ours.conv.weight.detach()[:, :, 0, 0].numpy(), wanted, atol=1e-6)


def zero_sum_fit(x: Array, y: Array) -> tuple[Array, Array]:
    """W and b of y = W x + b, where each row of W sums to zero: by Lagrange's conditions."""
    around = x - x.mean(0)
    ones = np.ones((x.shape[1], 1))
    system = np.block([[around.T @ around, ones], [ones.T, np.zeros((1, 1))]])
    right = np.vstack([around.T @ (y - y.mean(0)), np.zeros((1, y.shape[1]))])
    weight = np.linalg.solve(system, right)[:-1].T
    return weight, y.mean(0) - weight @ x.mean(0)


@pytest.mark.parametrize("groups", [1, 2, CHANNELS])
def test_filters_that_sum_to_zero_are_numpys_constrained_least_squares(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a ridge, the factors by which the inputs were scaled change nothing."""
    monkeypatch.setattr(least_squares, "RIDGES", (1e-12,))
    theirs: Any = source(skip=False, relu=False)
    theirs.conv = nn.Conv2d(CHANNELS, CHANNELS, 1, groups=groups).double()
    ours: Any = copy.deepcopy(theirs)
    with torch.no_grad():
        ours.before.bias.add_(0.7)
        x = rows(ours.before(pixels()))
        y = rows(theirs.conv(theirs.before(pixels())))
    factors = torch.tensor([1.0, 2.0, 0.5, 4.0])

    sequential_fit.refit(
        theirs,
        ours,
        list(pixels().split(8)),
        only=lambda path: path == "conv",
        zero_sum=lambda path, module: factors,
    )

    # Each group reads channels of its own, and writes as many.
    for channels in np.split(np.arange(CHANNELS), groups):
        weight, bias = zero_sum_fit(x[:, channels], y[:, channels])
        found = ours.conv.weight.detach()[channels, :, 0, 0].numpy()
        assert np.allclose(found, weight, atol=1e-6)
        assert np.allclose(ours.conv.bias.detach()[channels].numpy(), bias, atol=1e-6)


@pytest.mark.slow
def test_a_detector_is_fitted_up_to_its_choice_of_boxes() -> None:
    """On pictures of different sizes; behind the choice the rows of the two networks are not of the
    same boxes.
    """
    torch.manual_seed(0)
    backbone = nn.Sequential(
        nn.Conv2d(3, 8, 3, 4, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 4, 1), nn.ReLU()
    )
    backbone.out_channels = 8  # type: ignore[assignment]
    small = {
        "rpn_pre_nms_top_n_test": 30,
        "rpn_post_nms_top_n_test": 20,
        "box_detections_per_img": 5,
    }
    anchors = AnchorGenerator(((16,),), ((1.0,),))
    detector = FasterRCNN(
        backbone, 5, min_size=64, max_size=96, rpn_anchor_generator=anchors, **small
    ).eval()
    pictures = [[torch.rand(3, *size)] for size in ((64, 64), (80, 60), (50, 70), (64, 90))]
    options = {"only": "backbone", "relative_eps": 0, "inputs": (pictures[0],)}
    done = conversion.convert(detector, "groupnorm", calibrate=pictures, **options)
    fitted = done.model.get_submodule("backbone.3")
    head = done.model.get_submodule("roi_heads.box_head.fc6")
    assert not torch.equal(fitted.weight, backbone[3].weight)
    assert torch.equal(head.weight, detector.roi_heads.box_head.fc6.weight)


IMAGES = 16
LOOKS = 8  # and the images with which a network is looked at before it is run


@pytest.mark.slow
def test_a_fit_runs_each_layer_once_over_the_images_and_their_mirror_images() -> None:
    images = torch.randn(IMAGES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    model = zoo_networks.trained("preact")
    result = conversion.convert(model, "groupnorm", relative_eps=0.0, inputs=images[:2]).model
    through: Counter[nn.Module] = Counter()

    def look(module: nn.Module, args: tuple[Tensor, ...], _output: object) -> None:
        through[module] += len(args[0])

    handle = register_module_forward_hook(look)
    try:
        sequential_fit.refit(model, result, [images])
    finally:
        handle.remove()
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            assert (
                max(through[module], through[result.get_submodule(path)]) <= 2 * IMAGES + LOOKS
            ), path
