"""Small networks with LayerNorms that look as if they had been trained."""

from typing import Any

import timm
import torch
from torch import Tensor, nn

TINY = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 24,
    "depth": 2,
    "num_heads": 3,
    "num_classes": 10,
}
SWIN = {
    "img_size": 32,
    "patch_size": 2,
    "window_size": 4,
    "embed_dim": 8,
    "depths": (2, 2),
    "num_heads": (2, 4),
    "num_classes": 10,
}
CONVNEXT = {"depths": (1, 1, 2, 1), "dims": (8, 12, 16, 24), "num_classes": 10}

SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", TINY),
    "vit without qkv bias": ("vit_tiny_patch16_224", {**TINY, "qkv_bias": False}),
    "vit with registers, averaged": (
        "vit_tiny_patch16_224",
        {**TINY, "reg_tokens": 2, "global_pool": "avg"},
    ),
    "vit, parallel": ("vit_small_patch16_36x1_224", TINY),
    "deit": ("deit_tiny_patch16_224", TINY),
    "deit, distilled": ("deit_tiny_distilled_patch16_224", TINY),
    "deit3, LayerScale": ("deit3_small_patch16_224", TINY),
    "cait, scales in forward": ("cait_xxs24_224", {**TINY, "depth_token_only": 2}),
    "beit, scales in forward, averaged": ("beit_base_patch16_224", TINY),
    "vit, norm of queries and keys": ("vit_tiny_patch16_224", {**TINY, "qk_norm": True}),
    "swin": ("swin_tiny_patch4_window7_224", SWIN),
    "swin v2": ("swinv2_tiny_window8_256", SWIN),
    "clip": ("vit_base_patch16_clip_224", TINY),
    "convnext": ("convnext_atto", CONVNEXT),
    "convnext, convolutions": ("convnext_atto", {**CONVNEXT, "conv_mlp": True}),
}


def skeleton(name: str) -> nn.Module:
    """A fresh network of `SMALL` in float64 and eval mode, which knows the size it is made for."""
    arch, args = SMALL[name]
    model = timm.create_model(arch, **args).double().eval()
    side = args.get("img_size", 64)
    config: Any = {**model.pretrained_cfg, "input_size": (3, side, side), "test_input_size": None}
    model.__dict__.update(pretrained_cfg=config, default_cfg=config)
    return model


def small(name: str) -> tuple[nn.Module, Tensor]:
    """A lived-in network of `SMALL`, and an input (2, 3, H, W) for it."""
    torch.manual_seed(0)
    model: Any = inhabit(skeleton(name))
    return model, torch.randn(2, *model.pretrained_cfg["input_size"], dtype=torch.float64)


def inhabit(model: nn.Module, seed: int = 0) -> nn.Module:
    """Return `model` itself, with random gammas, betas, biases, embeddings and LayerScales.

    Some gammas are negative, some zero.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64)

    in_norms: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            in_norms.update(id(parameter) for parameter in module.parameters())

    with torch.no_grad():
        for path, value in model.named_parameters():
            if id(value) in in_norms and path.endswith("weight"):
                value.copy_(1 + 0.3 * noise(value))
                value[::7].neg_()
                value[::11] = 0
            # LayerScale
            elif path.endswith("gamma"):
                value.copy_(0.5 + 0.2 * noise(value))
            elif value.ndim == 1 or "token" in path or "pos_embed" in path:
                value.copy_(0.3 * noise(value))
            elif path.endswith("weight"):
                value.copy_(noise(value) / value[0].numel() ** 0.5)
    return model
