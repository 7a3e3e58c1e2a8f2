"""The report about a directory that normswap wrote: everything that the page says, as records.

The source is opened again if its tensors are still the recorded ones. Otherwise the report is made
from the directory alone.
"""

import itertools
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
from normswap.proof.verdict import Report
from normswap.storage import checkpoint
from normswap.surgery import reverification
from normswap.surgery.network import Network

# Without images, the signal is measured on this many images of noise.
_NOISE = 8


@dataclass(frozen=True)
class NormFact:
    """A norm of the source network, and what the conversions did to it.

    Args:
        path: The dotted path of the norm in the source.
        role: The norm's role: `stem`, `last`, `down`, `head` or `other` (`graph.inspection`).
        outcome: What became of the norm, in one word: a key of `page.OUTCOMES`, such as `gone`.
        said: What became of the norm, as a sentence.
    """

    path: str
    role: str
    outcome: str
    said: str


@dataclass(frozen=True)
class BlockFact:
    """A residual block of the source network, and what the conversions did to its norms.

    Args:
        path: The path of the block.
        stage: The path of the stage that the block belongs to.
        skip: The kind of the skip: `identity`, `projection` or `other`.
        norms: The norms in the block, each with what was done to it.
    """

    path: str
    stage: str
    skip: str
    norms: tuple[NormFact, ...]


@dataclass(frozen=True)
class Alpha:
    """The scalar by which the end of a residual branch is multiplied, y = skip + alpha f(x).

    Args:
        block: The path of the block that the branch belongs to.
        path: The path of the module that has the scalar.
        value: The scalar as it is now.
        planned: The value with which the conversion placed the scalar. None if its plan states no
            number.
        bias: A number that is added beside the scalar. None if there is none.
    """

    block: str
    path: str
    value: float
    planned: float | None
    bias: float | None


@dataclass(frozen=True)
class Facts:
    """All that the HTML page says about a converted network and its source.

    The source is the network that was converted, and the result is the converted one.

    Args:
        source: The name of the source, as the user gave it. Empty if it is not recorded.
        sha256: The hash of the source's tensors.
        arch: The architecture.
        steps: The scheme of each step, with its options, summary and paper.
        digest: The hash of the plan.
        versions: The versions of the libraries that wrote the directory.
        report: The report of the conversion. None if the weights were changed since.
        blocks: The residual blocks of the source.
        others: The norms outside of blocks.
        alphas: The scalars at the ends of the residual branches.
        sizes: The counts of norms and parameters, for the source (`before`) and the result
            (`after`).
        notes: Why figures of the source are missing, a sentence each.
        signal: The mean and variance of the activations at each residual block, for the source
            (`before`) and the result (`after`). A network without blocks, or one that cannot be
            opened, is missing.
        signal_inputs: The inputs that the signal was measured on, in words.
        accuracy: Top-1 in percent of source and result, their agreement, and the count of images.
            What was not measured is missing.
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
        """The title of the page: the name of the architecture and those of the conversion schemes.

        For example `resnet18 converted to folded`.
        """
        names = [step["scheme"] for step in self.steps]
        if not names:
            return self.arch.name
        return f"{self.arch.name} converted to {', then '.join(names)}"

    @property
    def is_exact(self) -> bool:
        """Whether the converted network is said to compute the same function as its source.

        This is so if the report of the last conversion says so, the weights were not changed since,
        and no step of the plan is known to change the function.
        """
        # None says that a scheme is not installed here. Then only the report can tell.
        steps = [Step(step["scheme"], step["options"], ()) for step in self.steps]
        keeps_function = schemes.are_exact_if_known(steps)
        return self.report is not None and self.report.exact and keeps_function is not False

    @property
    def norms(self) -> tuple[NormFact, ...]:
        """Every norm of the source, with what was done to it. The norms in blocks come first."""
        in_blocks = itertools.chain.from_iterable(block.norms for block in self.blocks)
        return (*in_blocks, *self.others)


def collect(
    directory: Path,
    images: Callable[[nn.Module], Loader] | None = None,
    *,
    device: str = "cpu",
    trust_factory: bool = False,
) -> Facts:
    """Load a directory that normswap wrote, open its source, and measure both networks.

    Args:
        directory: The directory.
        images: Makes the loader of labelled images that both networks are evaluated on. Without
            it nothing is evaluated, and the signal is measured on noise.
        device: The device that the networks run on.
        trust_factory: Whether the factory that the directory names may be imported.
    """
    result = devices.place(checkpoint.load(directory, trust_factory=trust_factory), device)
    record = provenance.of(result)
    assert record.arch is not None
    loader = None if images is None else images(result)
    batch, signal_inputs = _signal_inputs(result, loader)

    # The blocks and norms in the report are the source's. Without the source, they are taken from a
    # new network of the same architecture. `after` makes the record of a network that takes the
    # same inputs as the result.
    network = Network(result, calling.form(result).of(batch))
    before, notes = _source(network)
    unconverted = before or network.after(zoo.create(record.arch).to(network.device))
    anatomy = unconverted.anatomy
    norms = _norms(anatomy, record.plan)

    # Sort the norms into their blocks.
    blocks: list[BlockFact] = []
    in_blocks: set[str] = set()
    for block in anatomy.blocks:
        inside = tuple(norms[path] for path in block.norms)
        blocks.append(BlockFact(block.path, block.stage, block.skip, inside))
        in_blocks.update(block.norms)

    # Measure the signal in both networks.
    signal: dict[str, tuple[Point, ...]] = {}
    if before and before.anatomy.blocks:
        signal["before"] = tuple(signal_propagation(before))
    if network.anatomy.blocks:
        signal["after"] = tuple(signal_propagation(network))

    header = checkpoint.read_header(directory)
    return Facts(
        source=record.source,
        sha256=record.sha256,
        arch=record.arch,
        steps=tuple(map(_step, record.plan.steps)),
        digest=record.plan.digest,
        versions=header.versions,
        report=header.report,
        blocks=tuple(blocks),
        others=tuple(norm for path, norm in norms.items() if path not in in_blocks),
        alphas=_alphas(result, anatomy, record.plan),
        sizes={"before": summary.sizes(unconverted.module), "after": summary.sizes(result)},
        notes=tuple(notes),
        signal=signal,
        signal_inputs=signal_inputs,
        accuracy=_accuracy(before, result, loader),
    )


def _signal_inputs(result: nn.Module, loader: Loader | None) -> tuple[Tensor, str]:
    """Return a batch of inputs to measure the signal on, and a few words that describe it.

    The batch is the user's first batch of images, or noise.

    Args:
        result: The converted network.
        loader: The batches of images with labels. None if the user named no images.
    """
    if loader is not None:
        batch = next(iter(loader))[0]
        return batch, f"the first {len(batch)} images"

    size = network_input.size(result)
    noise = torch.randn(_NOISE, *size, generator=torch.Generator().manual_seed(0))
    return noise, f"{_NOISE} images of N(0, 1) noise"


def _source(network: Network) -> tuple[Network | None, list[str]]:
    """Open the source that is recorded in a converted network.

    Args:
        network: The converted network.

    Returns:
        The source, and notes for the report. The source is None if none is recorded, if it cannot
        be opened, or if its tensors have changed since the conversion. In the last two cases a note
        says which.
    """
    # The source is not opened without a recorded hash of its tensors, because it could not be told
    # whether it is still the same network.
    result = network.module
    record = network.provenance
    if not record.source or not record.sha256:
        return None, []

    try:
        source = checkpoint.open_model(record.source, **reverification.how(result))
    except (NormswapError, OSError):
        return None, ["The recorded source cannot be opened from here any more."]
    if reverification.unchanged(source, result) is False:
        return None, ["The recorded source has other tensors now than when this was made."]
    return network.after(source.to(network.device)), []


def _step(step: Step) -> Body:
    """Return a dict that describes one step of the plan for the page.

    It has the name of the scheme, its summary and paper, and the options that differ from the
    scheme's defaults.

    Args:
        step: The step.
    """
    scheme = schemes.get(step.scheme)
    return {
        "scheme": step.scheme,
        "options": schemes.changed(step.scheme, step.options),
        "summary": scheme.summary,
        "paper": scheme.paper,
    }


def _norms(anatomy: Anatomy, plan: Plan) -> dict[str, NormFact]:
    """Return what the conversions did to each norm of the source, by the norm's path.

    Args:
        anatomy: The recorded source, with its norms.
        plan: The plan of all conversions of the source.
    """
    # The last layer that was placed at the norm's path decides the outcome.
    outcomes = {norm.path: "kept" for norm in anatomy.norms}
    sentences: dict[str, list[str]] = {path: [] for path in outcomes}
    for step in plan.steps:
        for edit in step.edits:
            if edit.path in outcomes:
                outcomes[edit.path] = planned_layers()[edit.layer].OUTCOME
        for path, outcome in step.outcomes.items():
            # Steps may give a norm no sentence, or one that an earlier step gave already.
            if path in sentences and str(outcome) not in ("", *sentences[path]):
                sentences[path].append(str(outcome))

    facts: dict[str, NormFact] = {}
    for norm in anatomy.norms:
        said = "; ".join(sentences[norm.path]) or "stays as it is"
        facts[norm.path] = NormFact(norm.path, norm.role, outcomes[norm.path], said)
    return facts


def _alphas(result: nn.Module, anatomy: Anatomy, plan: Plan) -> tuple[Alpha, ...]:
    """Return the learned scalars at the ends of the residual branches, in the order of the blocks.

    Args:
        result: The converted network.
        anatomy: The recorded source, with its blocks.
        plan: The plan of all conversions, which placed the scalars.
    """
    # The value with which each scalar was placed, by its path.
    planned: dict[str, float | None] = {}
    for step in plan.steps:
        planned |= summary.alphas_of(step)

    # The source's blocks, by the path of the module behind which their scalar is placed.
    block_paths = {block.tail: block.path for block in anatomy.blocks if block.tail}
    alphas = []
    for name, module in nn.Module.named_modules(result):
        # A constant, such as that of `nf --init reset`, is no alpha.
        if scales_branch(module) and module.learns:
            # If the module at that path stays, it is called `inner`, and the scalar is `then`. A
            # constant behind the scalar is the `then` of both.
            path = name
            while path.endswith((".inner", ".then")):
                path = path.rpartition(".")[0]
            alpha = Alpha(
                block=block_paths.get(path, path),
                path=path,
                value=module.alpha.item(),
                planned=planned.get(path),
                bias=None if module.bias is None else module.bias.item(),
            )
            alphas.append(alpha)

    # Scalars that end no block of the source stand last.
    depths = {tail: depth for depth, tail in enumerate(block_paths)}
    return tuple(sorted(alphas, key=lambda alpha: depths.get(alpha.path, len(depths))))


def _accuracy(before: Network | None, result: nn.Module, loader: Loader | None) -> dict[str, float]:
    """Return the accuracy on images, of both networks if the source could be opened.

    Args:
        before: The record of the source. None if it could not be opened.
        result: The converted network.
        loader: The images. None if the user named no images.

    Returns:
        A dict with the accuracies `result` and `source`, the share `agreement` of equal answers,
        and the `count` of images, as far as they were measured. Without labels, the distance of the
        outputs takes the place of the accuracies.
    """
    if loader is None:
        return {}
    if before is not None:
        return reverification.on_images(before, result, loader)
    if reverification.labels_are_missing(loader):
        return {}

    evaluation = evaluate(result, loader)
    return {"result": evaluation.top1, "count": evaluation.count}
