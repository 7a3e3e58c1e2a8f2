"""The doctor on images: how they are prepared, and whether statistics and eps fit them."""

import copy
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from support import zoo_networks
from support.command_line import MODEL, Capture, run_json
from torch import Tensor, nn

import normswap
from normswap.calibration.population import estimate_population
from normswap.diagnosis import drift, normalization
from normswap.diagnosis.findings import Case, Certainty, Diagnosis, Finding, sites_of
from normswap.diagnosis.image_batches import ImageBatches
from normswap.errors import SourceError
from normswap.images.datasets import make_loader
from normswap.models.calling import Example
from normswap.models.preprocessing import data_config, state
from normswap.models.stated_images import Preprocessing
from normswap.storage.checkpoint import open_model
from normswap.surgery.network import Network
from normswap.surgery.recalibration import recalibrate

COUNT = 96
BATCH = 12
# Changes a network in place, and returns its images, perhaps others than before.
Plant = Callable[[nn.Module, list[Tensor]], list[Tensor]]


def trained() -> nn.Module:
    return copy.deepcopy(zoo_networks.trained("plain"))


def norms(model: nn.Module) -> list[Any]:
    return [
        module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]


def images(model: nn.Module) -> list[Tensor]:
    loader = make_loader(model, "demo", workers=0, samples=COUNT, batch_size=BATCH, labelled=False)
    return [batch for batch, _ in loader]


def faults(diagnosis: Diagnosis) -> list[str]:
    return [finding.name for finding in diagnosis.faults]


def as_maps(model: nn.Module, name: str) -> Tensor:
    """The network's mean or std of each channel, as (C, 1, 1)."""
    return torch.tensor(data_config(model)[name]).reshape(-1, 1, 1)


def pixels(model: nn.Module, batch: Tensor) -> Tensor:
    return (batch * as_maps(model, "std") + as_maps(model, "mean")).clamp(0, 1)


def normalized(model: nn.Module, pixels: Tensor) -> Tensor:
    return (pixels - as_maps(model, "mean")) / as_maps(model, "std")


def blue_first(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    return [normalized(model, pixels(model, batch).flip(1)) for batch in batches]


def unnormalized(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    return [pixels(model, batch) for batch in batches]


def in_bytes(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    return [pixels(model, batch) * 255 for batch in batches]


def by_half(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """The network's record says 0.5, and so its images are normalized; it was trained otherwise."""
    given = [(pixels(model, batch) - 0.5) / 0.5 for batch in batches]
    state(model, Preprocessing((0.5,), (0.5,)))
    return given


def other_weights(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """One inner norm has statistics of weights that were three times as large."""
    norm = norms(model)[3]
    norm.running_mean.mul_(3)
    norm.running_var.mul_(9)
    return batches


def at_night(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """Dark images of little contrast, with grain."""
    generator = torch.Generator().manual_seed(0)
    dark: list[Tensor] = []
    for batch in batches:
        grain = torch.randn(batch.shape, generator=generator)
        dark.append(batch * 0.15 - 1.4 + 0.6 * grain)
    return dark


def about_zero(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """In -1..1, by another library's habit."""
    return [pixels(model, batch) * 2 - 1 for batch in batches]


def divided(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """Divided by the deviations, but the means were forgotten."""
    return [pixels(model, batch) / as_maps(model, "std") for batch in batches]


@torch.no_grad()
def of_two_images(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """Statistics of the last two images that it saw in training mode."""
    estimate_population(model, [batches[0][:2]])
    return batches


@torch.no_grad()
def small_variances(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """Trained with an eps of 1e-3, that mattered; now it is torch's."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.mul_(0.03)
    for norm in norms(model):
        norm.eps = 1e-3
    estimate_population(model, batches)
    for norm in norms(model):
        norm.eps = 1e-5
    return batches


PLANTED: dict[str, tuple[Plant, str, str]] = {
    "BGR": (blue_first, "preprocessing", "channels as BGR"),
    "not normalized": (unnormalized, "preprocessing", "given as pixels in 0..1"),
    "0..255": (in_bytes, "preprocessing", "given as pixels in 0..255"),
    "another normalization": (by_half, "preprocessing", "0.485,0.456,0.406"),
    "one norm of other weights": (other_weights, "wrong-statistics", "the statistics are wrong"),
    "in -1..1": (about_zero, "preprocessing", "given with mean 0.5, std 0.5"),
    "means forgotten": (divided, "preprocessing", "given with mean 0, std 0.247"),
    "two images' statistics": (of_two_images, "wrong-statistics", "no norm by itself is far off"),
    "night": (at_night, "drifted-domain", "trained on other images than these"),
    "eps": (small_variances, "eps", "with 0.001"),
}


@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.one_in(4)
def test_a_planted_fault_is_named(fault: str) -> None:
    plant, name, words = PLANTED[fault]
    model = trained()
    batches = plant(model, images(model))

    diagnosis = normswap.diagnose(model, images=batches)

    assert faults(diagnosis) == [name]
    assert words in diagnosis.faults[0].evidence
    assert diagnosis.faults[0].mend


def grey(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """Brightness alone, in all three channels."""
    brightness = [pixels(model, batch).mean(1, keepdim=True) for batch in batches]
    return [normalized(model, batch) for batch in brightness]


def without_betas(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    for norm in norms(model):
        nn.init.zeros_(norm.bias)
    return batches


@torch.no_grad()
def roots(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    for norm in norms(model):
        norm.running_var.sqrt_()
    return batches


def sharpened(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """A little: the means stay, and no norm is far off."""
    sharp: list[Tensor] = []
    for batch in batches:
        smooth = nn.functional.avg_pool2d(batch, 3, 1, 1, count_include_pad=False)
        sharp.append(batch + (batch - smooth))
    return sharp


SUBTLE: dict[str, tuple[Plant, str, str]] = {
    "no colours": (grey, "grey-images", "one picture"),
    "betas not loaded": (without_betas, "zero-betas", "whose gammas were trained"),
    "deviations": (roots, "deviations-for-variances", "squares of the kept variances"),
    "sharpened": (sharpened, "drifted-domain", "other details"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", SUBTLE)
def test_a_cause_is_named_where_no_norm_by_itself_is_far_off(fault: str) -> None:
    plant, name, words = SUBTLE[fault]
    model = trained()

    batches = plant(model, images(model))

    diagnosis = normswap.diagnose(model, images=batches)

    assert faults(diagnosis) == [name]
    assert words in diagnosis.faults[0].evidence


@pytest.mark.slow
def test_the_line_for_deviations_mends_every_norm() -> None:
    model = trained()
    batches = roots(model, images(model))
    (finding,) = normswap.diagnose(model, images=batches).faults

    line, _, _ = finding.mend.partition("; or normswap")
    exec(line, {"model": model})

    assert faults(normswap.diagnose(model, images=batches)) == []


def test_a_network_of_grey_images_is_well() -> None:
    model = trained()
    batches = grey(model, images(model))
    assert faults(normswap.diagnose(recalibrate(model, batches).model, images=batches)) == []


@pytest.mark.slow
def test_a_healthy_network_has_no_fault_on_its_images_nor_on_few() -> None:
    model = trained()
    batches = images(trained())
    before = copy.deepcopy(model.state_dict())

    assert faults(normswap.diagnose(model, images=batches[:2])) == []
    assert faults(normswap.diagnose(model, images=batches)) == []

    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    with pytest.raises(SourceError, match="too few"):
        normswap.diagnose(model, images=[batches[0][:6]])


def test_copies_of_an_image_are_no_evidence() -> None:
    """Copies have no spread, so what one image shows would seem to be beyond chance."""
    model = trained()
    (first, *others) = images(model)
    alike = first[:1].repeat(BATCH, 1, 1, 1)

    for batches in ([alike] * 8, [alike, first[:7]]):
        with pytest.raises(SourceError, match=r"[17] images are too few"):
            normswap.diagnose(model, images=batches)

    seen = ImageBatches.read(model, [alike, first, *others, *others])
    assert seen.count == COUNT
    assert len(torch.cat([call.images for call in seen.calls]).unique(dim=0)) == COUNT


def test_drift_is_that_of_the_norms_input_with_its_error() -> None:
    """Against NumPy: a first norm sees what its convolution makes of the images, in four parts."""
    model = trained()
    norm = norms(model)[0]
    norm.running_mean.add_(norm.running_var.sqrt())
    norm.running_var.mul_(3)
    case = case_of(model, images(model))

    first = drift.measured_drifts(case)[0]

    assert case.images is not None
    means, variances = (
        np.array(each)
        for each in zip(*(moments_of(model, part) for part in case.images.parts), strict=True)
    )
    stored_mean, stored_var = (
        each.double().numpy() for each in (norm.running_mean, norm.running_var)
    )
    shifts = (means - stored_mean) / np.sqrt(stored_var + norm.eps)
    ratios = np.log((variances + norm.eps) / (stored_var + norm.eps))
    for value, error, by_part in (
        (first.mean, first.error, shifts),
        (first.log_var, first.log_error, ratios),
    ):
        assert value == pytest.approx(np.median(np.abs(by_part.mean(0))), rel=0.02)
        standard_errors = by_part.std(0, ddof=1) / math.sqrt(len(by_part))
        assert error == pytest.approx(np.median(standard_errors), rel=0.1)
    assert np.allclose(first.seen[0], means.mean(0), rtol=1e-4, atol=1e-6)
    assert np.allclose(first.seen[1], variances.mean(0), rtol=1e-4)
    assert first.site.path == case.sites[0].path
    assert first.is_off


def moments_of(model: nn.Module, calls: Iterable[Example]) -> tuple[Any, Any]:
    """Mean and variance per channel of what the first convolution makes of some images."""
    moments: list[tuple[Any, Any]] = []
    for call in calls:
        maps = model.get_submodule("0")(call.images).detach().double()
        values = maps.transpose(0, 1).flatten(1).numpy()
        moments.append((values.mean(1), values.var(1, ddof=1)))
    means, variances = (np.mean(each, 0) for each in zip(*moments, strict=True))
    return means, variances


def case_of(model: nn.Module, batches: list[Tensor]) -> Case:
    return Case(
        Network(model),
        anatomy=None,
        sites=sites_of(model, None),
        name="net",
        data="data",
        images=ImageBatches.read(model, batches),
    )


def calls_of(case: Case) -> tuple[Example, ...]:
    assert case.images is not None
    return case.images.calls


def with_calls(case: Case, calls: Iterable[Example]) -> Case:
    return dataclasses.replace(case, images=ImageBatches(tuple(calls)))


def drift_of(site: Any, mean: float = 0.0, error: float = 0.0, **fields: Any) -> drift.Drift:
    """A drift of which only what is named differs from 0."""
    seen = (torch.zeros(1), torch.ones(1)) if site is None else (site.mean, site.var)
    rest = {"log_var": 0.0, "log_error": 0.0, "seen": seen, **fields}
    return drift.Drift(site, mean=mean, error=error, **rest)


@pytest.mark.slow
def test_the_command(capfd: Capture) -> None:
    command = ("doctor", MODEL, "--data", "demo", "--samples", "96", "--workers", "0")

    well = run_json(capfd, *command)
    assert (well["faults"], well["findings"]) == (0, [])

    ill = run_json(capfd, *command, "--image-mean", "0", "--image-std", "1", code=1)
    assert ill["findings"][0]["name"] == "preprocessing"
    assert ill["findings"][0]["mend"].partition(MODEL)[2].startswith(" --image-mean 0.485")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["demo", "depthwise", "efficient", "dense", "regnet", "preact", "plain_norm_after"]
)
def test_no_healthy_network_has_a_fault(name: str) -> None:
    model = open_model("demo") if name == "demo" else zoo_networks.trained(name)
    assert normswap.diagnose(model, images=images(model)).faults == ()


def test_chance_is_taken_off_what_a_norm_is_off() -> None:
    # 0.5 - 3 x 0.1 is no more than 0.3.
    assert not drift_of(None, mean=0.5, error=0.1).is_off
    assert drift_of(None, mean=0.7, error=0.1).is_off
    assert not drift_of(None, log_var=0.9, log_error=0.1).is_off
    assert drift_of(None, log_var=1.1, log_error=0.1).is_off


def test_what_one_half_of_the_images_moves_the_answers_by_is_chance() -> None:
    """Every other batch is dark: the network has the statistics of the bright half."""
    model = trained()
    case = case_of(model, images(model))
    estimate_population(model, [call.images for call in calls_of(case)[::2]])
    zeros_and_ones = (torch.zeros(1), torch.ones(1))
    drifts = [drift_of(site, seen=zeros_and_ones) for site in case.sites]

    half_dark = list(calls_of(case))
    half_dark[1::2] = [call.map(lambda x: 0.3 * x - 1) for call in half_dark[1::2]]

    assert [*drift._many_small_drifts(with_calls(case, half_dark), drifts)] == []


@pytest.mark.slow
def test_statistics_that_hardly_move_the_answers_are_no_fault() -> None:
    """Every image comes twice, once in either half, so that chance is nothing."""
    model = trained()
    once = case_of(model, images(model))
    twice = [call for call in calls_of(once) for copies in range(2)]
    case = with_calls(once, twice)
    estimate_population(model, [call.images for call in twice])
    drifts = [drift_of(site) for site in case.sites]

    norms(model)[-1].running_var.mul_(1.1)
    assert [*drift._many_small_drifts(case, drifts)] == []

    norms(model)[-1].running_var.mul_(4.0)
    assert len([*drift._many_small_drifts(case, drifts)]) == 1


def test_images_are_the_cause_where_the_first_norm_sees_other_variances_at_the_same_means() -> None:
    """A later norm alone is far off."""
    model = trained()
    case = case_of(model, images(model))
    drifts = [drift_of(site) for site in case.sites]
    assert drift._far_off(case, drifts, [drifts[3]]).name == "wrong-statistics"

    mean, var = drifts[0].seen
    drifts[0] = dataclasses.replace(drifts[0], seen=(mean, 2 * var))
    assert drift._far_off(case, drifts, [drifts[3]]).name == "drifted-domain"


@pytest.mark.parametrize(("share", "name"), [(0.4, "drifted-domain"), (0.6, "zero-betas")])
def test_betas_of_0_are_the_cause_where_most_norms_have_none(share: float, name: str) -> None:
    """Of all norms: those whose gammas were never trained count as well."""
    model = trained()
    for number, norm in enumerate(norms(model)):
        nn.init.zeros_(norm.bias)
        if number >= share * len(norms(model)):
            nn.init.ones_(norm.weight)

    case = case_of(model, images(model))
    finding = Finding(
        "drifted-domain",
        paths=(),
        evidence="these are others",
        certainty=Certainty.LIKELY,
        cost="",
        mend="",
    )
    assert drift._with_cause(case, finding).name == name


def test_one_large_batch_is_told_into_parts() -> None:
    model = trained()
    seen = ImageBatches.read(model, [torch.cat(images(model))])
    assert [sum(call.count for call in part) for part in seen.parts] == [COUNT // 4] * 4


def test_another_normalization_has_to_fit_each_part_of_the_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = trained()
    case = case_of(model, images(model))
    asked: list[Tensor] = []

    def distances(model: nn.Module, images: Tensor) -> list[float]:
        asked.append(images)
        if len(asked) == 1:
            return [1.0] * 5
        return [0.001, 0.001, 0.9, 0.001, 0.001]

    monkeypatch.setattr(normalization, "_distances", distances)
    assert [*normalization.unfit_preprocessing(case)] == []
    assert len(asked) > 2


def test_the_error_is_that_of_a_mean_over_parts() -> None:
    parts = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    columns = parts.T.tolist()

    mean, error = drift._median_size(parts)

    sizes = [abs(statistics.mean(column)) for column in columns]
    errors = [statistics.stdev(column) / 4**0.5 for column in columns]
    assert mean == pytest.approx(statistics.median(sizes))
    assert error == pytest.approx(statistics.median(errors))


@pytest.mark.parametrize("first_is_off", [False, True])
def test_a_finding_of_drift_names_what_is_off_and_the_farthest(first_is_off: bool) -> None:
    """Means and logarithms of variances count alike, and what fits is not named."""
    model = trained()
    case = case_of(model, images(model)[:8])
    sites = case.sites[:4]
    sizes = [(0.4 if first_is_off else 0.1, 0.0), (0.5, 1.5), (0.9, 0.2), (0.2, 0.1)]
    drifts = [
        drift_of(site, mean, log_var=log_var)
        for site, (mean, log_var) in zip(sites, sizes, strict=True)
    ]
    off = [each for each in drifts if each.is_off]

    finding = drift._far_off(case, drifts, off)

    named = sites[:3] if first_is_off else sites[1:3]
    assert finding.paths == tuple(site.path for site in named)
    assert finding.evidence.startswith(f"{len(named)} of 4 norms")
    assert f"{BATCH * 8} images have, most at {drifts[1]}" in finding.evidence
    assert finding.name == ("drifted-domain" if first_is_off else "wrong-statistics")
    assert case.recalibrate in finding.mend
    assert str(drifts[1]).startswith(f"{sites[1].path}: means off by 0.50 +- 0.00 deviations")
    assert str(drifts[1]).endswith(f"variances {math.exp(1.5):.1f} x")
