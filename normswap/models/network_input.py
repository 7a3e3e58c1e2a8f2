"""What a network takes, and how to look at what it gives: the one answer for the whole package.

An example comes from what the user gives; else from what the network says of itself (its patches, timm's record, a
Hugging Face config), else from its first layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from normswap import provenance
from normswap.errors import OptionError, SourceError
from normswap.models.calling import Example, form, named_tensors
from normswap.models.modes import evaluating

ANSWERS = ("logits", "out")  # what transformers and torchvision call the answer among several outputs
_SIDE = {1: (224,), 2: (224, 224), 3: (16, 64, 64)}  # by dimensions, where nothing says more


def demand_shapes(model: nn.Module) -> None:
    """Raises:
    SourceError: what `torch.compile` gave, or a lazy layer that has not run yet.
    """
    inner = getattr(model, "_orig_mod", None)
    if inner is not None:
        raise SourceError("the network is compiled", f"it stands for a {type(inner).__name__}", "Give model._orig_mod")
    for path, module in nn.Module.named_modules(model):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            where = f"{path}.{name}" if path else name
            if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
                raise SourceError(f"{where} has no shape yet", "a lazy layer", "Run the network once, on an example")


def answer(output: object) -> Tensor:
    """The network's answer among what it gives: the tensor, or the one in a dict or record that has that name, or is
    the only one.

    Raises:
        OptionError: there is none, or nobody can say which.
    """
    if isinstance(output, Tensor):
        return output
    named = dict(named_tensors(output, depth=1)) if not isinstance(output, list) else {}
    found = next((named[name] for name in ANSWERS if name in named), None)
    if found is None and len(named) == 1:
        found = next(iter(named.values()))
    if found is None:
        what = f"{type(output).__name__} of {', '.join(named)}" if named else type(output).__name__
        raise OptionError("the network does not give one tensor", f"it gives a {what}")
    return found


def scores(output: object) -> Tensor:
    """The scores of the classes (N, classes) in what the network gives.

    Raises:
        OptionError: it does not classify images.
    """
    found = answer(output)
    if found.ndim != 2:
        shape = "x".join(map(str, found.shape))
        raise OptionError("the network does not classify images", f"it gives {shape}, not a score per class")
    return found


def noise(model: nn.Module, size: Sequence[int], batch: int = 1, seed: int = 0) -> Example:
    """N(0, 1) of a size (C, H, W), on the network's device and in its dtype."""
    x = torch.randn(batch, *size, generator=torch.Generator().manual_seed(seed))
    return form(model).of(x).like(model)


def tokens(model: nn.Module) -> Iterator[tuple[tuple[int, ...], Example]]:
    """A row of numbers of words, with no size of an image, for a network that begins with an embedding."""
    first = next((m for m in nn.Module.modules(model) if next(m.parameters(recurse=False), None) is not None), None)
    if isinstance(first, nn.Embedding):
        row = torch.arange(8, device=first.weight.device) % first.num_embeddings
        yield (), Example((row[None],))


def size(model: nn.Module) -> tuple[int, ...]:
    """The size of one input, (C, H, W) of an image, that the network is made for."""
    found = candidates(model)
    channels = {one[0] for one in found[:2]}
    if len(channels) < 2:
        return found[0]
    return next((one for one in found[:2] if _runs(model, one)), found[0])  # its stem may rearrange channels


def small(size: Sequence[int]) -> list[tuple[int, ...]]:
    """Sizes (C, H, W) of images that cost less to look at, one even, one odd, where `size` is larger than they are."""
    channels, *sides = size
    reduced = [(channels, *(min(side, to) for side in sides)) for to in (64, 97)] if len(sides) == 2 else []
    return [one for one in dict.fromkeys(reduced) if one != tuple(size)]


def candidates(model: nn.Module) -> list[tuple[int, ...]]:
    """Sizes to try, the likeliest first."""
    said, first = _said(model), _first_layer(model)
    found = [said] if said else []
    if first and said and len(first) == len(said):
        found.append((first[0], *said[1:]))
    elif first:
        found.append(first)
    channels = (first or said or (3,))[0]
    if first and len(first) == 1:
        found += [(_outputs(model), *first), (channels, *first), (channels, 32, 32), (3, 224, 224)]
    if len(first or (3, 0, 0)) == 3:
        found += [(channels, side, side) for side in (224, 64, 32, 28, 96, 128, 256, 299, 384, 512)]
    return list(dict.fromkeys(found))


def _said(model: nn.Module) -> tuple[int, ...] | None:
    """What the network says of itself."""
    record = provenance.of(model)
    configs = (record.pretrained_cfg if record else {}, getattr(model, "pretrained_cfg", None) or {})
    stated = next((tuple(c["input_size"]) for c in configs if isinstance(c, Mapping) and c.get("input_size")), None)
    patches = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if isinstance(patches, tuple) and len(patches) == 2:
        return ((stated or _first_layer(model) or (3,))[0], *patches)
    return stated or _configured(getattr(model, "config", None))


def _configured(config: object) -> tuple[int, ...] | None:
    """Of a Hugging Face config, or of the config of the vision part in it."""
    for one in (config, *(getattr(config, name, None) for name in ("vision_config", "backbone_config", "encoder"))):
        side, channels = getattr(one, "image_size", None), getattr(one, "num_channels", 3)
        if isinstance(side, int):
            return (channels, side, side)
        if isinstance(side, list | tuple) and len(side) == 2:
            return (channels, *side)
    return None


def _first_layer(model: nn.Module) -> tuple[int, ...] | None:
    for module in nn.Module.modules(model):
        if isinstance(module, nn.modules.conv._ConvNd):
            return (module.in_channels, *_SIDE[len(module.kernel_size)])
        if isinstance(module, nn.Linear):
            return (module.in_features,)
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return (module.num_features, *_SIDE[2])
    return None


def _outputs(model: nn.Module) -> int:
    return next((m.out_features for m in nn.Module.modules(model) if isinstance(m, nn.Linear)), 1)


@torch.no_grad()
def _runs(model: nn.Module, one: tuple[int, ...]) -> bool:
    try:
        with evaluating(model):
            noise(model, one).call(model)
    except Exception:  # whatever the network raises
        return False
    return True
