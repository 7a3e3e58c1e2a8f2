"""Networks that users write themselves: residual branches that end in a convolution, in a norm, in a function."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lived import lived_in
from own_networks import Net, PostAct, PreAct
from torch import Tensor, nn

import normswap
from normswap.errors import RefusedError


def lived(block: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return lived_in(Net(block), torch.randn(4, 3, 33, 33, dtype=torch.float64))


@pytest.mark.parametrize("block", [PreAct, PostAct])
def test_dropout_in_front_of_the_classifier(block: type[nn.Module], tmp_path: Path) -> None:
    """The pool is a function: the dropout sits in the linear layer's place. It can be set anew, and taken out."""
    source, x = lived(block), torch.randn(2, 3, 41, 41, dtype=torch.float64)
    done = normswap.convert(source, "regularized-skipinit", dropout=0.6, input_size=(3, 33, 33))
    torch.manual_seed(0)
    with torch.no_grad():
        seen: list[Tensor] = []
        done.model.head.inner.register_forward_hook(lambda module, args, out: seen.append(args[0]))  # type: ignore[union-attr]
        for _ in range(50):
            done.model.train()(x)
        assert float((torch.stack(seen) == 0).double().mean()) == pytest.approx(0.6, abs=0.06)
        again = normswap.convert(done.model, "regularized-skipinit", dropout=0.1, input_size=(3, 33, 33))
        plain = normswap.convert(again.model, "skipinit", input_size=(3, 33, 33))
        assert torch.equal(plain.model.train()(x), plain.model(x))
        assert (plain.model.eval()(x) - source(x)).norm() <= 1e-10 * source(x).norm()
    loaded = normswap.load(normswap.save(plain, tmp_path / "out"), skeleton=Net(block).double())
    assert torch.equal(loaded(x), plain.model(x))
    with pytest.raises(RefusedError, match="nothing to convert"):
        normswap.convert(plain.model, "skipinit", input_size=(3, 33, 33))


def test_a_classifier_that_is_read_elsewhere_gets_no_dropout() -> None:
    class Tied(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.head.weight.norm()

    torch.manual_seed(0)
    source = lived_in(Tied(PostAct), torch.randn(4, 3, 33, 33, dtype=torch.float64))
    with pytest.raises(RefusedError, match="no place for a dropout"):
        normswap.convert(source, "regularized-skipinit", input_size=(3, 33, 33))


class Smooth(PostAct):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())).add(x))


def test_a_factor_does_not_pass_gelu() -> None:
    with pytest.raises(RefusedError, match="cannot pass the activation that follows"):
        normswap.convert(lived(Smooth), "residual-scale", rule="balduzzi", input_size=(3, 33, 33))
    normswap.convert(lived(Smooth), "residual-scale", rule="hanin", input_size=(3, 33, 33))
