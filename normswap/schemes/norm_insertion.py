"""`batchnorm`, `frozen-bn`, `affine` and `tune`: a layer wherever a BatchNorm stands, or stood.

The new layer computes what the network computes there now. After a norm has been folded away, that
is the identity (Ioffe & Szegedy 2015, section 3: a BatchNorm can be the identity). The new layer's
statistics depend on how the norm was folded:

- A norm that was folded back leaves its output in the place: mean = beta,
  variance = gamma^2 var / (var + eps).
- A norm that was folded forward, or left a shift or an affine map, leaves its input in the place,
  with its running statistics.
"""

import math
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor, nn

from normswap.errors import RefusedError, spelled
from normswap.folding.canonical_form import fold_norms
from normswap.folding.plan_builder import (
    FROZEN_ALREADY,
    KEEPS_STATISTICS,
    KEPT,
    PlanBuilder,
    left_affine,
    scales_weight,
)
from normswap.graph.inspection import Anatomy
from normswap.layers import reparametrized
from normswap.layers.channelwise import ChannelAffine
from normswap.layers.placeholders import Vacant
from normswap.layers.planned_layer import OwnLayer
from normswap.layers.site_norm import OF_TORCH, SiteNorm
from normswap.plan import AbsorbMode, Body, Edit, Outcome
from normswap.schemes.replaceable_batchnorms import require_no_tokenwise_norms
from normswap.sites.known_norms import Statistics
from normswap.sites.site import Site, site_of


def plan(anatomy: Anatomy, *, where: str, like: str, ghost_batch: int) -> PlanBuilder:
    """Return the plan that places a BatchNorm wherever a norm stands or stood.

    Args:
        anatomy: The recorded network.
        where: Not read here. The step `measured-batchnorm` places norms in networks that never had
            any.
        like: Not read here. `surgery.likeness` makes the conversion to an architecture.
        ghost_batch: The number of samples that share statistics in training (Hoffer et al. 2017,
            arXiv:1705.08741, algorithm 1). 0 stands for all samples of a batch.
    """
    ghost = {"ghost": ghost_batch} if ghost_batch else {}

    def keep(builder: PlanBuilder, site: Site) -> None:
        """Keep a BatchNorm with ghost batches of the wanted size, and replace any other norm."""
        path = site.path
        module = site.module
        # `SiteNorm` is normswap's own BatchNorm. With `dims` it becomes torch's BatchNorm, which
        # has no ghost batches.
        dims = {} if ghost_batch else dimensions(anatomy, path)

        # Only a `SiteNorm` can have ghost batches. One that needs none is replaced by torch's own
        # BatchNorm, unless it applies an activation.
        has_same_ghosts = not ghost_batch
        if isinstance(module, SiteNorm):
            becomes_torchs_own = bool(dims) and module.act is None
            has_same_ghosts = module.ghost == ghost_batch and not becomes_torchs_own

        # A registered norm is of another library's class, so it is replaced.
        uses_batch = site.statistics_in_training is Statistics.BATCH
        if has_same_ghosts and uses_batch and not site.is_registered:
            builder.settle(path, KEPT)
        else:
            # Eps, momentum and the number of batches are those of the norm in the source network.
            settings = _settings(anatomy, anatomy.original_path(path))
            builder.replace(path, "SiteNorm", **ghost, **settings, **dims)
            sentence = f"statistics over {ghost_batch or 'all'} samples"
            builder.settle(path, Outcome("statistics over some samples", sentence))

    return insert_norms(anatomy, "SiteNorm", keep, **ghost)


def plan_frozen(anatomy: Anatomy) -> PlanBuilder:
    """Return the plan that places a norm of constants wherever a norm stands or stood.

    The new norm is a `FrozenBatchNorm2d`, or timm's class if the norm has an activation.
    """

    def freeze(builder: PlanBuilder, site: Site) -> None:
        """Keep a norm that is frozen already, and replace any other."""
        if site.is_frozen:
            builder.settle(site.path, FROZEN_ALREADY)
        else:
            builder.replace(site.path, "FrozenNorm")
            builder.settle(site.path, Outcome("frozen", "frozen"))

    return insert_norms(anatomy, "FrozenNorm", freeze)


def plan_affine(anatomy: Anatomy) -> PlanBuilder:
    """Return the plan that places a learnable scale and shift wherever a norm stands or stood.

    They start as the map that the norm computes in eval mode.
    """

    def keep_the_map(builder: PlanBuilder, site: Site) -> None:
        """Replace a norm by the scale and shift that it applies in eval mode."""
        builder.replace(site.path, ChannelAffine.__name__)
        builder.settle(site.path, left_affine("its own map"))

    return insert_norms(anatomy, ChannelAffine.__name__, keep_the_map)


def plan_tune(anatomy: Anatomy) -> PlanBuilder:
    """Return the plan in which each norm's gamma scales the weight of the convolution before it.

    The gamma still learns, and the weight is scaled anew in each forward:
    W' = gamma / sqrt(var + eps) W and b' = beta + gamma / sqrt(var + eps) (b - mean). A norm that
    no plain 2-D convolution can absorb keeps frozen statistics in its place, and learns gamma and
    beta there.
    """

    def keep_in_place(builder: PlanBuilder, site: Site) -> None:
        """Replace a norm by one with frozen statistics, whose gamma and beta learn."""
        builder.replace(site.path, "EvalNorm")
        builder.settle(site.path, KEEPS_STATISTICS)

    builder = insert_norms(anatomy, "EvalNorm", keep_in_place)
    # A norm that folds back into one plain convolution can scale its weight instead.
    for path, conv in _folding(anatomy).items():
        edit = builder.replacements.get(path)
        module = anatomy.traced.linear(conv)
        is_plain = reparametrized.plain_class(module) is nn.Conv2d
        if edit is None or not is_plain or reparametrized.keeps_input_bias(module):
            continue
        # Another layer that is planned in the convolution's place cannot scale its weight.
        if conv in builder.linears and builder.linears[conv].layer != "Folded":
            continue

        # The convolution takes the norm in, with the arguments of the layer that was planned in the
        # norm's place.
        linear = builder.linear(conv)
        linear.layer = "Tuned"
        linear.extra = dict(edit.args)
        linear.add(path, AbsorbMode.NORM)
        builder.remove(path)
        builder.settle(path, scales_weight(conv))
    return builder


def _folding(anatomy: Anatomy) -> dict[str, str]:
    """Return the convolution into which each norm folds or was folded, by the norm's path.

    Norms that share a convolution, or fold into several, are left out.
    """
    modules = anatomy.traced.modules

    # The norms that still stand, by the convolution before them that would absorb them.
    absorbed = {}
    for conv, linear in fold_norms(anatomy).linears.items():
        after = [read for read, absorption in linear.reads if absorption.way is AbsorbMode.AFTER]
        absorbed[conv] = [read for read in after if anatomy.site(read).is_batchnorm]

    # The norms that an earlier conversion folded into the convolution before them. What is left in
    # such a norm's place is a `Vacant`.
    for edit in anatomy.provenance.plan.edits:
        norms_of_conv = absorbed.setdefault(edit.path, [])
        for path, absorption in edit.absorbed:
            follows = absorption.way in (AbsorbMode.AFTER, AbsorbMode.NORM)
            is_gone = isinstance(modules.get(path), Vacant)
            if follows and is_gone and path not in norms_of_conv:
                norms_of_conv.append(path)

    # The same by norm. A norm is left out if it shares a convolution, or has several.
    convolutions: dict[str, list[str]] = {}
    for conv, paths in absorbed.items():
        if len(paths) == 1 and conv in modules:
            convolutions.setdefault(paths[0], []).append(conv)

    return {path: convs[0] for path, convs in convolutions.items() if len(convs) == 1}


# A function that plans what becomes of a BatchNorm that still stands, given the plan in the making
# and the norm's site.
PlanNorm = Callable[[PlanBuilder, Site], None]


def insert_norms(anatomy: Anatomy, layer: str, keep: PlanNorm, **args: object) -> PlanBuilder:
    """Return the plan that places a layer wherever the network has, or once had, a norm.

    Args:
        anatomy: The recorded network. What can fold is folded, except its BatchNorms.
        layer: The class of the new layer, by name.
        keep: Plans what becomes of a BatchNorm that still stands. It is called with the plan in the
            making and the norm's site.
        args: Arguments of the layers that take the places of norms that are gone.

    Raises:
        RefusedError: The network has no BatchNorm, and no conversion took one away.
    """
    # The BatchNorms that the network still has.
    norms = [norm for norm in anatomy.norms if norm.is_batchnorm and norm.called]
    living = [norm.site for norm in norms if anatomy.takes_part(norm.path)]
    lost = _lost_norms(anatomy)

    # Layers that took the place of a norm are not folded, since the new norm is made from them.
    unfolded = [site.path for site in living]
    for original_path in lost:
        path = anatomy.current_path(original_path)
        if _stands_for_a_norm(anatomy.traced.modules.get(path)):
            unfolded.append(path)
    builder = fold_norms(anatomy, leave=unfolded)

    for site in living:
        if site.refusal is not None:
            builder.refusals[site.path] = site.refusal
        else:
            keep(builder, site)

    if not living and not lost and not builder.refusals:
        _refuse_without_statistics(anatomy)

    for path in lost:
        _restore(builder, path, layer, {**args, **_settings(anatomy, path)})
    return builder


def _lost_norms(anatomy: Anatomy) -> list[str]:
    """Return the paths of the norms that earlier conversions have taken away.

    The paths are those in the network before the conversions. Norms that the user has left out of
    this conversion (`only`, `skip`) are left out here, too.
    """
    present = {anatomy.original_path(norm.path) for norm in anatomy.norms}
    return [
        path
        for path in anatomy.provenance.original_paths
        if path not in present and anatomy.takes_part(path)
    ]


def _refuse_without_statistics(anatomy: Anatomy) -> NoReturn:
    """Raise the RefusedError for a network that has no BatchNorm and no record of one."""
    require_no_tokenwise_norms(anatomy, "no statistics are known")
    why = "the network has no BatchNorm, and was not converted from one that had"
    if anatomy.provenance.original_paths:
        why = "a conversion replaced its BatchNorms by norms that keep none"
    if anatomy.refused_norms:
        why += f"; {anatomy.refused_norms}"
    measuring = f"'{spelled('to', 'batchnorm')}' with '{spelled('calibrate', metavar='DATA')}'"
    remedy = f"{measuring} measures some (images, no labels needed)"
    raise RefusedError("no statistics are known", why, remedy)


def dimensions(anatomy: Anatomy, path: str) -> Body:
    """Return `{"dims": n}` to build a `SiteNorm`, where the input of a layer has n dimensions.

    The dict is empty if forward does not call the layer at the path, if its inputs have different
    numbers of dimensions, or if torch has no BatchNorm for that number.
    """
    module = anatomy.traced.modules.get(path)
    counts: set[int] = set()
    for call in anatomy.traced.calls.get(id(module), ()):
        shape = call.meta.get("shape")
        # 0 stands for a value that is no single tensor. torch has no BatchNorm for it.
        counts.add(len(shape) if isinstance(shape, torch.Size) else 0)

    has_one_number = len(counts) == 1
    if not has_one_number or not counts <= OF_TORCH.keys():
        return {}
    return {"dims": counts.pop()}


def _settings(anatomy: Anatomy, path: str) -> Body:
    """Return `{"settings": ...}` to build a `SiteNorm`, with the recorded settings of a norm.

    The settings are eps, momentum and the number of batches of the norm that stood at `path`. The
    dict is empty if none of them is recorded.
    """
    norms = anatomy.provenance.norms
    names = ("eps", "momentum", "num_batches_tracked")
    settings: dict[str, float | None] = {}
    for name in names:
        if f"{path}.{name}" in norms:
            # A momentum of None is recorded as NaN.
            value = norms[f"{path}.{name}"].item()
            settings[name] = None if math.isnan(value) else value

    return {"settings": settings} if settings else {}


def _restore(builder: PlanBuilder, original: str, layer: str, args: Body) -> None:
    """Plan a layer in the place of a norm that is gone, or note why there is no place.

    Args:
        builder: The plan in the making.
        original: The path of the norm in the network that it was converted from.
        layer: The class of the new layer, by name.
        args: The arguments of the new layer.
    """
    # With `dims` a `SiteNorm` becomes torch's own BatchNorm. That has no ghost batches, so a norm
    # with ghost batches gets no `dims`.
    path = builder.anatomy.current_path(original)
    if layer == SiteNorm.__name__ and not args.get("ghost"):
        args = {**args, **dimensions(builder.anatomy, path)}

    # A layer that forward does not call is no place for a norm, unless it is the placeholder of a
    # removed norm.
    old = builder.traced.modules.get(path)
    if old is None or (id(old) not in builder.traced.calls and not isinstance(old, Vacant)):
        builder.notes.append(f"{path}: there is no place for its norm any more")
        return

    # A new norm can stand where no layer will be left, or in place of an affine map that a norm
    # left. Any other layer stays.
    becomes_free = builder.is_removed(path, old)
    if not becomes_free and not _stands_for_a_norm(old):
        builder.notes.append(
            f"{path} stays a {type(old).__name__}: {builder.outcomes.get(path, 'it is in use')}"
        )
        return

    # A layer that keeps a norm's statistics gives them to the new norm. Any other new norm gets its
    # statistics from the record of the norm that is gone.
    if site_of(old).holds_statistics and not becomes_free:
        builder.replace(path, layer, **args)
        builder.settle(path, KEEPS_STATISTICS)
        return

    # Where a scale or shift of the norm is left, the new norm reads what the old norm read.
    mean, std = moments(builder.anatomy, original, at_input=not becomes_free)
    builder.replace(path, layer, **args, mean=_rounded(mean), std=_rounded(std))
    builder.settle(
        path, Outcome("norms from the statistics kept", "gets a norm from the statistics kept")
    )


def _stands_for_a_norm(module: nn.Module | None) -> bool:
    """Whether a module is an affine map per channel that normswap put in the place of a norm."""
    return isinstance(module, OwnLayer) and module.AFFINE and module.PER_CHANNEL


def _ways(edit: Edit) -> list[tuple[str, AbsorbMode]]:
    """Return the path of each norm that an edit's layer absorbs, with its absorption mode."""
    return [(read, absorption.way) for read, absorption in edit.absorbed]


def moments(anatomy: Anatomy, path: str, *, at_input: bool) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation per channel of the values where a norm once stood.

    If the norm was folded into the layer before it, its place now has the values that were its
    output. If it was folded into the layer after it, or left a scale or shift, its place still has
    the values that were its input.

    Args:
        anatomy: The recorded network.
        path: The path of the norm in the network that it was converted from.
        at_input: Whether the norm left a scale or shift in its place, which reads what the norm
            read.

    Returns:
        Mean and deviation, (C,) each, in float64.
    """
    record = anatomy.provenance
    mean, var = (record.norms[f"{path}.running_{name}"].double() for name in ("mean", "var"))
    went_forward = any((path, AbsorbMode.BEFORE) in _ways(edit) for edit in record.plan.edits)
    if at_input or went_forward:
        return mean, var.sqrt()

    kept_moments = anatomy.kept_moments(path)
    assert kept_moments is not None

    # If no deviation of the output is on record, `kept_moments` gives |gamma|, as if eps were 0.
    # The exact deviation is |gamma| sqrt(var / (var + eps)).
    beta, deviation = kept_moments
    if f"{path}.output_std" not in record.norms:
        deviation = deviation * (var / (var + record.norms[f"{path}.eps"])).sqrt()

    return beta, deviation


def _rounded(values: Tensor) -> list[float]:
    """Return statistics with six digits.

    Six digits are enough, because gamma and beta make up for any statistics.
    """
    return [float(f"{value:.6g}") for value in values.tolist()]
