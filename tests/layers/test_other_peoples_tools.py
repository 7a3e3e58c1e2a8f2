"""What torch's and timm's own functions do with the layers of a converted network."""

import copy

import pytest
import timm
import torch
from support.lived_in_networks import lived_in
from timm.layers import BatchNormAct2d, unfreeze_batch_norm_2d
from torch import nn

import normswap

SIZE = (3, 48, 48)
IMAGES = torch.randn(2, *SIZE, generator=torch.Generator().manual_seed(0))


def _network(arch: str) -> nn.Module:
    torch.manual_seed(0)
    narrow = timm.create_model(arch, channels=(8, 8, 8, 8), num_classes=3)
    return lived_in(narrow, IMAGES.double()).float()


@pytest.mark.parametrize(
    ("arch", "kind"), [("resnet18", nn.BatchNorm2d), ("resnetv2_18", BatchNormAct2d)]
)
def test_timm_thaws_what_was_frozen(arch: str, kind: type[nn.Module]) -> None:
    source = _network(arch)
    frozen = normswap.convert(source, "frozen-bn", input_size=SIZE).model

    thawed = unfreeze_batch_norm_2d(copy.deepcopy(frozen)).eval()

    norms = [module for module in thawed.modules() if isinstance(module, kind)]
    assert len(norms) == sum(isinstance(module, kind) for module in source.modules())
    assert torch.allclose(thawed(IMAGES), source(IMAGES), atol=1e-6)
    thawed.train()(IMAGES)
    assert any(
        not torch.equal(tensor, source.state_dict()[name])
        for name, tensor in thawed.state_dict().items()
        if name.endswith("running_mean")
    )


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize(
    "scheme", ["folded", "skipinit", "affine", "frozen-bn", "tune", "dyt", "groupnorm"]
)
def test_torchscript_compiles_what_the_page_says(scheme: str) -> None:
    converted = normswap.convert(_network("resnet18"), scheme, input_size=SIZE).model

    scripted = torch.jit.script(converted)

    with torch.no_grad():
        assert torch.allclose(scripted(IMAGES), converted(IMAGES), atol=1e-6)
