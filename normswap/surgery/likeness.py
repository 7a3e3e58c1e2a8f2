"""A network without norms, converted to an architecture that has BatchNorms, by the user's choice.

The architecture is built, and the network's weights are copied into it by name. Each BatchNorm
begins as the identity, plus the bias of its convolution if the architecture has no bias there. Then
it gets statistics measured on images, and gamma = sqrt(var + eps), beta = bias + mean undo them
(Ioffe & Szegedy 2015, arXiv:1502.03167, section 3: a norm can be the identity). The result needs no
layer of normswap's.
"""

from collections.abc import Container, Iterable, Mapping
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
from normswap.surgery import learning, unfolding
from normswap.surgery.carrying_out import Conversion
from normswap.surgery.network import Network

_ANOTHER = "the network is not that architecture without its norms"
_MEASURED = Outcome("norms measured", "has statistics measured on images")


@torch.no_grad()
def batchnorm_like(
    network: Network, like: str | nn.Module, batches: Iterable[object]
) -> Conversion:
    """Return a network of a given class that has BatchNorms, and computes what `network` does.

    Args:
        network: A network without norms.
        like: The name of an architecture, such as `resnet50`, as the command line takes it for
            MODEL. Or a network of that class, which is not changed.
        batches: Images on which the statistics are measured.

    Raises:
        SourceError: There is no such architecture, or the images are unusable.
        RefusedError: The network has norms with statistics per sample (such as LayerNorm), or its
            weights do not fit the class, or that class computes something else with them.
        VerificationError: A variance is not finite, or too large for its dtype.
    """
    for norm in network.anatomy.norms:
        if norm.averages:
            why = f"{norm.path} is a {norm.kind}, which no BatchNorm computes"
            remedy = f"First convert to folded with `{spelled('calibrate', metavar='DATA')}`"
            raise RefusedError("the network has norms of its own", why, remedy)

    module = of_class(network, like)

    # The skeleton is a network of the given class. It gets the tensors, inputs and origin of
    # `network`, the dtype and device, and what of it is trained.
    module.to(network.device, network.dtype)
    learning.resemble(network.module, module)
    skeleton = unfolding.bare(network, module, provenance.of(module).arch)
    # If inputs are noise, both networks get noise of the same size.
    if network.inputs is None:
        skeleton = replace(skeleton, size=network.input_size)
    maps = _fill(network, skeleton)
    norms: dict[str, Any] = {path: module.get_submodule(path) for path in maps}

    # `maps` has the s x + t that each norm must compute in the end. While statistics are measured,
    # the norms compute it already, so that the layers behind them read what they will read. Then
    # gamma and beta are set again, so that they undo the measured statistics.
    _undo_statistics(module, maps)
    measured = channel_moments.measure(module, norms, batches, network.progress)
    measured.store(norms)
    _undo_statistics(module, maps)

    # In float64 the gammas and betas are set again in a float64 copy, so that they are not rounded.
    precise = doubles.compare_double(
        network, lambda: _undo_statistics(skeleton.doubled().module, maps)
    )
    report = comparison.compare_networks(network, module, precise=precise)
    # If nothing is proved, this raises the error that says so.
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
    """Return a new network of the class that a user gives.

    If the class is given by name, the new network's provenance records how it was built.

    Args:
        network: The network whose weights will be loaded.
        like: The name of an architecture, such as `resnet50`, or a network of that class, which is
            copied.

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
        like: The name of an architecture, such as `resnet50`.
    """
    # None asks for the three channels that an architecture usually has.
    channels = network.input_size[0]
    in_chans = None if channels == 3 else channels
    module = zoo.open_source(like, weights="random", in_chans=in_chans)

    usual_classes = _classes(Network(module, size=network.input_size))
    classes = _classes(network)
    if usual_classes == classes or not (usual_classes and classes):
        return module
    return zoo.open_source(like, weights="random", in_chans=in_chans, num_classes=classes)


def _classes(network: Network) -> int:
    """Return the number of classes that a network scores, or 0 if it is not known.

    It is the number of rows of the classifier's weight. If no classifier was recognized, it is the
    argument `num_classes` with which the network was built.
    """
    anatomy = network.anatomy
    arch = provenance.of(network.module).arch
    if anatomy.classifier is not None:
        return int(anatomy.traced.linear(anatomy.classifier).weight.shape[0])
    return 0 if arch is None else int(arch.kwargs.get("num_classes", 0))


def _fill(network: Network, skeleton: Network) -> dict[str, Pair]:
    """Copy a network's tensors into a skeleton, and return what the skeleton's norms must compute.

    Extra state is copied, too. The norms get mean 0 and variance 1.

    Args:
        network: The network without norms.
        skeleton: A network of the class that the user gave, which has norms. It is written to.

    Returns:
        For each norm of the skeleton, by its path, the s and t, each (C,), of the map s x + t that
        the norm must compute. If `network` has a layer at that path that scales and shifts
        channels, they are those of the layer, or else 1 and 0. If the convolution before the norm
        has a bias in `network` and none in the skeleton, s times that bias is added to t.

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

    # `state` is the skeleton's state dict, which lacks the buffers that are not saved.
    state = copying.state_tensors(skeleton.module)
    _copy_tensors(tensors, skeleton.module, maps, state)
    _copy_extra_state(network.module, skeleton.module)

    # If a convolution has a bias that its counterpart in the skeleton lacks, the norm behind it has
    # to add the bias: s (x + bias) + t. A plan that folds the skeleton tells which norm is behind a
    # convolution: the one that the convolution absorbs as a norm `AFTER` it.
    for edit in fold_norms(skeleton.anatomy).edits():
        norms_behind = [read for read in edit.absorbed if read[1].way is AbsorbMode.AFTER]
        name = f"{edit.path}.bias"
        if name in tensors and name not in state and len(norms_behind) == 1:
            ((norm_path, absorption),) = norms_behind
            scale, shift = maps[norm_path]
            bias = tensors[name].double()
            shift[absorption.channels] += scale[absorption.channels] * bias

    return maps


def _copy_tensors(
    tensors: Mapping[str, Tensor],
    skeleton: nn.Module,
    norms: Container[str],
    state: Container[str],
) -> None:
    """Copy tensors into a skeleton, in place and by name, except into its norms.

    A bias that the network lacks is set to zero. A buffer that is not saved keeps the skeleton's
    value if the network lacks it.

    Args:
        tensors: The network's parameters and buffers, by name.
        skeleton: The network that is written to.
        norms: The paths of the skeleton's norms, which are left as they are.
        state: The names of the skeleton's tensors that are saved.

    Raises:
        RefusedError: The network lacks a tensor of the skeleton, or has it in another size.
    """
    for name, tensor in copying.tensors(skeleton).items():
        path, _, own_name = name.rpartition(".")
        if path in norms:
            continue
        if own_name == "bias" and name not in tensors:
            tensor.zero_()
        elif name in tensors and tensors[name].shape == tensor.shape:
            tensor.copy_(tensors[name])
        elif name in state:
            raise RefusedError(_ANOTHER, f"it has no {name} of size {tuple(tensor.shape)}")


def _reset(path: str, norm: nn.Module) -> None:
    """Set a norm's statistics, in place, to those of a new BatchNorm: mean 0 and variance 1.

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
    """Return s and t, each (C,), of the map s x + t that a network computes at a norm's path.

    If the network has no layer there that scales and shifts channels, they are 1 and 0.

    Args:
        model: The network without norms.
        norm: The norm in the skeleton, with its path.
    """
    device = norm.module.get_buffer("running_mean").device
    ones = torch.ones(norm.channels, dtype=torch.float64, device=device)

    # The maps of the layers that run there one after the other make one map: if the first is
    # s x + t, and the second S x + T, both together are S s x + (S t + T).
    scale = ones
    shift = torch.zeros_like(ones)
    for layer in _layers_at(copying.tree(model).get(norm.path)):
        # Such a map per channel is computed by some of normswap's own layers, and by norms in eval
        # mode. Other layers leave s and t as they are.
        is_map = isinstance(layer, OwnLayer) and layer.AFFINE and layer.PER_CHANNEL
        if is_map or site_of(layer).is_affine_norm:
            own_scale, own_shift = site_of(layer).scale_and_shift
            scale = own_scale.to(device) * scale
            shift = own_scale.to(device) * shift + own_shift.to(device)
    return scale, shift


def _layers_at(present: nn.Module | None) -> list[nn.Module]:
    """Return the layers that run one after the other in a module.

    They are the two layers of a `Chain`, or the layers of chains inside it, in order. Any other
    module is returned as a single layer.

    Args:
        present: The module at a norm's path in the network, or None if there is none.
    """
    if present is None:
        return []
    if isinstance(present, Chain):
        return [*_layers_at(present.inner), *_layers_at(present.then)]
    return [present]


def _copy_extra_state(source: nn.Module, target: nn.Module) -> None:
    """Copy the extra state of layers to the layers of the same path and class in another network.

    Extra state is what a layer saves by torch's `get_extra_state`.

    Args:
        source: The network whose state is read.
        target: The network that is written to.
    """
    # A class that does not override this method has no extra state.
    without_state = nn.Module.get_extra_state
    source_modules = copying.tree(source)
    for path, module in copying.tree(target).items():
        same = source_modules.get(path)
        if type(module).get_extra_state is not without_state and type(same) is type(module):
            module.set_extra_state(same.get_extra_state())  # type: ignore[union-attr]
