"""A network's answers to images, with its stored statistics and with the images' own.

A sound network can store statistics that look wrong: those that training kept frozen. Its answers
decide. With statistics of other weights, the answers to all images are nearly the same.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from normswap.diagnosis.findings import Case
from normswap.errors import NormswapError
from normswap.models.calling import Example, named_tensors
from normswap.models.modes import undisturbed
from normswap.surgery.recalibration import changed_answers

# The stored statistics are plausible if the answers still differ between images: by at least this
# share of their difference under the images' own statistics. After training with frozen statistics
# the share was 0.97 to 1.7. With statistics of other weights it was 0.1 to 0.9.
_ANSWERS_VARY = 0.95


@torch.no_grad()
def outputs(model: nn.Module, call: Example) -> Tensor:
    """Return the floating-point outputs of a network for a batch, side by side, in float64.

    The result (N, numbers) has a row for each image. Outputs without a row for each image are left
    out.

    Args:
        model: The network.
        call: The batch, as the arguments that the network is called with.
    """
    # The empty first entry gives each image a row, even if no output is left.
    rows = [torch.zeros(call.count, 0, dtype=torch.float64)]
    for value in _floating_outputs(model, call):
        rows.append(value.double().cpu().reshape(call.count, -1))
    return torch.cat(rows, 1)


@torch.no_grad()
def class_scores(model: nn.Module, calls: Sequence[Example]) -> Tensor | None:
    """Return the class scores (N, C) in float64, or None if the output is something else.

    Args:
        model: The network.
        calls: Batches of its inputs.
    """
    rows: list[Tensor] = []
    for call in calls:
        found = _floating_outputs(model, call)
        if len(found) != 1 or found[0].ndim != 2 or found[0].shape[1] < 2:
            return None
        rows.append(found[0].double().cpu())
    return torch.cat(rows)


def _floating_outputs(model: nn.Module, call: Example) -> list[Tensor]:
    """Return a network's floating-point outputs for a batch, as tensors (N, ...) of N images.

    Outputs whose first dimension is not the number of images are left out.

    Args:
        model: The network. Its state is put back afterwards.
        call: The batch, as the arguments that the network is called with.
    """
    with undisturbed(model):
        named = named_tensors(call.call_on_copies(model))

    outputs: list[Tensor] = []
    for _, value in named:
        has_a_row_each = value.shape[:1] == (call.count,)
        if value.is_floating_point() and has_a_row_each:
            outputs.append(value)
    return outputs


def tells_images_apart(case: Case, share: float = _ANSWERS_VARY) -> bool:
    """Whether outputs differ between images about as much as with the images' own statistics.

    With wrong statistics the outputs for all images are nearly the same.

    Args:
        case: A network with images.
        share: With the stored statistics, the outputs must differ between images by more than this
            share of their difference with the images' own statistics.
    """
    assert case.images is not None, "only images tell"
    calls = case.images.calls
    stored = _variation(case.model, calls)
    # `case.renewed` is a copy of the network whose norms store the statistics of these images.
    renewed = _variation(case.renewed(calls), calls)
    # If even that copy gives all images the same outputs, its outputs decide nothing.
    return stored > share * renewed > 0


def _variation(model: nn.Module, calls: Sequence[Example]) -> float:
    """Return how much the network's outputs differ between images, as a share of their size.

    It is the L2 norm of the outputs' deviations from their mean over the images, divided by the L2
    norm of the outputs, or 0 if there are no outputs.

    Args:
        model: The network.
        calls: The batches of images, as the arguments that the network is called with.
    """
    answers = torch.cat([outputs(model, call) for call in calls])
    return float((answers - answers.mean(0)).norm() / answers.norm().clamp_min(1e-30))


def effect_of_recalibrating(case: Case) -> str:
    """Return how much `recalibrate` would change the answers to the images, in words.

    The text is empty if that cannot be measured.
    """
    if case.images is None:
        return ""
    calls = case.images.calls
    try:
        renewed = case.renewed(calls)
    except NormswapError:
        return ""

    change = changed_answers(case.model, renewed, calls)
    return "" if change is None else f"recalibrated, its answers would be {change}"
