"""GroupNorm in place of every BatchNorm, with gamma and beta that suit an average sample.

`layers.per_sample` has the formulas. By default eps is 9 times the mean variance
(`--relative-eps`), so nine tenths of variance + eps are the same for every sample.
`per_sample_rescaling` chooses sign and scale of each channel before the norm, so that a sample's
own statistics cost least.
"""

from normswap.calibration.per_sample_rescaling import choose_rescaling, rescalable
from normswap.calibration.sequential_fit import refit
from normswap.errors import spelled
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.plan import Body, Edit, Outcome, Step
from normswap.schemes.replaceable_batchnorms import conv_before, exchanged, replaceable_batchnorms
from normswap.schemes.scheme import FitTask
from normswap.sites.site import Site


def plan_layernorm(anatomy: Anatomy, *, relative_eps: float) -> PlanBuilder:
    """Return the plan that places a GroupNorm of one group where every BatchNorm stands.

    With one group it is a LayerNorm over channels and positions.

    Args:
        anatomy: The recorded network.
        relative_eps: The eps of the norms, in multiples of the mean variance (`plan`).
    """
    return plan(anatomy, groups=1, group_size=0, relative_eps=relative_eps)


def plan_instancenorm(anatomy: Anatomy) -> PlanBuilder:
    """Return the plan that places an InstanceNorm where every BatchNorm stands.

    An InstanceNorm normalizes each channel of each sample by itself, so it erases the mean and the
    size of the channel. A channel of one element would be erased altogether, so a network with such
    a norm is refused.
    """
    return plan(anatomy, channelwise=True, groups=0, group_size=1, relative_eps=0.0)


def fit(task: FitTask) -> None:
    """Choose sign and scale of each channel before its norm. With images, also fit each layer.

    Args:
        task: The source, the result and the images.
    """
    # Without channels that may be rescaled, and without images, there is nothing to choose.
    if not rescalable(task.step) and task.batches is None:
        return

    # The result is fitted to a network that has BatchNorms in the places of the GroupNorms.
    target = task.after(fitting_target(task.step))
    choose_rescaling(target, task.result, task.step, task.example, task.batches or ())

    if task.batches is not None:
        refit(
            target,
            task.result,
            task.batches,
            only=task.takes_part,
            seed=task.seed,
            progress=task.progress,
        )


def plan(
    anatomy: Anatomy,
    channelwise: bool = False,
    *,
    groups: int,
    group_size: int,
    relative_eps: float,
) -> PlanBuilder:
    """Return the plan that places a GroupNorm where every BatchNorm stands.

    Args:
        anatomy: The recorded network.
        channelwise: Whether each channel is a group.
        groups: The number of groups, if `group_size` is 0.
        group_size: The number of channels of each group, unless it is 0.
        relative_eps: The eps of the norms, in multiples of the mean variance of the norm's
            channels. Unless it is 0, channels may be rescaled, by a convolution right before the
            norm or by a `ChannelAffine`. The larger the eps, the less the divisor depends on the
            sample. With r = `relative_eps`, a sample of d times the average deviation is divided by
            sqrt((r + d^2) / (r + 1)) times the divisor of an average sample.
    """
    builder, norms = replaceable_batchnorms(anatomy, "norm with statistics per sample")
    # The number of groups of each new norm, by its path.
    counts: dict[str, int] = {}
    for path, site in norms.items():
        if site.sees_one_value and (site.channels == 1 or channelwise):
            builder.refusals[path] = _refusal_of_one_element(site)
        elif channelwise:
            counts[path] = site.channels
        else:
            wanted = max(site.channels // group_size, 1) if group_size else groups
            counts[path] = _group_count(builder, path, site.channels, wanted)

    # A plan with refusals is not carried out, so it needs no edits.
    if builder.refusals:
        return builder

    # A norm whose groups have one channel each keeps the BatchNorm's eps.
    large_eps: dict[str, float] = {}
    if relative_eps:
        grouped = [path for path in counts if counts[path] < norms[path].channels]
        large_eps = {path: absolute_eps(norms[path], relative_eps) for path in grouped}

    for path, count in counts.items():
        channels = norms[path].channels
        args: Body = {"groups": count}
        groups_text = "1 group" if count == 1 else f"{count} groups"
        sentence = f"statistics per sample over {groups_text} of {channels // count} channels"

        if path in large_eps:
            # The channels are rescaled by the convolution before the norm. If that cannot absorb a
            # scale and shift, a `ChannelAffine` in front of the norm (`lead`) rescales them.
            args["eps"] = large_eps[path]
            conv = conv_before(builder, norms[path])
            if conv is None:
                args["lead"] = True
                sentence += ", behind a scale and shift"
            else:
                builder.replacements[conv] = Edit(
                    conv, "Rescaled", {"groups": count}, reads=(path,)
                )

        builder.replace(path, "GroupNorm", **args)
        builder.settle(path, Outcome("became GroupNorm", sentence))

    if large_eps:
        builder.notes.append(_note_on_eps(relative_eps))
    return builder


def _refusal_of_one_element(norm: Site) -> str:
    """Return why a norm cannot be replaced if each of its groups would have a single element."""
    channels = norm.channels
    why = f"{channels} groups of {channels} channels: a group of one element erases it"
    # A map has more values per channel if the inputs are larger. A row has always one.
    larger = "" if norm.reads_rows else "give larger inputs, or "
    return f"{why}; {larger}leave it out with `{spelled('skip')}`"


def _note_on_eps(relative_eps: float) -> str:
    """Return a sentence that tells the user what the chosen eps does.

    Args:
        relative_eps: The eps, in multiples of the mean variance of a norm's channels.
    """
    share = relative_eps / (1 + relative_eps)
    return (
        f"eps is {relative_eps:g} times the mean variance, so {share:.0%} of variance + eps is"
        f" constant, and {1 - share:.0%} of a small difference between the deviations of samples"
        f" is removed; `{spelled('relative_eps', 0)}` is the plain norm, which removes all of"
        " it and keeps less"
    )


def _group_count(builder: PlanBuilder, path: str, channels: int, groups: int) -> int:
    """Return the number of groups of a norm, and note it if it is not the wanted one.

    Args:
        builder: The plan in the making, which gets the note.
        path: The path of the norm.
        channels: The number of its channels.
        groups: The wanted number of groups.
    """
    # Groups of one channel would erase each channel's mean, so they are made larger.
    count = nearest_divisor(channels, groups)
    has_groups_of_one = count == channels
    if has_groups_of_one and channels > 1:
        count = nearest_divisor(channels, channels // 2)
        size = channels // count
        builder.notes.append(
            f"{path}: groups of {size} channels, as groups of 1 erase each channel's mean"
        )
    elif count != groups:
        builder.notes.append(
            f"{path}: {count} groups, the divisor of its {channels} channels nearest to {groups}"
        )

    return count


def absolute_eps(norm: Site, relative_eps: float) -> float:
    """Return the eps of the norm that replaces a BatchNorm.

    It is the BatchNorm's own eps plus a multiple of the mean of its channels' variances.

    Args:
        norm: The BatchNorm.
        relative_eps: The number of mean variances of the norm's channels that are added to its own
            eps.
    """
    _, variance = norm.input_moments
    return norm.eps + relative_eps * float(variance.mean())


def fitting_target(step: Step) -> Step:
    """Return a copy of a plan's step that places a BatchNorm where the step places a GroupNorm.

    The BatchNorm undoes the rescaling of its input (`Recentred`). The copy is carried out to make a
    network to which the network with GroupNorms is then fitted.
    """
    return exchanged(step, "GroupNorm", "Recentred")


def nearest_divisor(channels: int, groups: int) -> int:
    """Return the divisor of `channels` nearest to `groups`. The smaller one wins a tie."""
    return min(
        (d for d in range(1, channels + 1) if channels % d == 0), key=lambda d: (abs(d - groups), d)
    )
