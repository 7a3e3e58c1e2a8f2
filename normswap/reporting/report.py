"""The report about a directory that normswap wrote: everything that the page says, as records.

The source is opened again where it is still what it was; else only what the directory itself holds
is told.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from normswap import provenance, schemes
from normswap.analysis import summary
from normswap.analysis.block_signals import Point, signal_propagation
from normswap.errors import NormswapError
from normswap.graph.inspection import Anatomy
from normswap.images.accuracy import evaluate
from normswap.images.datasets import Loader
from normswap.layers.planned_layer import planned_layers, scales_branch
from normswap.models import calling, devices, network_input, zoo
from normswap.plan import Arch, Body, Plan, Step
from normswap.storage import checkpoint
from normswap.surgery import reverification
from normswap.surgery.network import Network
from normswap.surgery.report import Report

_NOISE = 8


@dataclass(frozen=True)
class NormFact:
    """A norm of the source, and what the plan did to it: one of `page.OUTCOMES`, and the same in
    words.
    """

    path: str
    role: str
    outcome: str
    said: str


@dataclass(frozen=True)
class BlockFact:
    """A residual block of the source."""

    path: str
    stage: str
    skip: str
    norms: tuple[NormFact, ...]


@dataclass(frozen=True)
class Alpha:
    """The scalar at the end of a branch: as it is now, and as the plan placed it."""

    block: str
    path: str
    value: float
    planned: float | None
    bias: float | None


@dataclass(frozen=True)
class Facts:
    """Everything the page says.

    Args:
        others: the norms outside of blocks.
        sizes: norms and parameters of `before` and `after`.
        notes: what the reader should know about the figures.
        signal: the points of the networks `before` and `after`, as far as there are any; measured
            on `signal_inputs`.
        accuracy: top-1 in percent of source and result, agreement and count, where measured.
    """

    source: str
    sha256: str | None
    arch: Arch
    steps: tuple[Body, ...]
    digest: str
    versions: dict[str, str]
    report: Report | None
    blocks: tuple[BlockFact, ...]
    others: tuple[NormFact, ...]
    alphas: tuple[Alpha, ...]
    sizes: dict[str, dict[str, int]]
    notes: tuple[str, ...]
    signal: dict[str, tuple[Point, ...]]
    signal_inputs: str
    accuracy: dict[str, float]

    @property
    def title(self) -> str:
        """The architecture, and what it was converted to."""
        names = [step["scheme"] for step in self.steps]
        return f"{self.arch.name} converted to {', then '.join(names)}" if names else self.arch.name

    @property
    def norms(self) -> tuple[NormFact, ...]:
        """Every norm of the source."""
        return (*(norm for block in self.blocks for norm in block.norms), *self.others)


def collect(
    directory: Path,
    images: Callable[[nn.Module], Loader] | None = None,
    *,
    device: str = "cpu",
    trust_factory: bool = False,
) -> Facts:
    """Load a directory that normswap wrote, open its source, measure both.

    Args:
        images: makes the loader of labelled images that both networks are evaluated on.
    """
    result = devices.place(checkpoint.load(directory, trust_factory=trust_factory), device)
    record = provenance.of(result)
    assert record.arch is not None
    loader = None if images is None else images(result)
    batch, signal_inputs = _signal_inputs(result, loader)
    network = Network(result, calling.form(result).of(batch))
    before, notes = _source(network)
    bare = before or network.after(zoo.create(record.arch).to(network.device))
    anatomy = bare.anatomy
    norms = _norms(anatomy, record.plan)
    in_blocks = {path for block in anatomy.blocks for path in block.norms}
    measured = {
        name: net
        for name, net in (("before", before), ("after", network))
        if net and net.anatomy.blocks
    }
    header = checkpoint.read_header(directory)
    return Facts(
        source=record.source,
        sha256=record.sha256,
        arch=record.arch,
        steps=tuple(map(_step, record.plan.steps)),
        digest=record.plan.digest,
        versions=header.versions,
        report=header.report,
        blocks=tuple(
            BlockFact(
                block.path, block.stage, block.skip, tuple(norms[path] for path in block.norms)
            )
            for block in anatomy.blocks
        ),
        others=tuple(norm for path, norm in norms.items() if path not in in_blocks),
        alphas=_alphas(result, anatomy, record.plan),
        sizes={
            name: summary.sizes(model)
            for name, model in (("before", bare.module), ("after", result))
        },
        notes=tuple(notes),
        signal={name: tuple(signal_propagation(net)) for name, net in measured.items()},
        signal_inputs=signal_inputs,
        accuracy=_accuracy(before, result, loader),
    )


def _signal_inputs(result: nn.Module, loader: Loader | None) -> tuple[Tensor, str]:
    """Return what the signal is measured on, the first batch of the images or noise, and its
    description.
    """
    if loader is not None:
        batch = next(iter(loader))[0]
        return batch, f"the first {len(batch)} images"
    noise = torch.randn(
        _NOISE, *network_input.size(result), generator=torch.Generator().manual_seed(0)
    )
    return noise, f"{_NOISE} images of N(0, 1) noise"


def _source(network: Network) -> tuple[Network | None, list[str]]:
    result = network.module
    record = network.provenance
    notes: list[str] = []
    if record.source and record.sha256:
        try:
            source = checkpoint.open_model(record.source, **reverification.how(result))
        except (NormswapError, OSError):
            notes.append("The recorded source cannot be opened from here any more.")
        else:
            if reverification.unchanged(source, result) is not False:
                return network.after(source.to(network.device)), notes
            notes.append("The recorded source has other tensors now than when this was made.")
    return None, notes


def _step(step: Step) -> Body:
    scheme = schemes.get(step.scheme)
    options = schemes.changed(step.scheme, step.options)
    return {
        "scheme": step.scheme,
        "options": options,
        "summary": scheme.summary,
        "paper": scheme.paper,
    }


def _norms(anatomy: Anatomy, plan: Plan) -> dict[str, NormFact]:
    outcomes = {norm.path: "kept" for norm in anatomy.norms}
    sentences: dict[str, list[str]] = {path: [] for path in outcomes}
    for step in plan.steps:
        for edit in step.edits:
            if edit.path in outcomes:
                outcomes[edit.path] = planned_layers()[edit.layer].OUTCOME
        for path, outcome in step.outcomes.items():
            if path in sentences and str(outcome) not in ("", *sentences[path]):
                sentences[path].append(str(outcome))
    said = {path: "; ".join(texts) or "stays as it is" for path, texts in sentences.items()}
    return {
        norm.path: NormFact(norm.path, norm.role, outcomes[norm.path], said[norm.path])
        for norm in anatomy.norms
    }


def _alphas(result: nn.Module, anatomy: Anatomy, plan: Plan) -> tuple[Alpha, ...]:
    planned = {
        edit.path: edit.args.get("alpha")
        for step in plan.steps
        for edit in step.edits
        if edit.layer == "Scale"
    }
    blocks = {block.tail: block.path for block in anatomy.blocks if block.tail}
    order = list(blocks)
    alphas = []
    for path, module in result.named_modules():
        if scales_branch(module):
            place = path.removesuffix(".then")
            bias = None if module.bias is None else module.bias.item()
            alphas.append(
                Alpha(
                    blocks.get(place, place), place, module.alpha.item(), planned.get(place), bias
                )
            )
    return tuple(
        sorted(
            alphas, key=lambda alpha: order.index(alpha.path) if alpha.path in order else len(order)
        )
    )


def _accuracy(before: Network | None, result: nn.Module, loader: Loader | None) -> dict[str, float]:
    if loader is None:
        return {}
    if before is not None:
        return reverification.on_images(before, result, loader)
    if reverification.labels_are_missing(loader):
        return {}
    measured = evaluate(result, loader)
    return {"result": measured.top1, "count": measured.count}
