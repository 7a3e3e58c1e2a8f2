"""GroupNorm in place of every BatchNorm, its gamma and beta set so that an average sample sees the BatchNorm.

With the running statistics of the channels of a group taken together (mean m, variance v): gamma' = s sqrt(v + eps),
beta' = beta + s (m - mean), where s is the BatchNorm's slope. By default nine tenths of the divisor v + eps are eps, a
constant (`--steady`); `--steady 0` is the plain norm. One group, the default, is a LayerNorm over channels and
positions. Sign and scale of each channel are free before the norm. They are chosen so that a sample's own statistics
cost least (`per_sample_rescaling`, on images of dead leaves); where no
convolution comes before the norm, as in pre-activation networks, a scale and shift in front of it holds them.
With `--calibrate` the convolutions and the norms' gamma and beta are then fitted, layer by layer, to what the source
computes on the same images (`sequential_fit`). Approximate: each sample has its own statistics. The fewer groups, the
less is lost; nothing is tied to the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from normswap.calibration.fit_task import FitTask
from normswap.calibration.per_sample_rescaling import choose_rescaling, rescalable
from normswap.calibration.sequential_fit import refit
from normswap.errors import spelled
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.layers import affine
from normswap.plan import Body, Edit, Outcome, Step
from normswap.schemes.replaceable_batchnorms import conv_before, exchanged, replaceable_batchnorms


def plan(anatomy: Anatomy, *, groups: int, group_size: int, steady: float) -> PlanBuilder:
    """Plan a GroupNorm in place of every BatchNorm, with eps = steady / (1 - steady) times the mean variance.

    A sample whose deviation is d times the average one is divided by sqrt(steady + (1 - steady) d^2) times the average.
    """
    return insert_per_sample_norms(
        anatomy, lambda channels: max(channels // group_size, 1) if group_size else groups, steady
    )


def plan_layernorm(anatomy: Anatomy, *, steady: float) -> PlanBuilder:
    """Plan a GroupNorm of one group, LayerNorm over all channels and positions, in place of every BatchNorm."""
    return insert_per_sample_norms(anatomy, lambda channels: 1, steady)


def plan_instancenorm(anatomy: Anatomy) -> PlanBuilder:
    """Plan a norm per channel and sample in place of every BatchNorm.

    A channel's mean and size, which often say what is in the image, are erased. A channel of one element is refused.
    """
    return insert_per_sample_norms(anatomy, lambda channels: channels, channelwise=True)


def fit(task: FitTask) -> None:
    """Choose the rescaling before each norm; with images, then fit layer by layer."""
    if not rescalable(task.step) and task.batches is None:
        return
    target = task.after(fitting_target(task.step))
    choose_rescaling(target, task.result, task.step, task.example)
    if task.batches is not None:
        refit(target, task.result, task.batches, seed=task.seed, progress=task.progress)


def insert_per_sample_norms(
    anatomy: Anatomy, groups: Callable[[int], int], steady: float = 0.0, *, channelwise: bool = False
) -> PlanBuilder:
    """A GroupNorm in place of every BatchNorm.

    Args:
        groups: how many are wanted, by the number of channels.
        steady: the share of an average sample's divisor (variance + eps) that eps makes. The channels may then be
            rescaled (`per_sample_rescaling`): a convolution right before the norm absorbs the scales, else a
            `ChannelAffine` in front of the norm holds them.
        channelwise: groups of one channel are what is wanted.

    Raises:
        RefusedError: the network has no BatchNorm, or a group would have one element, which the norm would erase.
    """
    modules = anatomy.traced.modules
    builder, norms = replaceable_batchnorms(anatomy, "norm with statistics per sample")
    counts: dict[str, int] = {}
    for path, module in norms:
        count = _count(builder, path, module, groups(affine.channels(module)), channelwise)
        if count is not None:
            counts[path] = count
    if not builder.refusals:
        steadied = {path: count for path, count in counts.items() if steady and count < affine.channels(modules[path])}
        eps = steady_eps({path: modules[path] for path in steadied}, steady)
        for path, count in counts.items():
            if path in steadied:
                _place_steadied(builder, path, count, eps[path])
            else:
                _place(builder, path, {"groups": count})
    return builder


def _count(builder: PlanBuilder, path: str, module: nn.Module, wanted: int, channelwise: bool) -> int | None:
    """How many groups this norm gets; None where it is refused."""
    channels = affine.channels(module)
    flat = isinstance(module, nn.BatchNorm1d)
    if flat and (channels == 1 or channelwise):  # the only channel of a map has its places
        remedy = f"leave it out with `{spelled('skip')}`" if channels == 1 else f"`{spelled('to', 'groupnorm')}`"
        builder.refusals[path] = f"{channels} groups of {channels} channels: a group of one element erases it; {remedy}"
        return None
    if channelwise:
        return channels
    count = nearest_divisor(channels, wanted)
    if count == channels > 1:
        count = nearest_divisor(channels, channels // 2)
        builder.notes.append(f"{path}: {count} groups of its {channels} channels, as one alone would lose its mean")
    elif count != wanted:
        builder.notes.append(f"{path}: {count} groups, the divisor of its {channels} channels nearest to {wanted}")
    return count


def steady_eps(norms: Mapping[str, nn.Module], steady: float) -> dict[str, float]:
    """The eps that makes this share of the variance by which an average sample is divided: eps / (v + eps)."""
    usual = [affine.statistics(norm)[1].mean() for norm in norms.values()]
    levels = torch.stack(usual).tolist() if usual else []  # together: a device is waited for once
    ratio = steady / (1 - steady)
    return {path: affine.epsilon(norms[path]) + ratio * level for path, level in zip(norms, levels, strict=True)}


def _place_steadied(builder: PlanBuilder, path: str, count: int, eps: float) -> None:
    args: Body = {"groups": count, "eps": eps}
    conv = conv_before(builder, builder.anatomy.traced.modules[path])
    if conv is None:
        _place(builder, path, {**args, "lead": True}, ", behind a scale and shift")
    else:
        builder.replacements[conv] = Edit(conv, "Steadied", {"groups": count}, (path,))
        _place(builder, path, args)


def _place(builder: PlanBuilder, path: str, args: Body, detail: str = "") -> None:
    count, channels = args["groups"], affine.channels(builder.anatomy.traced.modules[path])
    builder.replace(path, "GroupNorm", **args)
    of = f"over {count} group{'s' * (count > 1)} of {channels // count} channels{detail}"
    builder.settle(path, Outcome("statistics per sample", f"statistics per sample {of}"))


def fitting_target(step: Step) -> Step:
    """The same step with the BatchNorms left in place: what its result is fitted to."""
    return exchanged(step, "GroupNorm", "Recentred")


def nearest_divisor(channels: int, groups: int) -> int:
    """The divisor of `channels` nearest to `groups`; of two, the smaller."""
    return min((d for d in range(1, channels + 1) if channels % d == 0), key=lambda d: (abs(d - groups), d))
