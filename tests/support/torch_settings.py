"""What a caller may have set in torch as a whole."""

from collections.abc import Callable
from typing import Any, cast

import torch


def settings() -> dict[str, Any]:
    """Return the settings of this process and thread, by name."""
    return {
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "only warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "threads": torch.get_num_threads(),
        **precisions(),
    }


def precisions() -> dict[str, str]:
    """Return how exactly torch multiplies float32 numbers, by every name that it has for it.

    A name that cannot be read, as another one was set, has the text `unreadable`.
    """
    backends = cast(Any, torch.backends)
    readers: dict[str, Any] = {
        "cuda.matmul.allow_tf32": lambda: backends.cuda.matmul.allow_tf32,
        "cudnn.allow_tf32": lambda: backends.cudnn.allow_tf32,
        "float32 products": torch.get_float32_matmul_precision,
    }
    # Older versions of torch have only the names above.
    if hasattr(backends.cudnn, "conv"):
        readers |= {
            "fp32_precision": lambda: backends.fp32_precision,
            "cuda.matmul": lambda: backends.cuda.matmul.fp32_precision,
            "cudnn.conv": lambda: backends.cudnn.conv.fp32_precision,
            "cudnn.rnn": lambda: backends.cudnn.rnn.fp32_precision,
            "mkldnn.matmul": lambda: backends.mkldnn.matmul.fp32_precision,
            "mkldnn.conv": lambda: backends.mkldnn.conv.fp32_precision,
        }
    return {name: _text(read) for name, read in readers.items()}


def _text(read: Callable[[], object]) -> str:
    try:
        return str(read())
    except RuntimeError:
        return "unreadable"
