"""Dress in norms: at every place where a BatchNorm stands, or stood, with the statistics that the network carries.

A norm that was folded back leaves its output in its seat: mean = beta, deviation = |gamma|. One that was folded
forward, or left a shift or an affine map, has its own input there: its running statistics. In either case the new norm
computes what the seat computes now (Ioffe & Szegedy 2015, section 3: the transform can be the identity).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from normswap.errors import RefusedError
from normswap.folding.canonical_form import undress
from normswap.folding.draft import Draft
from normswap.folding.outcomes import KEEPS_STATISTICS
from normswap.folding.passage import read_directly
from normswap.graph.inspection import Anatomy
from normswap.layers import affine
from normswap.layers.own import OwnLayer
from normswap.layers.placeholders import Chain, Vacant
from normswap.plan import Body, Outcome, Way

Wish = Callable[[Draft, str, nn.Module], None]


def dress_in_norms(anatomy: Anatomy, layer: str, keep: Wish, **args: object) -> Draft:
    """Undress all but the BatchNorms, give each of those to `keep`, and seat a `layer` wherever one was lost.

    Raises:
        RefusedError: there is no BatchNorm, and no record of one.
    """
    modules = anatomy.traced.modules
    called = [norm.path for norm in anatomy.norms if id(modules[norm.path]) in anatomy.traced.calls]
    norms = [path for path in called if affine.is_batchnorm(modules[path])]
    living = [path for path in norms if anatomy.takes_part(path)]
    held = {site_of(anatomy, norm.path) for norm in anatomy.norms}
    lost = [path for path in sites(anatomy) if path not in held and anatomy.takes_part(path)]
    seats = [seat_of(anatomy, path) for path in lost]
    draft = undress(anatomy, leave=[*living, *(path for path in seats if _stands_for_a_norm(modules.get(path)))])
    for path in living:
        read = read_directly(anatomy.traced, modules[path])
        why = affine.refusal(modules[path]) or (read and f"{read} is read in forward, not only by the norm itself")
        if why:
            draft.refusals[path] = why
        else:
            keep(draft, path, modules[path])
    if not living and not lost:
        raise RefusedError(
            "no statistics are known",
            "the network has no BatchNorm, and was not converted from one that had",
            "Of norms with statistics per sample '--calibrate DATA' (images, no labels needed) measures some",
        )
    for path in lost:
        _restore(draft, path, layer, args)
    return draft


def sites(anatomy: Anatomy) -> list[str]:
    """Where norms stood before the network was converted, in the order of the record."""
    suffix = ".running_mean"
    return [name.removesuffix(suffix) for name in anatomy.provenance.norms if name.endswith(suffix)]


def seat_of(anatomy: Anatomy, path: str) -> str:
    """Where the seat of a norm that is gone is now: whatever chained something after it called it `inner`."""
    while isinstance(anatomy.traced.modules.get(path), Chain):
        path = f"{path}.inner"
    return path


def site_of(anatomy: Anatomy, path: str) -> str:
    """The site at which the norm at `path` stands: it may be one part of a chain."""
    parts = path.split(".")
    while parts and parts[-1] in ("inner", "then") and ".".join(parts) not in sites(anatomy):
        parts.pop()
    return ".".join(parts)


def _restore(draft: Draft, site: str, layer: str, args: Body) -> None:
    path = seat_of(draft.anatomy, site)
    old = draft.anatomy.traced.modules.get(path)
    if old is None or (id(old) not in draft.anatomy.traced.calls and not isinstance(old, Vacant)):
        draft.notes.append(f"{path}: there is no seat for its norm any more")
        return
    vacant = draft.empty(path, old)
    if not vacant and not _stands_for_a_norm(old):
        draft.notes.append(f"{path} stays a {type(old).__name__}: {draft.outcomes.get(path, 'it is in use')}")
        return
    if affine.holds_statistics(old) and not vacant:
        draft.seat(path, layer, **args)
        draft.settle(path, KEEPS_STATISTICS)
        return
    mean, std = moments(draft.anatomy, site, at_input=not vacant)
    draft.seat(path, layer, **args, mean=_rounded(mean), std=_rounded(std))
    draft.settle(path, Outcome("norms from the statistics kept", "gets a norm from the statistics kept"))


def _stands_for_a_norm(module: nn.Module | None) -> bool:
    return isinstance(module, OwnLayer) and module.AFFINE and module.PER_CHANNEL


def kept_moments(anatomy: Anatomy, path: str) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Mean and deviation per channel of the norm that stood at `path`: its beta and |gamma|, if they are known."""
    site = site_of(anatomy, path)
    return anatomy.provenance.moments(site) if site in sites(anatomy) else (None, None)


def moments(anatomy: Anatomy, path: str, *, at_input: bool) -> tuple[Tensor, Tensor]:
    """Mean and deviation per channel in the seat of a norm that is gone."""
    record = anatomy.provenance
    mean, var = (record.norms[f"{path}.running_{name}"].double() for name in ("mean", "var"))
    edits = (edit for step in record.plan.steps for edit in step.edits)
    moved_on = any(read == path and take.way is Way.BEFORE for edit in edits for read, take in edit.taken)
    if at_input or moved_on:
        return mean, var.sqrt()
    beta, gamma = kept_moments(anatomy, path)
    assert beta is not None
    assert gamma is not None
    return beta, gamma


def _rounded(values: Tensor) -> list[float]:
    """Six digits are enough: the norm is the same map whatever its statistics are."""
    return [float(f"{value:.6g}") for value in values.tolist()]
