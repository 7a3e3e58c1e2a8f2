"""Norms with statistics per sample and a large eps: signs, factors of channels; the cost, the
descent, going back.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import zoo_networks
from support.lived_in_networks import distance, run
from support.sampled_tables import quick
from torch import Tensor, nn

from normswap import shipped
from normswap.calibration import per_sample_rescaling
from normswap.calibration.per_sample_rescaling import NormInputs
from normswap.graph.inspection import inspect
from normswap.images.datasets import make_loader
from normswap.models.calling import Example
from normswap.schemes import groupnorm
from normswap.surgery import applying, conversion

CHANNELS = 12
GROUPS = 2
EPS = 1e-2


def maps(count: int = 40) -> Tensor:
    """Channels that go together, and whose deviations differ a hundredfold; of mean 0 over all
    images.
    """
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(CHANNELS, CHANNELS, generator=generator, dtype=torch.float64)
    level = torch.randn(count, CHANNELS, 1, generator=generator, dtype=torch.float64)
    x = torch.einsum(
        "ij,njp->nip",
        mixing,
        level + torch.randn(count, CHANNELS, 30, generator=generator).double(),
    )
    x = x * torch.logspace(-1, 1, CHANNELS, dtype=torch.float64)[:, None]
    return x - x.mean((0, 2), keepdim=True)


def norm_of(x: Tensor, effect: Tensor) -> Any:
    """A BatchNorm that knows the channels' variances, and through which errors cost what they are
    to.
    """
    norm: Any = nn.BatchNorm2d(CHANNELS, eps=EPS).double()
    norm.running_var.copy_(x.square().mean((0, 2)))
    norm.weight.data.copy_((effect * (norm.running_var + EPS)).sqrt())
    return norm


def site(x: Tensor, effect: Tensor, eps: float = EPS) -> NormInputs:
    moments = torch.stack([x.mean(2), x.square().mean(2)])
    return NormInputs.of([moments], norm_of(x, effect), GROUPS, eps)


def leveled(scale: Tensor, var: Tensor) -> Tensor:
    """With a factor for each group, so that all groups have the variance that the channels have in
    the mean.
    """
    groups = (scale.square() * var).view(GROUPS, -1).mean(1)
    return scale * (var.mean() / groups).sqrt().repeat_interleave(CHANNELS // GROUPS)


def cost(x: Tensor, effect: Tensor, scale: Tensor, eps: float) -> float:
    """By torch's own GroupNorm: what is wrong with x when it has gone through the norm and back."""
    reached = leveled(scale, x.square().mean((0, 2))).view(-1, 1) * x
    parts = reached.reshape(len(x), GROUPS, -1)
    mean = parts.mean(2)
    var = parts.var(2, correction=0)
    normed = F.group_norm(reached, GROUPS, eps=eps)
    back = normed * (var.mean(0) + eps).sqrt().repeat_interleave(CHANNELS // GROUPS)[:, None]
    assert mean.mean(0).abs().max() < 1e-6 * var.max()
    wrong = (back - reached) / reached * x
    return float((wrong.square().mean((0, 2)) * effect).sum())


@pytest.mark.parametrize("eps", [EPS, 1.0, 100.0])
def test_the_loss_is_what_a_groupnorm_gets_wrong(
    monkeypatch: pytest.MonkeyPatch, eps: float
) -> None:
    """One eps for groups of which one is a hundred times as loud as the other."""
    monkeypatch.setattr(per_sample_rescaling, "CHANCE", 0.0)
    x = maps()
    effect = torch.rand(CHANNELS, generator=torch.Generator().manual_seed(1)).double()
    place = site(x, effect, eps)

    scale = place.least_costly()
    for one in (scale, scale.abs(), torch.ones_like(scale)):
        parts = place.loss(one.float().view(GROUPS, -1))
        assert float(parts.sum() * effect.max()) == pytest.approx(
            cost(x, effect, one, eps), rel=1e-3
        )


@pytest.mark.parametrize("eps", [EPS, 1.0, 100.0])
def test_the_descents_gradient_is_autograds_of_the_loss(eps: float) -> None:
    """In float64; scales of both signs, whose group has another mean variance than the channels."""
    place = site(maps(), torch.logspace(2, -2, CHANNELS, dtype=torch.float64), eps)
    parts = (place.means, place.squares, place.var, place.effect, place.eps)
    precise = NormInputs(*(part.double() for part in parts))
    signs = torch.tensor([1.0, -1.0, 1.0]).double().repeat(GROUPS, CHANNELS // GROUPS // 3)
    scale = signs * torch.linspace(0.3, 2.0, CHANNELS, dtype=torch.float64).view(GROUPS, -1)

    log = torch.zeros_like(scale, requires_grad=True)
    precise.loss(precise._with_mean_variance(scale * log.exp())).sum().backward()

    loss = per_sample_rescaling._Loss(
        means=precise.means.numpy(),
        squares=precise.squares.numpy(),
        var=precise.var.numpy(),
        effect=precise.effect.numpy(),
        eps=precise.eps.numpy(),
        chance=precise.means.var(1).numpy(),
    )
    found = torch.from_numpy(loss.gradient(scale.numpy()))
    assert log.grad is not None
    assert torch.allclose(found, log.grad, rtol=1e-9, atol=1e-12 * float(log.grad.abs().max()))


@pytest.mark.parametrize("eps", [EPS, 1.0, 100.0])
def test_the_rescaling_costs_less_than_its_parts_and_than_its_neighbours(eps: float) -> None:
    """A group's mean variance stays."""
    x = maps()
    effect = torch.logspace(2, -2, CHANNELS, dtype=torch.float64)
    place = site(x, effect, eps)
    scale = place.least_costly()
    var = x.square().mean((0, 2))
    kept = (scale.square() * var).view(GROUPS, -1).mean(1)
    assert torch.allclose(kept, var.view(GROUPS, -1).mean(1), rtol=1e-4)

    def loss(scale: Tensor) -> float:
        return float(place.loss(scale.float().view(GROUPS, -1)).sum())

    best = loss(scale)
    assert best < 0.5 * loss(torch.ones_like(scale)), "factors count"
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        flips = torch.randint(0, 2, (CHANNELS,), generator=generator) * 2 - 1
        assert loss(scale * flips) > 0.9 * best


@pytest.mark.parametrize("eps", [EPS, 1.0, 100.0])
def test_the_descent_lowers_every_groups_loss_and_turns_no_sign(eps: float) -> None:
    place = site(maps(), torch.logspace(2, -2, CHANNELS, dtype=torch.float64), eps)
    signs = torch.tensor([1.0, -1.0, 1.0]).repeat(GROUPS, CHANNELS // GROUPS // 3)
    start = place._with_mean_variance(signs * torch.linspace(0.3, 2.0, CHANNELS).view(GROUPS, -1))

    found = place.descended(start)

    assert bool((place.loss(found) < 0.9 * place.loss(start)).all())
    assert torch.equal(found.sign(), signs)


def test_where_the_channels_lie_and_the_unit_of_costs_do_not_count() -> None:
    """Moments about another point, and effects beyond what float32 holds."""
    x = maps()
    effect = torch.logspace(2, -2, CHANNELS, dtype=torch.float64)
    apart = torch.linspace(-3, 3, CHANNELS, dtype=torch.float64)
    moved = x + apart.view(-1, 1)
    one = site(x, effect)
    moments = torch.stack([moved.mean(2), moved.square().mean(2)])
    two = NormInputs.of([moments], norm_of(x, 1e50 * effect), GROUPS, EPS)
    for part in ("means", "squares", "var", "effect"):
        assert torch.allclose(getattr(one, part), getattr(two, part), rtol=1e-4, atol=1e-4), part


def test_a_channel_that_is_constant_on_these_images_is_as_loud_as_the_norm_says() -> None:
    """Rounding leaves its images other means, and no squares about them (EfficientNet-Lite1, groups
    of 16).
    """
    x = maps()
    norm: Any = nn.BatchNorm2d(CHANNELS, eps=EPS).double()
    norm.running_var.copy_(x.square().mean((0, 2)))
    means = x.mean(2)
    squares = x.square().mean(2)
    means[:, 3] = 1e3 + torch.linspace(-1e-5, 1e-5, len(x), dtype=torch.float64)
    squares[:, 3] = means[:, 3].square() - 1e-6
    found = NormInputs.of([torch.stack([means, squares])], norm, GROUPS, EPS)
    assert bool((found.means.square().mean(1) <= 1.0001 * found.var).all())
    assert bool(torch.isfinite(found.least_costly()).all())


def test_independent_channels_get_the_fourth_root_of_what_they_cost() -> None:
    """Of two numbers phi, with sum(phi^2) sum(a / phi^2): by hand phi^4 = a."""
    var = torch.tensor([1.0, 4.0, 100.0, 0.25])
    effect = torch.tensor([1.0, 4.0, 0.16, 1.0])
    level = NormInputs(
        torch.zeros(1, 3, 4), torch.zeros(1, 3, 4), var[None], effect[None], torch.ones(1, 1)
    )._best_if_independent()[0]
    wanted = (var * effect) ** 0.25
    assert torch.allclose(level * var.sqrt(), wanted)
    tried = torch.rand(1000, 4, generator=torch.Generator().manual_seed(0)) + 0.1
    sums = tried.square().sum(1) * (var * effect / tried.square()).sum(1)
    assert wanted.square().sum() * (var * effect / wanted.square()).sum() <= sums.min()


@pytest.mark.parametrize("dead", [0.0, 1e-20])
def test_channels_that_are_dead_or_cost_nothing_get_finite_scales(dead: float) -> None:
    x = maps()
    effect = torch.ones(CHANNELS, dtype=torch.float64)
    x[:, :3] *= dead
    effect[2:5] = dead
    for part in (x, dead * x):
        assert bool(torch.isfinite(site(part, effect).least_costly()).all())
    assert bool((site(x, effect).least_costly() != 0).all())


@pytest.fixture(scope="module")
def pictures() -> Tensor:
    loader = make_loader(zoo_networks.PREPROCESSING, str(shipped.FOLDER / "images.tar"), workers=0)
    return torch.cat([x for x, _ in loader])[:100]


@pytest.mark.slow
@pytest.mark.parametrize("to", quick(["groupnorm", "layernorm"], ["groupnorm"]))
@pytest.mark.parametrize("kind", ["depthwise", "dense"])
def test_chosen_on_leaves_it_keeps_more_than_none_of_it(
    kind: str, to: str, monkeypatch: pytest.MonkeyPatch, pictures: Tensor
) -> None:
    """On photographs: with the same eps, than channels as they are."""
    model = zoo_networks.trained(kind)

    def wrong() -> float:
        return distance(
            run(model, pictures),
            run(conversion.convert(model, to, inputs=pictures[:2]).model, pictures),
        )

    ours = wrong()
    monkeypatch.setattr(
        NormInputs, "least_costly", lambda site: torch.ones(site.var.numel()).double()
    )
    assert ours < 0.7 * wrong()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["depthwise", "dense"])
def test_chosen_on_photographs_too_it_keeps_more_of_others(kind: str, pictures: Tensor) -> None:
    """With few channels to a group, than chosen on leaves alone; nothing is fitted."""
    model = zoo_networks.trained(kind)
    known = pictures[:50]
    others = pictures[50:]
    step, _ = conversion.plan_step(inspect(model, known[:2]), "groupnorm", group_size=4)

    errors = []
    for batches in ((), [Example((known,))]):
        target, result = (
            applying.apply_step(model, each) for each in (groupnorm.fitting_target(step), step)
        )
        per_sample_rescaling.choose_rescaling(target, result, step, Example((known[:2],)), batches)
        assert distance(run(model, others), run(target, others)) < 1e-5
        errors.append(distance(run(model, others), run(result, others)))

    assert errors[1] < errors[0]


def test_a_group_of_dead_channels_stays_dead() -> None:
    """As ImageNet-trained networks have them, filters and variances of 0, when groups are small."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 8, 3)

    norm = nn.BatchNorm2d(8)
    with torch.no_grad():
        conv.weight[2:4] = 0.0
        conv.bias[2:4] = 0.0
        norm.running_var[2:4] = 0.0  # type: ignore[index]
        norm.bias.copy_(torch.randn(8))

    model = nn.Sequential(conv, norm, nn.ReLU(), nn.Conv2d(8, 2, 1)).double().eval()
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    done = conversion.convert(model, "groupnorm", groups=4, inputs=x)
    with torch.no_grad():
        normed = done.model[1](done.model[0](x))

    assert torch.allclose(normed[:, 2:4], norm.bias[2:4].view(2, 1, 1).expand_as(normed[:, 2:4]))
