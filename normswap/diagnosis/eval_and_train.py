"""Eval mode against train mode: from how many images in a batch on both give the same answers."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from normswap.diagnosis.findings import Case, Certainty, Finding, paths_of
from normswap.models import network_input
from normswap.models.calling import form
from normswap.models.modes import evaluating

_SIZES = (1, 2, 8, 32)
_MOST = 64  # images
_SAME = 0.9  # share of answers, from which on the modes agree


def batch_sizes(case: Case) -> Iterator[Finding]:
    """The share of images with the same answer in eval mode and on the statistics of their batch, by batch size."""
    if case.images is None or case.images.images is None:
        return
    images = case.images.images[:_MOST]
    try:
        shares = {size: _agreement(case.model, images, size) for size in _SIZES if size <= len(images)}
    except Exception:  # whatever the network raises, or outputs that are no scores
        return
    listed = ", ".join(f"{size}: {'stops' if share is None else f'{share:.0%}'}" for size, share in shares.items())
    agrees = next((size for size, share in shares.items() if share is not None and share >= _SAME), None)
    from_on = f"they agree from {agrees} on" if agrees is not None else "they agree at none of these"
    evidence = f"the same answer in eval mode and on a batch's own statistics, by batch size {listed}; {from_on}"
    cost = "training below that sees another network than eval mode runs"
    mend = f"normswap advise {case.name} --batch-size N says what trains in batches of N"
    yield Finding("modes", paths_of(case.sites[:1]), evidence, Certainty.CERTAIN, cost, mend, fault=False)


@torch.no_grad()
def _agreement(model: nn.Module, images: Tensor, size: int) -> float | None:
    """The share of same answers; None where a norm stops at one value per channel."""
    other = copy.deepcopy(model).eval()
    for site in other.modules():
        if isinstance(site, nn.modules.batchnorm._BatchNorm):
            site.train()
    called = form(model)
    with evaluating(model):
        answers = network_input.scores(called.of(images).like(model).call(model)).argmax(1)
    batches = images[: len(images) // size * size].split(size)
    try:
        batchwise = [network_input.scores(called.of(batch).like(other).call(other)).argmax(1) for batch in batches]
    except ValueError:
        return None
    alone = torch.cat(batchwise)
    return float((alone == answers[: len(alone)]).double().mean())
