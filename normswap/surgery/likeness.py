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
from normswap.errors import RefusedError
from normswap.folding.canonical_form import fold_norms
from normswap.layers import measured_norm
from normswap.models import zoo
from normswap.plan import AbsorbMode, Outcome
from normswap.proof import comparison, doubles, verdict
from normswap.surgery import unfolding
from normswap.surgery.carrying_out import Conversion
from normswap.surgery.network import Network

_ANOTHER = "the network is not that architecture without its norms"
_MEASURED = Outcome("norms measured", "has statistics measured on images")


@torch.no_grad()
def batchnorm_like(
    network: Network, like: str | nn.Module, batches: Iterable[object]
) -> Conversion:
    """Return the network in another class, with that class's BatchNorms.

    Args:
        network: A network without norms.
        like: The architecture, named as a MODEL is, or a network of that class, which stays as it
            is.
        batches: Images on which the statistics are measured.

    Raises:
        SourceError: There is no such architecture, or the images are unusable.
        RefusedError: The weights do not fit the class, or it computes something else with them.
        VerificationError: A variance is not finite, or too large for its dtype.
    """
    if isinstance(like, nn.Module):
        module = copying.duplicate(like, {})
        arch = None
    else:
        module = _built(network, like)
        arch = provenance.of(module).arch

    module.to(network.device, network.dtype).train(network.module.training)
    skeleton = unfolding.bare(network, module, arch)
    if network.inputs is None:
        skeleton = replace(skeleton, size=network.input_size)
    shifts = _fill(network, skeleton)
    norms: dict[str, Any] = {path: module.get_submodule(path) for path in shifts}
    for path, shift in shifts.items():
        norms[path].bias.copy_(shift)
    measured = channel_moments.measure(module, norms, batches, network.progress)
    measured.store(norms)
    _undo_statistics(module, shifts)
    precise = doubles.compare_double(
        network, lambda: _undo_statistics(skeleton.doubled().module, shifts)
    )
    report = comparison.compare(network, module, precise=precise)
    if report.unproved:
        verdict.require_passed(report, "batchnorm")

    if not report.passed:
        worst = max(report.logits, key=lambda error: error.relative_l2)
        why = (
            "with its weights that computes something else (relative L2 error"
            f" {worst.relative_l2:.1e})"
        )
        raise RefusedError(_ANOTHER, why)

    notes = (f"the statistics of {len(shifts)} norms were measured on {measured.images} images",)
    return Conversion(skeleton.after(module), report, dict.fromkeys(shifts, _MEASURED), notes)


@torch.no_grad()
def _undo_statistics(module: nn.Module, shifts: Mapping[str, Tensor]) -> nn.Module:
    for path, shift in shifts.items():
        measured_norm.undo_statistics(module.get_submodule(path), shift)
    return module


def _built(network: Network, like: str) -> nn.Module:
    channels = network.input_size[0]
    in_chans = None if channels == 3 else channels
    module = zoo.open_source(like, weights="random", in_chans=in_chans)
    target = _classes(Network(module, size=network.input_size))
    classes = _classes(network)
    if target == classes or not (target and classes):
        return module
    return zoo.open_source(like, weights="random", in_chans=in_chans, num_classes=classes)


def _classes(network: Network) -> int:
    """Return how many classes a network tells apart; 0 where nothing says it.

    Its classifier says it, or what its builder was told.
    """
    anatomy = network.anatomy
    arch = provenance.of(network.module).arch
    if anatomy.classifier is not None:
        return int(anatomy.traced.linear(anatomy.classifier).weight.shape[0])
    return 0 if arch is None else int(arch.kwargs.get("num_classes", 0))


def _fill(network: Network, skeleton: Network) -> dict[str, Tensor]:
    """Copy the tensors by name into the skeleton, and make every norm the identity.

    Returns:
        The bias (C,) of the convolution before each norm, by the norm.
    """
    traced = skeleton.anatomy.traced
    tensors = network.module.state_dict()

    shifts: dict[str, Tensor] = {}
    for path, norm in traced.modules.items():
        site = traced.site(path)
        if not site.is_batchnorm or not site.called:
            continue

        if norm.weight is None or norm.running_mean is None:
            why = f"{path} has no gamma and beta, or no running statistics"
            raise RefusedError("the norms of that architecture cannot be the identity", why)

        norm.reset_running_stats()  # type: ignore[operator]
        norm.weight.fill_((1.0 + site.eps) ** 0.5)  # type: ignore[operator]
        norm.bias.zero_()  # type: ignore[union-attr,operator]
        shifts[path] = torch.zeros(site.channels, dtype=torch.float64, device=skeleton.device)

    for name, tensor in skeleton.module.state_dict().items():
        path, _, leaf = name.rpartition(".")
        if path in shifts:
            continue
        if leaf == "bias" and name not in tensors:
            tensor.zero_()
        elif name not in tensors or tensors[name].shape != tensor.shape:
            raise RefusedError(_ANOTHER, f"it has no {name} of size {tuple(tensor.shape)}")
        else:
            tensor.copy_(tensors[name])

    places = skeleton.module.state_dict().keys()
    for edit in fold_norms(skeleton.anatomy).edits():
        after = [read for read in edit.absorbed if read[1].way is AbsorbMode.AFTER]
        name = f"{edit.path}.bias"
        if name in tensors and name not in places and len(after) == 1:
            ((norm_path, absorption),) = after
            shifts[norm_path][absorption.channels] += tensors[name].double()

    return shifts
