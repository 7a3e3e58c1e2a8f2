"""How a network wants its images: what its record states, what is assumed beyond that, and what the user says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from timm.data import resolve_data_config
from torch import nn

from normswap import provenance
from normswap.errors import OptionError, spelled
from normswap.models import network_input, stated_images
from normswap.models.hub_config import GENERAL, Cfg, per_channel
from normswap.models.stated_images import Preprocessing
from normswap.provenance import Provenance


def data_config(model: nn.Module) -> Cfg:
    """The evaluation preprocessing: input_size, mean, std, interpolation, crop_pct, crop_mode."""
    cfg = {**GENERAL, **{key: value for key, value in _stated(model).items() if value is not None}}
    if not cfg.get("input_size"):
        size = network_input.size(model)
        cfg["input_size"] = size if len(size) == 3 else (size[0], 224, 224)
    cfg |= {key: per_channel(cfg[key], cfg["input_size"][0]) for key in ("mean", "std")}
    return dict(resolve_data_config(pretrained_cfg=cfg))


def assumed(model: nn.Module) -> tuple[str, ...]:
    """The parts of a `Preprocessing` that no record of the network states."""
    cfg = _stated(model)
    return tuple(part.name for part in fields(Preprocessing) if cfg.get(part.name) is None)


def assumption(model: nn.Module) -> str:
    """A sentence that says what is assumed; empty where everything is stated."""
    config = data_config(model)
    parts = [f"{name.replace('_', '-')} {_said(config[name])}" for name in assumed(model)]
    return f"assumed, as the network does not say: {', '.join(parts)}" if parts else ""


def state(model: nn.Module, values: Preprocessing) -> nn.Module:
    """The network itself, whose record states these values from now on.

    Raises:
        OptionError: a value that no image can be prepared by.
    """
    values.check()
    stated = {
        part.name: getattr(values, part.name) for part in fields(values) if getattr(values, part.name) is not None
    }
    if stated:
        channels = data_config(model)["input_size"][0]
        for name in {"mean", "std"} & set(stated):
            stated[name] = _per_channel(name, stated[name], channels)
        origin = provenance.of(model) or Provenance()
        provenance.attach(model, replace(origin, pretrained_cfg={**_stated(model), **stated}))
    return model


def for_size(model: nn.Module, size: Sequence[int]) -> nn.Module:
    """The network itself, whose record says that it is made for images of this size (C, H, W).

    Raises:
        OptionError: it is built for another.
    """
    origin = provenance.of(model) or Provenance()
    record = {**_stated(model), "input_size": tuple(size)}
    provenance.attach(model, replace(origin, pretrained_cfg=record))
    built = network_input.size(model)
    if tuple(built) != tuple(size):
        text, built_for = (",".join(map(str, one)) for one in (size, built))
        raise OptionError(
            f"input size {text}",
            f"the network is built for {built_for}",
            f"See `{spelled('arch_args', metavar='img_size=...')}`",
        )
    return model


def _stated(model: nn.Module) -> Cfg:
    origin = provenance.of(model)
    config: object = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    return dict((origin.pretrained_cfg if origin else None) or (config if isinstance(config, Mapping) else {}))


def _per_channel(name: str, numbers: tuple[float, ...], channels: int) -> list[float]:
    if len(numbers) not in (1, channels):
        raise OptionError(f"{name} has {len(numbers)} numbers", f"images of the network have {channels} channels")
    return list(numbers) if len(numbers) == channels else list(numbers) * channels


def _said(value: object) -> str:
    return stated_images.comma_list(value) if isinstance(value, list | tuple) else str(value)
