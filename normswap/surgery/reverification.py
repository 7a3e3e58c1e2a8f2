"""PROVE again: a converted network that was loaded from disk against its source."""

from __future__ import annotations

import copy
import itertools
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from normswap import provenance, schemes
from normswap.copying import tree
from normswap.errors import NormswapError, SourceError, spelled
from normswap.graph import recording
from normswap.images.accuracy import agreement, classify
from normswap.images.datasets import Loader
from normswap.models import calling, kinds, network_input, weight_files
from normswap.models.modes import Progress
from normswap.plan import Body
from normswap.proof import comparison, doubles, held_out, where
from normswap.proof.comparison import EVERY_BLOCK, Claims
from normswap.proof.verdict import Report
from normswap.proof.where import Departure
from normswap.surgery import applying
from normswap.surgery.network import Network


def recorded(result: nn.Module, directory: Path) -> str:
    """Return the name, hub id or path of the network that a result was converted from.

    It is the argument MODEL of the conversion, as the result's provenance has recorded it.

    Args:
        result: The converted network.
        directory: The directory that it was loaded from, for errors.

    Raises:
        SourceError: The source had random weights, which are lost.
    """
    record = provenance.of(result)
    remedy = f"Say what to compare with: '{spelled('against', metavar='MODEL')}'."
    # Only a source with random weights has no hash in the record.
    if record.sha256 is None:
        raise SourceError(
            f"{directory} was made from random weights", "they cannot be had again", remedy
        )
    return record.source


def how(result: nn.Module) -> Body:
    """Return the keyword arguments of `checkpoint.open_model` that open a result's source.

    They are taken from the result's provenance. If it has no architecture, the dict is empty.
    """
    record = provenance.of(result)
    if record.arch is None:
        return {}

    # A factory is the user's own function that builds the network, and opening the source runs its
    # code. The user has not typed its name for this call (`named`). But the result was built by it,
    # too, so it is trusted.
    trusted = kinds.by_builder(record.arch.builder).foreign
    options: Body = {"arch_args": record.arch.kwargs, "named": False, "trust_factory": trusted}
    options["inputs"] = record.pretrained_cfg.get("inputs")
    # A file holds weights only, so it needs the architecture.
    if Path(record.source).is_file():
        options["arch"] = kinds.named(record.arch)
    if record.pretrained_cfg.get("input_size"):
        options["input_size"] = network_input.size(result)

    return options


def unchanged(source: nn.Module, result: nn.Module) -> bool | None:
    """Whether the source still has the tensors that it had when the result was made.

    Args:
        source: The source, as it was opened now.
        result: The converted network.

    Returns:
        Whether the source's hash is the one that was recorded, or None if none was recorded.
    """
    recorded_hash = provenance.of(result).sha256
    if recorded_hash is None:
        return None
    return provenance.of(source).sha256 == recorded_hash


def again(source: Network, result: nn.Module) -> Report:
    """Compare a loaded result with its source, and return the report.

    Args:
        source: The source.
        result: The result, whose plan says whether it claims to be exact.

    Raises:
        TraceError: The source cannot be recorded.
        VerificationError: One of them does not run.
    """
    steps = Network(result).provenance.plan.steps
    exact = schemes.are_exact(steps)
    claims = applying.claims(steps)
    report = comparison.compare_networks(source, result, exact=exact, claims=claims)
    return decided_by_plan(source, result, report, claims=claims)


def decided_by_plan(
    source: Network,
    result: nn.Module,
    report: Report,
    *,
    claims: Claims = EVERY_BLOCK,
    traced: bool = True,
) -> Report:
    """Compare source and result again, in float64, if they did not pass in their own precision.

    In float32 rounding may look like a mistake, as when it decides which boxes are chosen. The
    result's own weights cannot be compared in float64, as they are rounded to float32. So the plan
    is applied to the source in float64, and the source is compared with that network. This says
    something about the result only if the plan, applied in the source's precision, gives the
    result's tensors to the bit.

    Args:
        source: The source.
        result: The converted network, which records its plan.
        report: The comparison in the network's own precision. It is returned if it passed, or if
            the result is not what its plan makes.
        claims: At which residual blocks the result claims to have the source's values.
        traced: Whether the values at residual blocks are compared, too.
    """
    steps = provenance.of(result).plan.steps
    is_exact = report.exact and schemes.are_exact(steps)
    if report.passed or not steps or not is_exact or not _is_what_is_planned(source.module, result):
        return report

    precise = doubles.compare_double(
        source, lambda: applying.apply(source.module, steps, double=True)
    )
    return comparison.compare_networks(
        source, result, exact=True, precise=precise, claims=claims, traced=traced
    )


def _is_what_is_planned(source: nn.Module, result: nn.Module) -> bool:
    """Whether a result has the layers and, to the bit, the tensors that its plan makes of a source.

    Layers are compared by their `repr`, which shows settings such as eps, and by the numbers and
    tensors among their attributes. The answer is no if values were fitted to images, which no plan
    records, or if the plan does not fit the source.

    Args:
        source: The source.
        result: The converted network, which records its plan.
    """
    try:
        planned = applying.apply(source, provenance.of(result).plan.steps)
    except NormswapError:
        return False

    if repr(planned) != repr(result) or any(map(_is_patched, nn.Module.modules(result))):
        return False
    # A state dict has extra state, and the modules have what no state dict holds, such as buffers
    # that are not persistent.
    pairs = [(weight_files.state_dict(planned), weight_files.state_dict(result))]
    expected_modules = tree(planned)
    actual_modules = tree(result)
    if expected_modules.keys() != actual_modules.keys():
        return False
    pairs += [
        (_numbers_of(module), _numbers_of(actual_modules[path]))
        for path, module in expected_modules.items()
    ]
    return all(
        expected.keys() == actual.keys()
        and all(_is_same(value, actual[name]) for name, value in expected.items())
        for expected, actual in pairs
    )


def _numbers_of(module: nn.Module) -> dict[str, object]:
    """Return the buffers of a module, and its attributes that are numbers or tensors, by name.

    Whether the module is in training mode is left out.
    """
    attributes = {name: value for name, value in vars(module).items() if name != "training"}
    return {**module._buffers, **dict(filter(_is_computed_with, attributes.items()))}


def _is_computed_with(attribute: tuple[str, object]) -> bool:
    """Whether the value of an attribute (name, value) is a number, a tensor or a list of them."""
    _, value = attribute
    entries = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(entry, Tensor | bool | int | float | complex) for entry in entries)


def _is_same(expected: object, actual: object) -> bool:
    """Whether two entries of a state dict are equal: tensors to the bit, or a layer's extra state.

    Extra state may be any object. If two cannot be compared, they do not count as the same.
    """
    if isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
        return len(expected) == len(actual) and all(map(_is_same, expected, actual))
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        return torch.equal(expected, actual.to(expected.device))
    try:
        return bool(expected == actual)
    # NumPy's arrays raise ValueError, and lists of tensors RuntimeError.
    except (ValueError, RuntimeError):
        return False


def _is_patched(module: nn.Module) -> bool:
    """Whether a module has a forward of its own, or hooks that run before or after its forward.

    Either may change what a layer computes, and no plan makes them.
    """
    has_hooks = bool(module._forward_hooks or module._forward_pre_hooks)
    return has_hooks or "forward" in vars(module)


def first_converted_layer_apart(
    source: Network, result: nn.Module, report: Report
) -> Departure | None:
    """Apply a result's plan to the source again, and return the first layer that differs.

    The network that this gives is compared with the result, layer by layer.

    Args:
        source: The source.
        result: The converted network, which records its plan.
        report: The comparison of both.

    Returns:
        The layer. None if the report passed, if the result is not exact, if the plan does not fit
        the source, if a forward cannot be recorded, or if no layer differs.
    """
    if report.passed or not report.exact:
        return None

    # Recording the result's forward hands out the value of each of its operations. They are copied,
    # as a later operation may write into them.
    example = source.examples[0]
    values: list[object] = []
    allowed = report.tolerance[report.worst.precision]
    try:
        expected = applying.apply(source.module, provenance.of(result).plan.steps)
        recording.record_once(
            result, example, lambda _name, value: values.append(copy.deepcopy(value))
        )
        return where.first_layer_apart(expected, example, values, allowed)
    except NormswapError:
        return None


def on_images(
    source: Network, result: nn.Module, loader: Loader, progress: Progress | None = None
) -> Body:
    """Compare both networks on images: by labels if there are any, or else by their outputs alone.

    Args:
        source: The source.
        result: The converted network.
        loader: Batches of images and labels. The label -1 says that there is none.
        progress: Called with the number of images done and their total. With labels all images are
            counted twice, once for each network.

    Returns:
        With labels, the top-1 of both networks in percent ("source", "result"), the fraction of
        images with the same prediction ("agreement") and the number of images ("count"). Without
        labels, or for a network without classes, the fields of `held_out.Kept`.

    Raises:
        SourceError: There are no images, or the labels are no classes of the networks.
    """
    if not source.anatomy.features and not labels_are_missing(loader):
        source_accuracy, source_answers = classify(source.module, loader, progress=progress)
        result_accuracy, result_answers = classify(result, loader, progress=progress)
        same = agreement(source_answers, result_answers)
        return {
            "source": source_accuracy.top1,
            "result": result_accuracy.top1,
            "agreement": same,
            "count": source_accuracy.count,
        }

    # `form` shows how images are given to the network. `read` returns a call and the labels, which
    # are not needed here.
    form = calling.form(source.module)
    calls = (form.read(batch)[0] for batch in loader)
    figures = held_out.measured(source.module, result, calls, source.anatomy)
    if figures is None:
        raise SourceError("no images to compare on")

    return asdict(figures)


def labels_are_missing(loader: Loader) -> bool:
    """Whether a sample of the first batch has the label -1, which stands for no label."""
    for batch in itertools.islice(loader, 1):
        labels = batch["labels"] if isinstance(batch, dict) else batch[1]
        return bool((labels < 0).any())
    return False
