"""Checks of where norms stand: in a row, at several places, on one value per channel, after a bias that is wasted."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import fx, nn

from normswap.diagnosis.findings import Case, Certainty, Finding, StoredNorm, paths_of
from normswap.graph.tracing import Traced, inputs
from normswap.layers import affine
from normswap.layers.activations import IDENTITIES


def shared(case: Case) -> Iterator[Finding]:
    """One norm, or one tensor of statistics, for several places."""
    twice = [site for site in case.sites if len(case.calls(site)) > 1]
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


def one_value(case: Case) -> Iterator[Finding]:
    """Norms that see one value per channel and image, at the network's own size."""
    hit = [site for site in case.sites if case.positions.get(site.path) == 1]
    if not hit or case.traced is None:
        return
    shrunk = [site for site in hit if not _is_pooled(case, site)]
    pooled = [site for site in hit if site not in shrunk]
    cost = "with one image in the batch training stops: `Expected more than 1 value per channel`"
    if shrunk:
        evidence = f"{len(shrunk)} norms see maps of 1 x 1: the images are too small for so many strides"
        mend = f"larger images, or fewer strides; or normswap convert {case.name} --to frozen-bn"
        yield Finding("one-value", paths_of(shrunk), evidence, Certainty.CERTAIN, cost, mend)
    if pooled:
        evidence = f"{len(pooled)} norms stand behind a pooling to 1 x 1: they see one value per channel and image"
        only = " ".join(f"--only {site.path}" for site in pooled[:3])
        mend = f"normswap convert {case.name} --to frozen-bn {only}"
        yield Finding("pooled-norm", paths_of(pooled), evidence, Certainty.CERTAIN, cost, mend, fault=False)


def _is_pooled(case: Case, site: StoredNorm) -> bool:
    """Whether a pooling, or an input without positions, is why the norm sees one value: it is built so."""
    for node in case.calls(site):
        while True:
            before = inputs(node)
            if not before or _positions(before[0]) != 1:
                break
            node = before[0]
        module = None if case.traced is None else case.traced.module(node)
        if _positions(before[0] if before else node) != 1 and isinstance(module, nn.modules.conv._ConvNd):
            return False
        if affine.is_norm(module or case.model):
            return False  # the recorded example was larger than the network's own size
    return True


def _positions(node: fx.Node) -> int:
    shape = node.meta.get("shape")
    return math.prod(shape[2:]) if shape is not None and all(isinstance(side, int) for side in shape) else 0


def wasted_bias(case: Case) -> Iterator[Finding]:
    """A convolution's bias right before a norm, which takes it off again."""
    if case.traced is None:
        return
    paths = []
    for site in case.sites:
        layer = case.layer_before(site)
        if layer is not None and layer.bias is not None:
            (call,) = case.calls(site)[:1]
            paths.append(str(inputs(call)[0].target))
    if paths:
        evidence, mend = (
            f"{len(paths)} convolutions have a bias that the norm behind takes off again",
            "build them with bias=False",
        )
        yield Finding(
            "wasted-bias", tuple(paths), evidence, Certainty.CERTAIN, "parameters that learn nothing", mend, fault=False
        )


def unreached(case: Case) -> Iterator[Finding]:
    """Norms that forward does not call."""
    if case.traced is None:
        return
    paths = tuple(site.path for site in case.sites if not case.calls(site))
    if paths:
        evidence = f"{len(paths)} norms are not called: an auxiliary head, a branch that is off"
        yield Finding(
            "unreached", paths, evidence, Certainty.CERTAIN, "none in eval mode", "nothing to do", fault=False
        )


def _source(traced: Traced, call: fx.Node) -> fx.Node | None:
    """Find the value that the call reads, past what does nothing in eval mode."""
    before = inputs(call)
    while len(before) == 1 and isinstance(traced.module(before[0]), IDENTITIES):
        before = inputs(before[0])
    return before[0] if len(before) == 1 else None
