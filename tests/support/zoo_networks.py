"""Small networks of every kind, for images of 32 px: what approximate conversions are measured on.

`python tests/lab/benchmarks/kinds_zoo.py` trains them; weights, accuracy and recipe are in
`tests/data/zoo`. As MODEL they are `zoo_networks:NAME` with `--weights
tests/data/zoo/NAME.safetensors`, where `tests` is on PYTHONPATH.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file
from timm.layers import SqueezeExcite
from timm.models._efficientnet_builder import decode_arch_def
from timm.models.efficientnet import EfficientNet
from timm.models.regnet import RegNet, RegNetCfg
from torch import Tensor, nn

DATA = Path(__file__).parents[1] / "data" / "zoo"
PREPROCESSING = {
    "input_size": (3, 32, 32),
    "mean": (0.491, 0.482, 0.447),
    "std": (0.247, 0.243, 0.262),
    "crop_pct": 1.0,
    "interpolation": "bilinear",
    "num_classes": 10,
}


def _seen(model: nn.Module) -> nn.Module:
    """The network, which now says how its images are to be prepared."""
    known = {**getattr(model, "pretrained_cfg", {}), **PREPROCESSING}
    return _tagged(model, num_classes=10, pretrained_cfg=known, default_cfg=known)


def _tagged(model: nn.Module, **values: Any) -> nn.Module:
    vars(model).update(values)
    return model


def _conv(
    fan: int,
    out: int,
    *,
    stride: int = 1,
    after: bool = False,
    kind: Any = nn.Conv2d,
    norm: Any = None,
) -> Any:
    """A 3 x 3 convolution, its norm and a ReLU; with `after`, the norm comes after the ReLU."""
    conv = kind(fan, out, 3, stride, 1, bias=after)
    norm = (norm or nn.BatchNorm2d)(out)
    act = nn.ReLU(inplace=not after)
    return [conv, act, norm] if after else [conv, norm, act]


def plain(*, after: bool = False) -> nn.Module:
    """VGG-like, no skips."""
    widths = ((3, 24, 1), (24, 32, 2), (32, 40, 1), (40, 64, 2), (64, 64, 1), (64, 96, 2))
    layers: list[nn.Module] = []
    for fan, out, stride in widths:
        layers += _conv(fan, out, stride=stride, after=after)
    return _seen(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)))


def plain_norm_after() -> nn.Module:
    """The same with every BatchNorm after its ReLU."""
    return plain(after=True)


def _inverted(arch: list[list[str]], **options: Any) -> nn.Module:
    layout = decode_arch_def(arch)
    return _seen(EfficientNet(layout, num_classes=10, num_features=160, stem_size=16, **options))


def depthwise() -> nn.Module:
    """MobileNetV2: inverted residuals with depthwise convolutions, ReLU6."""
    arch = [
        ["ds_r1_k3_s1_c12"],
        ["ir_r1_k3_s1_e4_c16"],
        ["ir_r2_k3_s2_e6_c24"],
        ["ir_r2_k3_s2_e6_c40"],
    ]
    return _inverted(arch, act_layer=nn.ReLU6)


def efficient() -> nn.Module:
    """EfficientNet: the same with squeeze-and-excitation and SiLU."""
    arch = [
        ["ds_r1_k3_s1_c12_se0.25"],
        ["ir_r1_k3_s1_e4_c16_se0.25"],
        ["ir_r2_k5_s2_e4_c24_se0.25"],
        ["ir_r2_k3_s2_e6_c40_se0.25"],
    ]
    return _inverted(arch, act_layer=nn.SiLU, se_layer=SqueezeExcite)


def dense() -> nn.Module:
    """DenseNet: concatenations, pre-activation."""
    model = timm.create_model(
        "densenet121", num_classes=10, growth_rate=12, block_config=(3, 3, 3), bn_size=3
    )
    # 32 px leave nothing to halve twice at once.
    model.features.conv0.stride = (1, 1)
    return _seen(model)


def regnet() -> nn.Module:
    """RegNet: bottlenecks with grouped convolutions."""
    config = RegNetCfg(depth=7, w0=24, wa=14.0, wm=1.6, group_size=8, stem_width=24)
    model = RegNet(config, num_classes=10)
    model.stem.conv.stride = (1, 1)
    return _seen(model)


def preact() -> nn.Module:
    """ResNetV2: norm and activation begin each branch."""
    model = timm.create_model(
        "resnetv2_18", num_classes=10, layers=(1, 2, 1), channels=(24, 48, 96), stem_chs=24
    )
    model.stem.conv.stride = (1, 1)
    return _seen(model)


class UNet(nn.Module):
    """Two levels down, two up, with concatenations; classes per pixel, (N, classes, H, W)."""

    def __init__(self, classes: int, width: int = 12) -> None:
        super().__init__()
        self.one = nn.Sequential(*_conv(3, width), *_conv(width, width))
        self.two = nn.Sequential(*_conv(width, 2 * width, stride=2), *_conv(2 * width, 2 * width))
        self.three = nn.Sequential(
            *_conv(2 * width, 4 * width, stride=2), *_conv(4 * width, 4 * width)
        )
        self.up = nn.Upsample(scale_factor=2)
        self.four = nn.Sequential(*_conv(6 * width, 2 * width))
        self.five = nn.Sequential(*_conv(3 * width, width))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.one(x)
        two = self.two(one)
        deep = self.four(torch.cat([self.up(self.three(two)), two], 1))
        return self.head(self.five(torch.cat([self.up(deep), one], 1)))


def unet() -> nn.Module:
    """Per pixel: the ground, an ellipse of another picture, or a rectangle of one
    (`kinds_images.pasted`).
    """
    return _tagged(_seen(UNet(3)), num_classes=3)


def one_d() -> nn.Module:
    """A 1-D network over the columns of an image, (N, 96, 32)."""
    conv: Any = functools.partial(_conv, kind=nn.Conv1d, norm=nn.BatchNorm1d)
    widths = ((96, 64, 1), (64, 64, 1), (64, 96, 2), (96, 96, 1), (96, 128, 2), (128, 128, 1))
    layers: list[nn.Module] = []
    for fan, out, stride in widths:
        layers += conv(fan, out, stride=stride)
    head = (nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, 10))
    return _tagged(nn.Sequential(*layers, *head), num_classes=10)


def three_d() -> nn.Module:
    """A 3-D network over short clips, (N, 3, 4, 16, 16): a picture that moves along its
    diagonal.
    """
    conv: Any = functools.partial(_conv, kind=nn.Conv3d, norm=nn.BatchNorm3d)
    layers = [*conv(3, 16), *conv(16, 32, stride=2), *conv(32, 32), *conv(32, 64, stride=2)]
    head = (nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(64, 10))
    return _tagged(nn.Sequential(*layers, *head), num_classes=10)


def vit() -> nn.Module:
    """A ViT of patches of 4 px: LayerNorms."""
    model = timm.create_model(
        "vit_tiny_patch16_224",
        num_classes=10,
        img_size=32,
        patch_size=4,
        embed_dim=64,
        depth=4,
        num_heads=2,
    )
    return _seen(model)


class Columns(nn.Module):
    """Turns images (N, C, H, W) into series (N, C H, W)."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1, 2)


class Clip(nn.Module):
    """Turns images (N, C, H, W) into clips (N, C, 4, H/2, W/2).

    The picture moves by two pixels along its diagonal from frame to frame.
    """

    def forward(self, images: Tensor) -> Tensor:
        frames = [images.roll((2 * t, 2 * t), (2, 3)) for t in range(4)]
        return torch.stack([nn.functional.avg_pool2d(frame, 2) for frame in frames], 2)


FRONTS: dict[str, Callable[[], nn.Module]] = {"one_d": Columns, "three_d": Clip}
# benchmarks/kinds.py writes the docstrings of these functions into its table.
KINDS: dict[str, Callable[[], nn.Module]] = {
    "depthwise": depthwise,
    "plain": plain,
    "plain_norm_after": plain_norm_after,
    "efficient": efficient,
    "dense": dense,
    "regnet": regnet,
    "preact": preact,
    "unet": unet,
    "one_d": one_d,
    "three_d": three_d,
    "vit": vit,
}


def trained(kind: str) -> nn.Module:
    """A network of the zoo with its weights, in float32 and eval mode."""
    model = KINDS[kind]()
    stored = load_file(DATA / f"{kind}.safetensors")
    for name, tensor in stored.items():
        if tensor.is_floating_point():
            stored[name] = tensor.float()
    model.load_state_dict(stored)
    return model.eval()


def known(kind: str) -> dict[str, Any]:
    """The record of a network of the zoo: its accuracy, recipe and images."""
    return dict(json.loads((DATA / f"{kind}.json").read_text(encoding="utf-8")))
