"""What the checks read of a network and what a diagnosis says, against accounts made by hand."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_doctor import settled
from test_doctor_on_images import case_of, drift_of
from timm.layers import BatchNormAct2d, FrozenBatchNormAct2d
from torch import Tensor, nn

import normswap
from normswap.diagnosis import answers, doctor, drift, normalization, settings, weight_moments
from normswap.diagnosis.findings import Case, Certainty, Diagnosis, Finding, StoredNorm, sites_of
from normswap.diagnosis.image_batches import ImageBatches
from normswap.diagnosis.normalization import _Preparation
from normswap.errors import SourceError, TraceError
from normswap.graph.inspection import inspect
from normswap.models.calling import Example
from normswap.surgery.network import Network


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def small(*between: nn.Module) -> Any:
    """Two norms, with gammas and betas as after a training, and the statistics of noise."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *between,
        nn.Conv2d(16, 8, 3),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 4, 1),
    )
    for norm in (net[1], net[-2]):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, std=0.3)
    return settled(net)


def without_images(model: nn.Module) -> Case:
    return Case(
        Network(model, inputs=noise(2, 3, 12, 12)),
        anatomy=None,
        sites=sites_of(model, None),
        name="net",
        data="pictures",
    )


def fault_names(diagnosis: Diagnosis) -> list[str]:
    return [fault.name for fault in diagnosis.faults]


@pytest.mark.parametrize(
    ("mean", "var", "gamma", "beta", "starts_at_init", "is_untouched"),
    [
        ([0, 0], [1, 1], [1, 1], [0, 0], True, True),
        ([0, 0], [1, 1], [0, 0], [0, 0], True, True),
        ([0, 0], [1, 1], None, None, True, True),
        ([0, 0], [1, 1], [1, 0], [0, 0], True, False),
        ([0, 0], [1, 1], [2, 2], [0, 0], True, False),
        ([0, 0], [1, 1], [1, 1], [0, 0.1], True, False),
        ([0, 0], [1, 2], [1, 1], [0, 0], False, True),
        ([0, 0.1], [1, 1], [1, 1], [0, 0], False, True),
        ([], [], [1, 1], [0, 0], False, True),
    ],
)
def test_a_norm_is_new_where_all_its_numbers_are(
    mean: list[float],
    var: list[float],
    gamma: list[float] | None,
    beta: list[float] | None,
    *,
    starts_at_init: bool,
    is_untouched: bool,
) -> None:
    norm = StoredNorm(
        "bn",
        module=nn.Identity(),
        mean=torch.tensor(mean),
        var=torch.tensor(var),
        gamma=None if gamma is None else torch.tensor(gamma),
        beta=None if beta is None else torch.tensor(beta),
        eps=1e-4,
        momentum=0.2,
    )

    assert (norm.starts_at_init, norm.is_untouched) == (starts_at_init, is_untouched)


def test_a_network_that_cannot_be_recorded_is_diagnosed_by_its_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(network: Network) -> None:
        raise TraceError("it leaves PyTorch")

    net = small()
    net[4].running_mean[3] = float("nan")
    monkeypatch.setattr(Network, "anatomy", property(refuse))

    diagnosis = normswap.diagnose(net, inputs=noise(2, 3, 12, 12))

    assert [(fault.name, fault.paths) for fault in diagnosis.faults] == [("not-finite", ("4",))]
    assert diagnosis.norms == 2
    assert "it leaves PyTorch" in diagnosis.notes[0]


def test_a_diagnosis_is_told_whole_as_json() -> None:
    finding = Finding(
        "eps",
        paths=("a.bn", "b.bn"),
        evidence="eps is 0.1",
        certainty=Certainty.LIKELY,
        cost="wrong scales",
        mend="norm.eps = 0.01",
    )
    sure = replace(finding, name="not-finite", certainty=Certainty.CERTAIN)

    body = doctor.body_of(Diagnosis((finding, sure), norms=7, notes=("a note",)), "net.pt")

    first = {
        "name": "eps",
        "paths": ("a.bn", "b.bn"),
        "evidence": "eps is 0.1",
        "certainty": "likely",
        "cost": "wrong scales",
        "mend": "norm.eps = 0.01",
    }
    assert body == {
        "source": "net.pt",
        "norms": 7,
        "findings": [first, {**first, "name": "not-finite", "certainty": "certain"}],
        "faults": 2,
        "notes": ["a note"],
    }


def test_the_command_that_mends_has_network_and_images_where_they_belong() -> None:
    net = small()
    net[1].running_var[:] = 0.0

    (finding,) = normswap.diagnose(
        net, inputs=noise(2, 3, 12, 12), name="net.pt", data="pictures"
    ).faults

    assert finding.mend == "normswap recalibrate net.pt --data pictures"


@pytest.mark.parametrize(
    ("tensor", "value", "is_told"),
    [
        ("weight", 2.0, False),
        ("weight", 0.0, False),
        ("running_var", 0.0, False),
        ("weight", float("inf"), True),
        ("running_mean", float("nan"), True),
        ("running_var", float("inf"), True),
    ],
)
def test_a_norm_that_is_never_called_is_no_fault_and_is_told_where_it_is_broken(
    tensor: str, value: float, *, is_told: bool
) -> None:
    net = small()
    net[0].spare = nn.BatchNorm2d(5).eval()
    getattr(net[0].spare, tensor).data[2] = value

    diagnosis = normswap.diagnose(net, inputs=noise(2, 3, 12, 12))

    assert diagnosis.faults == ()
    assert any("0.spare" in note for note in diagnosis.notes) == is_told


@pytest.mark.parametrize(
    ("make", "is_named"), [(FrozenBatchNormAct2d, False), (nn.BatchNorm2d, True)]
)
def test_a_norm_whose_statistics_are_constants_is_never_in_training(
    make: Callable[[int], nn.Module], *, is_named: bool
) -> None:
    """Its mode changes nothing."""
    net = small()
    norm = make(16).eval()
    norm.load_state_dict(net[1].state_dict(), strict=False)
    net[1] = norm.train()

    diagnosis = normswap.diagnose(net, inputs=noise(2, 3, 12, 12))

    assert ("training-mode" in fault_names(diagnosis)) == is_named


def test_norms_without_statistics_have_one_fault_alone() -> None:
    net = small()
    for norm in (net[1], net[4]):
        norm.running_mean = norm.running_var = norm.num_batches_tracked = None
        norm.track_running_stats = False

    diagnosis = normswap.diagnose(net, inputs=noise(2, 3, 12, 12))

    assert [(fault.name, fault.paths) for fault in diagnosis.faults] == [
        ("no-statistics", ("1", "4"))
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_weights_that_were_not_loaded_are_told_in_any_precision(dtype: torch.dtype) -> None:
    """The squares of these weights are below the smallest number of float16."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(
        nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.Conv2d(16, 4, 1)
    )
    net[0].weight.data.mul_(1e-3)

    diagnosis = normswap.diagnose(net.eval().to(dtype), inputs=noise(2, 3, 12, 12).to(dtype))

    assert fault_names(diagnosis) == ["not-loaded"]


@pytest.mark.parametrize(("eps", "built_eps"), [(1e-2, 1e-5), (1e-5, 1e-2)])
def test_another_eps_harms_channels_with_variances_near_the_larger_one(
    eps: float, built_eps: float
) -> None:
    net = small()
    net[1].eps = eps
    built = copy.deepcopy(net)
    built[1].eps = built_eps
    case = without_images(net)
    vars(case)["bare"] = built

    (finding,) = settings.unlike_builder(case)

    assert isinstance(finding, Finding)
    assert finding.paths == ("1",)
    assert f"eps is {eps:g} in 1 of 2 norms; the library builds them with {built_eps:g}" in (
        finding.evidence
    )
    assert "a variance near 0.01" in finding.cost
    assert finding.mend.endswith(f".eps = {built_eps}")


@pytest.mark.parametrize("trained_eps", [1e-3, 1e-5])
@torch.no_grad()
def test_the_eps_with_which_the_images_fit_is_found(trained_eps: float) -> None:
    """The variances of the first norm are below 1e-3: its eps scales the input of the second."""
    net = small()
    net[0].weight.mul_(0.03)
    for norm in (net[1], net[4]):
        norm.eps = trained_eps
    settled(net)
    case = case_of(net, list(noise(64, 3, 12, 12, seed=1).split(16)))
    assert [*settings.unfit_eps(case)] == []

    other_eps = {1e-3: 1e-5, 1e-5: 1e-3}[trained_eps]
    for norm in (net[1], net[4]):
        norm.eps = other_eps
    (finding,) = settings.unfit_eps(case_of(net, list(noise(64, 3, 12, 12, seed=1).split(16))))

    assert (finding.name, finding.paths) == ("eps", ("1", "4"))
    assert f"eps is {other_eps:g}; with {trained_eps:g}" in finding.evidence
    assert "64 images" in finding.evidence
    assert "a variance near 0.001" in finding.cost
    assert finding.mend.endswith(f"norm.eps = {trained_eps}")


class Gives(nn.Module):
    """A network that gives what `output` makes of its images."""

    def __init__(self, output: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.output = output

    def forward(self, x: Tensor) -> object:
        return self.output(x)


@pytest.mark.parametrize(
    ("output", "are_scores"),
    [
        (lambda x: x[:, :, 0, 0], True),
        (lambda x: x[:, :2, 0, 0], True),
        (lambda x: x[:, :1, 0, 0], False),
        (lambda x: x[:, :, 0], False),
        (lambda x: (x[:, :2, 0, 0], x[:, :2, 0, 1]), False),
        (lambda x: (x[:, :2, 0, 0], x[:, 0, 0, 0].long()), True),
    ],
    ids=["three", "two", "one", "maps", "two outputs", "labels beside"],
)
def test_one_output_of_two_classes_or_more_is_class_scores(
    output: Callable[[Tensor], object], *, are_scores: bool
) -> None:
    images = noise(5, 3, 4, 4)
    calls = [Example((batch,)) for batch in images.split(2)]

    scores = answers.class_scores(Gives(output), calls)

    assert (scores is not None) == are_scores
    if scores is not None:
        expected: Any = output(images)
        assert torch.equal(scores, (expected[0] if isinstance(expected, tuple) else expected))


def test_entropies_of_answers_are_those_of_their_probabilities() -> None:
    """Half and half is ln 2. One of four with 7/10, the others with 1/10 each, by hand."""
    probabilities = torch.tensor([[0.5, 0.5, 0, 0], [0.25] * 4, [0.1, 0.7, 0.1, 0.1]]) + 1e-12
    images = noise(3, 3, 4, 4)

    entropies = normalization._entropies(Gives(lambda x: probabilities.log() + 2.5), images)

    assert entropies is not None
    mostly_one = -(0.7 * math.log(0.7) + 3 * 0.1 * math.log(0.1))
    assert entropies.tolist() == pytest.approx([math.log(2), math.log(4), mostly_one], abs=1e-6)


@torch.no_grad()
def test_answers_tell_whether_statistics_are_those_of_the_images() -> None:
    net = nn.Sequential(small(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    batches = list(noise(32, 3, 12, 12, seed=1).split(8))
    case = case_of(net, batches)
    assert case.images is not None
    right = case.renewed(case.images.calls)
    far_off: Any = copy.deepcopy(right)
    far_off[0][1].running_mean.sub_(20)
    constant: Any = copy.deepcopy(right)
    constant[0][1].weight.zero_()

    assert answers.tells_images_apart(case_of(right, batches))
    assert not answers.tells_images_apart(case_of(far_off, batches))
    assert not answers.tells_images_apart(case_of(constant, batches))


class OfTwoInputs(nn.Module):
    """A network of two vectors, of which neither is an image."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.norm(x) + y


@pytest.mark.parametrize("count", [8, 12, 13, 14, 15])
def test_a_batch_of_several_inputs_is_cut_into_four_parts_that_share_no_sample(count: int) -> None:
    """The samples are dealt in turn. Those that would make a part larger are left out."""
    numbers = torch.arange(float(count))
    x = numbers[:, None].expand(count, 4)

    seen = ImageBatches.read(OfTwoInputs(), [{"x": x, "y": 10 * x}])

    dealt = count // 4 * 4
    parts = [call.tensors() for call in seen.calls]
    assert [part[0][:, 0].tolist() for part in parts] == [
        numbers[start:dealt:4].tolist() for start in range(4)
    ]
    for first, second in parts:
        assert torch.equal(second, 10 * first)


def test_copies_of_a_sample_of_several_inputs_are_no_evidence() -> None:
    x = torch.arange(8.0)[:, None].expand(8, 4)
    whole = {"x": x, "y": 10 * x}
    alike = {"x": x[:1].repeat(32, 1), "y": x[1:2].repeat(32, 1)}

    for batches in ([whole] * 4, [alike]):
        with pytest.raises(SourceError, match="too few"):
            ImageBatches.read(OfTwoInputs(), batches)

    others = [{"x": x + number, "y": x} for number in (0, 8, 16, 24)]
    assert ImageBatches.read(OfTwoInputs(), [*others, whole, others[0]]).count == 40


@pytest.mark.parametrize(
    ("of_other_weights", "tells_apart", "first_is_off", "is_asked"),
    [
        (True, True, False, True),
        (False, True, False, False),
        (True, False, False, False),
        (True, True, True, False),
    ],
)
def test_a_drift_that_freezing_explains_is_a_question(
    monkeypatch: pytest.MonkeyPatch,
    *,
    of_other_weights: bool,
    tells_apart: bool,
    first_is_off: bool,
    is_asked: bool,
) -> None:
    """The stored means are those of other weights, the stem fits, and the answers are right."""
    case = case_of(small(), list(noise(32, 3, 12, 12).split(8)))
    vars(case)["of_other_weights"] = of_other_weights
    first, second = case.sites
    drifts = [drift_of(first, mean=2.0 if first_is_off else 0.0), drift_of(second, mean=1.5)]
    monkeypatch.setattr(drift, "measured_drifts", lambda case: drifts)
    monkeypatch.setattr(drift, "tells_images_apart", lambda case: tells_apart)

    (answer,) = drift.drifted(case)

    if is_asked:
        assert isinstance(answer, str)
        assert answer.startswith("1 of 2 norms keep other statistics than 32 images have")
        assert case.recalibrate in answer
        # There are images, so nobody is told to give some.
        assert "normswap doctor" not in answer
    else:
        assert isinstance(answer, Finding)
        assert answer.name == ("drifted-domain" if first_is_off else "wrong-statistics")


def test_without_images_a_question_says_what_would_answer_it() -> None:
    question = drift.frozen_or_stale(without_images(small()), "The means are others")

    assert "normswap doctor net --data pictures" in question


@pytest.mark.parametrize("has_other_details", [False, True])
def test_small_drifts_are_laid_to_the_images_where_the_stem_sees_other_details(
    *, has_other_details: bool
) -> None:
    net = small()
    case = case_of(net, list(noise(64, 3, 12, 12, seed=1).split(16)))
    net[4].running_var.mul_(4)
    drifts = [drift_of(site) for site in case.sites]
    if has_other_details:
        mean, var = drifts[0].seen
        drifts[0] = replace(drifts[0], seen=(mean, 2 * var))

    (finding,) = drift._many_small_drifts(case, drifts)

    assert finding.paths == ("1", "4")
    assert finding.name == ("drifted-domain" if has_other_details else "wrong-statistics")
    assert ("the first one finds the means that it keeps" in finding.evidence) == has_other_details


def test_pixels_come_back_from_what_the_network_takes() -> None:
    pixels = torch.rand(2, 3, 4, 5, dtype=torch.float64)
    mean = (0.2, 0.5, 0.7)
    std = (0.1, 0.3, 0.9)
    preparation = _Preparation(mean, std, reverses=False)

    prepared = preparation.apply(pixels)

    for channel in range(3):
        by_hand = (pixels[:, channel] - mean[channel]) / std[channel]
        assert torch.allclose(prepared[:, channel], by_hand, rtol=1e-14, atol=0)
    assert torch.allclose(preparation.undo(prepared), pixels, rtol=0, atol=1e-14)
    reversed_order = replace(preparation, reverses=True)
    assert torch.equal(reversed_order.apply(pixels.flip(1)), prepared)


@pytest.mark.parametrize(
    ("least", "most", "given"),
    [
        (0.0, 1.0, {"pixels in 0..1", "std 0.1,0.3,0.9", "mean 0, std 1"}),
        (0.0, 255.0, {"pixels in 0..255", "mean 0, std 0.003922"}),
        (-1.0, 1.0, {"mean 0.5, std 0.5"}),
        (-50.0, 200.0, set()),
    ],
)
def test_pixels_that_are_guessed_are_tried_with_the_stated_preparation_alone(
    least: float, most: float, given: set[str]
) -> None:
    present = _Preparation((0.2, 0.5, 0.7), (0.1, 0.3, 0.9), reverses=False)
    images = torch.linspace(least, most, 2 * 3 * 16, dtype=torch.float64).reshape(2, 3, 4, 4)

    guessed = [trial for trial in normalization._trials(present, images) if trial.given_as]

    for trial in guessed:
        assert float(trial.pixels.min()) > -0.02
        assert float(trial.pixels.max()) < 1.02
    # Each guess is tried with both orders of colours.
    assert {trial.preparation for trial in guessed} <= {present, replace(present, reverses=True)}
    said = [trial.given_as for trial in guessed]
    assert all(said.count(words) == 2 for words in said)
    assert {token for token in given for words in said if token in words} == given
    assert bool(said) == bool(given)


@pytest.mark.parametrize(("count_off", "fits"), [(0, True), (1, True), (2, True), (3, False)])
def test_a_preparation_fits_where_half_of_the_norms_fit(
    monkeypatch: pytest.MonkeyPatch, count_off: int, *, fits: bool
) -> None:
    case = case_of(small(), list(noise(16, 3, 12, 12).split(4)))
    drifts = [drift_of(None, mean=2.0 * (number < count_off)) for number in range(4)]
    monkeypatch.setattr(normalization, "measured_drifts", lambda case: drifts)

    assert normalization._fits_most_norms(case, noise(16, 3, 12, 12, seed=1)) == fits


def as_squares(layer: Any) -> Any:
    """A copy whose weights are squared and whose bias is 0: it adds the inputs' variances."""
    squared = copy.deepcopy(layer)
    squared.weight.data.square_()
    if squared.bias is not None:
        squared.bias.data.zero_()
    return squared


@pytest.mark.parametrize(
    ("first", "layer", "second", "sizes"),
    [
        (nn.BatchNorm1d(6), nn.Linear(6, 4), nn.BatchNorm1d(4), ()),
        (nn.BatchNorm1d(6), nn.Conv1d(6, 4, 3, bias=False), nn.BatchNorm1d(4), (3,)),
        (nn.BatchNorm2d(6), nn.Conv2d(6, 4, (2, 3), groups=2), nn.BatchNorm2d(4), (2, 3)),
        (nn.BatchNorm2d(6), nn.Conv2d(6, 12, 1, groups=6), nn.BatchNorm2d(12), (1, 1)),
    ],
    ids=["linear", "1-D", "two groups", "depthwise"],
)
@torch.no_grad()
def test_moments_behind_a_layer_are_those_that_the_layer_computes(
    first: Any, layer: Any, second: nn.Module, sizes: tuple[int, ...]
) -> None:
    """Of a constant input beta, and of independent inputs with the variances gamma^2."""
    torch.manual_seed(0)
    nn.init.uniform_(first.weight, 0.5, 2.0)
    nn.init.normal_(first.bias)
    net = nn.Sequential(first, layer, second).double().eval()
    traced = inspect(net, noise(2, 6, *sizes).double()).traced

    mean, var = weight_moments.predicted_moments(traced)["2"]

    ones = torch.ones(1, 6, *sizes, dtype=torch.float64)
    shape = (1, 6, *[1] * len(sizes))
    by_hand = layer(ones * first.bias.view(shape)).flatten()
    var_by_hand = as_squares(layer)(ones * first.weight.view(shape).square()).flatten()
    assert torch.allclose(mean, by_hand, rtol=1e-12)
    assert torch.allclose(var, var_by_hand, rtol=1e-12)


class Pooled(nn.Module):
    """An activation that also averages each map."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu().flatten(2).mean(2)


@torch.no_grad()
def test_an_activation_that_changes_shapes_does_not_stop_the_diagnosis() -> None:
    torch.manual_seed(0)
    norm = BatchNormAct2d(8, act_layer=Pooled)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.Linear(8, 16), nn.BatchNorm1d(16))

    diagnosis = normswap.diagnose(settled(net), inputs=noise(2, 3, 12, 12))

    assert diagnosis.norms == 2
