"""Dynamic Tanh in place of every BatchNorm: gamma tanh(alpha x) + beta, with one alpha per layer.

The convolution before absorbs the BatchNorm's mean and deviation, so that one alpha fits all
channels. If no convolution can absorb them (pre-activation networks), a scale and shift in front of
the tanh holds them. `layers.dynamic_tanh` has the formula of the new gamma. `tanh_factors` makes
channels with long tails smaller.
"""

from normswap.calibration.sequential_fit import refit
from normswap.calibration.tanh_factors import choose_factors
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.layers.dynamic_tanh import DynamicTanh, Straight, Whitened
from normswap.plan import Body, Edit, Outcome, Step
from normswap.schemes.replaceable_batchnorms import conv_before, exchanged, replaceable_batchnorms
from normswap.schemes.scheme import FitTask


def plan(anatomy: Anatomy, *, bend: float) -> PlanBuilder:
    """Return the plan that places a Dynamic Tanh where every BatchNorm stands.

    Args:
        anatomy: The recorded network.
        bend: The alpha that every layer starts with.
    """
    builder, norms = replaceable_batchnorms(anatomy, "Dynamic Tanh")
    for path, site in norms.items():
        conv = conv_before(builder, site)
        args: Body = {"alpha": float(bend)}
        sentence = "becomes a Dynamic Tanh"
        # The input of the tanh is standardized by the BatchNorm's mean and deviation. The
        # convolution before it absorbs them (`Whitened`). If it cannot, a scale and shift in front
        # of the tanh (`lead`) holds them.
        if conv is None:
            args["lead"] = True
            sentence += " behind a scale and shift"
        else:
            builder.replacements[conv] = Edit(conv, Whitened.__name__, reads=(path,))
        builder.replace(path, DynamicTanh.__name__, **args)
        builder.settle(path, Outcome("became Dynamic Tanh", sentence))

    return builder


def fit(task: FitTask) -> None:
    """Choose a factor for each channel before its tanh. With images, also fit the other values.

    The other values are those of the convolutions, gammas and betas.

    Args:
        task: The source, the result and the images.
    """
    # The network after the same step, but without the tanh, computes what the source does.
    target = task.after(fitting_target(task.step))
    choose_factors(target, task.result, task.step, task.example, task.batches or ())

    if task.batches is not None:
        refit(
            target,
            task.result,
            task.batches,
            only=task.takes_part,
            seed=task.seed,
            progress=task.progress,
        )


def fitting_target(step: Step) -> Step:
    """Return a copy of a plan's step, with a scale and shift in place of every Dynamic Tanh.

    Where the step has gamma tanh(alpha x) + beta, the copy has gamma x + beta (`Straight`). The
    copy is carried out to make a network that computes what the source does. The network with
    Dynamic Tanhs is then fitted to it.
    """
    return exchanged(step, DynamicTanh.__name__, Straight.__name__)
