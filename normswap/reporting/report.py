"""The report about a directory that normswap wrote: its facts as one record, which `page` lays out.

The source is opened again where it is still what it was; else the network is unfolded, which brings its BatchNorm back;
else only what the directory itself holds is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from normswap import provenance, schemes
from normswap.analysis import summary
from normswap.analysis.signal_propagation import Point, signal
from normswap.diagnosis.doctor import diagnose
from normswap.diagnosis.findings import Finding
from normswap.errors import NormswapError
from normswap.graph.inspection import Anatomy
from normswap.images.accuracy import evaluate
from normswap.images.datasets import Loader
from normswap.layers import affine
from normswap.layers.own import scales_branch
from normswap.layers.planned_layer import planned_layers
from normswap.models import devices, network_input, zoo
from normswap.models.calling import Inputs, form
from normswap.plan import Plan, Step
from normswap.provenance import Provenance
from normswap.reporting.records import COLOURS, Alpha, BlockFact, Facts, Gammas, NormFact, StepFact
from normswap.storage import checkpoint, header_record
from normswap.surgery import reverification, unfolding
from normswap.surgery.network import Network

_BINS = 30
_NOISE = 8


def collect(
    directory: Path,
    images: Callable[[nn.Module], Loader] | None = None,
    say: Callable[[str], None] = lambda what: None,
    *,
    inputs: Inputs = None,
    device: str = "cpu",
    trust_factory: bool = False,
) -> Facts:
    """Load, open the source, measure.

    Args:
        images: makes the loader of labelled images that both networks are evaluated on.
        say: called with what is going on.
        inputs: what the networks take, as in `convert`, where that is not images alone: what the signal is measured on.
        device: where both networks run, by name.
        trust_factory: as in `checkpoint.load`.

    Raises:
        SourceError: `directory` is not there, was not written by normswap, or is damaged.
    """
    say(f"loading {directory}")
    result = devices.place(checkpoint.load(directory, trust_factory=trust_factory), device)
    record = provenance.of(result)
    assert record is not None
    assert record.arch is not None
    say("opening the source")
    loader = None if images is None else images(result)
    batch, described = _inputs(result, loader) if inputs is None else (inputs, "given inputs")
    network = Network(result, batch)
    before, against, notes = _source(network)
    bare = before or network.after(zoo.create(record.arch).to(network.device))
    seen = bare.anatomy
    norms = _norms(seen, record.plan)
    inside = {path for block in seen.blocks for path in block.norms}
    say("measuring")
    return Facts(
        source=record.source,
        sha256=record.sha256,
        arch=record.arch,
        steps=tuple(_step(step) for step in record.plan.steps),
        digest=record.plan.digest,
        versions=header_record.read_header(directory).versions,
        report=header_record.read_report(directory),
        blocks=tuple(BlockFact(b.path, b.stage, b.skip, tuple(norms[path] for path in b.norms)) for b in seen.blocks),
        others=tuple(norm for path, norm in norms.items() if path not in inside),
        gammas=_gammas(record, norms),
        alphas=_alphas(result, seen, record.plan),
        sizes={
            name: {"norms": summary.norms(model), "parameters": summary.parameters(model)}
            for name, model in (("before", bare.module), ("after", result))
        },
        against=against,
        notes=tuple(notes),
        signal=_signal(before, network),
        signal_inputs=described,
        accuracy=_accuracy(before, result, loader),
        findings=_findings(before or network, loader),
    )


def _source(network: Network) -> tuple[Network | None, str, list[str]]:
    """Return the network before the conversion, where it is from (`source`, `unfolded`, ``), and notes on it."""
    result, record = network.module, network.provenance
    notes: list[str] = []
    if record.source and record.sha256:
        try:
            source = checkpoint.open_model(record.source, **reverification.how(result))
        except (NormswapError, OSError):
            notes.append("The recorded source cannot be opened from here any more.")
        else:
            if reverification.unchanged(source, result) is not False:
                return network.after(source.to(network.device)), "source", notes
            notes.append("The recorded source has other tensors now than when this was made.")
    try:
        if not all(schemes.exact(step) for step in record.plan.steps):
            notes.append("The conversion changed the function, so the source's signal cannot be had from the result.")
            return None, "", notes
        unfolded = unfolding.unfold(network)
    except NormswapError as error:
        notes.append(f"The result cannot be unfolded: {error}")
        return None, "", notes
    unfolded.module.eval()
    return unfolded, "unfolded", notes


def _step(step: Step) -> StepFact:
    known = schemes.get(step.scheme) if step.scheme in schemes.names() else None
    edits = Counter(edit.layer for edit in step.edits)
    return StepFact(
        step.scheme,
        schemes.changed(step.scheme, step.options),
        known.summary if known else "",
        known.paper if known else "",
        dict(edits.most_common()),
    )


def _norms(seen: Anatomy, plan: Plan) -> dict[str, NormFact]:
    """Return every norm of the source by path, with what all steps together did to it."""
    outcomes = dict.fromkeys((norm.path for norm in seen.norms), "kept")
    sentences: dict[str, list[str]] = {path: [] for path in outcomes}
    for step in plan.steps:
        for edit in step.edits:
            if edit.path in outcomes:
                outcomes[edit.path] = planned_layers()[edit.layer].OUTCOME
        for path, outcome in step.outcomes.items():
            if path in sentences:
                sentences[path].append(str(outcome))
    said = {path: "; ".join(dict.fromkeys(filter(None, told))) for path, told in sentences.items()}
    return {
        norm.path: NormFact(
            norm.path, norm.role, norm.channels, outcomes[norm.path], said[norm.path] or "stays as it is"
        )
        for norm in seen.norms
    }


def _gammas(record: Provenance, norms: dict[str, NormFact]) -> tuple[Gammas, ...]:
    by_role: dict[str, list[np.ndarray]] = {}
    for name, tensor in record.norms.items():
        path, _, kind = name.rpartition(".")
        if kind == "weight":
            role = norms[path].role if path in norms else "other"
            by_role.setdefault(role, []).append(tensor.detach().double().flatten().numpy())
    if not by_role:
        return ()
    edges = np.histogram_bin_edges(
        np.concatenate([values for tensors in by_role.values() for values in tensors]), _BINS
    )
    listed = []
    for role, tensors in sorted(by_role.items(), key=lambda pair: [*COLOURS].index(pair[0])):
        values = np.concatenate(tensors)
        counts, _ = np.histogram(values, edges)
        listed.append(
            Gammas(
                role=role,
                norms=len(tensors),
                edges=tuple(edges.tolist()),
                counts=tuple(counts.tolist()),
                mean=float(values.mean()),
                negative=int((values < 0).sum()),
                zero=int((values == 0).sum()),
            )
        )
    return tuple(listed)


def _alphas(result: nn.Module, seen: Anatomy, plan: Plan) -> tuple[Alpha, ...]:
    """Return the scalars in order of the blocks whose branches they end; others after those."""
    planned = {edit.path: edit.args.get("alpha") for step in plan.steps for edit in step.edits if edit.layer == "Scale"}
    blocks = {block.tail: block.path for block in seen.blocks if block.tail}
    order = list(blocks)
    alphas = []
    for path, module in result.named_modules():
        if scales_branch(module):
            place = path.removesuffix(".then")
            bias = None if module.bias is None else module.bias.item()
            alphas.append(Alpha(blocks.get(place, place), place, module.alpha.item(), planned.get(place), bias))
    return tuple(sorted(alphas, key=lambda alpha: order.index(alpha.path) if alpha.path in order else len(order)))


def _signal(before: Network | None, after: Network) -> dict[str, tuple[Point, ...]]:
    """Return the signal at the residual blocks of both networks, as far as there are any."""
    networks = {"before": before, "after": after}
    return {name: tuple(signal(one)) for name, one in networks.items() if one is not None and one.anatomy.blocks}


def _inputs(result: nn.Module, loader: Loader | None) -> tuple[Inputs, str]:
    """Return what the signal is measured on, the first batch of the images or noise, and its description."""
    if loader is not None:
        batch = next(iter(loader))[0]
        return form(result).of(batch), f"the first {len(batch)} images"
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(_NOISE, *network_input.size(result), generator=generator)
    return form(result).of(noise), f"{_NOISE} images of N(0, 1) noise"


def _findings(network: Network, loader: Loader | None) -> tuple[Finding, ...]:
    """Return what the doctor says of the network, on images where there are enough; nothing where it has no norms."""
    if not any(affine.is_batchnorm(module) for module in network.module.modules()):
        return ()
    try:
        return diagnose(network, images=loader).faults
    except NormswapError:
        return diagnose(network).faults


def _accuracy(before: Network | None, result: nn.Module, loader: Loader | None) -> dict[str, float]:
    if loader is None:
        return {}
    if before is not None:
        return reverification.on_images(before, result, loader)
    if reverification.labels_are_missing(loader):
        return {}
    measured = evaluate(result, loader)
    return {"result": measured.top1, "count": measured.count}
