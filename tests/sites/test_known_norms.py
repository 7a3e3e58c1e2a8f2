"""Norms of the table and registered ones: listed, with a role, and converted as a BatchNorm is."""

import pytest
import timm
import torch
from support.lived_in_networks import distance, lived_in
from timm.layers import GroupNormAct, RmsNorm, RmsNorm2d
from timm.layers.norm import RmsNormFp32, SimpleNorm
from torch import Tensor, nn

import normswap
from normswap import provenance
from normswap.analysis.weight_decay import roles
from normswap.errors import RefusedError
from normswap.layers.per_sample import GroupNorm
from normswap.layers.site_norm import SiteNorm
from normswap.plan import Arch
from normswap.provenance import Provenance
from normswap.sites import affine, known_norms


class Whitener(nn.Module):
    """y = gain (x - centre) / spread + bias, with tensors of names that no BatchNorm has."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(channels) + 0.5)
        self.bias = nn.Parameter(torch.randn(channels))
        self.register_buffer("centre", torch.randn(channels))
        self.register_buffer("spread", torch.rand(channels) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.map()
        return x * scale.view(1, -1, 1, 1).to(x) + shift.view(1, -1, 1, 1).to(x)

    def map(self) -> tuple[Tensor, Tensor]:
        scale = self.weight.double() / self.spread.double()
        return scale, self.bias.double() - self.centre.double() * scale


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn1 = Whitener(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2 = Whitener(8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())) + x).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.norm = Whitener(8)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.norm(self.stem(x)).relu()).mean((2, 3)))


X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A network of such norms, registered, on the statistics that it sees."""
    monkeypatch.setattr(known_norms, "_REGISTERED", {})
    normswap.register_norm(
        Whitener, affine=Whitener.map, statistics=lambda norm: (norm.centre, norm.spread.square())
    )
    torch.manual_seed(0)
    model = Net().eval()

    def settle(norm: Whitener, args: tuple[Tensor, ...]) -> None:
        values = args[0].transpose(0, 1).flatten(1)
        norm.centre.copy_(values.mean(1))
        norm.spread.copy_(values.std(1))

    norms = [module for module in model.modules() if isinstance(module, Whitener)]
    handles = [norm.register_forward_pre_hook(settle) for norm in norms]
    with torch.no_grad():
        model(X)
    for handle in handles:
        handle.remove()
    provenance.attach(
        model, Provenance(Arch("test_known_norms:Net", {}, "factory"), "test_known_norms:Net")
    )
    return model


def apart(first: nn.Module, second: nn.Module) -> float:
    """How far the answers of two networks are from each other."""
    with torch.no_grad():
        return distance(first(X), second(X))


def whiteners(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, Whitener)]


def error_of(source: nn.Module, scheme: str) -> float:
    return normswap.convert(source, scheme, inputs=X).report.worst.relative_l2


def test_groupnorm_has_the_matched_moments(source: nn.Module) -> None:
    done = normswap.convert(source, "instancenorm", inputs=X)
    new = done.model.norm
    old = source.norm

    # With a channel to a group gamma and beta come out.
    assert type(new) is nn.GroupNorm
    assert torch.allclose(new.weight, old.weight, atol=1e-4)
    assert torch.allclose(new.bias, old.bias, atol=1e-4)

    assert whiteners(done.model) == []
    assert error_of(source, "groupnorm") < 0.8
    assert error_of(source, "dyt") < 0.8


def test_skipinit_takes_alpha_from_the_statistics(source: nn.Module) -> None:
    done = normswap.convert(source, "skipinit", inputs=X)
    assert apart(source, done.model) < 1e-5
    for old, new in zip(source.blocks, done.model.blocks, strict=True):
        deviation = old.bn2.weight.square().mean().sqrt().item()
        assert new.bn2.alpha.item() == pytest.approx(deviation, rel=1e-5)


@pytest.mark.parametrize("scheme", ["batchnorm", "tune", "frozen-bn"])
def test_another_norm_takes_its_place(source: nn.Module, scheme: str) -> None:
    done = normswap.convert(source, scheme, inputs=X)
    assert apart(source, done.model) < 1e-5
    assert whiteners(done.model) == []

    if scheme == "batchnorm":
        norm = done.model.norm
        assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
        assert torch.allclose(norm.running_mean, source.norm.centre)
        assert torch.allclose(norm.running_var, source.norm.spread.square())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("scheme", ["folded", "skipinit", "affine", "batchnorm"])
@pytest.mark.parametrize("learned", [False, True])
def test_unfold_brings_it_back(source: nn.Module, scheme: str, learned: bool) -> None:
    done = normswap.convert(source, scheme, inputs=X).model
    if learned:
        with torch.no_grad():
            for name, parameter in done.named_parameters():
                if name.endswith("bias"):
                    parameter.add_(torch.randn(parameter.shape) / 10)

    back = normswap.convert(done, "unfold", inputs=X).model
    assert apart(done, back) < 1e-5
    assert len(whiteners(back)) == 5
    if not learned:
        assert torch.equal(back.norm.centre, source.norm.centre)


def test_a_lost_norm_is_remembered_with_its_output(source: nn.Module) -> None:
    bare = normswap.convert(source, "folded", inputs=X).model
    done = normswap.convert(bare, "batchnorm", inputs=X).model
    assert apart(source, done) < 1e-5

    # The input of the new norm is the output of the old one.
    assert torch.allclose(done.norm.running_mean, source.norm.bias, atol=1e-5)
    assert torch.allclose(done.norm.running_var.sqrt(), source.norm.weight.abs(), atol=1e-4)


def test_what_has_no_beta_cannot_take_up_what_was_learned(source: nn.Module) -> None:
    class Fixed(Whitener):
        def __init__(self, channels: int) -> None:
            super().__init__(channels)
            self.shift = nn.Parameter(self.bias.detach())
            del self.bias

        def map(self) -> tuple[Tensor, Tensor]:
            scale = self.weight.double() / self.spread.double()
            return scale, self.shift.double() - self.centre.double() * scale

    normswap.register_norm(Fixed, affine=Fixed.map)
    with pytest.raises(RefusedError, match="no beta"), torch.no_grad():
        affine.set_shift(Fixed(3), torch.ones(3))

    normswap.register_norm(Whitener, affine=lambda norm: (norm.weight, norm.bias * 2))
    with pytest.raises(RefusedError, match="beta of a Whitener"), torch.no_grad():
        affine.set_shift(Whitener(3), torch.ones(3))


def test_one_without_statistics_is_folded_but_gives_no_place_to_a_norm(source: nn.Module) -> None:
    normswap.register_norm(Whitener, affine=Whitener.map)
    assert apart(source, normswap.convert(source, "folded", inputs=X).model) < 1e-5
    with pytest.raises(RefusedError, match="no BatchNorm to replace"):
        normswap.convert(source, "groupnorm", inputs=X)


class Pair(nn.Module):
    """A norm of timm's between linear layers, and a classifier."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = norm
        self.second = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.norm(self.first(x))).relu())


@pytest.mark.parametrize("kind", [RmsNorm, SimpleNorm])
def test_timms_norms_of_tokens_are_listed_folded_and_have_a_role(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = Pair(kind(6)).eval()
    x = torch.randn(2, 5, 6)
    nn.init.uniform_(model.norm.weight, 0.5, 2)

    (norm,) = normswap.inspect(model, x).norms
    assert (norm.path, norm.kind, norm.channels) == ("norm", kind.__name__, 6)
    role_by_path = {assignment.path: assignment.role for assignment in roles(model)}
    assert role_by_path["norm.weight"].startswith("gamma_")

    done = normswap.convert(model, "folded", inputs=x)
    assert done.model.norm.weight is None
    with torch.no_grad():
        assert distance(model(x), done.model(x)) < 1e-6


def test_what_computes_in_float32_stays_and_says_so() -> None:
    model = Pair(RmsNormFp32(6)).eval()
    x = torch.randn(2, 5, 6)
    with pytest.raises(RefusedError, match="nothing to convert"):
        normswap.convert(model, "folded", inputs=x)


def test_rmsnorm_of_maps_is_estimated_from_images() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), RmsNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 5)
    ).eval()
    done = normswap.convert(
        model, "folded", input_size=(3, 8, 8), calibrate=[torch.randn(8, 3, 8, 8)]
    )
    assert not any(affine.is_norm(module) for module in done.model.modules())


def test_the_table_says_what_carries_an_activation() -> None:
    assert isinstance(affine.activation(GroupNormAct(8, 2)), nn.ReLU)
    for kind, known in known_norms.KINDS.items():
        assert known.activation == kind.__name__.endswith(("Act", "Act2d")), kind


def test_dynamic_tanhs_alpha_is_not_called_skipinits() -> None:
    torch.manual_seed(0)
    model = lived_in(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2)),
        torch.randn(4, 3, 8, 8, dtype=torch.float64),
    )
    done = normswap.convert(model, "dyt", input_size=(3, 8, 8)).model
    (alpha,) = (assignment for assignment in roles(done) if assignment.path.endswith("alpha"))
    assert not alpha.decay
    assert "Dynamic Tanh" in alpha.reason


def test_instancenorm_on_one_pixel() -> None:
    """A 32-pixel input leaves the last stage of a ResNet one pixel: said, with what to do."""
    model = timm.create_model("resnet18", channels=(8, 8, 8, 8), num_classes=5).eval()
    with pytest.raises(RefusedError, match=r"layer4\.0\.bn1.*larger inputs"):
        normswap.convert(model, "instancenorm", input_size=(3, 32, 32))
    normswap.convert(model, "instancenorm", input_size=(3, 32, 32), skip="layer4")


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("eps", [None, 3.0])
def test_an_average_sample_sees_the_batchnorm(groups: int, eps: float | None) -> None:
    """Half of a channel's values lie a deviation above its mean, half below."""
    torch.manual_seed(0)
    old = nn.BatchNorm2d(8, eps=1e-3).double().eval()
    for tensor in (old.weight, old.bias, old.running_mean):
        nn.init.normal_(tensor)
    nn.init.uniform_(old.running_var, 0.5, 2.0)
    deviation = old.running_var.sqrt()
    values = [old.running_mean - deviation, old.running_mean + deviation]
    x = torch.stack(values, 1).reshape(1, 8, 2, 1)

    with torch.no_grad():
        new = GroupNorm.replacing(old, like=x, groups=groups, eps=eps, lead=eps is not None)
    assert torch.allclose(new(x), old(x), atol=1e-12)


def test_ghost_batches_are_batches_of_their_own() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 3, 4, 4)
    plain = nn.BatchNorm2d(3).train()

    with torch.no_grad():
        ghost = SiteNorm.replacing(nn.BatchNorm2d(3), like=x, ghost=2).train()

    expected = torch.cat([plain(part) for part in x.split(2)])
    assert torch.allclose(ghost(x), expected, atol=1e-5)
