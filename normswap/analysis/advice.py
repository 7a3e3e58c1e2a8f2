"""Which target to choose: three plain rules, the first target that the network admits, and its measured cost.

1. For inference nothing beats `folded`. 2. Private training admits no statistics of the batch: `skipinit`, which keeps
the function, then `groupnorm`. 3. BatchNorm is kept from 16 images a batch on: below that its statistics are too noisy
to train with (Wu & He 2018, arXiv:1803.08494, table 2: ResNet-50 errs 23.6 % with 32 and with 16 images 23.7 %, with 8
24.8 %, with 4 27.3 %, with 2 34.7 %). Then `skipinit`, or `groupnorm` where there are no residual blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from normswap import schemes
from normswap.analysis import expected
from normswap.analysis.network_kind import Kind, kind_of
from normswap.errors import OptionError, RefusedError
from normswap.graph.inspection import inspect
from normswap.layers import affine
from normswap.plan import Body
from normswap.surgery.conversion import drafts

ENOUGH = 16  # images in a batch for BatchNorm


@dataclass(frozen=True)
class Cost:
    """What was measured of a target; None where nothing was.

    Args:
        kept: smallest and largest share of the source's accuracy, in percent, without a gradient step; with unlabelled
            images where the command has `--calibrate`.
        step: time of a training step against BatchNorm's: the middle, the lowest, the highest.
        memory: what a training step keeps for its backward pass per image, against BatchNorm's.
    """

    kept: tuple[float, float] | None
    step: tuple[float, float, float] | None
    memory: float | None


_table = expected.table


def measured(kind: Kind = Kind.RESIDUAL) -> dict[str, tuple[str, str]]:
    """For each figure, the networks that it was measured on, and where that is written."""
    found = {
        what: (part["on"], part["where"]) for what, part in _table().items() if isinstance(part, dict) and "on" in part
    }
    if kind is Kind.RESIDUAL:
        return found
    known = expected.networks(kind)
    return {**found, "kept": (f"networks with {kind.value} ({', '.join(known) or 'none yet'})", expected.WHERE)}


def cost(scheme: str, kind: Kind = Kind.RESIDUAL) -> Cost:
    """What the table has of a scheme with its own options, fitted to data if it can be, on networks of this kind."""
    kept, step, memory = (_table()[what]["figures"].get(scheme) for what in ("kept", "step", "memory"))
    if kind is not Kind.RESIDUAL:
        kept = {"none": (100.0, 100.0)} if schemes.get(scheme).is_exact(schemes.get(scheme).options) else {}
        kept = kept or expected.figures(kind, scheme)
    spans = [span for how, span in sorted((kept or {}).items()) if (how not in expected.NO_IMAGES) == _fitted(scheme)]
    return Cost((spans[-1][0], spans[-1][1]) if spans else None, tuple(step) if step else None, memory)


def _fitted(scheme: str) -> bool:
    """Whether the command gives it images to fit values to."""
    known = schemes.get(scheme)
    return known.fit is not None and not known.is_exact(known.options)


@dataclass(frozen=True)
class Advice:
    """One target, why, the command, and what it costs, by the figures for this kind of network."""

    scheme: str
    why: str
    command: str
    cost: Cost
    kind: Kind = Kind.RESIDUAL


def advise(
    model: nn.Module, name: str, batch_size: int, *, private: bool = False, deploy: bool = False
) -> tuple[list[Advice], dict[str, str]]:
    """Targets for a network, the best first, and why others that would come first are not possible.

    Args:
        name: how the commands shall call the network.
        batch_size: images whose statistics a norm would see together: per device, per client.

    Raises:
        OptionError: no batch size, or purposes that exclude each other.
        RefusedError: nothing is possible.
    """
    if batch_size < 1:
        raise OptionError(f"--batch-size {batch_size}", "a batch has at least one image")
    if private and deploy:
        raise OptionError("--private and --deploy", "one trains, the other does not", "Ask twice")
    found, refused = [], {}
    kind = kind_of(inspect(model))
    for scheme, why in _wishes(model, batch_size, private, deploy):
        try:
            if scheme != "batchnorm":
                list(drafts(model, scheme, "opacus" if private else None, measured=_fitted(scheme)))
        except RefusedError as error:
            refused[scheme] = str(error)
        else:
            found.append(Advice(scheme, why, _command(name, scheme, private), cost(scheme, kind), kind))
    if not found:
        raise RefusedError("no target fits this network", "; ".join(refused.values()))
    return found, refused


def _wishes(model: nn.Module, batch_size: int, private: bool, deploy: bool) -> list[tuple[str, str]]:
    if deploy:
        return [("folded", "inference: nothing is left to normalize, and the function is kept")]
    without = [
        ("skipinit", "keeps the function; no norm, one scalar per branch"),
        ("groupnorm", "normalizes still, each sample by itself"),
        ("frozen-bn", "statistics as constants; in federated training often ahead of GroupNorm (arXiv:2303.06530)"),
    ]
    if private:
        return [(scheme, f"gradients per sample need norms without the batch: {why}") for scheme, why in without]
    has = any(affine.is_batchnorm(module) for module in model.modules())
    if has and batch_size >= ENOUGH:
        enough = f"{batch_size} images are enough for its statistics ({ENOUGH} or more)"
        return [("batchnorm", f"keep it: {enough}"), ("tune", "frozen statistics, where the domain stays the same")]
    few = f"{batch_size} images are too few for BatchNorm (fewer than {ENOUGH})"
    return [*((scheme, f"{few}: {why}") for scheme, why in without), ("tune", "frozen statistics, for a short tuning")]


def _command(name: str, scheme: str, private: bool) -> str:
    if scheme == "batchnorm":
        return ""
    data = " --calibrate DATA" if _fitted(scheme) else ""
    return f"normswap convert {name} --to {scheme}{data}{' --for opacus' if private else ''}"


def body_of(found: list[Advice], refused: dict[str, str], **asked: object) -> Body:
    """The advice as a JSON-able record."""
    rows = [
        {"scheme": one.scheme, "why": one.why, "command": one.command, "kept": one.cost.kept,
         "step": one.cost.step and one.cost.step[0], "step_range": one.cost.step and one.cost.step[1:],
         "memory": one.cost.memory}
        for one in found
    ]  # fmt: skip
    where = {what: {"on": on, "where": where} for what, (on, where) in measured(found[0].kind).items()}
    return {
        **asked,
        "kind": found[0].kind.value,
        "choose": rows[0],
        "others": rows[1:],
        "refused": refused,
        "measured": where,
    }
