"""How a network wants its images: what its record states, what is assumed, what the user says."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from timm.data import resolve_data_config
from torch import nn

from normswap import provenance
from normswap.errors import OptionError, spelled
from normswap.models import network_input
from normswap.models.hub import GENERAL, Cfg, own_cfg, per_channel
from normswap.models.stated_images import Preprocessing, comma_list


def data_config(model: nn.Module) -> Cfg:
    """Return how a network's images are prepared for evaluation, by the keys of timm's record.

    The keys are input_size, mean, std, interpolation, crop_pct and crop_mode. A value that the
    network does not state is timm's default.
    """
    known = {key: value for key, value in stated(model).items() if value is not None}
    cfg = {**GENERAL, **known}
    # timm needs the size of an image, so sides are made up for an input that is no image.
    if not cfg.get("input_size"):
        size = network_input.size(model)
        cfg["input_size"] = size if len(size) == 3 else (size[0], 224, 224)
    cfg |= {key: per_channel(cfg[key], cfg["input_size"][0]) for key in ("mean", "std")}
    return dict(resolve_data_config(pretrained_cfg=cfg))


def assumed(model: nn.Module) -> tuple[str, ...]:
    """Return which values of an image's preparation a network does not state, so one is assumed.

    They are names of fields of `Preprocessing`, such as `mean` or `crop_pct`.
    """
    cfg = stated(model)
    return tuple(entry.name for entry in fields(Preprocessing) if cfg.get(entry.name) is None)


def assumption(model: nn.Module) -> str:
    """Return a sentence with each value of the preparation of images that is only assumed.

    A value is assumed if no record of the network states it. If all are stated, the text is empty.
    """
    config = data_config(model)
    parts: list[str] = []
    for name in assumed(model):
        value = config[name]
        shown = comma_list(value) if isinstance(value, list | tuple) else value
        parts.append(f"{name.replace('_', '-')} {shown}")
    if not parts:
        return ""
    return f"assumed, as the network does not say: {', '.join(parts)}"


def state(model: nn.Module, values: Preprocessing) -> nn.Module:
    """Write how images are prepared into the network's record, and return the network.

    Args:
        model: The network.
        values: The values that the user stated. A value that is None stays as it is in the record.

    Raises:
        OptionError: No image can be prepared in this way.
    """
    values.check()
    asked = {name: value for name, value in vars(values).items() if value is not None}
    if not asked:
        return model

    # Mean and deviation are one number for all channels, or one for each.
    channels = data_config(model)["input_size"][0]
    for name in {"mean", "std"} & set(asked):
        if len(asked[name]) not in (1, channels):
            why = f"images of the network have {channels} channels"
            raise OptionError(f"{name} has {len(asked[name])} numbers", why)
        asked[name] = per_channel(asked[name], channels)
    _record(model, asked)
    return model


def for_size(model: nn.Module, size: Sequence[int]) -> nn.Module:
    """Write the size of a network's images into its record, and return the network.

    Args:
        model: The network, which is changed.
        size: The size (C, H, W).

    Raises:
        OptionError: The network is built for another size.
    """
    # The size that the network takes according to its record, before the record is changed.
    usual = network_input.size(model)
    _record(model, {"input_size": tuple(size)}, without=("test_input_size",))

    built = network_input.size(model)
    # A size with another number of dimensions may be no mistake, so the network is tried on it.
    if len(usual) != len(size) and not network_input.runs(model, network_input.noise(model, size)):
        why = f"the network does not run on it; it takes sizes such as {comma_list(usual)}"
        raise OptionError(f"input size {comma_list(size)}", why)
    # A patch embedding states its own size, whatever the record says.
    if tuple(built) != tuple(size):
        remedy = f"See `{spelled('arch_args', metavar='img_size=...')}`"
        raise OptionError(
            f"input size {comma_list(size)}",
            f"the network is built for {comma_list(built)}",
            remedy,
        )
    return model


def for_inputs(model: nn.Module, inputs: Mapping[str, Sequence[object]]) -> nn.Module:
    """Write into a network's record what inputs it takes, and return the network.

    Args:
        model: The network, which is changed.
        inputs: A pair for each input, by the input's name: its shape without the batch, and its
            type, such as `float32`.
    """
    _record(model, {"inputs": {name: list(stated) for name, stated in inputs.items()}})
    return model


def _record(model: nn.Module, values: Cfg, without: Sequence[str] = ()) -> None:
    """Write values into a network's record of images and classes, and remove other entries.

    Args:
        model: The network, which is changed.
        values: The values by key.
        without: The keys of the entries to remove.
    """
    recorded = {**stated(model), **values}
    for key in without:
        recorded.pop(key, None)
    provenance.attach(model, replace(provenance.of(model), pretrained_cfg=recorded))


def stated(model: nn.Module) -> Cfg:
    """Return the record of a network's images and classes, as a dict with the keys of timm.

    It is normswap's own record if there is one, or else timm's.
    """
    return dict(provenance.of(model).pretrained_cfg) or own_cfg(model)
