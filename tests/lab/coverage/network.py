"""One network of the walk: build it, let it live, fold it, compare; and the same for torch's own
fuser.
"""

import warnings
from collections import Counter
from typing import Any

import timm
import torch
from support.lived_in_networks import BATCHNORMS, batchnorms, distance, lived_in, run
from timm.models._registry import _model_to_module
from torch import Tensor, fx, nn
from torch.fx.experimental import optimization

from normswap import schemes
from normswap.errors import RefusedError, TraceError
from normswap.folding.plan_builder import (
    FOLDED_BACK,
    FOLDED_FORWARD,
    LEFT_AFFINE,
    LEFT_SHIFT,
    NEVER_CALLED,
)
from normswap.graph import inspection
from normswap.plan import Step
from normswap.surgery import applying

# Relative L2 in float64. A wrong eps is off by 1e-4, a correct fold by 1e-14, a chaotic network by
# 1e-10.
EXACT = 1e-8
WAYS = {FOLDED_BACK: "back", FOLDED_FORWARD: "forward", LEFT_SHIFT: "moved", LEFT_AFFINE: "affine"}
WAYS[NEVER_CALLED.counted] = "unused"
# The number of images that statistics are measured on; more where maps of 1 x 1 make them
# degenerate.
IMAGES = 2
MORE = 8
# How far a network may stray when its input changes by 1e-15, before more images are used
NOISY = 1e-11
FOLDED = schemes.get(
    "folded"
)  # imported before the walk forks: one state of the code for all networks


def family(name: str) -> str:
    """timm's file, but for the two files that hold many families: these by the beginning of the
    name, too.
    """
    module = _model_to_module[name]
    return f"{module}: tf_" if module == "efficientnet" and name.startswith("tf_") else module


def count(name: str) -> tuple[int, int]:
    """Parameters and BatchNorm layers of an architecture, without its tensors."""
    with torch.device("meta"):
        model = timm.create_model(name)
    return sum(p.numel() for p in model.parameters()), len(batchnorms(model))


def living(name: str) -> tuple[nn.Module, Tensor, float]:
    """The network as if trained, an input (2, C, H, W), and how far the output strays when that
    changes by 1e-15.
    """
    for images in (IMAGES, MORE):
        model, x = _measured(name, images)
        noise = distance(outputs(model, x), outputs(model, x * (1 + 1e-15)))
        if noise <= NOISY:
            break
    return model, x, noise


def _measured(name: str, images: int) -> tuple[nn.Module, Tensor]:
    """In float64, on an input of 96 pixels, or of the smallest size the network accepts."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    channels, *native = model.pretrained_cfg["input_size"]
    sizes = (
        [native] if model.pretrained_cfg.get("fixed_input_size") else [[96, 96], [128, 128], native]
    )
    wake(model)

    for i, size in enumerate(sizes):
        x = torch.randn(images, channels, *size, dtype=torch.float64)
        try:
            return lived_in(model, x), x[:2]
        except (RuntimeError, AssertionError, ValueError):
            if i == len(sizes) - 1:
                raise
            model = timm.create_model(name).eval()
            wake(model)

    raise AssertionError


def wake(model: nn.Module, seed: int = 1) -> None:
    """Give random values to what timm starts at one constant (LayerScale, zeroed biases and gates),
    but norms.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, BATCHNORMS):
            continue

        for name, value in module.named_parameters(recurse=False):
            if (
                value.numel()
                and bool((value == value.flatten()[0]).all())
                and value.is_floating_point()
            ):
                bias = "bias" in name or value.ndim > 1
                with torch.no_grad():
                    noise = torch.rand(value.shape, generator=generator, dtype=torch.float64)
                    value.copy_((noise - 0.5) * 0.4 if bias else noise + 0.5)


def fold(model: nn.Module) -> tuple[nn.Module | None, dict[str, Any]]:
    """The folded network, or None, and what is to be recorded."""
    try:
        builder = FOLDED.plan(inspection.inspect(model))
    except (TraceError, RefusedError) as error:
        return None, {
            "status": "refused",
            "refused": len(batchnorms(model)),
            "why": str(error)[:300],
        }

    ways = Counter(WAYS[one.counted] for one in builder.outcomes.values() if one.counted in WAYS)
    reasons = Counter(one.reason for one in builder.outcomes.values() if one.counted == LEFT_AFFINE)
    row: dict[str, Any] = {
        **ways,
        "kept": [f"{n} x {why}"[:120] for why, n in reasons.most_common(3)],
    }

    if builder.refusals:
        path, why = next(iter(builder.refusals.items()))
        row |= {
            "status": "refused",
            "refused": len(builder.refusals),
            "why": f"{path}: {why}"[:300],
        }
        return None, row

    return applying.apply_step(model, Step("folded", {}, builder.edits())), row


def outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Everything that the network returns, in a row for each image."""
    # Some forwards write to their input.
    value: Any = run(model, x.clone())
    parts = value if isinstance(value, tuple | list) else (value,)
    return torch.cat([part.flatten(1) for part in parts], 1)


def checksum(model: nn.Module) -> list[float]:
    """The sum of each tensor, which tells a change without a copy of the network."""
    return [float(tensor.sum()) for tensor in model.state_dict().values()]


def check(name: str) -> dict[str, Any]:
    """What folding did to one network."""
    warnings.simplefilter("ignore")
    model, x, noise = living(name)
    reference = outputs(model, x)
    total = len(batchnorms(model))
    before = checksum(model)
    sensitivity = float((reference[0] - reference[1]).norm() / reference.norm())
    row: dict[str, Any] = {
        "norms": total,
        "size": x.shape[-1],
        "noise": noise,
        "sensitivity": sensitivity,
    }
    result, found = fold(model)

    row |= found
    if result is not None:
        used = total - found.get("unused", 0)
        row["error"] = distance(reference, outputs(result, x))
        row["left"] = len(batchnorms(result)) - (total - used)
        row["status"] = (
            "wrong" if not row["error"] <= EXACT else "incomplete" if row["left"] else "exact"
        )
        if checksum(model) != before:
            row |= {"status": "wrong", "why": "the source was changed"}

    del result
    row["fuse"] = fuse(model, x, reference)
    return row


def fuse(model: nn.Module, x: Tensor, reference: Tensor) -> dict[str, Any]:
    """The same by `torch.fx.experimental.optimization.fuse`; the model is used up."""
    total = len(batchnorms(model))
    try:
        fused: Any = optimization.fuse(model, inplace=True)
        left = sum(_normalizes(fused, node) for node in fused.graph.nodes)
        error = distance(reference, outputs(fused, x))
    except Exception as problem:
        return {
            "status": "raised",
            "left": total,
            "why": f"{type(problem).__name__}: {problem}"[:120],
        }

    if not error <= EXACT:
        return {"status": "wrong", "left": left, "error": error}

    status = "complete" if left == 0 else "no-op" if left >= total else "partial"
    return {"status": status, "left": left, "error": error}


def _normalizes(fused: fx.GraphModule, node: fx.Node) -> bool:
    """Whether this step is a BatchNorm with running statistics (`batch_norm` also standardizes
    weights, without).
    """
    if node.op == "call_module":
        return isinstance(fused.get_submodule(str(node.target)), BATCHNORMS)
    return node.target is torch.nn.functional.batch_norm and node.args[1] is not None
