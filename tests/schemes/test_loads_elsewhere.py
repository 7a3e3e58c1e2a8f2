"""What comes out is theirs: its tensors load, strictly, into the framework's own network without BatchNorm."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torchvision
from lived import distance, lived_in, run
from torch import nn
from torchvision.models import vgg
from torchvision.ops.misc import FrozenBatchNorm2d

from normswap.surgery import conversion

resnet = partial(torchvision.models.resnet18, num_classes=5)
layers = partial(vgg.make_layers, [8, "M", 16, 16, "M"])


def unet(norm: bool) -> nn.Module:
    smp = pytest.importorskip("segmentation_models_pytorch")
    wide: Any = {"encoder_depth": 3, "decoder_channels": (16, 8, 8), "encoder_weights": None}
    return smp.Unet("resnet18", decoder_use_norm=norm, **wide)


CASES: dict[str, tuple[Callable[[], nn.Module], str, dict[str, Any], Callable[[], nn.Module]]] = {
    "torchvision, GroupNorm":
        (resnet, "groupnorm", {"relative_eps": 0}, lambda: resnet(norm_layer=partial(nn.GroupNorm, 1))),
    "torchvision, GroupNorm, 32 groups":
        (resnet, "groupnorm", {"relative_eps": 0, "groups": 32}, lambda: resnet(norm_layer=partial(nn.GroupNorm, 32))),
    "torchvision, frozen": (resnet, "frozen-bn", {}, lambda: resnet(norm_layer=FrozenBatchNorm2d)),
    "torchvision, VGG without norms": (lambda: layers(batch_norm=True), "folded", {}, lambda: layers(batch_norm=False)),
    "segmentation_models_pytorch, decoder without norms":
        (lambda: unet(True), "folded", {"only": ["decoder"]}, lambda: unet(False)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.one_in(2)
def test_it_loads_without_normswap(case: str) -> None:
    source, to, options, made = CASES[case]
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    model = lived_in(source(), x)
    done = conversion.convert(model, to, inputs=x, **options).model
    theirs = made().double().eval()
    state = done.state_dict()
    if "VGG" in case:  # places without a norm have other numbers there
        state = dict(zip(theirs.state_dict(), state.values(), strict=True))
    theirs.load_state_dict(state, strict=True)
    assert distance(run(done, x), run(theirs, x)) < 1e-13
    if to != "groupnorm":
        assert distance(run(model, x), run(theirs, x)) < 1e-12
