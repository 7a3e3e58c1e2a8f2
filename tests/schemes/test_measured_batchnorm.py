"""BatchNorms in a network that never had any: exact in eval mode, alive in training, foldable
again.
"""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from support.lived_in_networks import batchnorms, lived_in, run
from support.narrow_networks import skeleton, source as lived
from torch import Tensor, nn

import normswap
from normswap import provenance
from normswap.errors import OptionError, RefusedError, VerificationError
from normswap.layers import measured_norm

LIMIT = 1e-10


class Small(nn.Module):
    """A stem, a residual block whose second convolution is summed before its ReLU, a gate, and a
    head.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.one = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.two = nn.Conv2d(8, 8, 1)
        self.gate = nn.Conv2d(8, 8, 1)
        self.linear = nn.Conv2d(8, 6, 1)
        self.head = nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = (x + self.two(nn.functional.silu(self.one(x)))).relu()
        x = x * self.gate(x.mean((2, 3), keepdim=True)).sigmoid()
        return self.head(self.linear(x)).mean((2, 3))


def network() -> nn.Module:
    torch.manual_seed(0)
    return Small().double().eval()


def images(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(4, 3, 12, 12, dtype=torch.float64, generator=generator) * 2 + 1
        for _ in range(count)
    ]


def apart(a: nn.Module, b: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return float((a(x) - b(x)).norm() / a(x).norm())


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ({}, ["stem", "one", "two"]),
        ({"where": "conv"}, ["stem", "one", "two", "linear"]),
        ({"only": "one"}, ["one"]),
        ({"skip": "stem"}, ["one", "two"]),
    ],
)
def test_where_they_are_put(options: dict[str, Any], places: list[str]) -> None:
    net = network()
    batches = images()
    done = normswap.convert(net, "batchnorm", inputs=batches[0], calibrate=batches, **options)
    assert list(batchnorms(done.model)) == [f"{path}.then" for path in places]
    assert apart(net, done.model, torch.cat(images(2))) < LIMIT
    assert done.report.exact


def test_statistics_are_those_of_the_images() -> None:
    net = network()
    batches = images()
    done = normswap.convert(
        net, "batchnorm", inputs=batches[0], calibrate=[*batches, images(1)[0][:1]]
    )
    norm: Any = done.model.get_submodule("stem.then")
    values = (
        net.get_submodule("stem")(torch.cat([*batches, images(1)[0][:1]]))
        .transpose(0, 1)
        .flatten(1)
    )
    bias: Any = net.get_submodule("stem").bias
    assert torch.allclose(norm.running_mean + bias, values.mean(1), atol=1e-12)
    assert torch.allclose(norm.running_var, values.var(1), rtol=1e-12)
    assert done.model.get_submodule("stem.inner").bias is None  # no training would move it


def test_the_proof_sees_a_wrong_statistic(monkeypatch: pytest.MonkeyPatch) -> None:
    right = measured_norm.undo_after_conv

    def wrong(source: Any, conv: Any, norm: Any) -> None:
        right(source, conv, norm)
        norm.bias.data[0] += 1e-3 * norm.running_mean[0]  # 0 until something is measured

    monkeypatch.setattr(measured_norm, "undo_after_conv", wrong)
    with pytest.raises(VerificationError, match="measured-batchnorm is wrong"):
        normswap.convert(network(), "batchnorm", inputs=images()[0], calibrate=images())


def test_ghost_batches_come_after(tmp_path: Path) -> None:
    net = network()
    batches = images()
    done = normswap.convert(net, "batchnorm", inputs=batches[0], calibrate=batches, ghost_batch=2)
    norm: Any = done.model.get_submodule("one.then")
    assert norm.ghost == 2
    assert done.steps == 2
    again = normswap.load(normswap.save(done, tmp_path / "net"), skeleton=network())
    assert apart(done.model, again.double(), batches[0]) == 0


def fused() -> tuple[nn.Module, Tensor]:
    """A folded network that nobody knows the norms of."""
    model, x, _ = lived("resnet18")
    return provenance.attach(
        normswap.convert(model, "folded", inputs=x).model, provenance.Provenance()
    ), x


def test_like_an_architecture_it_is_of_that_class() -> None:
    net, x = fused()
    like = skeleton("resnet18")
    done = normswap.convert(net, "batchnorm", inputs=x, calibrate=[x], like=like)
    assert type(done.model) is type(like)
    assert not any(
        type(module).__module__.startswith("normswap") for module in done.model.modules()
    )
    assert apart(net, done.model, x) < LIMIT
    like.load_state_dict(done.model.state_dict())
    seen: list[Tensor] = []
    with like.get_submodule("bn1").register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        assert apart(net, like, x) < LIMIT
    norm: Any = like.get_submodule("bn1")
    assert torch.allclose(norm.running_mean, seen[0].transpose(0, 1).flatten(1).mean(1), atol=1e-12)
    assert torch.allclose(norm.running_var, seen[0].transpose(0, 1).flatten(1).var(1), rtol=1e-12)


def test_like_another_architecture_is_refused() -> None:
    net, x = fused()
    wider = skeleton("resnet18", channels=(8, 16, 24, 48))
    ask: dict[str, Any] = {"inputs": x, "calibrate": [x]}
    with pytest.raises(RefusedError, match="it has no layer4"):
        normswap.convert(net, "batchnorm", like=wider, **ask)
    with pytest.raises(RefusedError, match="it has no"):
        normswap.convert(net, "batchnorm", like=skeleton("resnet26d"), **ask)
    twisted = skeleton("resnet18")
    twisted.get_submodule("layer1.0").drop_path = nn.SiLU()
    with pytest.raises(RefusedError, match="computes something else"):
        normswap.convert(net, "batchnorm", like=twisted, **ask)
    with pytest.raises(OptionError, match="cannot go with"):
        normswap.convert(net, "batchnorm", like=skeleton("resnet18"), only="layer1", **ask)
    with pytest.raises(OptionError, match="there are none"):
        normswap.convert(net, "batchnorm", inputs=x, like=skeleton("resnet18"))
    with pytest.raises(OptionError, match="neither an architecture nor a network"):
        normswap.convert(net, "batchnorm", like=3, **ask)


def test_images_that_nobody_took_are_refused() -> None:
    net = network()
    batches = images()
    with pytest.raises(OptionError, match="there are none"):
        normswap.convert(net, "batchnorm", inputs=batches[0], where="conv")
    with pytest.raises(RefusedError, match="calibrate=DATA"):
        normswap.convert(net, "batchnorm", inputs=batches[0])


def test_a_convolution_that_is_called_twice_gets_none() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 4, 1)
            self.shared = nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).relu()
            return self.shared(self.shared(x).relu()).relu().mean((2, 3))

    done = normswap.convert(
        Twice().double().eval(), "batchnorm", inputs=images()[0], calibrate=images()
    )
    assert list(batchnorms(done.model)) == ["stem.then"]
    assert any("shared gets no norm: it is called more than once" in note for note in done.notes)


def test_hidden_layers_of_a_network_without_convolutions_get_norms() -> None:
    """The network of Ioffe & Szegedy's section 4.1: three hidden layers of 100, with sigmoids."""
    torch.manual_seed(0)
    hidden: list[nn.Module] = [nn.Linear(784, 100), nn.Sigmoid()]
    for _ in range(2):
        hidden += [nn.Linear(100, 100), nn.Sigmoid()]
    net = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(100, 10)).double().eval()
    digits = [torch.rand(60, 1, 28, 28, dtype=torch.float64) for _ in range(2)]

    done = normswap.convert(net, "batchnorm", inputs=digits[0], calibrate=digits)

    assert list(batchnorms(done.model)) == ["1.then", "3.then", "5.then"]
    assert apart(net, done.model, digits[1]) < LIMIT
    assert done.report.exact
    norm: Any = done.model.get_submodule("1.then")
    assert isinstance(norm, nn.BatchNorm1d)
    weight, bias = net[1].weight, net[1].bias
    values = torch.cat(digits).flatten(1) @ weight.T
    assert torch.allclose(norm.running_var, values.var(0), rtol=1e-12)
    # Section 3: gamma = sqrt(Var x) and beta = E x are the identity; section 3.2: b goes into beta.
    assert torch.allclose(norm.weight, (values.var(0) + norm.eps).sqrt(), rtol=1e-12)
    assert torch.allclose(norm.bias, values.mean(0) + bias, rtol=1e-12)
    assert done.model.get_submodule("1.inner").bias is None

    # Where there is a convolution, as in VGG, the hidden layers of its head get none.
    with_conv = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2704, 8))
    with_conv.extend([nn.ReLU(), nn.Linear(8, 2)]).double().eval()
    done = normswap.convert(with_conv, "batchnorm", inputs=digits[0], calibrate=digits)
    assert list(batchnorms(done.model)) == ["0.then"]


class Beside(nn.Module):
    """A convolution that is read by a norm, behind an identity, and by an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.same = nn.Identity()
        self.norm = nn.BatchNorm2d(4)
        self.other = nn.Conv2d(4, 4, 3)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.head(self.other(self.norm(self.same(x)) + x.relu()).relu()).mean((2, 3))


def test_a_norm_behind_an_identity_is_enough() -> None:
    torch.manual_seed(0)
    done = normswap.convert(
        Beside().double().eval(),
        "batchnorm",
        inputs=images()[0],
        calibrate=images(),
        where="activation",
    )
    assert list(batchnorms(done.model)) == ["norm", "other.then"]


class Joined(nn.Module):
    """A norm of what two convolutions give, one beside the other."""

    def __init__(self, *, normed: bool) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(3, width, 3, bias=not normed) for width in (4, 5))
        self.norm = nn.BatchNorm2d(9) if normed else nn.Identity()
        self.head = nn.Conv2d(9, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.cat([self.one(x), self.two(x)], 1)).relu()).mean((2, 3))


def test_a_norm_of_two_convolutions_gets_the_bias_of_each_in_its_place() -> None:
    torch.manual_seed(0)
    net = Joined(normed=False).double().eval()
    like = Joined(normed=True)
    done = normswap.convert(net, "batchnorm", like=like, inputs=images()[0], calibrate=images())
    assert apart(net, done.model, images()[1]) < LIMIT


def test_an_architecture_by_name_gets_the_networks_channels_and_classes() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 1, 64, 64, dtype=torch.float64)
    source = lived_in(timm.create_model("test_resnet", in_chans=1, num_classes=7), x)
    folded = normswap.convert(source, "folded", inputs=x).model
    bare = provenance.attach(folded, provenance.Provenance())

    found = normswap.convert(bare, "batchnorm", inputs=x, calibrate=[x], like="test_resnet").model

    assert found.state_dict().keys() == source.state_dict().keys()
    assert run(found, x).shape == (2, 7)


def test_an_architecture_whose_norms_cannot_be_the_identity_is_refused() -> None:
    net, x = fused()
    like = skeleton("resnet18")
    like.get_submodule("layer1.0").bn1 = nn.BatchNorm2d(8, affine=False)

    with pytest.raises(RefusedError, match=r"layer1\.0\.bn1 has no gamma"):
        normswap.convert(net, "batchnorm", inputs=x, calibrate=[x], like=like)
