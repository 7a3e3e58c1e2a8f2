"""Convolutions with a forward of their own: those that pad by themselves are convolutions, all others are refused."""

import pytest
import torch
import torch.nn.functional as F
from timm.layers import Conv2dSame, pad_same
from torch import nn

import normswap
from normswap.calibration.sampling import fits, patches
from normswap.layers import own_forwards


class Ahead(nn.Conv2d):
    """Pads with a module of its own, one end more than the other."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        stride, kernel = self.stride[0], self.kernel_size[0]
        less, more = (kernel - stride) // 2, (kernel - stride + 1) // 2
        self.padding_of_mine = nn.ZeroPad2d((less, more, less, more)) if kernel > 1 else nn.Identity()

    def forward(self, x):
        x = self.padding_of_mine(x)
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class BySize(nn.Conv2d):
    """Pads by the size of its input."""

    def forward(self, x):
        x = pad_same(x, list(self.kernel_size), list(self.stride), list(self.dilation))
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class Same(nn.Conv2d):
    """Pads as torch does."""

    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias, 1, "same", self.dilation, self.groups)


class Own(nn.Conv2d):
    def __init__(self, body):
        super().__init__(3, 6, 3)
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def masked(m, x):
    m.weight.data[:, :, -1] = 0
    return nn.Conv2d.forward(m, x)


OTHERS = {
    "doubles": lambda m, x: 2 * nn.Conv2d.forward(m, x),
    "bends": lambda m, x: nn.Conv2d.forward(m, x.relu()),
    "masks": masked,
    "mirrors": lambda m, x: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), m.weight, m.bias),
    "has no bias": lambda m, x: F.conv2d(x, m.weight),
    "strides": lambda m, x: F.conv2d(x, m.weight, m.bias, 2),
}


@pytest.mark.parametrize("kind", [Ahead, BySize, Conv2dSame])
@pytest.mark.parametrize("args", [{"stride": 2}, {"groups": 3}, {"bias": False}, {"dilation": 2}])
def test_a_convolution_that_pads_by_itself_is_one(kind, args):
    conv = kind(3, 6, 3, **args)
    before = {name: tensor.clone() for name, tensor in conv.state_dict().items()}
    assert own_forwards.computes(conv)
    assert own_forwards.pads(conv)
    assert all(torch.equal(tensor, before[name]) for name, tensor in conv.state_dict().items())


@pytest.mark.parametrize("body", OTHERS.values(), ids=OTHERS)
def test_whatever_computes_something_else_is_none(body):
    assert not own_forwards.computes(Own(body))
    assert not fits(Own(body))


def test_even_padding_is_what_torch_pads_the_same_with():
    assert own_forwards.even_padding(Ahead(3, 6, 3)) == (1, 1)
    assert own_forwards.even_padding(Ahead(3, 6, 1)) == (0, 0)
    assert own_forwards.even_padding(Ahead(3, 6, 3, stride=2)) is None
    assert own_forwards.even_padding(BySize(3, 6, 3, stride=2)) is None  # by the size of its input
    assert not own_forwards.pads(Ahead(3, 6, 1))


@pytest.mark.parametrize(("kind", "kernel", "stride"), [(Ahead, 3, 2), (BySize, 3, 2), (Same, 5, 1)])
@pytest.mark.parametrize("size", [9, 12])
def test_patches_are_read_as_the_layer_pads_them(kind, kernel, stride, size):
    conv = kind(4, 6, kernel, stride=stride, groups=2).double()
    x = torch.randn(2, 4, size, size, dtype=torch.float64)
    y = conv(x)
    seen, wanted = patches(conv, x, y, 1000, torch.Generator())
    weight = conv.weight.view(2, 3, -1)
    made = torch.einsum("ngpf,gof->ngpo", seen, weight) + conv.bias.view(2, 1, 3)
    assert torch.allclose(made, wanted)


def network(kind, seed=0):
    torch.manual_seed(seed)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.norm1 = kind(8, 16, 1, bias=False), nn.BatchNorm2d(16)
            self.two, self.norm2 = kind(16, 16, 3, groups=16, bias=False), nn.BatchNorm2d(16)
            self.three, self.norm3 = kind(16, 8, 1, bias=False), nn.BatchNorm2d(8)

        def forward(self, x):
            y = F.relu6(self.norm2(self.two(F.relu6(self.norm1(self.one(x))))))
            return x + self.norm3(self.three(y))

    stem = [kind(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU6()]
    model = nn.Sequential(*stem, Block(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.running_var):
                nn.init.uniform_(tensor, 0.5, 2)
            for tensor in (module.bias, module.running_mean):
                nn.init.normal_(tensor)
    return model.eval()


@pytest.mark.parametrize("kind", [Ahead, BySize])
@pytest.mark.parametrize(("scheme", "options"), [("folded", {}), ("tune", {}), ("fixup", {}), ("nf", {"mean": "keep"})])
def test_networks_of_them_convert_and_keep_their_function(kind, scheme, options):
    model = network(kind)
    result = normswap.convert(model, scheme, input_size=(3, 32, 32), **options)
    x = torch.randn(2, 3, 32, 32)
    assert torch.allclose(result.model(x), model(x), atol=1e-4)
    if scheme == "folded":
        assert not any(isinstance(module, nn.BatchNorm2d) for module in result.model.modules())
    else:
        back = normswap.convert(result, "folded", input_size=(3, 32, 32))
        assert torch.allclose(back.model(x), model(x), atol=1e-4)


@pytest.mark.parametrize("kind", [Ahead, BySize])
def test_they_are_fitted_to_images(kind):
    model, images = network(kind), torch.randn(64, 3, 32, 32)
    plain = normswap.convert(model, "groupnorm", input_size=(3, 32, 32)).model
    fitted = normswap.convert(model, "groupnorm", input_size=(3, 32, 32), calibrate=[images]).model
    changed = [not torch.equal(a.weight, b.weight) for a, b in zip(plain.modules(), fitted.modules(), strict=True)
               if isinstance(a, nn.Conv2d)]  # fmt: skip
    assert all(changed)
