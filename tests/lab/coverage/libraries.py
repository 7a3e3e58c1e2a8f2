"""Networks of other libraries than timm, by name, with random weights, and inputs for them."""

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, Any]
# Networks with more parameters are not tried: with its copies in float64, one takes some 5 GB.
LARGEST = 200e6
ENCODERS = ("resnet18", "mobilenet_v2", "efficientnet-b0", "timm-regnetx_002")
TIMMS = ("tu-resnet18", "tu-mobilevit_xxs", "tu-vit_tiny_patch16_224", "tu-vit_tiny_r_s16_p8_224")
UNETS = (
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
)
SMP = {**dict.fromkeys(UNETS, ENCODERS), "DPT": TIMMS}
YOLO = (
    "yolov8n",
    "yolov8n-seg",
    "yolov8n-pose",
    "yolov8n-cls",
    "yolo11n",
    "yolo11n-seg",
    "yolo11n-pose",
    "yolo11n-cls",
    "yolo26n",
    "yolo26n-seg",
    "yolo26n-pose",
    "yolo26n-cls",
)
VIT = {
    "num_hidden_layers": 4,
    "hidden_size": 48,
    "num_attention_heads": 3,
    "intermediate_size": 96,
    "image_size": 96,
}
BACKBONE = {
    "model_type": "resnet",
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [16, 32, 64, 64],
    "embedding_size": 16,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
DECODING = {"encoder_layers": 1, "decoder_layers": 1}
# Classes of transformers, or the beginning of their names, with arguments that make them small.
SMALL: dict[str, dict[str, Any]] = {
    "ResNet": {"depths": [2, 2], "hidden_sizes": [16, 32], "embedding_size": 16},
    "RegNet": {
        "depths": [1, 2],
        "hidden_sizes": [16, 32],
        "groups_width": 8,
        "embedding_size": 16,
    },
    "MobileNetV1": {"depth_multiplier": 0.5},
    "MobileNetV2": {"depth_multiplier": 0.5},
    "EfficientNet": {
        "width_coefficient": 0.5,
        "depth_coefficient": 0.5,
        "image_size": 96,
        "hidden_dim": 640,
    },
    "Align": {
        "width_coefficient": 0.5,
        "depth_coefficient": 0.5,
        "image_size": 96,
        "hidden_dim": 640,
    },
    "MobileViT": {},
    "MobileViTV2": {"width_multiplier": 0.5},
    "LevitForImageClassification": {},
    "PoolFormer": {"depths": [1, 1, 1, 1]},
    "Segformer": {"depths": [1, 1, 1, 1]},
    "SegformerForSemanticSegmentation": {"depths": [1, 1, 1, 1]},
    "BeitForSemanticSegmentation": {**VIT, "out_indices": [0, 1, 2, 3]},
    "Data2VecVisionForSemanticSegmentation": {**VIT, "out_indices": [0, 1, 2, 3]},
    "DPT": {
        **VIT,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [16, 16, 16, 16],
        "use_batch_norm_in_fusion_residual": True,
        "fusion_hidden_size": 16,
    },
    "SwiftFormer": {"depths": [1, 1, 1, 1]},
    "Bit": {"depths": [1, 1, 1, 1], "layer_type": "preactivation"},
    "ConvNextV2": {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32]},
    "ViT": {
        "num_hidden_layers": 2,
        "hidden_size": 48,
        "num_attention_heads": 3,
        "intermediate_size": 96,
    },
    "Dinov2": {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 3},
    "Swin": {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16},
    "HGNetV2": {},
    "TextNet": {},
    "PPLCNet": {},
    "TimmWrapper": {"architecture": "resnet18"},
    "Detr": DECODING,
    "ConditionalDetr": DECODING,
    "TableTransformer": DECODING,
    "DeformableDetr": {**DECODING, "decoder_layers": 2},
    "DabDetr": {**DECODING, "backbone_config": BACKBONE},
    "RTDetr": {},
    "RTDetrV2": {},
    "DFine": {},
    "Deimv2": {},
    "PPDocLayoutV3": {},
    "MaskFormer": {
        "backbone_config": BACKBONE,
        "decoder_config": {"model_type": "detr", **DECODING},
    },
    "Mask2Former": {"backbone_config": BACKBONE, **DECODING},
    "UperNet": {},
    "ZoeDepth": {},
    "SuperPoint": {},
    "FocalNet": {},
    "EfficientLoFTR": {},
    "VitPose": {
        "backbone_config": {
            "model_type": "vitpose_backbone",
            "image_size": [128, 96],
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "out_features": ["stage2"],
        },
        "use_simple_decoder": False,
    },
    "VitMatte": {
        "hidden_size": 48,
        "convstream_hidden_sizes": [48, 96, 192],
        "fusion_hidden_sizes": [64, 64, 32, 16],
        "backbone_config": {
            "model_type": "vitdet",
            "num_channels": 4,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "image_size": 128,
            "pretrain_image_size": 128,
            "out_features": ["stage2"],
        },
    },
    "Cvt": {"depth": [1, 2, 3], "embed_dim": [16, 32, 64], "num_heads": [1, 2, 4]},
}
HEADS = (
    "ForImageClassification",
    "ForObjectDetection",
    "ForSemanticSegmentation",
    "ForDepthEstimation",
    "ForKeypointDetection",
    "ForKeypointMatching",
    "ForPoseEstimation",
    "ForImageMatting",
    "ForInstanceSegmentation",
    "ForUniversalSegmentation",
    "VisionModel",
    "Model",
)
TAKES = {"VitMatte": (4, 128, 128), "VitPose": (3, 128, 96), "EfficientLoFTR": (2, 1, 128, 128)}
FLAT = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
SOLID = {**FLAT, "spatial_dims": 3}
LEVELS = {"channels": (8, 16, 32), "strides": (2, 2)}
BASIC = {"features": (8, 8, 16, 16, 32, 8), "norm": "batch"}
DYNAMIC = {
    "kernel_size": (3, 3, 3),
    "strides": (1, 2, 2),
    "upsample_kernel_size": (2, 2),
    "norm_name": "batch",
}
MONAI: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "UNet": ({**FLAT, **LEVELS, "num_res_units": 2, "norm": "BATCH"}, (1, 64, 64)),
    "UNet 3-D": ({**SOLID, **LEVELS, "norm": "BATCH"}, (1, 32, 32, 32)),
    "BasicUNet": ({**FLAT, **BASIC}, (1, 64, 64)),
    "AttentionUnet": ({**FLAT, **LEVELS}, (1, 64, 64)),
    "SegResNet": ({"spatial_dims": 3, "init_filters": 8, "norm": "BATCH"}, (1, 32, 32, 32)),
    "DynUNet": ({**FLAT, **DYNAMIC}, (1, 64, 64)),
    "VNet": ({"spatial_dims": 2}, (1, 64, 64)),
    "HighResNet": (FLAT, (1, 48, 48)),
    "DenseNet121": (FLAT, (1, 64, 64)),
    "resnet18": ({"spatial_dims": 3, "n_input_channels": 1}, (1, 32, 32, 32)),
    "EfficientNetBN": (
        {"model_name": "efficientnet-b0", "spatial_dims": 2, "in_channels": 1, "pretrained": False},
        (1, 64, 64),
    ),
    "UNet 1-D": ({**FLAT, "spatial_dims": 1, **LEVELS, "norm": "BATCH"}, (1, 128)),
    "AttentionUnet 3-D": ({**SOLID, **LEVELS}, (1, 32, 32, 32)),
    "BasicUNet 3-D": ({**SOLID, **BASIC}, (1, 32, 32, 32)),
    "BasicUNetPlusPlus": ({**FLAT, **BASIC}, (1, 64, 64)),
    "SegResNetDS": ({**FLAT, "init_filters": 8, "norm": "BATCH"}, (1, 64, 64)),
    "SegResNetVAE": (
        {"input_image_size": (32, 32, 32), "spatial_dims": 3, "init_filters": 8, "norm": "BATCH"},
        (1, 32, 32, 32),
    ),
    "DynUNet 3-D": ({**SOLID, **DYNAMIC, "res_block": True}, (1, 32, 32, 32)),
    "HighResNet 3-D": (SOLID, (1, 24, 24, 24)),
    "DenseNet121 3-D": (SOLID, (1, 32, 32, 32)),
    "resnet50": ({"spatial_dims": 2, "n_input_channels": 1}, (1, 64, 64)),
    "SEResNet50": ({"spatial_dims": 2, "in_channels": 1}, (1, 64, 64)),
    "SEResNext50 3-D": ({"spatial_dims": 3, "in_channels": 1}, (1, 32, 32, 32)),
    "FlexibleUNet": (
        {"in_channels": 1, "out_channels": 2, "backbone": "efficientnet-b0"},
        (1, 64, 64),
    ),
    "FlexibleUNet on a ResNet": (
        {"in_channels": 1, "out_channels": 2, "backbone": "resnet18"},
        (1, 64, 64),
    ),
    "HoVerNet": ({"mode": "fast", "in_channels": 3, "out_classes": 5}, (3, 256, 256)),
    "AHNet": ({**FLAT, "layers": (3, 4, 6, 3), "upsample_mode": "transpose"}, (1, 128, 128)),
    "LocalNet": ({**FLAT, "num_channel_initial": 8, "extract_levels": (0, 1, 2)}, (1, 64, 64)),
    "GlobalNet": (
        {
            "image_size": (64, 64),
            "spatial_dims": 2,
            "in_channels": 1,
            "num_channel_initial": 8,
            "depth": 3,
        },
        (1, 64, 64),
    ),
    "DAF3D": ({"in_channels": 1, "out_channels": 2, "visual_output": False}, (1, 32, 32, 32)),
    "SENet": (
        {
            "spatial_dims": 2,
            "in_channels": 1,
            "block": "se_resnetxt_bottleneck",
            "layers": (1, 1, 1, 1),
            "groups": 4,
            "reduction": 4,
        },
        (1, 64, 64),
    ),
}
# Whole networks, with the tower for text.
CLIPS = ("RN50", "RN50-quickgelu", "RN101", "RN50x4")
# The packages of libraries that have another name here.
MODULES = {"smp": "segmentation_models_pytorch"}


class TooLargeError(Exception):
    """A network has more parameters than `LARGEST`."""


def preload(chosen: Iterable[str]) -> None:
    """Import the libraries of these networks once, before a process is made for each of them."""
    for library in {name.partition(":")[0] for name in chosen}:
        importlib.import_module(MODULES.get(library, library))


def names() -> Iterator[str]:
    """Yield the names of all networks that can be built here."""
    from torchvision import models

    for room in ("", ".segmentation", ".detection", ".video", ".optical_flow", ".quantization"):
        module = importlib.import_module(f"torchvision.models{room}")
        yield from (f"torchvision:{name}" for name in models.list_models(module=module))

    segmenters: list[str] = []
    for arch, encoders in SMP.items():
        segmenters += [f"{arch}:{encoder}" for encoder in encoders]
    listed = {
        "smp": segmenters,
        "ultralytics": YOLO,
        "transformers": SMALL,
        "monai": MONAI,
        "open_clip": CLIPS,
    }
    for library, networks in listed.items():
        if importlib.util.find_spec(MODULES.get(library, library)) is not None:
            yield from (f"{library}:{name}" for name in networks)


def build(name: str) -> Built:
    """The network of this name, and an input for it.

    Raises:
        TooLargeError: The network has BatchNorms, and too many parameters.
    """
    library, _, rest = name.partition(":")
    makers: dict[str, Callable[[str], Built]] = {
        "torchvision": _torchvision,
        "smp": _smp,
        "ultralytics": _ultralytics,
        "transformers": _transformers,
        "monai": _monai,
        "open_clip": _open_clip,
    }
    return makers[library](rest)


def norms(model: nn.Module) -> list[str]:
    """The paths of all modules with running statistics, whatever their class."""
    return [
        path
        for path, module in model.named_modules()
        if getattr(module, "running_mean", None) is not None
    ]


def _images(*size: int, count: int = 2) -> Tensor:
    return torch.rand(count, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _torchvision(name: str) -> Built:
    from torchvision import models

    room = models.get_model_builder(name).__module__
    if "detection" in room:
        return _torchvision_detector(name)
    if "optical_flow" in room:
        return models.get_model(name, weights=None), (
            _images(3, 128, 128) * 2 - 1,
            _images(3, 128, 128) * 2 - 1,
        )
    if "segmentation" in room:
        return models.get_model(name, weights=None, weights_backbone=None), _images(3, 64, 64)
    if "video" in room:
        size = (3, 8, 64, 64)
        if any(word in name for word in ("vit", "swin", "s3d")):
            size = (3, 16, 224, 224)
        return models.get_model(name, weights=None), _images(*size, count=1)
    model = models.get_model(name, weights=None)
    if norms(model) and sum(p.numel() for p in model.parameters()) > LARGEST:
        raise TooLargeError(f"more than {LARGEST / 1e6:.0f} M parameters")
    # On smaller images, the deepest networks stray by 1e-6 and more.
    sides = {"inception": 128, "maxvit": 224, "efficientnet": 160}
    side = next((side for word, side in sides.items() if word in name), 64)
    return model, _images(3, side, side)


def _torchvision_detector(name: str) -> Built:
    from torchvision import models

    options: dict[str, int] = {}
    if "ssd" not in name:
        options = {"min_size": 128, "max_size": 160}
    if "rcnn" in name:
        options["rpn_post_nms_top_n_test"] = 50
    # The forward loops over all detections.
    if "keypoint" in name:
        options["box_detections_per_img"] = 5
    model = models.get_model(name, weights=None, weights_backbone=None, num_classes=5, **options)
    if hasattr(model, "score_thresh"):
        model.score_thresh = 0.0
    return model, ([_images(3, 96, 128)[0], _images(3, 128, 100)[0]],)


def _smp(name: str) -> Built:
    import segmentation_models_pytorch as smp

    arch, encoder = name.split(":")
    least = {"PAN": 128}.get(arch, 64)
    side = 224 if "vit_" in encoder else least
    return getattr(smp, arch)(encoder, encoder_weights=None, classes=4), _images(3, side, side)


def _ultralytics(name: str) -> Built:
    from ultralytics import YOLO

    return YOLO(f"{name}.yaml", verbose=False).model, _images(3, 64, 64)


def _transformers(name: str) -> Built:
    import transformers

    found = (getattr(transformers, f"{name}{head}", None) for head in ("", *HEADS))
    kind: Any = next(candidate for candidate in found if candidate is not None)
    config = kind.config_class(**SMALL[name])
    side = getattr(config, "image_size", None)
    side = side if isinstance(side, int) else 128
    return kind(config), {"pixel_values": _images(*TAKES.get(name, (3, side, side)))}


def _monai(name: str) -> Built:
    from monai.networks import nets

    args, size = MONAI[name]
    return getattr(nets, name.split()[0])(**args), _images(*size)


def _open_clip(name: str) -> Built:
    import open_clip

    model: Any = open_clip.create_model(name, pretrained=None, load_weights=False)
    side = model.visual.image_size
    side = side if isinstance(side, int) else side[0]
    text = torch.randint(
        1, 1000, (1, model.context_length), generator=torch.Generator().manual_seed(1)
    )
    return model, {"image": _images(3, side, side, count=1), "text": text}
