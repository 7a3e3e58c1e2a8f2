"""Recalibrate: the same network with statistics of other images, as one more step of its plan.

BatchNorms get statistics measured on the images. Without BatchNorms, the layers' outputs get the
means and variances that they have in another network, the one before the change.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from normswap import copying
from normswap.calibration.population import norms_of
from normswap.calibration.restoring import restore
from normswap.errors import OptionError, RefusedError, spelled
from normswap.layers import affine
from normswap.models import network_input
from normswap.models.calling import Inputs
from normswap.models.modes import Progress
from normswap.plan import Body, Step
from normswap.surgery import comparison
from normswap.surgery.carrying_out import Conversion, applied, carry_out
from normswap.surgery.conversion import convert
from normswap.surgery.network import Batches, Network, calls_of


def recalibrate(
    model: nn.Module | Network,
    batches: Batches,
    *,
    against: nn.Module | Sequence[nn.Module] = (),
    inputs: Inputs = None,
    input_size: Sequence[int] | None = None,
    progress: Progress | None = None,
    **record: object,
) -> Conversion:
    """Return `model`, which is not changed, with population statistics estimated on `batches`
    (`population`).

    Args:
        batches: images (N, C, H, W), (images, labels), or what `inputs` may be, in batches of one
            size, or a function that gives them.
        against: for a network without BatchNorm: the network before it was pruned, rounded or
            averaged, or several whose average it is. Mean and variance per channel of each layer's
            output become theirs (`restoring`). BatchNorms in it are folded first.
        inputs: as in `convert`: what the change is measured on, and how the network is called; by
            default noise.
        input_size: (C, H, W) of the noise.
        progress: called after each batch with the batches done and their total; with `against`,
            after each layer.
        record: what the plan records of the data: data, samples, batch_size; and means_only: with
            `against`, the means alone, by biases.

    Broken statistics (NaN, a variance below zero) are replaced, too.

    Raises:
        RefusedError: no BatchNorm with running statistics, and no `against`; or BatchNorms, and
            `against`.
        OptionError: an unknown key of `record`.
        SourceError: unusable images, or batches of less than two.
    """
    means_only = bool(record.pop("means_only", False))
    if unknown := sorted(record.keys() - {"data", "samples", "batch_size"}):
        raise OptionError(f"recalibrate has no option {', '.join(unknown)}")
    model, broken = _without_broken_statistics(model)
    network = Network.of(
        model, inputs=inputs, size=input_size, calibrate=batches, progress=progress
    )
    references = (against,) if isinstance(against, nn.Module) else tuple(against)
    if references:
        return _restored(network, references, means_only, record)
    if not _keeps_statistics(network.module):
        remedy = (
            f"'{spelled('against', metavar='SOURCE')}' names the network before it was pruned,"
            " rounded or averaged"
        )
        raise RefusedError("the network has no BatchNorm with running statistics", remedy=remedy)
    norms_of(network.module)
    conversion = carry_out(network, Step("recalibrate", record, ()))
    if not broken:
        return conversion
    note = (
        f"the statistics of {len(broken)} norms were broken ({', '.join(broken[:3])}); the report"
        " is about 0 and 1"
    )
    return replace(conversion, notes=(*conversion.notes, note))


def _keeps_statistics(model: nn.Module) -> bool:
    norms = (
        module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    )
    return any(norm.running_mean is not None for norm in norms)


def _restored(
    network: Network, references: Sequence[nn.Module], means_only: bool, record: Body
) -> Conversion:
    if _keeps_statistics(network.module):
        remedy = f"Leave out '{spelled('against')}': its BatchNorms get those of the images"
        raise RefusedError("the network keeps statistics of its own", remedy=remedy)
    bare = tuple(_without_norms(reference, network) for reference in references)
    images = network.images
    assert images is not None
    step = Step("recalibrate", {**record, "against": len(bare), "scales": not means_only}, ())
    result = applied(network, step)
    calls = calls_of(images, network)
    progress = network.progress
    notes = restore(result, bare, calls, means_only=means_only, progress=progress)
    report = comparison.compare(network, result, exact=False)
    comparison.require_passed(network, report, step.scheme)
    return Conversion(network.after(result), report, {}, notes)


def _without_norms(reference: nn.Module, like: Network) -> nn.Module:
    if not any(affine.is_batchnorm(module) for module in reference.modules()):
        return reference
    return convert(
        reference, "folded", inputs=like.inputs, input_size=like.size, branches="keep"
    ).model


def _without_broken_statistics(model: nn.Module | Network) -> tuple[nn.Module | Network, list[str]]:
    if not isinstance(model, nn.Module):
        return model, []
    broken = [
        path
        for path, module in nn.Module.named_modules(model)
        if network_input.has_broken_statistics(module)
    ]
    if broken:
        model = copying.duplicate(model, {})
    for path in broken:
        model.get_submodule(path).get_buffer("running_mean").zero_()
        model.get_submodule(path).get_buffer("running_var").fill_(1.0)
    return model, broken
