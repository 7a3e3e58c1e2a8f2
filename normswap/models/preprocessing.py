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
    """Return the evaluation preprocessing of a network.

    The record has input_size, mean, std, interpolation, crop_pct and crop_mode.
    """
    known = {key: value for key, value in stated(model).items() if value is not None}
    cfg = {**GENERAL, **known}
    if not cfg.get("input_size"):
        size = network_input.size(model)
        cfg["input_size"] = size if len(size) == 3 else (size[0], 224, 224)
    cfg |= {key: per_channel(cfg[key], cfg["input_size"][0]) for key in ("mean", "std")}
    return dict(resolve_data_config(pretrained_cfg=cfg))


def assumed(model: nn.Module) -> tuple[str, ...]:
    """Return the parts of a `Preprocessing` that no record of the network states."""
    cfg = stated(model)
    return tuple(entry.name for entry in fields(Preprocessing) if cfg.get(entry.name) is None)


def assumption(model: nn.Module) -> str:
    """Return a sentence on what is assumed. It is empty if everything is stated."""
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
    """Return the network itself. From now on its record states these values.

    Raises:
        OptionError: No image can be prepared in this way.
    """
    values.check()
    asked = {name: value for name, value in vars(values).items() if value is not None}
    if not asked:
        return model

    channels = data_config(model)["input_size"][0]
    for name in {"mean", "std"} & set(asked):
        if len(asked[name]) not in (1, channels):
            why = f"images of the network have {channels} channels"
            raise OptionError(f"{name} has {len(asked[name])} numbers", why)
        asked[name] = per_channel(asked[name], channels)
    _record(model, asked)
    return model


def for_size(model: nn.Module, size: Sequence[int]) -> nn.Module:
    """Return the network itself. From now on its record states this size (C, H, W).

    Raises:
        OptionError: The network is built for another size.
    """
    usual = network_input.size(model)
    _record(model, {"input_size": tuple(size)}, without=("test_input_size",))

    built = network_input.size(model)
    if len(usual) != len(size) and not network_input.runs(model, network_input.noise(model, size)):
        why = f"the network does not run on it; it takes sizes such as {comma_list(usual)}"
        raise OptionError(f"input size {comma_list(size)}", why)
    if tuple(built) != tuple(size):
        remedy = f"See `{spelled('arch_args', metavar='img_size=...')}`"
        raise OptionError(
            f"input size {comma_list(size)}",
            f"the network is built for {comma_list(built)}",
            remedy,
        )
    return model


def for_inputs(model: nn.Module, inputs: Mapping[str, Sequence[object]]) -> nn.Module:
    """Return the network itself. From now on its record states these inputs.

    Args:
        model: The network.
        inputs: The shape of each input without the batch, and its type, by name.
    """
    _record(model, {"inputs": {name: list(stated) for name, stated in inputs.items()}})
    return model


def _record(model: nn.Module, values: Cfg, without: Sequence[str] = ()) -> None:
    """Let the network's record state these values, and none of the keys of `without`."""
    recorded = {**stated(model), **values}
    for key in without:
        recorded.pop(key, None)
    provenance.attach(model, replace(provenance.of(model), pretrained_cfg=recorded))


def stated(model: nn.Module) -> Cfg:
    """Return what the network's own record, or else timm's, states of images and classes."""
    return dict(provenance.of(model).pretrained_cfg) or own_cfg(model)
