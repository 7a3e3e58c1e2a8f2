"""Wide residual networks for small images, of any depth: the n-2 networks of De & Smith's tables.

`wide_resnet_cifar` in timm's registry is built by these arguments:

- `depth` n = 6 k + 4: k blocks of two 3x3 convolutions in each of three stages. n counts the
  convolutions of the blocks, the stem and the three projections.
- `width`: the stages have 16, 32 and 64 times as many channels.
- `order`: with "pre" (v2, as in the tables) norm and ReLU stand before each convolution; with
  "post" (v1) they stand after it, and a ReLU follows each sum.
- `norm=False` leaves the norms out.

Convolutions start from He's initialization. The file is imported when a name is asked for that timm
does not know, so recipes and commands know the network.

Zagoruyko & Komodakis 2016, arXiv:1605.07146, section 2; De & Smith 2020, arXiv:2002.10444, section
2.3.
"""

from __future__ import annotations

import math
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

# timm adds the names that it registers.
__all__ = ["WideResNet"]

_STAGES = 3
# Mean and standard deviation of CIFAR-10's training images, per channel.
_MEAN = (0.4914, 0.4822, 0.4465)
_STD = (0.247, 0.2435, 0.2616)


def batchnorm(channels: int, has_norm: bool) -> nn.Module:
    """Return a BatchNorm, or the identity for a network without norms."""
    return nn.BatchNorm2d(channels) if has_norm else nn.Identity()


class Before(nn.Module):
    """A v2 block: y = (skip + conv(relu(norm(conv(relu(norm(x))))))) factor.

    It takes (N, C, H, W) and gives (N, C', H / stride, W / stride). Where the shape changes, the
    skip is a 1x1 convolution of relu(norm(x)).

    Args:
        in_channels: Channels C of the input.
        out_channels: Channels C' of the output.
        stride: Stride of the first convolution.
        factor: The factor of the sum.
        norm: Whether the block has BatchNorms.
    """

    def __init__(
        self, in_channels: int, out_channels: int, stride: int, factor: float, norm: bool
    ) -> None:
        super().__init__()
        self.factor = factor
        self.norm1 = batchnorm(in_channels, norm)
        self.act1 = nn.ReLU()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.norm2 = batchnorm(out_channels, norm)
        self.act2 = nn.ReLU()
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)

        self.downsample = None
        if in_channels != out_channels or stride != 1:
            self.downsample = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
        self.drop_path = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        active = self.act1(self.norm1(x))
        skip = x if self.downsample is None else self.downsample(active)
        branch = self.conv2(self.act2(self.norm2(self.conv1(active))))
        total = skip + self.drop_path(branch)
        return total if self.factor == 1 else total * self.factor


class After(nn.Module):
    """A v1 block: y = relu((skip + norm(conv(relu(norm(conv(x)))))) factor).

    It takes (N, C, H, W) and gives (N, C', H / stride, W / stride). Where the shape changes, the
    skip is a 1x1 convolution and a norm. The arguments are those of `Before`.
    """

    def __init__(
        self, in_channels: int, out_channels: int, stride: int, factor: float, norm: bool
    ) -> None:
        super().__init__()
        self.factor = factor
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.norm1 = batchnorm(out_channels, norm)
        self.act1 = nn.ReLU()
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.norm2 = batchnorm(out_channels, norm)

        self.downsample = None
        if in_channels != out_channels or stride != 1:
            projection = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, batchnorm(out_channels, norm))
        self.act2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        branch = self.norm2(self.conv2(self.act1(self.norm1(self.conv1(x)))))
        total = skip + branch
        return self.act2(total if self.factor == 1 else total * self.factor)


class WideResNet(nn.Module):
    """Stem, three stages, global average pool and classifier, with the methods of timm's networks.

    Args:
        depth: The number of convolutions, 6 k + 4.
        width: The factor on the channels 16, 32 and 64 of the stages. The stem has 16 channels.
        order: "pre" for blocks `Before` (v2), "post" for blocks `After` (v1).
        divide: Whether residual sums are divided by sqrt(2) (Balduzzi et al. 2017,
            arXiv:1702.08591).
        norm: Whether there are BatchNorms. A network without them that is converted to `skipinit`
            has He's weights.
        per_image: Whether each image is standardized over all of its values, after the
            normalization per channel.
        num_classes: The number of classes; 0 leaves the classifier out.
        in_chans: Channels of the images.
        drop_rate: The rate of dropout before the classifier.
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

        # In v2 the first block has the norm of the stem, and the norm of the last block stands
        # outside of it.
        is_pre = order == "pre"
        self.conv1 = nn.Conv2d(in_chans, 16, 3, 1, 1, bias=False)
        self.norm1: nn.Module = nn.Identity() if is_pre else batchnorm(16, norm)
        self.act1: nn.Module = nn.Identity() if is_pre else nn.ReLU()

        block = Before if is_pre else After
        factor = math.sqrt(0.5) if divide else 1.0
        channels = 16
        self.stages = nn.Sequential()
        for stage in range(_STAGES):
            stage_channels = 16 * 2**stage * width
            blocks = nn.Sequential()
            for number in range((depth - 4) // 6):
                stride = 2 if stage > 0 and number == 0 else 1
                blocks.append(block(channels, stage_channels, stride, factor, norm))
                channels = stage_channels
            self.stages.append(blocks)

        self.norm2: nn.Module = batchnorm(channels, norm) if is_pre else nn.Identity()
        self.act2: nn.Module = nn.ReLU() if is_pre else nn.Identity()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head_drop = nn.Dropout(drop_rate)
        self.fc = nn.Linear(channels, num_classes) if num_classes else nn.Identity()
        self.init_weights()

    def init_weights(self) -> None:
        """Draw all weights anew, by He's initialization.

        Weights of convolutions are N(0, 2 / fan_in), those of the classifier N(0, 1 / fan_in). The
        classifier's bias is 0.
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                nn.init.zeros_(module.bias)

    def group_matcher(self, coarse: bool = False) -> dict[str, object]:
        """Return the layers as timm groups them: the stem, then every stage or every block.

        Args:
            coarse: Whether a group is a stage.
        """
        stem = r"^(?:conv1|norm1)"
        if coarse:
            return {"stem": stem, "blocks": r"^stages\.(\d+)"}
        return {"stem": stem, "blocks": [(r"^stages\.(\d+)\.(\d+)", None), (r"^norm2", (99999,))]}

    def get_classifier(self) -> nn.Module:
        return self.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a new one; the pool is always the average."""
        self.num_classes = num_classes
        self.fc = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the features (N, 64 width, H / 4, W / 4) of images (N, C, H, W)."""
        if self.per_image:
            variance = x.var((1, 2, 3), correction=0, keepdim=True)
            mean = x.mean((1, 2, 3), keepdim=True)
            x = (x - mean) / (variance + 1e-6).sqrt()

        stem = self.act1(self.norm1(self.conv1(x)))
        return self.act2(self.norm2(self.stages(stem)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.head_drop(self.pool(x).flatten(1))
        return x if pre_logits else self.fc(x)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, num_classes) of images (N, C, H, W)."""
        return self.forward_head(self.forward_features(x))


default_cfgs = generate_default_cfgs(
    {
        "wide_resnet_cifar": {
            "num_classes": 10,
            "input_size": (3, 32, 32),
            "pool_size": (8, 8),
            "crop_pct": 1.0,
            "interpolation": "bilinear",
            "mean": _MEAN,
            "std": _STD,
            "first_conv": "conv1",
            "classifier": "fc",
        }
    }
)


@register_model
def wide_resnet_cifar(pretrained: bool = False, **kwargs: Any) -> WideResNet:
    """Return WRN-depth-width for images of 32 pixels, by default WRN-16-2."""
    return build_model_with_cfg(WideResNet, "wide_resnet_cifar", pretrained, **kwargs)
