"""Under autocast a converted network stays in half precision.

A float32 number times a bfloat16 map would give a float32 map.
"""

from typing import Any

import pytest
import timm
import torch
from support.model_sources import SMALL_IMAGES
from torch import Tensor, nn

import normswap
from normswap.layers.channelwise import ChannelAffine, ChannelBias
from normswap.layers.dynamic_tanh import DynamicTanh
from normswap.layers.scalars import ScalarBias, Scale
from normswap.schemes.catalogue import TARGETS

KEEPING: dict[str, dict[str, Any]] = {
    "nf": {"mean": "keep"},
    "centered-weightnorm": {"mean": "keep"},
}


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    small = {"channels": (4, 4, 8, 8), "pretrained_cfg_overlay": SMALL_IMAGES}
    model = timm.create_model("resnet18", num_classes=10, zero_init_last=False, **small)
    with torch.no_grad():
        model.train()(torch.randn(8, 3, 32, 32))
    return model.eval()


# RMSNorm takes the place of LayerNorms alone, and BatchNorm that of scalars.
@pytest.mark.parametrize("scheme", sorted(set(TARGETS) - {"rmsnorm", "batchnorm"}))
@pytest.mark.one_in(4)
def test_no_layer_makes_float32_of_bf16(network: nn.Module, scheme: str) -> None:
    options = KEEPING.get(scheme, {})
    model = normswap.convert(network, scheme, input_size=(3, 64, 64), **options).model
    widening_layers: list[str] = []

    def look(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if args and args[0].dtype == torch.bfloat16 and output.dtype != torch.bfloat16:
            widening_layers.append(type(module).__name__)

    for module in model.modules():
        module.register_forward_hook(look)
    images = torch.randn(4, 3, 64, 64)

    for training in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            answers = model.train(training)(images)
        assert (answers.dtype, widening_layers) == (torch.bfloat16, [])

    answers.float().square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert {grad.dtype for grad in gradients if grad is not None} <= {torch.float32}


NUMBERS = torch.linspace(0.5, 2, 4)
LAYERS: dict[str, nn.Module] = {
    "scale and shift": ChannelAffine(NUMBERS, -NUMBERS),
    "sign and shift": ChannelBias(NUMBERS, torch.tensor([1.0, -1.0, 0.0, 1.0])),
    "tanh": DynamicTanh(NUMBERS, -NUMBERS, 0.3),
    "scalar": Scale(0.3, bias=True),
    "scalar bias": ScalarBias(torch.ones(1)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 5, 6)], ids=["rows", "maps"])
def test_a_layers_numbers_take_the_dtype_of_its_input(name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)

    output = LAYERS[name](x.bfloat16())

    assert output.dtype == torch.bfloat16
    assert torch.allclose(output.float(), LAYERS[name](x), rtol=0.03, atol=0.03)
