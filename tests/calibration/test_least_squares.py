"""Streamed least squares against a dense computation of its own, and what calibration refuses."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
from support.graph_cases import outputs
from support.lived_in_networks import distance, lived_in, run
from support.sampled_tables import crossed
from support.tiny_modules import ONE, C, bn, conv, hooked, net, patched, tied
from timm.layers import ScaledStdConv2d
from torch import Tensor, nn

from normswap.calibration import (
    channel_values,
    least_squares,
    per_sample_rescaling,
    sampling,
    sequential_fit,
    synthetic_images,
)
from normswap.calibration.least_squares import Folds
from normswap.calibration.synthetic_images import leaves
from normswap.errors import OptionError, RefusedError, SourceError
from normswap.graph import inspection
from normswap.models.calling import Example
from normswap.plan import Step
from normswap.schemes import groupnorm
from normswap.surgery import applying, conversion

# torch says of an even kernel that it may copy its input.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

CONVS: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": 3, "padding": 1},
    "strided": {"kernel_size": 3, "stride": 2, "padding": 1},
    "dilated": {"kernel_size": 3, "padding": 2, "dilation": 2},
    "grouped": {"kernel_size": 3, "padding": 1, "groups": 2},
    "same": {"kernel_size": 3, "padding": "same", "dilation": 2},
    # Of an odd number of zeros, one more stands at the end.
    "same, even": {"kernel_size": (2, 4), "padding": "same"},
    "pointwise": {"kernel_size": 1},
}


def narrow(arch: str = "resnet18", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    width: dict[str, Any] = {"stem_chs": 8} if "v2" in arch else {}
    width["pretrained_cfg_overlay"] = {"input_size": (3, 32, 32)}
    model = timm.create_model(
        arch, num_classes=10, channels=(8, 16, 24, 32), layers=(1, 1, 1, 1), **width
    )
    return lived_in(model, torch.randn(4, 3, 32, 32, dtype=torch.float64)).float()


def images(count: int = 32, size: int = 32, seed: int = 1) -> list[Tensor]:
    return list(
        torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed)).split(8)
    )


def dense(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """The unrolled input, (N * places, G, f), by probing the layer with one tap at a time."""
    out = []
    for g in range(conv.groups):
        columns = []
        probe = copy.deepcopy(conv)
        probe.bias = None
        for tap in range(conv.weight[0].numel()):
            with torch.no_grad():
                probe.weight.zero_()
                probe.weight[g * (conv.out_channels // conv.groups)].view(-1)[tap] = 1
                columns.append(probe(x)[:, g * (conv.out_channels // conv.groups)].flatten())
        out.append(torch.stack(columns, 1))

    return torch.stack(out, 1)


@pytest.mark.parametrize("kind", CONVS)
def test_patches_are_what_the_layer_reads(kind: str) -> None:
    conv = nn.Conv2d(4, 6, **CONVS[kind]).double()
    x = torch.randn(3, 4, 9, 7, dtype=torch.float64)
    y = conv(x).detach()
    seen, wanted = sampling.patches(conv, x, y, 11, torch.Generator().manual_seed(0))
    weight = conv.weight.detach().reshape(conv.groups, 6 // conv.groups, -1)
    bias = conv.get_parameter("bias").detach().reshape(conv.groups, 1, -1)
    assert distance(wanted, seen @ weight.transpose(1, 2) + bias) < 1e-12


@pytest.mark.parametrize(
    ("conv", "size"),
    [
        (nn.Conv1d(4, 6, 3, 2, 1, groups=2), (17,)),
        (nn.Conv1d(4, 6, 4, padding="same", dilation=2), (9,)),
        (nn.Conv1d(4, 6, 4, padding="same"), (9,)),
        (nn.Conv3d(4, 8, 3, (1, 2, 1), (0, 1, 2), groups=4), (5, 9, 8)),
        (nn.Conv3d(4, 2, (1, 3, 2), dilation=(2, 1, 1)), (3, 7, 5)),
    ],
)
def test_patches_of_one_and_of_three_dimensions(conv: Any, size: tuple[int, ...]) -> None:
    conv = conv.double()
    x = torch.randn(3, 4, *size, dtype=torch.float64)
    seen, wanted = sampling.patches(conv, x, conv(x).detach(), 11, torch.Generator().manual_seed(0))
    weight = conv.weight.detach().reshape(conv.groups, conv.out_channels // conv.groups, -1)

    assert seen.shape[2] == min(11, conv(x)[0, 0].numel())
    assert (
        distance(
            wanted, seen @ weight.transpose(1, 2) + conv.bias.detach().view(conv.groups, 1, -1)
        )
        < 1e-12
    )


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("sum_of", ["nothing", "ones", "numbers"])
@pytest.mark.parametrize("kind", CONVS)
def test_streamed_regression_is_numpys_least_squares_on_the_unrolled_layer(
    kind: str, sum_of: str, biased: bool
) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, **CONVS[kind]).double()
    batches = [3 + torch.randn(5, 4, 9, 7, dtype=torch.float64) for _ in range(3)]
    targets = [(torch.randn_like(conv(x)) + conv(x).relu()).detach() for x in batches]
    folds = Folds(biased=biased)
    for x, y in zip(batches, targets, strict=True):
        folds.add(*sampling.patches(conv, x, y, 10_000, torch.Generator()))
    prior = conv.weight.detach().reshape(conv.groups, 6 // conv.groups, -1)
    some = torch.rand(conv.groups, prior.shape[2], dtype=torch.float64) + 0.2
    zero_sum = {"nothing": None, "ones": torch.ones_like(some), "numbers": some}[sum_of]
    fit = least_squares.regress(folds, prior, zero_sum=zero_sum)
    unrolled = torch.cat([dense(conv, x) for x in batches]).numpy()

    wanted = torch.cat([y.transpose(0, 1).flatten(1).T for y in targets]).detach().numpy()
    for g in range(conv.groups):
        a = unrolled[:, g]
        b = np.split(wanted, conv.groups, 1)[g]
        ac, bc = (a - a.mean(0), b - b.mean(0)) if biased else (a, b)
        damp = fit.ridge * (ac**2).mean()
        # the ridge as further rows; the constraint by substitution: V = P u with the columns of P
        # spanning zero sums
        rows = np.concatenate([ac / np.sqrt(len(a)), np.sqrt(damp) * np.eye(a.shape[1])])
        goal = np.concatenate([bc / np.sqrt(len(a)), np.sqrt(damp) * prior[g].numpy().T])
        basis = (
            np.eye(a.shape[1])
            if zero_sum is None
            else np.linalg.svd(zero_sum[g, None].numpy())[2][1:].T
        )
        v = basis @ np.linalg.lstsq(rows @ basis, goal, rcond=None)[0]

        assert np.linalg.norm(fit.weight[g].numpy().T - v) <= 1e-8 * np.linalg.norm(v)
        assert np.allclose(fit.bias[g].numpy(), biased * (b.mean(0) - a.mean(0) @ v), atol=1e-8)

        if zero_sum is not None:
            assert abs(zero_sum[g].numpy() @ fit.weight[g].numpy().T).max() < 1e-10


@pytest.mark.parametrize("block", [500, least_squares._BLOCK])
def test_blocks_in_float32_are_as_good_as_float64(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wide patches (NumPy's product), far from zero, in batches that fill blocks unevenly or not at
    all.
    """
    monkeypatch.setattr(least_squares, "_BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(200, 200, generator=generator)
    batches = [100 + torch.randn(40, 1, 9, 200, generator=generator) @ mixing for _ in range(8)]
    truth = torch.randn(1, 5, 200, generator=generator)
    narrow = Folds()

    wide = Folds()
    for x in batches:
        y = (x @ truth.transpose(1, 2)).relu()
        narrow.add(x, y)
        wide.add(x.double(), y.double())

    rows = torch.cat(batches).double()
    own = (rows.flatten(0, 2) - rows.mean((0, 1, 2))).numpy()
    covariance = narrow.total().covariances()[0][0].numpy()

    assert np.abs(covariance - own.T @ own / len(own)).max() <= 1e-6 * np.abs(covariance).max()

    one, two = (least_squares.regress(folds, torch.zeros_like(truth)) for folds in (narrow, wide))
    assert one.ridge == two.ridge
    assert (one.weight - two.weight).norm() <= 1e-4 * two.weight.norm()


@pytest.mark.parametrize("block", [1, least_squares._BLOCK])
def test_images_go_to_both_folds_in_turn(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of odd sizes, summed one by one or together, against NumPy."""
    monkeypatch.setattr(least_squares, "_BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    x = 3 + torch.randn(15, 2, 3, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(15, 2, 3, 5, generator=generator, dtype=torch.float64)
    folds = Folds()

    for inputs, targets in zip(x.split([5, 3, 7]), y.split([5, 3, 7]), strict=True):
        folds.add(inputs, targets)
    covariance, cross, variance = folds.each().covariances()
    input_mean, target_mean = folds.each().means()

    for fold, group in itertools.product(range(2), range(2)):
        rows = torch.cat([x, y], 3)[fold::2, group].flatten(0, 1).numpy()
        wanted = np.cov(rows.T, bias=True)
        place = (fold, group)
        assert np.allclose(covariance[place].numpy(), wanted[:4, :4])
        assert np.allclose(cross[place].numpy(), wanted[4:, :4])
        assert np.allclose(variance[place].numpy(), wanted.diagonal()[4:])
        assert np.allclose(input_mean[place].numpy(), rows.mean(0)[:4])
        assert np.allclose(target_mean[place].numpy(), rows.mean(0)[4:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_half_precision_are_summed_up_in_float32(dtype: torch.dtype) -> None:
    """As a network in half precision gives them: only the rows are rounded."""
    generator = torch.Generator().manual_seed(0)
    x, y = ((1 + torch.randn(1, 3000, width, generator=generator)).to(dtype) for width in (5, 2))
    # Each row is an image, and the layer has one group.
    folds = Folds()
    for rows, targets in zip(x.split(700, 1), y.split(700, 1), strict=True):
        folds.add(rows[0, :, None, None], targets[0, :, None, None])
    both = np.cov(torch.cat([x, y], 2)[0].double().numpy().T, bias=True)

    covariance, cross, variance = (value[0].numpy() for value in folds.total().covariances())
    for got, wanted in (
        (covariance, both[:5, :5]),
        (cross, both[5:, :5]),
        (variance, both[5:, 5:].diagonal()),
    ):
        assert np.abs(got - wanted).max() < 1e-5


def test_what_float32_left_below_zero_is_lifted() -> None:
    """Sums that rounding has made indefinite: their ridge grows until they are not; the other group
    keeps its own.
    """
    generator = torch.Generator().manual_seed(0)
    rows = (
        torch.randn(2, 20, 64, generator=generator, dtype=torch.float64)
        @ torch.ones(64, 64).double()
        * 30
    )
    covariance = rows.transpose(1, 2) @ rows / 20
    bent = torch.randn(64, generator=generator, dtype=torch.float64)
    bent = bent - bent.mean()
    covariance[0] -= (
        3e-3 * covariance[0].diagonal().mean() * torch.outer(bent, bent) / bent.square().sum()
    )
    one, two = covariance.diagonal(dim1=1, dim2=2).mean(1).tolist()
    kernel = least_squares.Kernel.of(covariance, 1e-4)

    assert kernel.damp.flatten().tolist() == pytest.approx([1e-2 * one, 1e-4 * two])

    again = kernel.factor @ kernel.factor.transpose(1, 2)
    assert torch.allclose(again, covariance + kernel.damp * torch.eye(64))

    covariance[1, 3, 5] = covariance[1, 5, 3] = torch.nan  # no ridge mends that
    with pytest.raises(torch.linalg.LinAlgError):
        least_squares.Kernel.of(covariance, 1e-4)


def test_the_ridge_follows_the_data() -> None:
    """Much data that contradict the prior: no ridge; noise alone: as much of it as there is."""
    x = torch.randn(400, 1, 4, 5, dtype=torch.float64)
    truth = torch.randn(1, 3, 5, dtype=torch.float64)
    prior = torch.zeros(1, 3, 5)
    clear = Folds()
    blind = Folds()
    clear.add(x, x @ truth.transpose(1, 2))
    blind.add(x[:8, :, :1], torch.randn(8, 1, 1, 3, dtype=torch.float64))
    assert least_squares.regress(clear, prior).ridge == min(least_squares.RIDGES)
    assert least_squares.regress(blind, prior).ridge == max(least_squares.RIDGES)


@pytest.mark.parametrize("arch", ["resnet18", "resnetv2_18"])
def test_nothing_to_repair_is_a_fixed_point(arch: str) -> None:
    model = narrow(arch).double()
    twin = copy.deepcopy(model)
    sequential_fit.refit(model, twin, [x.double() for x in images()])
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert distance(run(model, x), run(twin, x)) < 1e-8


@crossed("arch, scheme", ["resnet18", "resnetv2_18"], ["groupnorm", "nf", "centered-weightnorm"])
@pytest.mark.one_in(3)
def test_fitting_repairs_and_is_reproducible(arch: str, scheme: str) -> None:
    model = narrow(arch)
    data = images(40)
    x = torch.cat(images(64, seed=9))
    options = (
        {"relative_eps": 1} if scheme == "groupnorm" else {}
    )  # the more of it, the less there is to repair
    results = [
        conversion.convert(model, scheme, inputs=x[:8], calibrate=data, seed=3, **options)
        for _ in range(2)
    ]

    assert all(
        torch.equal(a, b)
        for a, b in zip(*(r.model.state_dict().values() for r in results), strict=True)
    )

    step = results[0].plan.steps[-1]
    unfitted = applying.apply_step(model, step)
    reference = run(model, x)

    assert distance(reference, run(results[0].model, x)) < 0.8 * distance(
        reference, run(unfitted, x)
    )
    assert all(module.training is model.training for module in results[0].model.modules())


@pytest.mark.slow
def test_nf_has_timms_convolutions_whose_filters_sum_to_zero() -> None:
    model = narrow("resnetv2_18")
    done = conversion.convert(model, "nf", calibrate=images(), input_size=(3, 32, 32), stem="fit")
    convs = [m for m in done.model.modules() if isinstance(m, nn.Conv2d)]

    assert (
        sum(type(conv) is ScaledStdConv2d for conv in convs) == len(convs) - 1
    )  # the classifier is none

    kept = conversion.convert(model, "nf", calibrate=images(), input_size=(3, 32, 32)).model
    assert [type(m) is ScaledStdConv2d for m in kept.modules() if isinstance(m, nn.Conv2d)] == [
        False,
        *[True] * (len(convs) - 2),
        False,
    ]


def hook(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda module, args, output: 2 * output)
    return layer


# what comes before a convolution like any other: whether it is standardized, and whether that is
# said
FIRST: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], bool, bool]] = {
    "a convolution": (conv, {}, True, False),
    "a grouped one": (lambda: conv(groups=2), {}, True, False),
    "a transposed one": (lambda: nn.ConvTranspose2d(C, C, 3, padding=1), {}, False, True),
    "filters of one number": (lambda: conv(1, groups=C), {}, False, True),
    "another padding": (lambda: conv(padding_mode="reflect"), {}, False, True),
    "hooks": (lambda: hook(conv()), {}, False, True),
    "one that is left out": (conv, {"skip": "first"}, False, False),
    "no convolution": (nn.Identity, {}, False, False),
}


@pytest.mark.parametrize("to", ["nf", "centered-weightnorm"])
@pytest.mark.parametrize("name", FIRST)
def test_what_cannot_be_standardized_keeps_nothing_else_from_it(name: str, to: str) -> None:
    make, options, fit, said = FIRST[name]
    torch.manual_seed(0)
    x = torch.randn(4, C, 9, 9, dtype=torch.float64)
    model = lived_in(
        net(
            lambda m, x: m.last(m.bn(m.conv(m.first(x).relu())).relu()),
            first=make,
            **ONE,
            last=conv,
        )(),
        x,
    )
    done = conversion.convert(model, to, inputs=x, mean="keep", **options)
    standardized = [
        edit.path for edit in done.plan.steps[-1].edits if edit.layer == "StandardizedConv"
    ]

    assert sorted(standardized) == sorted(["conv"] + ["first"] * fit)
    assert any("first is not standardized" in note for note in done.notes) is said
    assert distance(run(model, x), run(done.model, x)) < 1e-12


@pytest.mark.parametrize(
    ("fan", "rows"), [(1, 2048), (9, 2048), (27, 3456), (1000, 32768), (4608, 55296)]
)
def test_a_narrow_patch_is_fitted_to_fewer_rows(fan: int, rows: int) -> None:
    """128 for each number in a patch, at least 2,048 and at most 32,768, but never fewer than 12
    for each.
    """
    assert sequential_fit.rows_needed(fan) == rows


@pytest.mark.parametrize("to", ["groupnorm", "nf"])
def test_a_layer_whose_numbers_overflow_is_named(to: str) -> None:
    """1e20 squared is no float32."""
    model: Any = narrow()
    with torch.no_grad():
        model.bn1.weight *= 1e20
    with pytest.raises(SourceError, match=r"layer1\.0\.conv1 cannot be fitted: .* overflows"):
        conversion.convert(model, to, input_size=(3, 32, 32), calibrate=images())


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        ("nf", {}, "calibrate=DATA"),
        ("nf", {"calibrate": images(), "mean": "keep"}, "no use for calibration data"),
        ("folded", {"calibrate": images()}, "no use for calibration data"),
        ("skipinit", {"calibrate": images(), "alpha": "0"}, "no use for calibration data"),
        ("groupnorm", {"calibrate": "nose"}, "neither batches of images nor 'synthetic'"),
    ],
)
def test_images_where_they_are_needed_alone(to: str, options: dict[str, Any], message: str) -> None:
    model = net(lambda m, x: m.bn(m.conv(x)) + x, **ONE)().eval()
    with pytest.raises(OptionError, match=message):
        conversion.convert(model, to, input_size=(C, 9, 9), **options)


def test_rows_of_features_are_fitted_to_as_images_are() -> None:
    torch.manual_seed(0)
    rows = torch.randn(64, 4)

    flat: Any = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).eval()
    with torch.no_grad():
        flat[1].running_mean.copy_(flat[0](rows).mean(0))
        flat[1].running_var.copy_(flat[0](rows).var(0))
        wanted = flat(rows)

    unfitted, fitted = (
        conversion.convert(flat, "layernorm", inputs=rows, **given).model
        for given in ({}, {"calibrate": rows.split(8)})
    )

    assert distance(wanted, run(fitted, rows)) < 0.8 * distance(wanted, run(unfitted, rows))


def test_groups_are_explained_or_refused() -> None:
    model = narrow()
    _, builder = conversion.plan_step(inspection.inspect(model), "groupnorm", groups=5)
    assert (
        "bn1: 4 groups, the divisor of its 8 channels nearest to 5" not in builder.notes
    )  # resnet18's stem has 64
    assert any("nearest to 5" in note for note in builder.notes)

    _, builder = conversion.plan_step(inspection.inspect(model), "groupnorm", groups=8)
    assert (
        "layer1.0.bn1: groups of 2 channels, as groups of 1 erase each channel's mean"
        in builder.notes
    )
    assert "9 times the mean variance, so 90% of variance + eps is constant" in builder.notes[-1]
    assert "10% of a small difference between the deviations of samples" in builder.notes[-1]

    _, builder = conversion.plan_step(inspection.inspect(model), "groupnorm", relative_eps=0)
    assert not any("eps" in note for note in builder.notes)

    flat = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).eval()
    with pytest.raises(RefusedError, match="erases it"):
        conversion.plan_step(inspection.inspect(flat), "instancenorm")

    single = nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1), nn.Linear(1, 2)).eval()
    with pytest.raises(RefusedError, match="erases it; leave it out with `skip=`"):
        conversion.plan_step(inspection.inspect(single), "groupnorm")

    with pytest.raises(RefusedError, match="no BatchNorm"):
        conversion.plan_step(
            inspection.inspect(conversion.convert(model, "folded").model), "groupnorm"
        )

    assert [groupnorm.nearest_divisor(c, g) for c, g in ((30, 4), (7, 3), (64, 32), (12, 5))] == [
        3,
        1,
        32,
        4,
    ]


def test_the_only_channel_of_a_map_is_normalized_over_its_places() -> None:
    """As behind the last convolution of a segmentation network: no group of one element."""
    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.Conv2d(3, 1, 3), nn.BatchNorm2d(1), nn.ReLU(), nn.Conv2d(1, 2, 1))
        .double()
        .eval()
    )
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    done = conversion.convert(model, "groupnorm", inputs=x, relative_eps=0)
    y = model[0](x)
    mean = y.mean((1, 2, 3), keepdim=True)
    var = y.var((1, 2, 3), correction=0, keepdim=True)

    assert torch.allclose(done.model(x), model[3](model[2]((y - mean) / (var + 1e-5).sqrt())))


def test_the_rescaling_before_the_norm_keeps_the_batchnorms_function() -> None:
    """With the norms themselves left BatchNorms, scales and leads cancel, with convolutions and
    without.
    """
    model = narrow("resnetv2_18").double()
    step, builder = conversion.plan_step(inspection.inspect(model), "groupnorm", groups=2)
    args = {edit.path: edit.args for edit in step.edits if edit.layer == "GroupNorm"}

    assert args["stages.0.blocks.0.norm1"]["lead"]
    assert "lead" not in args["stages.0.blocks.0.norm2"]
    assert str(builder.outcomes["norm"]).endswith("behind a scale and shift")

    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    recentred = applying.apply_step(model, groupnorm.fitting_target(step))
    assert distance(run(model, x), run(recentred, x)) < 1e-12

    edits = tuple(edit for edit in groupnorm.fitting_target(step).edits if edit.layer != "Rescaled")
    broken = applying.apply_step(model, Step(step.scheme, step.options, edits))
    assert distance(run(model, x), run(broken, x)) > 1e-3


# which convolutions rescale the channels of the norm after them; a scale and shift in front of it
# does, where none can
HOLDERS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a convolution": (net(lambda m, x: m.bn(m.conv(x)), **ONE), ["conv"]),
    "one for each norm": (
        net(lambda m, x: m.bn2(m.conv2(m.bn(m.conv(x)).relu())), **ONE, conv2=conv, bn2=bn),
        ["conv", "conv2"],
    ),
    "the output read elsewhere": (net(lambda m, x: m.bn(y := m.conv(x)) + y, **ONE), []),
    "the output returned": (net(lambda m, x: (m.bn(y := m.conv(x)), y), **ONE), []),
    "the convolution called elsewhere": (
        net(lambda m, x: m.bn(m.conv(x)) + m.conv(x.flip(-1)), **ONE),
        [],
    ),
    "the norm called twice": (
        net(lambda m, x: m.bn(m.conv(x)) + m.bn(m.conv2(x)), **ONE, conv2=conv),
        [],
    ),
    "both called twice": (net(lambda m, x: m.bn(m.conv(x)) + m.bn(m.conv(x.flip(-1))), **ONE), []),
    "an activation between": (net(lambda m, x: m.bn(m.conv(x).relu()), **ONE), []),
    "no convolution": (net(lambda m, x: m.conv(m.bn(x)), **ONE), []),
    "a shared weight": (tied, []),
    "hooks": (hooked, []),
    "a forward of its own": (patched("conv"), []),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_who_can_absorbs_the_rescaling_and_the_function_stays(name: str) -> None:
    """With the norms themselves left BatchNorms."""
    make, holders = HOLDERS[name]
    torch.manual_seed(0)
    x = torch.randn(4, C, 9, 9, dtype=torch.float64)
    model = lived_in(make(), x)
    step, _ = conversion.plan_step(inspection.inspect(model, x), "groupnorm", groups=2)
    assert [edit.path for edit in step.edits if edit.layer == "Rescaled"] == holders
    leads = {edit.path: "lead" in edit.args for edit in step.edits if edit.layer == "GroupNorm"}
    assert len(leads) == len(holders) + sum(leads.values())
    recentred = applying.apply_step(model, groupnorm.fitting_target(step))
    assert distance(outputs(model, x), outputs(recentred, x)) < 1e-12


def test_many_descents_find_the_best_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against all 2^10 of them; of two that are opposite either."""
    torch.manual_seed(0)
    monkeypatch.setattr(per_sample_rescaling, "STARTS", 64)
    every = torch.tensor(
        [[1.0 if i >> b & 1 else -1.0 for b in range(10)] for i in range(1024)], dtype=torch.float64
    )

    for _ in range(10):
        half = torch.randn(4, 10, dtype=torch.float64)
        values = (every @ half.T).square().sum(1)
        found = torch.from_numpy(per_sample_rescaling.least_sum((half.T @ half).numpy()))
        assert set(found.tolist()) <= {1.0, -1.0}
        assert float((half @ found).square().sum()) == pytest.approx(float(values.min()), rel=1e-9)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sides", [(32,), (24, 20), (12, 10, 8)])
def test_the_amplitude_of_the_noise_falls_with_its_frequency(sides: tuple[int, ...]) -> None:
    found = synthetic_images.pink(4000, (2, *sides), 0).double()
    assert float(found.std()) == pytest.approx(1, rel=1e-4)

    power = np.square(
        np.abs(np.fft.fftn(found.numpy(), axes=tuple(range(2, 2 + len(sides)))))
    ).mean((0, 1))
    frequency = np.sqrt(
        sum(np.square(f) for f in np.meshgrid(*map(np.fft.fftfreq, sides), indexing="ij"))
    )
    flat = (power * np.square(frequency)).ravel()[1:]

    assert flat.min() > 0.85 * flat.max()
    assert power.flat[0] * max(sides) ** -2 == pytest.approx(flat.mean(), rel=0.1)

    one, two = found.movedim(1, 0).flatten(1)
    # of the first's own noise a the others have a share: sqrt(0.8) a + sqrt(0.2) b, the first both
    # of a
    assert float(torch.corrcoef(torch.stack([one, two]))[0, 1]) == pytest.approx(
        1.2 / 1.8**0.5, rel=0.02
    )


class Batches(nn.Module):
    """As robot policies do, it takes a dict of observations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1)
        )

    def forward(self, batch: dict[str, Any]) -> Any:
        return self.layers(batch["image"])


def flipped(weight: Tensor, source: Tensor) -> bool:
    """Whether some filters changed their sign, and some did not."""
    return len((weight * source).flatten(1).sum(1).sign().unique()) == 2


def test_a_network_that_takes_more_than_images_keeps_its_signs() -> None:
    inputs = {"batch": {"image": torch.randn(2, 3, 9, 9), "state": torch.randn(2, 4)}}
    model = Batches().eval()
    done = conversion.convert(model, "groupnorm", inputs=inputs)
    assert not flipped(done.model.layers[0].weight, model.layers[0].weight)


def network() -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(2)
    ).eval()
    model.pretrained_cfg = {"input_size": (3, 32, 32)}
    return model


def on_leaves(model: Any, size: tuple[int, ...] = (3, 32, 32)) -> Tensor:
    """The moments of the norm's input, (2, N, C)."""
    norms = {"1": model[1]}
    batches = channel_values.dead_leaves(model, Example((torch.randn(2, *size),)), norms)
    return torch.cat(
        channel_values.observed(model, norms, batches, channel_values.image_moments)["1"], 1
    )


def test_leaves_are_as_loud_as_the_first_norm_expects() -> None:
    model = network()
    norm = model[1]
    norm.running_var.copy_(
        9 * model[0](leaves(64, (3, 32, 32), 0)).square().mean((0, 2, 3)).detach()
    )
    seen = on_leaves(model)
    share = float(seen[1].mean(0).sum() / norm.running_var.double().sum())
    assert 0.5 < share < 2


def test_no_image_of_leaves_is_shown_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Tensor] = []

    def noted(count: int, size: list[int], seed: int) -> Tensor:
        shown.append(leaves(count, size, seed))
        return shown[-1]

    monkeypatch.setattr(channel_values, "leaves", noted)
    model = network()
    on_leaves(model)
    images = torch.cat([batch for batch in shown if len(batch) == channel_values.BATCH])
    assert len(images.flatten(1).unique(dim=0)) == channel_values.COUNT


@pytest.mark.parametrize("size", [(3, 64, 64), (3, 24, 40)])
def test_leaves_are_as_large_as_the_images_that_are_given(
    size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record at the smaller size of two is no wish: the network's own size is taken then."""
    shown: list[list[int]] = []
    monkeypatch.setattr(
        channel_values,
        "leaves",
        lambda count, size, seed: shown.append([*size]) or leaves(count, size, seed),
    )
    model = network()
    model.pretrained_cfg = {"input_size": (3, 72, 72)}
    on_leaves(model, size)

    assert {*map(tuple, shown)} == {(3, 72, 72) if size == (3, 64, 64) else size}


@pytest.mark.parametrize("width", [3, least_squares._WIDE, 2 * least_squares._WIDE])
def test_products_of_rows_stay_on_the_rows_device(width: int) -> None:
    """NumPy, which is faster for wide rows, knows the CPU alone."""
    rows = torch.empty(2, 1, 5, width, device="meta")

    squared = least_squares._squared(rows)

    assert squared.device == rows.device
    assert squared.shape == (2, 1, width, width)
