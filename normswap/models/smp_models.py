"""segmentation_models_pytorch's networks: `smp:ARCHITECTURE:ENCODER`, e.g. smp:Unet:resnet34."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import segmentation_models_pytorch as smp
from torch import nn

from normswap.errors import SourceError, spelled
from normswap.layers.seeding import seeded
from normswap.models.building import BuildRequest, Built, Cfg, check_allowed, make, near
from normswap.models.weight_files import check_finite
from normswap.plan import Arch

_FORBIDDEN = ("encoder_weights", "encoder_name")
_TRAINED = "imagenet"


def build(name: str, wanted: BuildRequest) -> Built:
    """Return the network of `smp:ARCHITECTURE:ENCODER`, bare unless its weights are wanted.

    Its weights are those of the encoder, from ImageNet: the library has no others by that name. The rest is drawn by
    a fixed seed.

    Raises:
        SourceError: unknown architecture, encoder or arguments.
    """
    called = name.partition(":")[2]
    _parts(called)  # before weights are missed of an encoder that is not there
    arch = Arch(called, wanted.named("classes", "in_channels"), "smp")
    note = f"{name}: the encoder has its ImageNet weights, all else is random"
    if not wanted.trained:  # what it sees is written on the hub, which a bare network must not wait for
        return Built(create(arch), arch, name, {}, lambda: _trained(arch), (note,))
    model = _trained(arch)
    return Built(model, arch, name, _preprocessing(called), lambda: model, (note,))


def create(arch: Arch) -> nn.Module:
    """Build the bare network; see `kinds`."""
    return _made(arch, None)


def _made(arch: Arch, weights: str | None) -> nn.Module:
    kind, encoder = _parts(arch.name)
    check_allowed(arch.name, arch.kwargs, _FORBIDDEN)
    builder = functools.partial(smp.create_model, kind, encoder, encoder_weights=weights)
    model: nn.Module = make(f"smp:{arch.name}", builder, arch.kwargs)
    return model.eval()


def _parts(called: str) -> tuple[str, str]:
    """Architecture and encoder.

    Raises:
        SourceError: not two, or unknown.
    """
    kind, colon, encoder = called.partition(":")
    known = [name for name, value in vars(smp).items() if isinstance(value, type) and hasattr(value, "from_pretrained")]
    if kind.lower() not in {name.lower() for name in known}:
        remedy = near(kind, known, f"There are {', '.join(sorted(known))}")
        raise SourceError(f"segmentation_models_pytorch has no architecture '{kind}'", remedy=remedy)
    if not colon:
        raise SourceError(f"smp:{called} names no encoder", remedy=f"For instance smp:{called}:resnet34")
    encoders = smp.encoders.get_encoder_names()
    if encoder not in encoders and not encoder.startswith("tu-"):  # those are timm's, which knows their names
        remedy = near(encoder, encoders, "See segmentation_models_pytorch.encoders.get_encoder_names()")
        raise SourceError(f"segmentation_models_pytorch has no encoder '{encoder}'", remedy=remedy)
    return kind, encoder


def _trained(arch: Arch) -> nn.Module:
    try:
        with seeded():
            model = _made(arch, _TRAINED)
    except SourceError as error:
        bare, filled = spelled("weights", "random"), spelled("weights", metavar="FILE")
        remedy = f"Use '{bare}', or a weights file on this disk with '{filled}'."
        what = f"cannot get the weights of the encoder of smp:{arch.name}"
        raise SourceError(what, error.why.rstrip("."), remedy) from None
    check_finite(model.state_dict(), f"smp:{arch.name}")
    return model


def _preprocessing(called: str) -> Cfg:
    """Return the preprocessing that the encoder was trained with."""
    try:
        params: object = smp.encoders.get_preprocessing_params(_parts(called)[1], _TRAINED)
    except Exception:  # an encoder without such weights
        return {}
    stated = params if isinstance(params, Mapping) else {}
    return {key: [float(one) for one in stated[key]] for key in ("mean", "std") if stated.get(key)}
