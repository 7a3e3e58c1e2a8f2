"""BatchNorm back in an architecture's own class, for a network without norms.

The weights are loaded by name. Each norm begins as the identity, plus the bias of its convolution
where that class has none. Then it gets statistics measured on images, and gamma = sqrt(var + eps),
beta = bias + mean undo them (Ioffe & Szegedy 2015, arXiv:1502.03167, section 3: a norm can be the
identity). The result needs no layer of normswap's.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from normswap import copying, provenance
from normswap.calibration import channel_moments
from normswap.errors import RefusedError, spelled
from normswap.folding.canonical_form import fold_norms
from normswap.layers import measured_norm
from normswap.layers.placeholders import Chain
from normswap.layers.planned_layer import OwnLayer
from normswap.models import zoo
from normswap.plan import AbsorbMode, Outcome
from normswap.proof import comparison, doubles, verdict
from normswap.sites.known_norms import Pair
from normswap.sites.site import Site, site_of
from normswap.surgery import unfolding
from normswap.surgery.carrying_out import Conversion
from normswap.surgery.network import Network

_ANOTHER = "the network is not that architecture without its norms"
_MEASURED = Outcome("norms measured", "has statistics measured on images")


@torch.no_grad()
def batchnorm_like(
    network: Network, like: str | nn.Module, batches: Iterable[object]
) -> Conversion:
    """Return a network of another class that has BatchNorms, and computes what `network` does.

    Args:
        network: A network without norms.
        like: The architecture, named as a MODEL is, or a network of that class, which stays as it
            is.
        batches: Images on which the statistics are measured.

    Raises:
        SourceError: There is no such architecture, or the images are unusable.
        RefusedError: The network has norms whose statistics are each sample's, or its weights do
            not fit the class, or it computes something else with them.
        VerificationError: A variance is not finite, or too large for its dtype.
    """
    for norm in network.anatomy.norms:
        if norm.averages:
            why = f"{norm.path} is a {norm.kind}, which no BatchNorm computes"
            remedy = f"First convert to folded with `{spelled('calibrate', metavar='DATA')}`"
            raise RefusedError("the network has norms of its own", why, remedy)

    module = of_class(network, like)

    # The skeleton is the other class's network, with this one's tensors, inputs and origin.
    module.to(network.device, network.dtype).train(network.module.training)
    skeleton = unfolding.bare(network, module, provenance.of(module).arch)
    if network.inputs is None:
        skeleton = replace(skeleton, size=network.input_size)
    maps = _fill(network, skeleton)
    norms: dict[str, Any] = {path: module.get_submodule(path) for path in maps}

    # While statistics are measured, each norm computes its s x + t already, so that the layers
    # behind it read what they will read. Then gamma and beta undo the measured statistics.
    _undo_statistics(module, maps)
    measured = channel_moments.measure(module, norms, batches, network.progress)
    measured.store(norms)
    _undo_statistics(module, maps)

    precise = doubles.compare_double(
        network, lambda: _undo_statistics(skeleton.doubled().module, maps)
    )
    report = comparison.compare_networks(network, module, precise=precise)
    if report.unproved:
        verdict.require_passed(report, "batchnorm")
    if not report.passed:
        worst = max(report.logits, key=lambda error: error.relative_l2)
        why = (
            "with its weights that computes something else (relative L2 error"
            f" {worst.relative_l2:.1e})"
        )
        raise RefusedError(_ANOTHER, why)

    notes = (f"the statistics of {len(maps)} norms were measured on {measured.images} images",)
    return Conversion(skeleton.after(module), report, dict.fromkeys(maps, _MEASURED), notes)


@torch.no_grad()
def _undo_statistics(module: nn.Module, maps: Mapping[str, Pair]) -> nn.Module:
    """Set gammas and betas, in place, so that each norm computes its s x + t; return the network.

    Args:
        module: The network.
        maps: The s and t of each norm, each (C,), by the norm's path.
    """
    for path, (scale, shift) in maps.items():
        measured_norm.undo_statistics(module.get_submodule(path), shift, scale)
    return module


def of_class(network: Network, like: str | nn.Module) -> nn.Module:
    """Return a new network of the class that a user gives, which knows how it is built if we do.

    Args:
        network: The network whose weights will be loaded.
        like: The architecture, named as a MODEL is, or a network of that class, which is copied.

    Raises:
        SourceError: There is no such architecture.
    """
    if isinstance(like, nn.Module):
        return copying.duplicate(like, {})
    return _built(network, like)


def _built(network: Network, like: str) -> nn.Module:
    """Build a network of an architecture, with as many input channels and classes as `network`.

    If either number of classes is unknown, the architecture's usual one is kept.

    Args:
        network: The network whose weights will be loaded.
        like: The architecture, named as a MODEL is.
    """
    channels = network.input_size[0]
    in_chans = None if channels == 3 else channels
    module = zoo.open_source(like, weights="random", in_chans=in_chans)

    usual_classes = _classes(Network(module, size=network.input_size))
    classes = _classes(network)
    if usual_classes == classes or not (usual_classes and classes):
        return module
    return zoo.open_source(like, weights="random", in_chans=in_chans, num_classes=classes)


def _classes(network: Network) -> int:
    """Return how many classes a network tells apart, or 0 if nothing says it.

    The rows of its classifier's weight say it, or else the argument `num_classes` of its builder.
    """
    anatomy = network.anatomy
    arch = provenance.of(network.module).arch
    if anatomy.classifier is not None:
        return int(anatomy.traced.linear(anatomy.classifier).weight.shape[0])
    return 0 if arch is None else int(arch.kwargs.get("num_classes", 0))


def _fill(network: Network, skeleton: Network) -> dict[str, Pair]:
    """Copy tensors and extra state into the skeleton, and set its norms to mean 0 and variance 1.

    Args:
        network: The network without norms.
        skeleton: The network of the other class, which is written to.

    Returns:
        The s and t, each (C,), of the map s x + t that each norm must compute, by the norm's path.
        It is what a layer at that path computes in the network, or 1 and 0 without such a layer. If
        the convolution before has a bias in the network and none in the skeleton, t takes it up.

    Raises:
        RefusedError: The weights do not fit the class, or a norm of the class cannot be the
            identity.
    """
    traced = skeleton.anatomy.traced
    tensors = copying.tensors(network.module)
    maps: dict[str, Pair] = {}
    for path, norm in traced.modules.items():
        site = traced.site(path)
        if site.is_batchnorm and site.called:
            _reset(path, norm)
            maps[path] = _map_at(network.module, site)

    # All other tensors are copied by name. A bias that the network lacks is zero.
    state = copying.state_tensors(skeleton.module)
    for name, tensor in copying.tensors(skeleton.module).items():
        path, _, leaf = name.rpartition(".")
        if path in maps:
            continue
        if leaf == "bias" and name not in tensors:
            tensor.zero_()
        elif name in tensors and tensors[name].shape == tensor.shape:
            tensor.copy_(tensors[name])
        # A buffer that is not saved is the skeleton's own.
        elif name in state:
            raise RefusedError(_ANOTHER, f"it has no {name} of size {tuple(tensor.shape)}")
    _copy_extra_state(network.module, skeleton.module)

    # The norm takes up the bias of the convolution before it: s (x + bias) + t. Which norm follows
    # which convolution, the plan of folding says.
    for edit in fold_norms(skeleton.anatomy).edits():
        after = [read for read in edit.absorbed if read[1].way is AbsorbMode.AFTER]
        name = f"{edit.path}.bias"
        if name in tensors and name not in state and len(after) == 1:
            ((norm_path, absorption),) = after
            scale, shift = maps[norm_path]
            bias = tensors[name].double()
            shift[absorption.channels] += scale[absorption.channels] * bias

    return maps


def _reset(path: str, norm: nn.Module) -> None:
    """Give a norm the statistics of no images, in place: mean 0 and variance 1.

    Args:
        path: The norm's path, for errors.
        norm: The norm.

    Raises:
        RefusedError: The norm has no gamma and beta, or no running statistics.
    """
    names = ("weight", "bias", "running_mean", "running_var")
    tensors: list[Any] = [getattr(norm, name, None) for name in names]
    if any(tensor is None for tensor in tensors):
        why = f"{path} has no gamma and beta, or no running statistics"
        raise RefusedError("the norms of that architecture cannot be the identity", why)

    _, _, mean, var = tensors
    mean.zero_()
    var.fill_(1)
    count = getattr(norm, "num_batches_tracked", None)
    if isinstance(count, Tensor):
        count.zero_()


def _map_at(model: nn.Module, norm: Site) -> Pair:
    """Return s and t, each (C,), of the map s x + t at the path of a norm to come.

    If the network has no layer there that computes such a map, they are 1 and 0.

    Args:
        model: The network without norms.
        norm: The site of the norm in the skeleton.
    """
    device = norm.module.get_buffer("running_mean").device
    ones = torch.ones(norm.channels, dtype=torch.float64, device=device)

    scale = ones
    shift = torch.zeros_like(ones)
    for layer in _layers_at(copying.tree(model).get(norm.path)):
        is_map = isinstance(layer, OwnLayer) and layer.AFFINE and layer.PER_CHANNEL
        if is_map or site_of(layer).is_affine_norm:
            own_scale, own_shift = site_of(layer).scale_and_shift
            scale = own_scale.to(device) * scale
            shift = own_scale.to(device) * shift + own_shift.to(device)
    return scale, shift


def _layers_at(present: nn.Module | None) -> list[nn.Module]:
    """Return the layers that run one after the other where a norm is to stand.

    Args:
        present: The module at the norm's path in the network, or None if there is none.
    """
    if present is None:
        return []
    if isinstance(present, Chain):
        return [*_layers_at(present.inner), *_layers_at(present.then)]
    return [present]


def _copy_extra_state(source: nn.Module, target: nn.Module) -> None:
    """Copy the extra state of layers to the layers of the same path and class in another network.

    Args:
        source: The network whose state is read.
        target: The network that is written to.
    """
    without_state = nn.Module.get_extra_state
    source_modules = copying.tree(source)
    for path, module in copying.tree(target).items():
        same = source_modules.get(path)
        if type(module).get_extra_state is not without_state and type(same) is type(module):
            module.set_extra_state(same.get_extra_state())  # type: ignore[union-attr]
