"""The doctor reads off images how they are prepared, whether statistics and eps fit them, how the
modes agree.
"""

import copy
import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import zoo_networks
from support.command_line import MODEL, Capture, run_json
from torch import Tensor, nn

import normswap
from normswap.calibration.population import estimate_population
from normswap.diagnosis import drift, normalization
from normswap.diagnosis.findings import Certainty, Diagnosis, Finding
from normswap.diagnosis.image_batches import ImageBatches
from normswap.errors import SourceError
from normswap.images.datasets import make_loader
from normswap.models.preprocessing import data_config, state
from normswap.models.stated_images import Preprocessing
from normswap.surgery.recalibration import recalibrate

COUNT = 96
BATCH = 12


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


def pixels(model: nn.Module, batch: Tensor) -> Tensor:
    mean, std = (
        torch.tensor(data_config(model)[name]).reshape(-1, 1, 1) for name in ("mean", "std")
    )
    return (batch * std + mean).clamp(0, 1)


def blue_first(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    mean, std = (
        torch.tensor(data_config(model)[name]).reshape(-1, 1, 1) for name in ("mean", "std")
    )
    return [(pixels(model, batch).flip(1) - mean) / std for batch in batches]


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
    noise = torch.Generator().manual_seed(0)
    return [
        batch * 0.15 - 1.4 + 0.6 * torch.randn(batch.shape, generator=noise) for batch in batches
    ]


def about_zero(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """In -1..1, by another library's habit."""
    return [pixels(model, batch) * 2 - 1 for batch in batches]


def divided(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """Divided by the deviations, but the means were forgotten."""
    return [
        pixels(model, batch) / torch.tensor(data_config(model)["std"]).reshape(-1, 1, 1)
        for batch in batches
    ]


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


PLANTED: dict[str, tuple[Callable[[nn.Module, list[Tensor]], list[Tensor]], str, str]] = {
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
@pytest.mark.one_in(2)
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
    mean, std = (
        torch.tensor(data_config(model)[name]).reshape(-1, 1, 1) for name in ("mean", "std")
    )
    return [(pixels(model, batch).mean(1, keepdim=True) - mean) / std for batch in batches]


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
    smooth = [
        nn.functional.avg_pool2d(batch, 3, 1, 1, count_include_pad=False) for batch in batches
    ]
    return [batch + (batch - other) for batch, other in zip(batches, smooth, strict=True)]


SUBTLE: dict[str, tuple[Callable[[nn.Module, list[Tensor]], list[Tensor]], str, str]] = {
    "no colours": (grey, "grey-images", "one picture"),
    "betas not loaded": (without_betas, "zero-betas", "whose gammas were trained"),
    "deviations": (roots, "deviations-for-variances", "squares of the kept variances"),
    "sharpened": (sharpened, "drifted-domain", "other details"),
}


@pytest.mark.parametrize("fault", SUBTLE)
def test_a_cause_is_named_where_no_norm_by_itself_is_far_off(fault: str) -> None:
    plant, name, words = SUBTLE[fault]
    model = trained()
    diagnosis = normswap.diagnose(model, images=plant(model, images(model)))
    assert faults(diagnosis) == [name]
    assert words in diagnosis.faults[0].evidence


def test_a_network_of_grey_images_is_well() -> None:
    model = trained()
    batches = grey(model, images(model))
    assert faults(normswap.diagnose(recalibrate(model, batches).model, images=batches)) == []


def test_a_healthy_network_has_no_fault_on_its_images_nor_on_few() -> None:
    model = trained()
    batches = images(trained())
    before = copy.deepcopy(model.state_dict())
    assert faults(normswap.diagnose(model, images=batches[:2])) == []
    assert faults(normswap.diagnose(model, images=batches)) == []
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    with pytest.raises(SourceError, match="too few"):
        normswap.diagnose(model, images=[batches[0][:6]])


def test_drift_is_that_of_the_norms_input_with_its_error() -> None:
    """Against sums written out: a first norm sees what its convolution makes of the images, in
    either mode.
    """
    model = trained()
    batches = images(model)
    norms(model)[0].running_mean.add_(norms(model)[0].running_var.sqrt())
    case = _case(model, batches)
    first = drift.measured_drifts(case)[0]
    norm = norms(model)[0]
    values = (
        model.get_submodule("0")(torch.cat(batches)).detach().double().transpose(0, 1).flatten(1)
    )
    shift = (values.mean(1) - norm.running_mean) / (norm.running_var + norm.eps).double().sqrt()

    assert first.mean == pytest.approx(float(shift.abs().median()), rel=1e-3)
    assert 0 < first.error < 0.1
    assert first.is_off


def _case(model: nn.Module, batches: list[Tensor]) -> Any:
    from normswap.diagnosis.findings import Case, sites_of
    from normswap.diagnosis.image_batches import ImageBatches
    from normswap.surgery.network import Network

    return Case(
        Network(model),
        None,
        sites_of(model, None),
        "net",
        "data",
        ImageBatches.read(model, batches),
    )


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
    from normswap.storage.checkpoint import open_model

    model = open_model("demo") if name == "demo" else zoo_networks.trained(name)
    assert normswap.diagnose(model, images=images(model)).faults == ()


def test_chance_is_taken_off_what_a_norm_is_off() -> None:
    site: Any = None
    there = (torch.zeros(1), torch.ones(1))
    assert not drift.Drift(
        site, 0.5, 0.1, 0.0, 0.0, there
    ).is_off  # 0.5 - 3 x 0.1 is no more than 0.3
    assert drift.Drift(site, 0.7, 0.1, 0.0, 0.0, there).is_off
    assert not drift.Drift(site, 0.0, 0.0, 0.9, 0.1, there).is_off
    assert drift.Drift(site, 0.0, 0.0, 1.1, 0.1, there).is_off


def test_what_one_half_of_the_images_moves_the_answers_by_is_chance() -> None:
    """Every other batch is dark: statistics of one half are no more than such images make of it by
    chance.
    """
    model = trained()
    case = _case(model, images(model))
    estimate_population(model, [call.images for call in case.images.calls[::2]])
    sites = [
        drift.Drift(site, 0.0, 0.0, 0.0, 0.0, (torch.zeros(1), torch.ones(1)))
        for site in case.sites
    ]
    dark = [
        call.map(lambda x: 0.3 * x - 1) if at % 2 else call
        for at, call in enumerate(case.images.calls)
    ]
    mixed = dataclasses.replace(case, images=dataclasses.replace(case.images, calls=tuple(dark)))

    assert [*drift._many_small_drifts(mixed, sites)] == []


def test_statistics_that_hardly_move_the_answers_are_no_fault() -> None:
    """Every image comes twice, once in either half: chance is nothing, and yet a few per cent are
    none.
    """
    model = trained()
    case = _case(model, images(model))
    twice = tuple(call for call in case.images.calls for _ in range(2))
    case = dataclasses.replace(case, images=dataclasses.replace(case.images, calls=twice))
    estimate_population(model, [call.images for call in twice])
    norms(model)[-1].running_var.mul_(1.1)
    assert [*drift._many_small_drifts(case, [_drift(site, 0.0) for site in case.sites])] == []
    norms(model)[-1].running_var.mul_(4.0)
    assert len([*drift._many_small_drifts(case, [_drift(site, 0.0) for site in case.sites])]) == 1


def _drift(site: Any, mean: float) -> drift.Drift:
    return drift.Drift(site, mean, 0.0, 0.0, 0.0, (site.mean, site.var))


def test_images_are_the_cause_where_the_first_norm_sees_other_variances_at_the_same_means() -> None:
    """A later norm alone is far off."""
    model = trained()
    case = _case(model, images(model))
    drifts = [_drift(site, 0.0) for site in case.sites]

    assert [drift._far_off(case, drifts, [drifts[3]]).name] == ["wrong-statistics"]

    mean, var = drifts[0].seen
    drifts[0] = dataclasses.replace(drifts[0], seen=(mean, 2 * var))
    assert [drift._far_off(case, drifts, [drifts[3]]).name] == ["drifted-domain"]


@pytest.mark.parametrize(("share", "name"), [(0.4, "drifted-domain"), (0.6, "zero-betas")])
def test_betas_of_0_are_the_cause_where_most_norms_have_none(share: float, name: str) -> None:
    """Of all norms: those whose gammas were never trained count as well."""
    model = trained()
    for at, norm in enumerate(norms(model)):
        nn.init.zeros_(norm.bias)
        if at >= share * len(norms(model)):
            nn.init.ones_(norm.weight)
    case = _case(model, images(model))
    finding = Finding("drifted-domain", (), "these are others", Certainty.LIKELY, "", "")
    assert drift._with_cause(case, finding).name == name


def test_one_large_batch_is_told_into_parts() -> None:
    model = trained()
    seen = ImageBatches.read(model, [torch.cat(images(model))])
    assert [sum(call.count for call in part) for part in seen.parts] == [COUNT // 4] * 4


def test_another_normalization_has_to_fit_each_part_of_the_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = trained()
    case = _case(model, images(model))
    asked = []

    def distances(model: nn.Module, images: Tensor) -> list[float]:
        asked.append(images)
        return [1.0] * 5 if len(asked) == 1 else [0.001, 0.001, 0.9, 0.001, 0.001]

    monkeypatch.setattr(normalization, "_distances", distances)
    assert [*normalization.unfit_preprocessing(case)] == []
    assert len(asked) > 2


def test_the_error_is_that_of_a_mean_over_parts() -> None:
    parts = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean, error = drift._median_size(parts)
    assert mean == pytest.approx(
        statistics.median(abs(statistics.mean(column)) for column in parts.T.tolist())
    )
    errors = [statistics.stdev(column) / 4**0.5 for column in parts.T.tolist()]
    assert error == pytest.approx(statistics.median(errors))
