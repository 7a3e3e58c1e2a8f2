"""How often source and result give the same answer on held-out images, and what that costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import nn

from normswap.models.calling import Example
from normswap.surgery import comparison, expected_accuracy, running
from normswap.surgery.held_out import Kept, summed


def measured(
    source: nn.Module,
    result: nn.Module,
    held: Iterable[Example],
    others: Sequence[Example] = (),
    *,
    scores: bool = True,
) -> Kept | None:
    """How far both agree on these batches of images; None without any. Of few, no accuracy is expected.

    Args:
        others: images that the result was fitted to.
        scores: whether scores of classes come out. The largest of an encoder's features is no answer.

    Raises:
        VerificationError: one of them does not run.
    """
    parts, answers, name = [], [], None
    for example in held:
        before, after = _outputs(source, result, example)
        error = comparison.worst("", example.images, before, after, exact=False)
        parts.append((example.count, error.relative_l2, error.agreement if scores else None))
        name = error.output if name is None else name  # one output, in every batch
        if error.agreement is not None and name in before and name in after:
            answers.append((expected_accuracy.places(before[name]), expected_accuracy.places(after[name])))
    known = summed(parts)
    if known is None or known.agreement is None or len(answers) < len(parts):
        return known
    there = (running.run(source, example.like(source))[0] for example in others)
    expected = expected_accuracy.expected(answers, [expected_accuracy.places(b[name]) for b in there if name in b])
    return known if expected is None else replace(known, right=expected.told, right_least=expected.least)


def _outputs(source: nn.Module, result: nn.Module, example: Example) -> tuple[running.Outputs, running.Outputs]:
    pair = running.both(source, result, example.like(source))
    assert pair is not None  # there is no other size
    (before, _), (after, _) = pair
    return before, after
