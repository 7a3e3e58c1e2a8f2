"""BatchNorm back, as an architecture has it: the weights of a network without norms in that architecture's own class.

Its convolutions are those of the network, by name or in the order of the forward pass. Each of its norms is first the
identity (with the bias of a convolution that has none there), then takes statistics measured on images, which gamma and
beta undo: gamma = sqrt(var + eps), beta = t + mean (Ioffe & Szegedy 2015, arXiv:1502.03167, section 3: a norm can be
the identity). The result needs no layer of normswap's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from normswap import copying, provenance
from normswap.calibration import channel_moments
from normswap.errors import RefusedError, VerificationError
from normswap.folding.canonical_form import fold_norms
from normswap.graph.inspection import Anatomy
from normswap.graph.node_reader import LINEAR
from normswap.layers import affine
from normswap.models import zoo
from normswap.models.modes import Progress
from normswap.plan import AbsorbMode, Edit, Outcome
from normswap.provenance import Provenance
from normswap.surgery import comparison
from normswap.surgery.carrying_out import Conversion
from normswap.surgery.network import Network

_ANOTHER = "the network is not that architecture without its norms"
_MEASURED = Outcome("norms measured", "has statistics measured on images")


def batchnorm_like(network: Network, like: str | nn.Module, batches: Iterable[object]) -> Conversion:
    """The network in the class of `like`, with BatchNorms where that has them and statistics measured on `batches`.

    Args:
        like: an architecture, named as a MODEL is, or a network of that class, which is not changed.

    Raises:
        SourceError: no such architecture, or unusable images.
        RefusedError: the weights do not fit it, or it computes something else with them; says which.
        VerificationError: a variance is not finite, or too large for its dtype.
    """
    skeleton = _skeleton(network, like)
    module = skeleton.module
    shifts = _fill(network, skeleton)
    image_count = _measure(module, shifts, batches, network.progress)
    _undo_statistics(module, shifts)
    precise = comparison.compare_double(network, lambda: _undo_statistics(copying.to_double(module), shifts))
    report = comparison.compare(network, module, precise=precise)
    if not report.passed:
        worst = max(report.logits, key=lambda error: error.relative_l2)
        why = f"with its weights that computes something else (relative L2 error {worst.relative_l2:.1e})"
        raise RefusedError(_ANOTHER, why)
    notes = (f"the statistics of {len(shifts)} norms were measured on {image_count} images",)
    return Conversion(skeleton.after(module), report, dict.fromkeys(shifts, _MEASURED), notes)


@torch.no_grad()
def _undo_statistics(module: nn.Module, shifts: Mapping[str, Tensor]) -> nn.Module:
    """Let gamma and beta undo the norms' statistics, in the precision of `module`, but for the shifts."""
    for path, shift in shifts.items():
        norm: Any = module.get_submodule(path)
        norm.weight.copy_((norm.running_var.double() + norm.eps).sqrt())
        norm.bias.copy_(norm.running_mean.double() + shift)
    return module


def _skeleton(network: Network, like: str | nn.Module) -> Network:
    """The architecture, with the head and the input channels of the network, carrying where that is from."""
    if isinstance(like, nn.Module):
        module, arch = copying.duplicate(like, {}), None
    else:
        module = _built(network, like)
        arch = (provenance.of(module) or Provenance()).arch
    module.to(network.device, network.dtype).train(network.module.training)
    attributes, record = network.module.__dict__, network.provenance
    module.__dict__.update({name: attributes[name] for name in ("pretrained_cfg", "default_cfg") if name in attributes})
    origin = Provenance(arch, record.source or type(network.module).__name__, record.sha256, record.pretrained_cfg)
    after = network.after(provenance.attach(module, origin))
    return replace(after, size=network.input_size) if network.inputs is None else after


def _built(network: Network, like: str) -> nn.Module:
    channels = network.input_size[0]
    in_chans = None if channels == 3 else channels
    module = zoo.open_source(like, weights="random", in_chans=in_chans)
    target, source = (_classes(seen) for seen in (Network(module, size=network.input_size).anatomy, network.anatomy))
    if target == source or not (target and source):
        return module
    return zoo.open_source(like, weights="random", in_chans=in_chans, num_classes=source)


def _classes(seen: Anatomy) -> int:
    """How many outputs the classifier has; 0 without one."""
    return 0 if seen.classifier is None else int(seen.traced.linear(seen.classifier).weight.shape[0])


@torch.no_grad()
def _fill(network: Network, skeleton: Network) -> dict[str, Tensor]:
    """Copy the weights, and let every norm's statistics be 0 and 1.

    Returns:
        By path of each norm, what it adds then, float64 (C,).

    Raises:
        RefusedError: a tensor has no counterpart, or a norm cannot be the identity.
    """
    module, pairs = skeleton.module, _pairs(network.anatomy, skeleton.anatomy)
    absorbing = {edit.path: edit for edit in fold_norms(skeleton.anatomy).edits()}
    norms = {path: norm for path, norm in skeleton.anatomy.traced.modules.items()
             if affine.is_batchnorm(norm) and id(norm) in skeleton.anatomy.traced.calls}  # fmt: skip
    shifts = {path: torch.zeros(affine.channels(norm), dtype=torch.float64) for path, norm in norms.items()}
    for path, norm in norms.items():
        _make_plain(path, norm)
    for path, source in pairs.items():
        conv: Any = module.get_submodule(path)
        conv.weight.copy_(source.weight)
        if conv.bias is not None:
            conv.bias.copy_(torch.zeros_like(conv.bias) if source.bias is None else source.bias)
        elif source.bias is not None:
            _shift(shifts, absorbing.get(path), source.bias.double().cpu(), path)
    _copy_the_rest(network.module, module, {*pairs, *norms})
    return {path: shift.to(skeleton.device) for path, shift in shifts.items()}


def _pairs(source: Anatomy, target: Anatomy) -> dict[str, Any]:
    """The network's linear layers by the paths that they have in the architecture."""
    mine, wanted = _linears(source), _linears(target)
    if all(path in mine and _shape(mine[path]) == _shape(layer) for path, layer in wanted.items()):
        return {path: mine[path] for path in wanted}
    if len(mine) != len(wanted):
        why = f"it has {len(wanted)} linear layers, and the network {len(mine)}"
        raise RefusedError(_ANOTHER, why)
    for (path, layer), (here, layer_here) in zip(wanted.items(), mine.items(), strict=True):
        if _shape(layer) != _shape(layer_here):
            why = f"{path} has a weight of {_shape(layer)}, and {here} one of {_shape(layer_here)}"
            raise RefusedError(_ANOTHER, why)
    return dict(zip(wanted, mine.values(), strict=True))


def _linears(seen: Anatomy) -> dict[str, Any]:
    """The linear layers in order of the forward pass."""
    traced = seen.traced
    return {str(node.target): traced.module(node) for node in traced.nodes if isinstance(traced.module(node), LINEAR)}


def _shape(layer: Any) -> tuple[int, ...]:
    return tuple(layer.weight.shape)


def _make_plain(path: str, norm: Any) -> None:
    """Let a norm's statistics be 0 and 1."""
    if norm.weight is None or norm.running_mean is None:
        what = "no gamma and beta" if norm.weight is None else "no running statistics"
        raise RefusedError("the norms of that architecture cannot be the identity", f"{path} has {what}")
    norm.running_mean.zero_()
    norm.running_var.fill_(1.0)
    norm.weight.fill_((1.0 + norm.eps) ** 0.5)
    norm.bias.zero_()


def _shift(shifts: dict[str, Tensor], edit: Edit | None, bias: Tensor, path: str) -> None:
    """Give the bias of a convolution to the norm after it, which is the one that would fold into it."""
    after = [read for read in edit.absorbed if read[1].way is AbsorbMode.AFTER] if edit else []
    if len(after) != 1:
        why = f"{path} has no bias there, and no norm right after it"
        raise RefusedError(_ANOTHER, why)
    ((norm, absorption),) = after
    shifts[norm][absorption.channels] += bias


def _copy_the_rest(source: nn.Module, module: nn.Module, done: Iterable[str]) -> None:
    """The tensors that are of neither linear layers nor norms, by name."""
    known, covered = source.state_dict(), set(done)
    for name, tensor in module.state_dict().items():
        if name.rpartition(".")[0] in covered:
            continue
        if name not in known or known[name].shape != tensor.shape:
            raise RefusedError(_ANOTHER, f"it has no {name}")
        tensor.copy_(known[name])


@torch.no_grad()
def _measure(
    module: nn.Module, shifts: Mapping[str, Tensor], batches: Iterable[object], progress: Progress | None
) -> int:
    """Set the running statistics; returns the number of images."""
    norms: dict[str, Any] = {path: module.get_submodule(path) for path in shifts}
    for path, shift in shifts.items():
        norms[path].bias.copy_(shift)
    seen = channel_moments.measure(module, norms, batches, progress)
    for path, moments in seen.moments.items():
        norms[path].running_mean.copy_(moments.mean)
        norms[path].running_var.copy_(moments.variance)
        if not bool(torch.isfinite(norms[path].running_var).all()):
            raise VerificationError(f"the variance at {path} is more than {norms[path].running_var.dtype} holds")
    return seen.images
