"""Diagnose a network: run all checks on it, and name the root of the trouble first."""

from collections.abc import Iterable
from dataclasses import asdict, replace

from torch import nn

from normswap.diagnosis import settings, stored_numbers
from normswap.diagnosis.answers import effect_of_recalibrating
from normswap.diagnosis.drift import contradicted, drifted, roots_for_variances
from normswap.diagnosis.findings import Case, Check, Diagnosis, Finding, Remark, sites_of
from normswap.diagnosis.image_batches import ImageBatches
from normswap.diagnosis.normalization import exchanged_colours, unfit_preprocessing
from normswap.errors import NormswapError
from normswap.graph.anatomy import Anatomy
from normswap.models import network_input
from normswap.models.calling import Inputs
from normswap.plan import Body
from normswap.surgery.network import HasModel, Network

# The checks in the order of their findings: a cause stands before its consequences.
CHECKS: tuple[Check, ...] = (
    stored_numbers.broken_statistics,
    stored_numbers.broken_parameters,
    stored_numbers.negative_variance,
    stored_numbers.unused_and_broken,
    settings.untracked,
    settings.in_training,
    settings.thawed,
    settings.momentum,
    settings.unlike_builder,
    settings.fused,
    settings.shared,
    settings.in_a_row,
    stored_numbers.never_updated,
    stored_numbers.zero_variance,
    stored_numbers.dead_gammas,
    contradicted,
)

# The checks that need images. The first one that finds a fault is the last one that is made.
ON_IMAGES: tuple[Check, ...] = (
    roots_for_variances,
    unfit_preprocessing,
    settings.unfit_eps,
    drifted,
    exchanged_colours,
)
# The note that says what only images show.
_NOT_LOOKED_AT = (
    "only images show whether they are prepared as in training, and whether statistics and eps fit"
    " them"
)


def diagnose(
    model: nn.Module | Network | HasModel,
    *,
    inputs: Inputs = None,
    images: Iterable[object] | None = None,
    name: str = "MODEL",
    data: str = "IMAGES",
) -> Diagnosis:
    """Find what is wrong with the BatchNorms of a network, which is not changed.

    Args:
        model: The network.
        inputs: The network's inputs, on which it is recorded: a tensor, a tuple of arguments, a
            dict of keywords, or a list of batches of these. By default it is N(0, 1) noise.
        images: Batches of the network's inputs, such as images (N, C, H, W) or (images, labels).
            They serve the checks of how the statistics fit them. At most 512 images are looked at.
        name: The name of the network in the commands that are proposed.
        data: The name of the images in the commands that are proposed.

    Returns:
        The faults. There are none if nothing is wrong.

    Raises:
        SourceError: `model` is no network, or the images are unusable or too few.
    """
    if isinstance(model, Network):
        network = model
    else:
        network = Network(network_input.require_module(model), inputs)

    notes: list[str] = []
    anatomy: Anatomy | None = None
    try:
        anatomy = network.anatomy
    except NormswapError as error:
        notes.append(f"its forward was not looked at: {error}")

    case = Case(
        network,
        anatomy=anatomy,
        sites=sites_of(network.module, anatomy),
        name=name,
        data=data,
        images=None if images is None else ImageBatches.read(network.module, images),
    )
    faults, open_questions, remarks = _answers_of(case, CHECKS)
    notes += open_questions + remarks

    # The statistics are held against images only if the stored numbers alone show no fault.
    if not faults and not open_questions and case.sites and images is not None:
        # The checks end at the first fault, because it explains later ones. For example, images
        # that are prepared wrongly fit no statistics.
        for check in ON_IMAGES:
            faults, open_questions, remarks = _answers_of(case, [check])
            notes += remarks
            if faults or open_questions:
                notes += open_questions
                break

    if not faults and case.sites and images is None:
        notes.append(f"{_NOT_LOOKED_AT}: normswap doctor {name} --data {data}")
    faults = _with_effects(case, faults)
    return Diagnosis(tuple(faults), len(case.sites), tuple(notes))


def _answers_of(case: Case, checks: Iterable[Check]) -> tuple[list[Finding], list[str], list[str]]:
    """Run checks on a network, and sort what they yield.

    Returns:
        The faults, the questions that cannot be decided (as text), and the remarks.
    """
    faults: list[Finding] = []
    open_questions: list[str] = []
    remarks: list[str] = []
    for check in checks:
        for answer in check(case):
            if isinstance(answer, Finding):
                faults.append(answer)
            elif isinstance(answer, Remark):
                remarks.append(answer.text)
            else:
                open_questions.append(answer)
    return faults, open_questions, remarks


def _with_effects(case: Case, faults: list[Finding]) -> list[Finding]:
    """Return the faults, some of them with one more figure in their evidence.

    If `normswap recalibrate` would mend a fault, the figure says how much that command changes the
    network's outputs on the images. Without images it is not measured.

    Args:
        case: The network that is diagnosed.
        faults: The faults that were found.
    """
    if not any(case.recalibrate in fault.mend for fault in faults):
        return faults
    effect = effect_of_recalibrating(case)
    if not effect:
        return faults

    measured: list[Finding] = []
    for fault in faults:
        if case.recalibrate in fault.mend:
            fault = replace(fault, evidence=f"{fault.evidence}; {effect}")
        measured.append(fault)
    return measured


def body_of(diagnosis: Diagnosis, source: str) -> Body:
    """Return a diagnosis as a JSON-able record.

    Args:
        diagnosis: The diagnosis.
        source: The name of the network, as the user gave it.
    """
    findings = [
        {**asdict(finding), "certainty": finding.certainty.name.lower()}
        for finding in diagnosis.faults
    ]
    return {
        "source": source,
        "norms": diagnosis.norms,
        "findings": findings,
        "faults": len(findings),
        "notes": list(diagnosis.notes),
    }
