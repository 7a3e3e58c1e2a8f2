"""What a caller may have set in torch as a whole."""

from typing import Any

import torch


def settings() -> dict[str, Any]:
    """Return the settings of this process and thread, by name."""
    return {
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "only warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "float32 products": torch.get_float32_matmul_precision(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "threads": torch.get_num_threads(),
    }
