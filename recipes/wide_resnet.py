"""Wide residual networks for small images, of any depth: the n-2 networks of De & Smith's tables.

`wide_resnet_cifar` in timm's registry, with `depth` n = 6 k + 4 (k blocks of two 3x3 convolutions
in each of three stages; n counts their convolutions, the stem and the three projections) and
`width` (channels are 16, 32 and 64 times it). `order="pre"`: norm and ReLU before each convolution
(v2, the one in the tables); `order="post"`: after it, with a ReLU on the skip path (v1).
`norm=False` leaves the norms out. Convolutions start from He's initialization. The file is imported
when a name is asked for that timm does not know, so recipes and commands have it.

Zagoruyko & Komodakis 2016, arXiv:1605.07146, section 2; De & Smith 2020, arXiv:2002.10444, section
2.3.
"""

from __future__ import annotations

import math
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

__all__ = ["WideResNet"]  # timm adds the names it registers

_STAGES = 3
_MEAN = (0.4914, 0.4822, 0.4465)
_STD = (0.247, 0.2435, 0.2616)  # of CIFAR-10's training images, per channel


def batchnorm(channels: int, norm: bool) -> nn.Module:
    """A BatchNorm, or the identity in a network without norms."""
    return nn.BatchNorm2d(channels) if norm else nn.Identity()


class Before(nn.Module):
    """v2: y = skip + conv(relu(norm(conv(relu(norm(x)))))), times `factor`; (N, C, H, W) -> (N, C',
    H / s, W / s).

    Where the shape changes, the skip is a 1x1 convolution of relu(norm(x)).
    """

    def __init__(self, inside: int, outside: int, stride: int, factor: float, norm: bool) -> None:
        super().__init__()
        self.factor = factor
        self.norm1 = batchnorm(inside, norm)
        self.act1 = nn.ReLU()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm2 = batchnorm(outside, norm)
        self.act2 = nn.ReLU()
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.downsample = (
            None
            if inside == outside and stride == 1
            else nn.Conv2d(inside, outside, 1, stride, bias=False)
        )
        self.drop_path = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        active = self.act1(self.norm1(x))
        skip = x if self.downsample is None else self.downsample(active)
        total = skip + self.drop_path(self.conv2(self.act2(self.norm2(self.conv1(active)))))
        return total if self.factor == 1 else total * self.factor


class After(nn.Module):
    """v1: y = relu(skip + norm(conv(relu(norm(conv(x)))))), (N, C, H, W) -> (N, C', H / stride, W /
    stride).

    Where the shape changes, the skip is a 1x1 convolution and a norm.
    """

    def __init__(self, inside: int, outside: int, stride: int, factor: float, norm: bool) -> None:
        super().__init__()
        self.factor = factor
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = batchnorm(outside, norm)
        self.act1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = batchnorm(outside, norm)
        self.downsample = None
        if inside != outside or stride != 1:
            projection = nn.Conv2d(inside, outside, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, batchnorm(outside, norm))
        self.act2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        total = skip + self.norm2(self.conv2(self.act1(self.norm1(self.conv1(x)))))
        return self.act2(total if self.factor == 1 else total * self.factor)


class WideResNet(nn.Module):
    """Stem, three stages, global average pool, classifier, with the methods that timm's networks
    have.

    Args:
        depth: 6 k + 4.
        width: factor on the channels 16, 32, 64 of the stages; the stem has 16.
        order: `pre` (v2) or `post` (v1).
        divide: residual sums are divided by sqrt(2) (Balduzzi et al. 2017, arXiv:1702.08591).
        norm: whether there are BatchNorms. A network without them that is converted to `skipinit`
            has He's weights.
        per_image: each image is standardized over all of its values, after the normalization per
            channel.
        drop_rate: dropout before the classifier.
    """

    def __init__(
        self,
        depth: int = 16,
        width: int = 2,
        order: str = "pre",
        divide: bool = False,
        norm: bool = True,
        per_image: bool = False,
        num_classes: int = 10,
        in_chans: int = 3,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6 or width < 1 or order not in ("pre", "post"):
            raise ValueError(
                f"depth {depth} must be 10, 16, 22 ..., width {width} >= 1, order {order!r} pre or"
                " post"
            )
        self.num_classes = num_classes
        self.num_features = 64 * width
        self.head_hidden_size = self.num_features
        self.per_image = per_image
        self.conv1 = nn.Conv2d(in_chans, 16, 3, 1, 1, bias=False)
        before = (
            order == "pre"
        )  # then the first block has the stem's norm, and the last block's is outside of it
        self.norm1: nn.Module = nn.Identity() if before else batchnorm(16, norm)
        self.act1: nn.Module = nn.Identity() if before else nn.ReLU()
        self.stages = nn.Sequential()
        inside = 16
        kind = Before if before else After
        factor = math.sqrt(0.5) if divide else 1.0
        for stage in range(_STAGES):
            outside = 16 * 2**stage * width
            blocks = nn.Sequential()
            for place in range((depth - 4) // 6):
                blocks.append(kind(inside, outside, 2 if stage and not place else 1, factor, norm))
                inside = outside
            self.stages.append(blocks)
        self.norm2: nn.Module = batchnorm(inside, norm) if before else nn.Identity()
        self.act2: nn.Module = nn.ReLU() if before else nn.Identity()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head_drop = nn.Dropout(drop_rate)
        self.fc = nn.Linear(inside, num_classes) if num_classes else nn.Identity()
        self.init_weights()

    def init_weights(self) -> None:
        """He's initialization: weights ~ N(0, 2 / fan_in); the classifier's N(0, 1 / fan_in), its
        bias 0.
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                nn.init.zeros_(module.bias)

    def group_matcher(self, coarse: bool = False) -> dict[str, object]:
        """Layers as timm groups them: the stem, then every block (or stage)."""
        blocks = (
            r"^stages\.(\d+)"
            if coarse
            else [(r"^stages\.(\d+)\.(\d+)", None), (r"^norm2", (99999,))]
        )
        return {"stem": r"^(?:conv1|norm1)", "blocks": blocks}

    def get_classifier(self) -> nn.Module:
        return self.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier; the pool is always the average."""
        self.num_classes = num_classes
        self.fc = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()

    def forward_features(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, 64 width, H / 4, W / 4)."""
        if self.per_image:
            variance = x.var((1, 2, 3), correction=0, keepdim=True)
            mean = x.mean((1, 2, 3), keepdim=True)
            x = (x - mean) / (variance + 1e-6).sqrt()
        return self.act2(self.norm2(self.stages(self.act1(self.norm1(self.conv1(x))))))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.head_drop(self.pool(x).flatten(1))
        return x if pre_logits else self.fc(x)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, num_classes)."""
        return self.forward_head(self.forward_features(x))


default_cfgs = generate_default_cfgs(
    {
        "wide_resnet_cifar": {
            "num_classes": 10, "input_size": (3, 32, 32), "pool_size": (8, 8), "crop_pct": 1.0,
            "interpolation": "bilinear", "mean": _MEAN, "std": _STD, "first_conv": "conv1", "classifier": "fc",
        }
    }
)  # fmt: skip


@register_model
def wide_resnet_cifar(pretrained: bool = False, **kwargs: Any) -> WideResNet:
    """WRN-depth-width for images of 32 pixels; 16-2 unless told otherwise."""
    return build_model_with_cfg(WideResNet, "wide_resnet_cifar", pretrained, **kwargs)
