"""Networks without BatchNorm get back the means and variances that their layers gave before they
were changed.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import update_bn
from torch.overrides import TorchFunctionMode

import normswap
from normswap import provenance
from normswap.errors import RefusedError
from normswap.surgery.recalibration import recalibrate


def network(*, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, bias=bias), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.SiLU()]
    return (
        nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
        .double()
        .eval()
    )


def images(count: int = 40) -> list[Tensor]:
    torch.manual_seed(1)
    return [*torch.randn(count, 3, 9, 9, dtype=torch.float64).split(16)]


@torch.no_grad()
def pruned(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        if parameter.ndim > 1:
            parameter[parameter.abs() < parameter.abs().median()] = 0
    return other


@torch.no_grad()
def moments(model: nn.Module, batches: list[Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """By torch's own forward, all images at once."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):

            def keep(_layer: Any, _args: Any, out: Tensor, path: str = path) -> None:
                rows = out.transpose(0, 1).flatten(1)
                seen[path] = (rows.mean(1), rows.var(1))

            layer.register_forward_hook(keep)
    model(torch.cat(batches))
    return seen


def test_by_biases_alone_the_weights_stay() -> None:
    source = network()
    batches = images()
    sparse = pruned(source)
    done = recalibrate(sparse, batches, against=source, means_only=True, input_size=(3, 9, 9))
    record = provenance.of(done.model)

    assert record is not None
    assert {name: record.plan.steps[-1].options[name] for name in ("against", "scales")} == {
        "against": 1,
        "scales": False,
    }

    wanted = moments(copy.deepcopy(source), batches)
    got = moments(copy.deepcopy(done.model), batches)
    assert all(
        torch.allclose(wanted[path][0], got[path][0], rtol=1e-9, atol=1e-12) for path in wanted
    )
    assert all(
        torch.equal(dict(done.model.named_parameters())[name], value)
        for name, value in sparse.named_parameters()
        if value.ndim > 1
    )


def test_of_several_references_the_moments_are_averaged() -> None:
    one = network()
    two = network()
    batches = images()
    with torch.no_grad():
        two[0].bias.add_(1.0)  # type: ignore[index, operator, union-attr]
    got = moments(
        recalibrate(network(), batches, against=[one, two], input_size=(3, 9, 9)).model, batches
    )
    first = moments(one, batches)
    second = moments(two, batches)

    assert torch.allclose(got["0"][0], (first["0"][0] + second["0"][0]) / 2)
    assert torch.allclose(got["2"][1].sqrt(), (first["2"][1].sqrt() + second["2"][1].sqrt()) / 2)


def test_a_layer_without_bias_keeps_its_means() -> None:
    source = network(bias=False)
    done = recalibrate(pruned(source), images(), against=source, input_size=(3, 9, 9))
    assert done.notes[1] == "1 layers have no bias: their means stay as they are"


class Calls(nn.Module):
    """Calls its first convolution so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.times = times
        self.first = nn.Conv2d(3, 3, 3, padding=1)
        self.last = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.relu(self.first(x))
        return self.last(x).mean((2, 3))


@pytest.mark.parametrize("times", [(1, 2), (2, 1), (2, 2)], ids=str)
def test_a_layer_that_is_called_twice_stays_as_it_is(times: tuple[int, int]) -> None:
    """Its one weight cannot give two outputs the moments of one, nor one those of two."""
    source, changed = (Calls(count).double().eval() for count in times)
    sparse = pruned(changed)
    done = recalibrate(sparse, images(), against=source, input_size=(3, 9, 9))
    assert "of 1 layers" in done.notes[0]
    before = sparse.state_dict()
    after = done.model.state_dict()
    assert [name for name in before if not before[name].equal(after[name])] == [
        "last.weight",
        "last.bias",
    ]


class Ordered(nn.Module):
    """Two convolutions, of which either may be called first."""

    def __init__(self, skip_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.skip_first = skip_first
        self.skip = nn.Conv2d(3, 4, 3)
        self.branch = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.skip_first:
            skip = self.skip(x)
            return skip + self.branch(torch.relu(x))
        branch = self.branch(torch.relu(x))
        return self.skip(x) + branch


@pytest.mark.parametrize("skip_first", [False, True])
def test_a_reference_may_call_its_layers_in_another_order(skip_first: bool) -> None:
    source, other = (Ordered(first).double().eval() for first in (skip_first, not skip_first))
    batches = images()

    done = recalibrate(pruned(other), batches, against=source, input_size=(3, 9, 9))

    wanted = moments(source, batches)
    got = moments(copy.deepcopy(done.model), batches)
    for path, (mean, variance) in wanted.items():
        assert torch.allclose(got[path][0], mean), path
        assert torch.allclose(got[path][1], variance), path


def test_a_channel_that_hardly_varies_stays_as_wide_as_it_is() -> None:
    """What is left of it is rounding, and ten million times as much would be noise."""
    source = network()
    faint = copy.deepcopy(source)
    with torch.no_grad():
        faint[0].weight[0] *= 1e-7  # type: ignore[index, union-attr, operator]
    done = recalibrate(faint, images(), against=source, input_size=(3, 9, 9))
    before, after = (model.get_parameter("0.weight") for model in (faint, done.model))
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[0], source.get_parameter("0.weight")[0])


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (network(), {}, "against=SOURCE"),
        (
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).double(),
            {"against": network()},
            "Leave out",
        ),
        (nn.Sequential(nn.Conv2d(3, 4, 3)).double(), {"against": network()}, "at other paths"),
    ],
)
def test_what_cannot_be_restored_is_refused(
    model: nn.Module, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(RefusedError) as error:
        recalibrate(model.eval(), images(), input_size=(3, 9, 9), **options)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "how",
    [
        lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
    ],
)
def test_weights_that_are_made_of_others_are_refused_by_path(
    how: Callable[[nn.Module], nn.Module],
) -> None:
    """Layers behind one that was left out would have made up for it, and nobody was told."""
    source = network()
    model = network()
    path, layer = next(
        (path, one) for path, one in model.named_modules() if isinstance(one, nn.Conv2d)
    )
    how(layer)

    with pytest.raises(
        RefusedError, match=rf"the weight of {path} is made of other tensors.*prune\.remove"
    ):
        recalibrate(model, images(), against=source, input_size=(3, 9, 9))


def test_a_weight_that_is_made_of_others_may_stand_where_no_reference_has_a_layer() -> None:
    """A head for other classes: its moments are nobody's."""
    source = network()
    model = network()
    model[6] = parametrizations.weight_norm(nn.Linear(8, 7).double())  # type: ignore[operator]
    done = recalibrate(pruned(model), images(), against=source, input_size=(3, 9, 9))
    assert "of 2 layers" in done.notes[0]


class Branched(nn.Module):
    """Two convolutions with norms that are summed, and a classifier for maps of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.arms = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 6, size, padding=size // 2), nn.BatchNorm2d(6))
            for size in (1, 3)
        )
        self.head = nn.Linear(6 * 81, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.arms[0](x) + self.arms[1](x)).relu().flatten(1))


def test_a_reference_is_folded_branch_by_branch_at_the_given_size() -> None:
    """Each convolution gets the moments of its norm's output, and not those of the sum."""
    torch.manual_seed(0)
    source = Branched().double()
    batches = images()
    source(torch.cat(batches))  # statistics
    folded = normswap.convert(source.eval(), "folded", input_size=(3, 9, 9), branches="keep").model

    changed = copy.deepcopy(folded)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1 + 0.3 * torch.randn_like(parameter))

    done = recalibrate(changed, batches, against=source, input_size=(3, 9, 9))
    assert "of 3 layers" in done.notes[0]

    wanted = moments(folded, batches)
    got = moments(done.model, batches)
    assert len(wanted) == 3

    for path, (mean, var) in wanted.items():
        assert torch.allclose(got[path][0], mean, atol=1e-9)
        assert torch.allclose(got[path][1], var, rtol=1e-9)


def test_hooks_that_stay_do_not_disturb_measured_statistics() -> None:
    """Against torch's own `update_bn`, with what a hook makes of a convolution's output, and a
    pruned weight.
    """
    layers = [
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3),
        nn.BatchNorm2d(4),
    ]
    model: Any = nn.Sequential(*layers).double().eval()
    model[0].register_forward_hook(lambda _module, _args, out: out * 2)
    prune.l1_unstructured(model[3], "weight", amount=0.5)
    batches = images(48)
    done = recalibrate(model, batches, inputs=batches[0]).model
    update_bn(batches, model)

    for at in (1, 4):
        mine: Any = done.get_submodule(str(at))
        assert torch.allclose(mine.running_mean, model[at].running_mean, atol=1e-10)
        assert torch.allclose(mine.running_var, model[at].running_var, rtol=1e-10)


class Rounding(TorchFunctionMode):
    """Rounds what a convolution gives, as fake quantizers do that a library hooks in."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return (out * 4).round() / 4 if func is torch.conv2d else out


class Hooked(nn.Sequential):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with Rounding():
            return super().__call__(*args, **kwargs)


def test_what_is_hooked_in_is_not_overlooked() -> None:
    source = network()
    with pytest.raises(RefusedError, match="something else than its modules"):
        recalibrate(Hooked(*copy.deepcopy(source)), images(), against=source, input_size=(3, 9, 9))
