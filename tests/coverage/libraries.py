"""Networks of other libraries than timm, by name, with random weights and, where it must be said, what they take."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, Any]
LARGEST = 70e6  # parameters of torchvision's classifiers that are tried
SMP = (
    "Unet",
    "UnetPlusPlus",
    "MAnet",
    "Linknet",
    "FPN",
    "PSPNet",
    "PAN",
    "DeepLabV3",
    "DeepLabV3Plus",
    "UPerNet",
    "Segformer",
    "DPT",
)
ENCODERS = ("resnet18", "mobilenet_v2", "efficientnet-b0", "timm-regnetx_002")
YOLO = ("yolov8n", "yolov8n-seg", "yolov8n-pose", "yolov8n-cls", "yolo11n", "yolo11n-seg", "yolo11n-pose",
        "yolo11n-cls", "yolo26n", "yolo26n-seg", "yolo26n-pose", "yolo26n-cls")  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {  # what makes a network of transformers small
    "ResNet": {"depths": [2, 2], "hidden_sizes": [16, 32], "embedding_size": 16},
    "RegNet": {"depths": [1, 2], "hidden_sizes": [16, 32], "groups_width": 8, "embedding_size": 16},
    "MobileNetV1": {"depth_multiplier": 0.5},
    "MobileNetV2": {"depth_multiplier": 0.5},
    "EfficientNet": {"width_coefficient": 0.5, "depth_coefficient": 0.5, "image_size": 96, "hidden_dim": 640},
    "MobileViT": {},
    "MobileViTV2": {"width_multiplier": 0.5},
    "LevitForImageClassification": {},
    "PoolFormer": {"depths": [1, 1, 1, 1]},
    "Segformer": {"depths": [1, 1, 1, 1]},
    "DPT": {"num_hidden_layers": 4, "hidden_size": 48, "num_attention_heads": 3, "intermediate_size": 96,
            "backbone_out_indices": [0, 1, 2, 3], "image_size": 96, "neck_hidden_sizes": [16, 16, 16, 16],
            "use_batch_norm_in_fusion_residual": True, "fusion_hidden_size": 16},
    "SwiftFormer": {"depths": [1, 1, 1, 1]},
    "Bit": {"depths": [1, 1, 1, 1], "layer_type": "preactivation"},
    "ConvNextV2": {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32]},
    "ViT": {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 3, "intermediate_size": 96},
    "Dinov2": {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 3},
    "Swin": {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16},
    "HGNetV2": {},
    "Detr": {}, "ConditionalDetr": {}, "TableTransformer": {}, "RTDetr": {}, "RTDetrV2": {},
    "DFine": {}, "UperNet": {},
    "ZoeDepth": {}, "VitMatte": {}, "SuperPoint": {}, "Focalnet": {}, "DeformableDetr": {},
    "Cvt": {"depth": [1, 1, 2], "embed_dim": [16, 32, 64], "num_heads": [1, 2, 4]},
}  # fmt: skip
HEADS = ("ForImageClassification", "ForObjectDetection", "ForSemanticSegmentation", "ForDepthEstimation", "Model")
MONAI: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "UNet": ({"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": (8, 16, 32), "strides": (2, 2),
              "num_res_units": 2, "norm": "BATCH"}, (1, 64, 64)),
    "UNet 3-D": ({"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "channels": (8, 16, 32), "strides": (2, 2),
                  "norm": "BATCH"}, (1, 32, 32, 32)),
    "BasicUNet": ({"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "features": (8, 8, 16, 16, 32, 8),
                   "norm": "batch"}, (1, 64, 64)),
    "AttentionUnet": ({"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": (8, 16, 32),
                       "strides": (2, 2)}, (1, 64, 64)),
    "SegResNet": ({"spatial_dims": 3, "init_filters": 8, "norm": "BATCH"}, (1, 32, 32, 32)),
    "DynUNet": ({"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "kernel_size": (3, 3, 3),
                 "strides": (1, 2, 2), "upsample_kernel_size": (2, 2), "norm_name": "batch"}, (1, 64, 64)),
    "VNet": ({"spatial_dims": 2}, (1, 64, 64)),
    "HighResNet": ({"spatial_dims": 2, "in_channels": 1, "out_channels": 2}, (1, 48, 48)),
    "DenseNet121": ({"spatial_dims": 2, "in_channels": 1, "out_channels": 2}, (1, 64, 64)),
    "resnet18": ({"spatial_dims": 3, "n_input_channels": 1}, (1, 32, 32, 32)),
    "EfficientNetBN": ({"model_name": "efficientnet-b0", "spatial_dims": 2, "in_channels": 1, "pretrained": False},
                       (1, 64, 64)),
    "SENet": ({"spatial_dims": 2, "in_channels": 1, "block": "se_resnetxt_bottleneck", "layers": (1, 1, 1, 1),
               "groups": 4, "reduction": 4}, (1, 64, 64)),
}  # fmt: skip


def there(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def names() -> Iterator[str]:
    """All that can be built here."""
    if there("torchvision"):
        from torchvision import models

        for room in ("", ".segmentation", ".detection", ".video", ".optical_flow"):
            module = importlib.import_module(f"torchvision.models{room}")
            yield from (f"torchvision:{name}" for name in models.list_models(module=module))
    if there("segmentation_models_pytorch"):
        yield from (f"smp:{arch}:{encoder}" for arch in SMP for encoder in ENCODERS)
    if there("ultralytics"):
        yield from (f"ultralytics:{name}" for name in YOLO)
    if there("transformers"):
        yield from (f"transformers:{name}" for name in SMALL)
    if there("monai"):
        yield from (f"monai:{name}" for name in MONAI)
    if there("open_clip"):
        yield "open_clip:RN50"


def build(name: str) -> Built:
    """The network, and its input or None for what it says of itself; `nn.Identity` for one that is too large."""
    library, _, rest = name.partition(":")
    makers: dict[str, Callable[[str], Built]] = {
        "torchvision": _torchvision, "smp": _smp, "ultralytics": _ultralytics, "transformers": _transformers,
        "monai": _monai, "open_clip": _open_clip,
    }  # fmt: skip
    return makers[library](rest)


def _images(*size: int, count: int = 2) -> Tensor:
    return torch.rand(count, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _torchvision(name: str) -> Built:
    from torchvision import models

    builder = models.get_model_builder(name)
    room = builder.__module__
    if "detection" in room:
        size = {} if "ssd" in name else {"min_size": 128, "max_size": 160}
        size |= {"rpn_post_nms_top_n_test": 50} if "rcnn" in name else {}
        model = models.get_model(name, weights=None, weights_backbone=None, num_classes=5, **size)
        if hasattr(model, "score_thresh"):
            model.score_thresh = 0.0
        return model, ([_images(3, 96, 128)[0], _images(3, 128, 100)[0]],)
    if "optical_flow" in room:
        return models.get_model(name, weights=None), (_images(3, 128, 128) * 2 - 1, _images(3, 128, 128) * 2 - 1)
    if "segmentation" in room:
        return models.get_model(name, weights=None, weights_backbone=None), _images(3, 96, 96)
    if "video" in room:
        size = (3, 16, 224, 224) if "vit" in name or "swin" in name else (3, 16, 112, 112) if "mvit" not in name else (
            3, 16, 224, 224)  # fmt: skip
        return models.get_model(name, weights=None), _images(*size, count=1)
    if any(word in name for word in ("128gf", "vit_h", "vit_l", "_32gf")):
        return nn.Identity(), None
    model = models.get_model(name, weights=None)
    if sum(p.numel() for p in model.parameters()) > LARGEST:
        return nn.Identity(), None
    return model, _images(3, *((299, 299) if "inception" in name else (224, 224) if "maxvit" in name else (96, 96)))


def _smp(name: str) -> Built:
    import segmentation_models_pytorch as smp

    arch, encoder = name.split(":")
    return getattr(smp, arch)(encoder, encoder_weights=None, classes=4), _images(3, 128, 128)


def _ultralytics(name: str) -> Built:
    from ultralytics import YOLO

    return YOLO(f"{name}.yaml", verbose=False).model, _images(3, 128, 128)


def _transformers(name: str) -> Built:
    import transformers

    base = name.removesuffix("ForImageClassification")
    base = {"Focalnet": "FocalNet"}.get(base, base)
    config = getattr(transformers, f"{base}Config")(**{**_defaults(base), **SMALL[name]})
    kind = next(k for head in HEADS if (k := getattr(transformers, f"{base}{head}", None)) is not None)
    model = kind(config)
    side = getattr(config, "image_size", None)
    side = side if isinstance(side, int) else 128
    channels = getattr(config, "num_channels", 3)
    extra = 4 if base == "VitMatte" else channels
    return model, {"pixel_values": _images(extra, side, side)}


def _defaults(base: str) -> dict[str, Any]:
    if base in ("Detr", "ConditionalDetr", "TableTransformer", "DeformableDetr"):
        return {"use_pretrained_backbone": False, "encoder_layers": 1, "decoder_layers": 1}
    return {}


def _monai(name: str) -> Built:
    from monai.networks import nets

    args, size = MONAI[name]
    return getattr(nets, name.split()[0])(**args), _images(*size)


def _open_clip(name: str) -> Built:
    from open_clip.modified_resnet import ModifiedResNet

    return ModifiedResNet([1, 1, 1, 1], output_dim=32, heads=4, image_size=96, width=16), _images(3, 96, 96)
