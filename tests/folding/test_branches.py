"""Branches that are summed become one convolution under `folded`.

The result is exact, and has as many convolutions as timm's own result.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from support.lived_in_networks import lived_in
from timm.layers import DropPath
from timm.utils.model import reparameterize_model
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import normswap
from normswap.errors import RefusedError
from normswap.folding import branches
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import inspect
from normswap.layers.channelwise import ChannelAffine

Body = Callable[[Any, Tensor], Tensor]


class ConvNorm(nn.Sequential):
    def __init__(self, kernel: int, **options: Any) -> None:
        options = {"padding": kernel // 2, "bias": False, **options}
        super().__init__(nn.Conv2d(4, 4, kernel, **options), nn.BatchNorm2d(4))


class Summed(nn.Module):
    """x + conv(x) + ..., then a module, and an activation; or what `body` does with the parts."""

    def __init__(
        self,
        *arms: nn.Module,
        skips: int = 0,
        then: nn.Module | None = None,
        body: Body | None = None,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.arms = nn.ModuleList(arms)
        self.skips = skips
        self.then = nn.Identity() if then is None else then
        self.body = body or Summed.total

    def total(self, x: Tensor) -> Tensor:
        total: Any = 0
        for arm in self.arms:
            # In place, as MobileOne does.
            total += arm(x)
        for _ in range(self.skips):
            total = total + x
        return self.then(total).relu()

    def two(self, x: Tensor) -> Tensor:
        first: Tensor = self.arms[0](x)
        second: Tensor = self.arms[1](x)
        return first + second

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.stem(x).relu()).mean((2, 3))


def images() -> Tensor:
    return torch.randn(3, 3, 9, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def built(net: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            module.reset_parameters()
    return lived_in(net, images())


def convolutions(net: nn.Module) -> int:
    return sum(isinstance(module, nn.modules.conv._ConvNd) for module in net.modules())


def apart(source: nn.Module, result: nn.Module) -> float:
    """The relative L2 distance of two networks' outputs."""
    with torch.no_grad():
        reference = source(images())
        return float((reference - result(images())).norm() / reference.norm())


MERGED = {
    "repvgg": lambda: Summed(ConvNorm(1), ConvNorm(3), nn.BatchNorm2d(4)),
    "many of one size": lambda: Summed(*(ConvNorm(3) for _ in range(3)), ConvNorm(1)),
    "groups": lambda: Summed(ConvNorm(3, groups=2), ConvNorm(1, groups=2), nn.BatchNorm2d(4)),
    "depthwise": lambda: Summed(ConvNorm(5, groups=4), ConvNorm(3, groups=4), nn.BatchNorm2d(4)),
    "strided": lambda: Summed(ConvNorm(3, stride=2), ConvNorm(1, stride=2)),
    "dilated": lambda: Summed(ConvNorm(5), ConvNorm(3, dilation=2, padding=2)),
    "not square": lambda: Summed(
        ConvNorm(3), nn.Conv2d(4, 4, (1, 3), padding=(0, 1)), nn.Conv2d(4, 4, 1, bias=False)
    ),
    "repvit": lambda: Summed(ConvNorm(3), nn.Conv2d(4, 4, 1), skips=1, then=nn.BatchNorm2d(4)),
    "twice itself": lambda: Summed(
        ConvNorm(3), nn.Conv2d(4, 4, 1), skips=2, then=nn.BatchNorm2d(4)
    ),
    "a norm of the sum": lambda: Summed(
        nn.Conv2d(4, 4, 3, padding=1), ConvNorm(1), then=nn.BatchNorm2d(4)
    ),
}


@pytest.mark.parametrize("case", MERGED)
def test_one_convolution(case: str, tmp_path: Path) -> None:
    net = built(MERGED[case]())
    done = normswap.convert(net, "folded", inputs=images())
    assert [step.scheme for step in done.plan.steps] == ["folded", "merged-branches"]

    used = [module for module in done.model.modules() if isinstance(module, nn.Conv2d)]
    # The stem's convolution, and the one of all branches.
    assert len(used) == 2
    assert not any(
        isinstance(module, nn.BatchNorm2d | ChannelAffine) for module in done.model.modules()
    )
    assert done.report.exact
    assert apart(net, done.model) < 1e-12

    if case == "repvgg":
        again = normswap.load(normswap.save(done, tmp_path / "net"), skeleton=MERGED[case]())
        assert apart(done.model, again) == 0


def read_elsewhere(m: Any, x: Tensor) -> Tensor:
    return torch.cat([one := m.arms[0](x), (one + m.arms[1](x)).relu()], 1)


KEPT = {
    "read elsewhere": lambda: Summed(ConvNorm(3), ConvNorm(1), body=read_elsewhere),
    "two sources": lambda: Summed(
        ConvNorm(3), ConvNorm(1), body=lambda m, x: (m.arms[0](x) + m.arms[1](x.tanh())).relu()
    ),
    "an activation": lambda: Summed(
        ConvNorm(3), ConvNorm(1), body=lambda m, x: (m.arms[0](x).relu() + m.arms[1](x)).relu()
    ),
    "called twice": lambda: Summed(
        ConvNorm(3), ConvNorm(1), body=lambda m, x: m.arms[0]((m.arms[0](x) + m.arms[1](x)).relu())
    ),
    "other groups": lambda: Summed(ConvNorm(3), ConvNorm(1, groups=2)),
    "taps between the taps": lambda: Summed(ConvNorm(3, dilation=2, padding=2), ConvNorm(3)),
    "under weight norm": lambda: Summed(ConvNorm(3), weight_norm(nn.Conv2d(4, 4, 1))),
    "reflected": lambda: Summed(ConvNorm(3, padding_mode="reflect"), ConvNorm(1)),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_is_no_one_convolution_stays(case: str) -> None:
    net = built(KEPT[case]())
    done = normswap.convert(net, "folded", inputs=images())
    assert convolutions(done.model) == 3
    assert apart(net, done.model) < 1e-12


# DropPath before some branches: the kernel of each branch, the forward, and how many convolutions
# are left.
DROPPED: dict[str, tuple[tuple[int, ...], Body, int]] = {
    "two of three": (
        (5, 3, 1),
        lambda m, x: (m.arms[0](x) + m.then(m.arms[1](x) + m.arms[2](x))).relu(),
        3,
    ),
    "one of two": ((1, 3), lambda m, x: (m.arms[0](x) + m.then(m.arms[1](x))).relu(), 2),
    "each by itself": (
        (3, 1),
        lambda m, x: (m.other(m.arms[0](x)) + m.then(m.arms[1](x))).relu(),
        3,
    ),
}


@pytest.mark.parametrize("case", DROPPED)
def test_branches_merge_only_if_training_drops_them_together(case: str) -> None:
    """Nor does the number 0, which stands where a branch was, pass a DropPath."""
    kernels, body, left = DROPPED[case]
    net: Any = Summed(*map(ConvNorm, kernels), then=DropPath(0.5), body=body)
    net.other = DropPath(0.5)
    done = normswap.convert(built(net), "folded", inputs=images())
    assert convolutions(done.model) == left
    assert apart(net, done.model) < 1e-12
    done.model.train()(images())


def test_they_can_be_kept_and_a_merged_one_says_why_it_cannot_go_back() -> None:
    net = built(MERGED["repvgg"]())
    kept = normswap.convert(net, "folded", inputs=images(), branches="keep")
    assert convolutions(kept.model) == 3
    merged = normswap.convert(net, "folded", inputs=images())
    with pytest.raises(RefusedError, match="branches were merged"):
        normswap.convert(merged, "unfold")
    with pytest.raises(RefusedError, match="no statistics are known"):
        normswap.convert(merged, "batchnorm")
    again = normswap.convert(merged, "batchnorm", calibrate=[images()])
    assert apart(net, again.model) < 1e-12


# What stands between the sum and the norm, or beside the sum: then the norm's scale is not that of
# the sum alone, and how many convolutions are left.
SCALED: dict[str, tuple[Body, int]] = {
    "another term": (lambda m, x: m.then(Summed.two(m, x) + m.arms[2](x.tanh())).relu(), 3),
    "an activation": (lambda m, x: m.then(Summed.two(m, x).relu()), 2),
    "a reader": (lambda m, x: m.then(y := Summed.two(m, x)).relu() + y.tanh(), 2),
}


@pytest.mark.parametrize("case", SCALED)
def test_a_scale_that_is_not_of_the_sum_alone_stays(case: str) -> None:
    body, left = SCALED[case]
    arms = [nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)]
    used = arms if case == "another term" else arms[:2]
    net = built(Summed(*used, then=nn.BatchNorm2d(4), body=body))

    done = normswap.convert(net, "folded", inputs=images())

    assert convolutions(done.model) == left
    assert isinstance(done.model.get_submodule("then"), ChannelAffine)
    assert apart(net, done.model) < 1e-12


def test_a_note_says_where_each_convolution_went() -> None:
    """A norm that is merged has an outcome, and no place in the note."""
    net = built(Summed(ConvNorm(1), ConvNorm(3), ConvNorm(1), nn.BatchNorm2d(4)))

    done = normswap.convert(net, "folded", inputs=images())

    (note,) = (note for note in done.notes if "merged" in note)
    assert note.startswith("2 convolutions")
    assert "arms.0.0 (into arms.1.0), arms.2.0 (into arms.1.0)" in note
    assert "arms.3" not in note
    kept = normswap.convert(net, "folded", inputs=images(), branches="keep")
    assert not any("merged" in note for note in kept.notes)


def test_part_of_a_network() -> None:
    net = built(MERGED["many of one size"]())
    done = normswap.convert(net, "folded", inputs=images(), skip="arms.0")
    assert convolutions(done.model) == 3
    assert any(isinstance(module, nn.BatchNorm2d) for module in done.model.modules())
    assert apart(net, done.model) < 1e-12


def test_a_network_without_sums_has_no_branches() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1)).double().eval()
    assert not branches.find(PlanBuilder(inspect(net, images())))


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch", ["repvgg_a0", "mobileone_s0", "repvit_m0_9", "fastvit_t8", "repghostnet_050"]
)
def test_as_many_as_timm_leaves(arch: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    net = lived_in(timm.create_model(arch, num_classes=10).eval(), x)
    done = normswap.convert(net, "folded", inputs=x)
    assert convolutions(done.model) == convolutions(reparameterize_model(net))
    with torch.no_grad():
        assert (net(x) - done.model(x)).norm() < 1e-9 * net(x).norm()


@pytest.mark.parametrize(
    ("conv", "fits"),
    [
        (nn.Conv2d(4, 4, 3, padding=1), True),
        (nn.Conv2d(4, 4, 3, padding=1, stride=2), False),
        (nn.Conv2d(4, 8, 3, padding=1), False),
        (nn.Conv2d(4, 4, 3), False),
    ],
)
def test_the_input_itself_is_a_tap_only_where_maps_stay_as_they_are(
    conv: nn.Conv2d, fits: bool
) -> None:
    assert branches._fits(conv, None) is fits


def test_a_weight_that_another_layer_has_too_is_left_alone() -> None:
    net = Summed(
        ConvNorm(3),
        ConvNorm(1),
        then=nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1, bias=False)),
    )
    net = built(net)
    net.then[1].weight = net.arms[0][0].weight
    found = branches.find(PlanBuilder(inspect(net, images())))
    assert all("arms.0.0" not in (merge.main, *merge.others) for merge in found)
