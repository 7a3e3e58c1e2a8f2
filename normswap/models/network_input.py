"""The inputs of a network, and the answer in its outputs, for the whole package.

An example comes from what the user gives; else from what the network says of itself (its patches,
timm's record, a Hugging Face config), else from its first layer.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from normswap import provenance
from normswap.copying import dotted
from normswap.errors import OptionError, SourceError, spelled
from normswap.models.calling import Example, form, named_tensors
from normswap.models.modes import callers_dtype, undisturbed
from normswap.sites.site import site_of

# What transformers and torchvision call the answer among several outputs.
ANSWERS = ("logits", "out")
# The attribute that holds the network, by the class of what wraps it.
_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "AveragedModel": "module",
    "GradSampleModule": "_module",
}
_MOST_WRAPPERS = 8
# The base of torch's int8 layers, which only those who quantize import.
_QUANTIZED = "WeightedQuantizedModule"
# Where torch defines exported programs, and the class of their modules.
_OF_EXPORT = ("torch.export.exported_program", "torch.export._unlift")
# The sides of an input, by the number of its dimensions, if nothing states them.
_SIDE = {1: (224,), 2: (224, 224), 3: (16, 64, 64)}


def check_shapes(model: nn.Module) -> None:
    """Raise SourceError for a compiled network, or one with lazy layers that have no shape yet."""
    inner = getattr(model, "_orig_mod", None)
    if inner is not None:
        raise SourceError(
            "the network is compiled",
            f"it stands for a {type(inner).__name__}",
            "Give model._orig_mod",
        )

    for name, tensor in _tensors(model):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise SourceError(
                f"{name} has no shape yet", "a lazy layer", "Run the network once, on an example"
            )


def check_values(model: nn.Module) -> None:
    """Raise SourceError for a network that cannot be converted or saved as it is.

    Such a network has tensors on the meta device, parameters that are NaN or infinite, broken
    running statistics, quantized layers, or tensors of a class of its own.
    """
    remedy = "Load the network's weights again"
    for name, tensor in _tensors(model):
        # Quantized or sharded layers have tensors of a class of their own.
        if is_traceable_wrapper_subclass(tensor):
            kind = type(tensor).__name__
            raise SourceError(
                f"{name} is no plain tensor but a {kind}",
                "its layer was quantized, sharded or rounded to fewer bits",
                "Convert the network as it was before, and do that to the result",
            )
        if tensor.is_meta and not is_lazy(tensor):
            raise SourceError(f"{name} has no values", "it is on the meta device", remedy)
        if isinstance(tensor, nn.Parameter) and not is_lazy(tensor) and not is_finite(tensor):
            raise SourceError(f"{name} holds NaN or infinite numbers", remedy=remedy)

    for path, module in nn.Module.named_modules(model):
        # torch's quantized layers are told by the name of their base class, so that the class need
        # not be imported.
        if any(base.__name__ == _QUANTIZED for base in type(module).__mro__):
            what = f"{path}: {type(module).__name__} is quantized".removeprefix(": ")
            raise SourceError(
                what, remedy="Convert the network as it was before, and quantize the result"
            )
        if has_broken_statistics(module):
            why = "they are not finite, or a variance is below zero"
            raise SourceError(
                f"the running statistics of {path or 'the network'} are broken", why, remedy
            )


def is_finite(tensor: Tensor) -> bool:
    """Return whether every number of a tensor is finite.

    The sum is checked first, because that is faster. If the sum is finite, every number is. Else
    each number is checked, because the sum of finite numbers may overflow.
    """
    # torch does not add up floating-point numbers of one byte or less.
    if tensor.element_size() == 1:
        tensor = tensor.float()
    with torch.no_grad():
        return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def has_broken_statistics(module: nn.Module) -> bool:
    """Return whether a layer has running statistics that are NaN, infinite or a negative variance.

    A layer without running statistics has no broken ones.
    """
    mean = getattr(module, "running_mean", None)
    variance = getattr(module, "running_var", None)
    if not isinstance(mean, Tensor) or not isinstance(variance, Tensor) or is_lazy(variance):
        return False

    are_finite = bool(torch.isfinite(mean).all()) and bool(torch.isfinite(variance).all())
    return not (are_finite and bool((variance >= 0).all()))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a network, each as a pair of its name and the tensor."""
    for path, module in nn.Module.named_modules(model):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield dotted(path, name), tensor


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the network inside a wrapper, such as that of DDP, or else the network itself.

    The wrappers are the results of torch.compile, DDP, DataParallel and AveragedModel, Opacus'
    GradSampleModule, and a module of Lightning whose parameters all belong to one network.
    """
    for _ in range(_MOST_WRAPPERS):
        inside = _inside(model)
        if inside is None:
            break
        model = inside
    return model


def _inside(model: nn.Module) -> nn.Module | None:
    """Return the network inside a wrapper such as DDP, or None if the module is no wrapper."""
    names = {base.__name__ for base in type(model).__mro__}
    for name, attribute in _WRAPPERS.items():
        if name in names:
            return model._modules.get(attribute)

    if "LightningModule" not in names:
        return None
    # In a module of Lightning, the child that holds all its parameters is the network. If there are
    # no parameters, this would be true of every child, so none is returned.
    parameters = {id(parameter) for parameter in model.parameters()}
    for child in model.children():
        if parameters and {id(parameter) for parameter in child.parameters()} == parameters:
            return child
    return None


def require_module(model: object) -> nn.Module:
    """Return the network that the user gave, by itself or in a result that has it as its `model`.

    Raises:
        SourceError: The object is neither a network nor a result, or is TorchScript or an exported
            program. Or torch's default device is not the CPU.
    """
    default_device = torch.get_default_device()
    if default_device.type != "cpu":
        what = (
            f"torch's default device is {default_device}, and normswap makes its tensors on the CPU"
        )
        raise SourceError(
            what,
            remedy="Call it inside `with torch.device('cpu'):`; the network may be on any device",
        )

    # A result, such as that of a conversion, has the network as its attribute `model`.
    if not isinstance(model, nn.Module):
        model = getattr(model, "model", model)
    if isinstance(model, torch.jit.ScriptModule):
        remedy = "Give the network that it was made from"
        raise SourceError("the network is TorchScript", "its Python forward is gone", remedy)
    # An exported program has recorded one mode: its module cannot go from training to eval mode.
    if any(base.__module__ in _OF_EXPORT for base in type(model).__mro__):
        raise SourceError(
            "the network is an exported program",
            "its Python forward is gone",
            "Give the network that it was made from, and export the result",
        )
    if isinstance(model, nn.Module):
        return model

    remedy = (
        "Give an instance: timm.create_model(NAME, pretrained=True), normswap.load(DIR),"
        " MyNetwork()"
    )
    raise SourceError(
        f"a network is wanted, not something of type {type(model).__name__}", remedy=remedy
    )


def require_size(size: object) -> None:
    """Raise OptionError unless `size` is None, or a size without a batch, such as (3, 224, 224)."""
    if size is None:
        return

    is_size = (
        isinstance(size, Sequence)
        and len(size) > 0
        and all(isinstance(side, int) and side > 0 for side in size)
    )
    if not is_size:
        raise OptionError(
            f"input_size={size!r}", "it is (C, H, W) of one image", "For instance (3, 224, 224)"
        )


def require_seed(seed: object) -> None:
    """Raise OptionError unless `seed` is a seed of torch's generators."""
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise OptionError(f"{spelled('seed', seed)} is no whole number from 0 to 2**63 - 1")


def check_calls(calls: Sequence[Example]) -> None:
    """Raise OptionError for inputs of a network that would prove nothing.

    These are inputs without images, and inputs whose images hold NaN or infinite numbers.

    Args:
        calls: The inputs of the network, one for each batch.
    """
    for call in calls:
        if not call.images.numel():
            raise OptionError(f"the inputs hold no image ({call})", remedy="Give at least one")
        if not is_finite(call.images):
            raise OptionError(
                f"the inputs ({call}) hold NaN or infinite numbers", remedy="Give finite ones"
            )


def answer(output: object) -> Tensor:
    """Return the one tensor in a network's output that holds its prediction.

    It is the output itself, or the tensor in it that is called `logits` or `out`, or the only
    tensor in it.

    Raises:
        OptionError: The output holds no tensor, or several without these names.
    """
    if isinstance(output, Tensor):
        return output

    # The entries of a plain list have no names, so a list has no such tensor.
    named: dict[str, Tensor] = {}
    if not isinstance(output, list):
        named = dict(named_tensors(output, depth=1))
    tensor = next((named[name] for name in ANSWERS if name in named), None)
    if tensor is None and len(named) == 1:
        tensor = next(iter(named.values()))
    if tensor is None:
        what = f"{type(output).__name__} of {', '.join(named)}" if named else type(output).__name__
        raise OptionError("the network does not give one tensor", f"it gives a {what}")
    return tensor


def scores(output: object) -> Tensor:
    """Return the class scores (N, classes) in a network's output.

    Raises:
        OptionError: The network gives no scores.
    """
    logits = answer(output)
    if logits.ndim != 2:
        shape = "x".join(map(str, logits.shape))
        raise OptionError(
            "the network does not classify images", f"it gives {shape}, not a score per class"
        )
    return logits


@torch.no_grad()
def classifies(model: nn.Module, size: Sequence[int]) -> bool:
    """Return whether the network gives a score per class, (N, classes), for an image.

    Args:
        model: The network.
        size: The size (C, H, W) of the image.
    """
    # `scores` raises OptionError for an output of another shape.
    with undisturbed(model), suppress(OptionError):
        scores(noise(model, size, batch=2).call(model))
        # A network of timm without a classifier has num_classes 0, and gives features, not scores.
        return getattr(model, "num_classes", None) != 0
    return False


def noise(model: nn.Module, size: Sequence[int], batch: int = 1, seed: int = 0) -> Example:
    """Return an input for a network: a batch of random images from N(0, 1).

    The images are on the network's device and in its dtype.

    Args:
        model: The network.
        size: The size (C, H, W) of an image.
        batch: The number of images.
        seed: The seed of the random numbers.
    """
    images = torch.randn(batch, *size, generator=torch.Generator().manual_seed(seed))
    # `form` shows how the network takes images, such as in a list. `of` puts the images there, and
    # `like` gives them the network's device and dtype.
    return form(model).of(images).like(model)


class DrawnCalls(list[Example]):
    """A list of batches of random values, for a network that takes other inputs than images.

    Each entry is the input of the network for one batch.
    """


def drawn_calls(model: nn.Module, batch: int = 2, seed: int = 0) -> DrawnCalls | None:
    """Return one batch of random values for the inputs that the network's record states.

    The result is a list with one entry: the input of the network. It is None if the record states
    no inputs. Floating-point inputs are drawn from N(0, 1). Others are whole numbers from 0, below
    the number of rows of the smallest embedding, or below 2 if the network has no embedding.

    Args:
        model: The network.
        batch: The number of samples.
        seed: The seed of the numbers.
    """
    stated = provenance.of(model).pretrained_cfg.get("inputs")
    if not stated:
        return None

    # A whole number may be an index into any embedding of the network.
    generator = torch.Generator().manual_seed(seed)
    embeddings = [each for each in nn.Module.modules(model) if isinstance(each, nn.Embedding)]
    fewest_rows = min((each.num_embeddings for each in embeddings), default=2)
    values: dict[str, object] = {}
    for name, (shape, dtype_name) in stated.items():
        dtype: torch.dtype = getattr(torch, dtype_name)
        if dtype.is_floating_point:
            numbers = torch.randn(batch, *shape, generator=generator)
        else:
            numbers = torch.randint(fewest_rows, (batch, *shape), generator=generator)
        values[name] = numbers.to(dtype)
    # The inputs are given by name. `like` gives them the network's device and dtype.
    return DrawnCalls([Example((), values).like(model)])


def tokens(model: nn.Module) -> Iterator[tuple[tuple[int, ...], Example]]:
    """Yield an example of token numbers, if the network begins with an embedding.

    It is a pair: the size (), which is empty because token numbers are no image, and the input of
    the network, one row of 8 token numbers. For other networks nothing is yielded.
    """
    # The first layer is the first module with parameters of its own.
    layers = nn.Module.modules(model)
    first_layer = next(
        (each for each in layers if next(nn.Module.parameters(each, False), None) is not None), None
    )
    if isinstance(first_layer, nn.Embedding):
        # The batch has one row.
        row = torch.arange(8, device=first_layer.weight.device) % first_layer.num_embeddings
        yield (), Example((row[None],))


def size(model: nn.Module) -> tuple[int, ...]:
    """Return the size of the input that the network is made for: (C, H, W) if it is an image."""
    # If the two likeliest sizes have the same number of channels, the first is returned without a
    # run of the network.
    likeliest = candidates(model)[:2]
    if len({channels for channels, *_ in likeliest}) < 2:
        return likeliest[0]

    # A stem may rearrange channels before its first layer, so that the number of channels of that
    # layer is not the image's. Then only a run shows which number is right.
    for shape in likeliest:
        if runs(model, noise(model, shape)):
            return shape
    return likeliest[0]


def small(size: Sequence[int]) -> list[tuple[int, ...]]:
    """Return up to two smaller sizes (C, H, W) of images, with which a network runs faster.

    In the first no side is longer than 64 pixels, in the second none is longer than 97. A size that
    would be `size` itself is left out. The list is empty if `size` is not that of an image.
    """
    channels, *sides = size
    if len(sides) != 2:
        return []

    # One limit is even and one is odd, because a layer with a stride of 2 treats them differently.
    height, width = sides
    smaller: list[tuple[int, ...]] = []
    for limit in (64, 97):
        shape = (channels, min(height, limit), min(width, limit))
        if shape != tuple(size) and shape not in smaller:
            smaller.append(shape)
    return smaller


def candidates(model: nn.Module) -> list[tuple[int, ...]]:
    """Return the sizes of one input that the network may take, the likeliest first.

    A size is (C, H, W) for an image, or (C,) for a row of features.
    """
    stated = stated_size(model)
    # The size that the first layer takes. A linear layer says only its number of features.
    first = _first_layer(model)

    sizes: list[tuple[int, ...]] = []
    if stated:
        sizes.append(stated)
    # The first layer may take another number of channels than the record states.
    if first and stated and len(first) == len(stated):
        sizes.append((first[0], *stated[1:]))
    elif first:
        sizes.append(first)

    channels = (first or stated or (3,))[0]
    # A linear first layer tells its number of features, and not whether its input is one row of
    # them, several rows or an image. So several rows and images are guessed, too.
    if first and len(first) == 1:
        # As many rows are tried as the first linear layer has outputs, then as it has inputs.
        out_features = 1
        for module in nn.Module.modules(model):
            if isinstance(module, nn.Linear):
                out_features = module.out_features
                break
        sizes += [(out_features, *first), (channels, *first), (channels, 32, 32), (3, 224, 224)]
    if not first or len(first) == 3:
        for side in (224, 64, 32, 28, 96, 128, 256, 299, 384, 512):
            sizes.append((channels, side, side))

    # Each size once, in this order.
    return list(dict.fromkeys(sizes))


def stated_size(model: nn.Module) -> tuple[int, ...] | None:
    """Return the size (C, H, W) of images that the network or its record states, or None.

    The size in a patch embedding goes first. After it comes the record that normswap keeps of the
    network, then timm's `pretrained_cfg`, then a config of transformers.
    """
    # The later of the two records takes the place of the earlier one.
    stated: tuple[int, ...] | None = None
    for record in (getattr(model, "pretrained_cfg", None), provenance.of(model).pretrained_cfg):
        if isinstance(record, Mapping) and record.get("input_size"):
            stated = tuple(record["input_size"])

    # A patch embedding states height and width, and not the number of channels.
    patches = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if isinstance(patches, tuple) and len(patches) == 2:
        return ((stated or _first_layer(model) or (3,))[0], *patches)
    return stated or _configured(getattr(model, "config", None))


def _configured(config: object) -> tuple[int, ...] | None:
    """Return the size (C, H, W) in a config of transformers, or None."""
    # The config of a larger network holds that of its vision part under one of these names.
    inner_names = ("vision_config", "backbone_config", "encoder")
    inner_configs = [getattr(config, name, None) for name in inner_names]

    for stated in (config, *inner_configs):
        side = getattr(stated, "image_size", None)
        channels = getattr(stated, "num_channels", 3)
        if isinstance(side, int):
            return (channels, side, side)
        if isinstance(side, list | tuple) and len(side) == 2:
            return (channels, *side)
    return None


def _first_layer(model: nn.Module) -> tuple[int, ...] | None:
    """Return a size of one input that the first layer takes, or None if no layer tells it.

    The layer says the number of channels or features. Layers do not say how high and wide images
    are, so usual numbers stand in, such as 224 pixels.
    """
    for module in nn.Module.modules(model):
        # `_SIDE` has the usual sides of an image, by the number of sides. A kernel has as many
        # dimensions as an image has sides.
        if isinstance(module, nn.modules.conv._ConvNd):
            return (module.in_channels, *_SIDE[len(module.kernel_size)])
        if isinstance(module, nn.Linear):
            return (module.in_features,)
        # `site_of` describes a norm. Behind a norm of rows, signals or volumes, the next layer
        # tells their sides. Any other BatchNorm that comes first is taken for one of images.
        site = site_of(module)
        if site.is_batchnorm1d_or_3d:
            continue
        if site.is_batchnorm and site.channels:
            return (site.channels, *_SIDE[2])
    return None


@torch.no_grad()
def runs(model: nn.Module, example: Example) -> bool:
    """Return whether a network runs on an input without an error, in eval mode.

    Args:
        model: The network.
        example: The input. It is not changed.
    """
    # The forward is the user's, and may raise anything for an input that it does not take.
    try:
        with undisturbed(model), callers_dtype():
            example.call_on_copies(model)
    except Exception:
        return False
    return True
