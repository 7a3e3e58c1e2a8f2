"""Recalibrate: the same network with statistics of other images, as one more step of its plan.

BatchNorms get statistics measured on the images. If the network has no BatchNorms and was changed
(pruned, rounded, averaged), its layers' outputs get back the means and variances that they had
before the change.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from normswap import copying
from normswap.calibration.population import norms_of
from normswap.calibration.restoring import restore
from normswap.errors import OptionError, RefusedError, spelled
from normswap.models import network_input
from normswap.models.calling import Example, Inputs, named_tensors
from normswap.models.modes import Progress, undisturbed
from normswap.plan import Body, Step
from normswap.proof import comparison, verdict
from normswap.sites.site import sites_of
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
    """Return the network with population statistics that are measured on other images.

    Broken statistics (NaN, a variance below zero) are replaced, too.

    Args:
        model: The network, or a `Network` record of it. It is not changed.
        batches: Batches, or a function that gives them. A batch is images (N, C, H, W), (images,
            labels), or inputs as `inputs` has them. A batch is weighted by its number of images.
        against: For a network without BatchNorm, the network before it was pruned, rounded or
            averaged, or all the networks whose average it is. The output of each layer gets back
            the mean and variance per channel that it has in these networks (`restoring`). Their
            BatchNorms are folded first.
        inputs: The inputs that the change is measured on and the network is called with, as in
            `convert`. By default they are noise.
        input_size: The size (C, H, W) of the noise.
        progress: Called after each batch with the batches done and their total. With `against` it
            is called after each layer.
        record: Facts about the data that are written to the plan: `data`, `samples` and
            `batch_size`. One more keyword, `means_only`, is an option: with `against`, only the
            means are given back, by changing biases.

    Returns:
        The network, with a report of how far its outputs are from those before.

    Raises:
        RefusedError: There is no BatchNorm with running statistics and no `against`, or there are
            both.
        OptionError: A key of `record` is unknown.
        SourceError: The images cannot be used, or a norm sees one value per channel.
    """
    means_only = bool(record.pop("means_only", False))
    if unknown := sorted(record.keys() - {"data", "samples", "batch_size"}):
        raise OptionError(f"recalibrate has no option {', '.join(unknown)}")

    model, broken = _without_broken_statistics(model)
    network = Network.of(
        model, inputs=inputs, size=input_size, calibrate=batches, progress=progress
    )
    # With references, moments of layers are restored. Otherwise statistics of norms are measured.
    references = (against,) if isinstance(against, nn.Module) else tuple(against)
    if references:
        return _restored(network, references, means_only, record)

    if not _keeps_statistics(network.module):
        remedy = (
            f"'{spelled('against', metavar='SOURCE')}' names the network before it was pruned,"
            " rounded or averaged"
        )
        raise RefusedError("the network has no BatchNorm with running statistics", remedy=remedy)

    # This call raises an error if a norm cannot be measured, before any work is done.
    norms_of(network.module)
    conversion = carry_out(network, Step("recalibrate", record, ()))
    if not broken:
        return conversion

    # The network before the step is the copy in which broken statistics are mean 0 and variance 1.
    note = (
        f"the statistics of {len(broken)} norms were broken ({', '.join(broken[:3])}); the report"
        " is about 0 and 1"
    )

    return replace(conversion, notes=(*conversion.notes, note))


@dataclass(frozen=True)
class ChangedAnswers:
    """How much a network's answers to some images change.

    Args:
        count: The number of images.
        changed: The share of images whose class changes. None if the outputs are not scores of
            classes.
        relative_l2: The distance |after - before| / |before| of its outputs.
    """

    count: int
    changed: float | None
    relative_l2: float

    def __str__(self) -> str:
        distance = f"relative L2 {self.relative_l2:.1e}"
        if self.changed is None:
            return f"changed by {distance} on {self.count} images"
        return f"changed on {100 * self.changed:.1f} % of {self.count} images, {distance}"


@torch.no_grad()
def changed_answers(
    before: nn.Module, after: nn.Module, calls: Iterable[Example]
) -> ChangedAnswers | None:
    """Return how much the answers of `after` differ from those of `before`.

    Args:
        before: A network.
        after: The same network with other statistics.
        calls: Batches of its inputs.

    Returns:
        The change, or None if the outputs of `before` are not finite, or none of them is a
        floating-point tensor with a row for each image.
    """
    # Sums over the batches: images, changed classes, and the squares of |after - before| and of
    # |before|.
    count = 0
    changed = 0
    distance = 0.0
    size = 0.0
    scores_classes = True
    for call in calls:
        old_outputs = _outputs(before, call)
        new_outputs = _outputs(after, call)
        if not old_outputs or not all(bool(old.isfinite().all()) for old in old_outputs):
            return None

        count += call.count
        for old, new in zip(old_outputs, new_outputs, strict=True):
            distance += float((new - old).square().sum())
            size += float(old.square().sum())

        # The share of changed classes is known only if every batch has one output of scores
        # (N, classes).
        scores_classes &= len(old_outputs) == 1 and old_outputs[0].ndim == 2
        scores_classes &= old_outputs[0].shape[-1] > 1
        if scores_classes:
            is_other = old_outputs[0].argmax(1) != new_outputs[0].argmax(1)
            changed += int(is_other.sum())

    relative_l2 = (distance / max(size, 1e-60)) ** 0.5
    changed_share = changed / count if scores_classes else None
    return ChangedAnswers(count, changed_share, relative_l2)


def _outputs(model: nn.Module, call: Example) -> list[Tensor]:
    """Return the floating-point outputs that have a row for each sample, in float64 on the CPU.

    The network is run in eval mode, and keeps its own mode afterwards. Other outputs are left out.

    Args:
        model: The network.
        call: A batch of samples.
    """
    with undisturbed(model):
        named = named_tensors(call.call_on_copies(model))
    return [
        value.double().cpu()
        for _, value in named
        if value.is_floating_point() and value.shape[:1] == (call.count,)
    ]


def _keeps_statistics(model: nn.Module) -> bool:
    """Whether a norm of the network learns a running mean and variance in training."""
    return any(site.learns_statistics for site in sites_of(model))


def _restored(
    network: Network, references: Sequence[nn.Module], means_only: bool, record: Body
) -> Conversion:
    """Return a copy whose layers' outputs have the moments that they have in reference networks.

    Moments are the mean and variance per channel of a layer's output.

    Args:
        network: A changed network without BatchNorm, with the images to measure on.
        references: The network before the change, or all the networks whose average it is.
        means_only: Whether only means are restored, by changing biases.
        record: Facts about the data that are written to the plan.

    Raises:
        RefusedError: The network keeps running statistics of its own.
    """
    if _keeps_statistics(network.module):
        remedy = f"Leave out '{spelled('against')}': its BatchNorms get those of the images"
        raise RefusedError("the network keeps statistics of its own", remedy=remedy)

    # The network has no norms, so its layers correspond to those of references without norms.
    bare = tuple(_without_norms(reference, network) for reference in references)
    images = network.images
    assert images is not None

    # The step has no edits: it changes values alone, which no plan records.
    step = Step("recalibrate", {**record, "against": len(bare), "scales": not means_only}, ())
    result = applied(network, step)
    calls = calls_of(images, network)
    progress = network.progress
    notes = restore(result, bare, calls, means_only=means_only, progress=progress)
    report = comparison.compare_networks(network, result, exact=False)
    verdict.require_passed(report, step.scheme)

    report = replace(report, steps_before=len(network.provenance.plan.steps))
    return Conversion(network.after(result), report, {}, notes)


def _without_norms(reference: nn.Module, like: Network) -> nn.Module:
    """Return a network with its BatchNorms folded, or the network itself if it has none.

    Args:
        reference: The network.
        like: The record of the network that is recalibrated. Its inputs are used for folding, too.
    """
    if not any(site.is_batchnorm for site in sites_of(reference)):
        return reference
    # Branches are not merged, so that each layer is still at its own path.
    folded = convert(reference, "folded", inputs=like.inputs, input_size=like.size, branches="keep")
    return folded.model


def _without_broken_statistics(model: nn.Module | Network) -> tuple[nn.Module | Network, list[str]]:
    """Replace broken running statistics by mean 0 and variance 1, in a copy of the network.

    Returns:
        The copy, and the paths of the norms whose statistics were broken. If there are none, or
        `model` is a `Network` record, then `model` itself and an empty list.
    """
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
