"""GroupNorm in place of every BatchNorm, its gamma and beta set so that an average sample sees the BatchNorm.

With the running statistics of the channels of a group taken together (mean m, variance v): gamma' = s sqrt(v + eps),
beta' = beta + s (m - mean), where s is the BatchNorm's slope. By default nine tenths of the divisor v + eps are eps, a
constant (`--steady`). Sign and scale of each channel are free before the norm, and chosen so that a sample's own
statistics cost least (`per_sample_rescaling`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from normswap.calibration.per_sample_rescaling import choose_rescaling, rescalable
from normswap.calibration.sequential_fit import refit
from normswap.errors import spelled
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.layers import affine
from normswap.plan import Body, Edit, Outcome, Step
from normswap.schemes.replaceable_batchnorms import conv_before, exchanged, replaceable_batchnorms
from normswap.schemes.scheme import FitTask


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
        refit(target, task.result, task.batches, only=task.takes_part, seed=task.seed, progress=task.progress)


def insert_per_sample_norms(
    anatomy: Anatomy, groups: Callable[[int], int], steady: float = 0.0, *, channelwise: bool = False
) -> PlanBuilder:
    """A GroupNorm in place of every BatchNorm.

    Args:
        groups: how many there should be, by the number of channels.
        steady: the share of an average sample's divisor (variance + eps) that eps makes. The channels may then be
            rescaled: by a convolution right before the norm, else by a `ChannelAffine` in front of it.
        channelwise: groups of one channel are what is asked for.
    """
    builder, norms = replaceable_batchnorms(anatomy, "norm with statistics per sample")
    counts: dict[str, int] = {}
    for path, module in norms.items():
        channels = affine.channels(module)
        if isinstance(module, nn.BatchNorm1d) and (channels == 1 or channelwise):
            # the only channel of a map has its places
            why = f"{channels} groups of {channels} channels: a group of one element erases it"
            builder.refusals[path] = f"{why}; leave it out with `{spelled('skip')}`"
        else:
            counts[path] = channels if channelwise else _count(builder, path, channels, groups(channels))
    if builder.refusals:
        return builder
    steadied = [path for path in counts if steady and counts[path] < affine.channels(norms[path])]
    eps = steady_eps({path: norms[path] for path in steadied}, steady)
    for path, count in counts.items():
        channels = affine.channels(norms[path])
        args: Body = {"groups": count}
        sentence = f"statistics per sample over {count} group{'s' * (count > 1)} of {channels // count} channels"
        if path in steadied:
            args["eps"] = eps[path]
            conv = conv_before(builder, norms[path])
            if conv is None:
                args["lead"] = True
                sentence += ", behind a scale and shift"
            else:
                builder.replacements[conv] = Edit(conv, "Steadied", {"groups": count}, (path,))
        builder.replace(path, "GroupNorm", **args)
        builder.settle(path, Outcome("statistics per sample", sentence))
    return builder


def _count(builder: PlanBuilder, path: str, channels: int, groups: int) -> int:
    """The divisor of the channels that is nearest to the number of groups, but for groups of one channel."""
    count = nearest_divisor(channels, groups)
    if count == channels > 1:
        count = nearest_divisor(channels, channels // 2)
        builder.notes.append(f"{path}: {count} groups of its {channels} channels, as one alone would lose its mean")
    elif count != groups:
        builder.notes.append(f"{path}: {count} groups, the divisor of its {channels} channels nearest to {groups}")
    return count


def steady_eps(norms: Mapping[str, nn.Module], steady: float) -> dict[str, float]:
    """The eps that makes this share of the variance by which an average sample is divided: eps / (v + eps)."""
    ratio = steady / (1 - steady)
    means = {path: float(affine.statistics(norm)[1].mean()) for path, norm in norms.items()}
    return {path: affine.epsilon(norms[path]) + ratio * mean for path, mean in means.items()}


def fitting_target(step: Step) -> Step:
    """The same step with the BatchNorms left in place: what its result is fitted to."""
    return exchanged(step, "GroupNorm", "Recentred")


def nearest_divisor(channels: int, groups: int) -> int:
    """The divisor of `channels` nearest to `groups`; of two, the smaller."""
    return min((d for d in range(1, channels + 1) if channels % d == 0), key=lambda d: (abs(d - groups), d))
