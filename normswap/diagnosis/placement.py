"""Checks of where norms stand: in a row, or at several places."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from normswap.diagnosis.findings import Case, Certainty, Finding, StoredNorm
from normswap.graph.tracing import Traced, inputs
from normswap.layers import affine
from normswap.layers.activations import is_identity


def shared(case: Case) -> Iterator[Finding]:
    """One norm, or one tensor of statistics, for several places."""
    twice = [site for site in case.sites if case.traced is not None and case.traced.called(site.module) > 1]
    owners: dict[int, list[StoredNorm]] = {}
    for site in case.sites:
        buffer = getattr(site.module, "running_mean", None)
        if buffer is not None:
            owners.setdefault(buffer.data_ptr(), []).append(site)
    aliased = [site for sites in owners.values() if len(sites) > 1 for site in sites]
    paths = tuple(dict.fromkeys(site.path for site in [*twice, *aliased]))
    if paths:
        evidence = f"{len(paths)} norms serve several places: one set of statistics for what differs"
        cost = "each place is normalized by the mixture; training mode, which takes each apart, hides it"
        mend = "share the weights, not the norms: give each place its own (nn.BatchNorm2d per level), then train on"
        yield Finding("shared-norm", paths, evidence, Certainty.CERTAIN, cost, mend)


def in_a_row(case: Case) -> Iterator[Finding]:
    """A norm that reads nothing but what another norm has just normalized."""
    if case.traced is None:
        return
    paths = []
    for site in case.sites:
        for call in case.calls(site):
            before = _source(case.traced, call)
            norm = None if before is None else case.traced.module(before)
            if before is None or norm is None or not affine.is_batchnorm(norm) or affine.activation(norm) is not None:
                continue
            if len(case.traced.users[before]) == 1:
                paths += [str(before.target), site.path]
    if paths:
        evidence = f"{paths[1]} normalizes what {paths[0]} has normalized, with nothing between"
        cost = "the first one's gamma and beta have no effect in training mode; another function than in eval mode"
        mend = f"normswap convert {case.name} --to folded --only {paths[0]}"
        yield Finding("double-norm", tuple(dict.fromkeys(paths)), evidence, Certainty.CERTAIN, cost, mend)


def _source(traced: Traced, call: fx.Node) -> fx.Node | None:
    """Find the value that the call reads, past what does nothing in eval mode."""
    before = inputs(call)
    while len(before) == 1 and is_identity(traced.module(before[0])):
        before = inputs(before[0])
    return before[0] if len(before) == 1 else None
