"""Factors that make channels with long tails smaller before the tanh of a Dynamic Tanh layer.

The loss of a channel x is the share of the variance of tanh(alpha x) that is not linear in x. Every
channel is multiplied by the largest factor, at most 1, with which its loss is no larger than that
of a channel of N(0, 1) without a factor. Gamma compensates the factor.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from normswap.calibration.channel_values import dead_leaves, observed
from normswap.calibration.checked_batches import first_images
from normswap.layers.dynamic_tanh import gain, gains
from normswap.layers.per_sample import rescale_output, rescaling_layer, without_lead
from normswap.models.calling import Example
from normswap.plan import Step

# At most so many of the user's images are used, with so many values of each channel in an image.
MOST = 512
PLACES = 16
# If the user's images give fewer values of a channel, dead leaves are used in their place.
ENOUGH = 256
# A factor is 2^(-i / STEPS) for a whole number i, and no smaller than 2^-OCTAVES.
STEPS = 4
OCTAVES = 5
# The number of quantiles by which N(0, 1) is sampled.
NORMAL = 2**14


@torch.no_grad()
def choose_factors(
    target: nn.Module, result: nn.Module, step: Step, example: Example, batches: Iterable[Example]
) -> None:
    """Multiply the channels before each tanh by factors, in place, in both networks.

    The factors are chosen on the user's images. For layers of which these give too few values, they
    are chosen on dead leaves (images of random shapes).

    Args:
        target: The network that the result is fitted to, without the tanh (`dyt.fitting_target`).
            Its gammas undo the factors, so it computes the same function as before.
        result: The network with the tanh.
        step: The step of the plan that made the result.
        example: A call of the networks, in which dead leaves take the place of the images.
        batches: Calls with the user's images. It is empty if the user gave none.
    """
    # By the path of a tanh, the path of the convolution before it, whose weights take the factors.
    # If there is none, a layer in front of the tanh takes them, which `without_lead` leaves out.
    holders = {edit.reads[0]: edit.path for edit in step.edits if edit.layer == "Whitened"}
    alphas = {edit.path: edit.args["alpha"] for edit in step.edits if edit.layer == "DynamicTanh"}
    layers = {path: without_lead(target.get_submodule(path)) for path in alphas}

    for path, x in _input_values(target, layers, example, batches).items():
        alpha = alphas[path]
        layer_without_tanh = layers[path]
        layer_with_tanh = without_lead(result.get_submodule(path))
        factor = factors(x, alpha).double().to(layer_without_tanh.weight.device)

        # The layer in front multiplies the input by the factor, and gamma compensates that. Behind
        # a tanh, gamma is proportional to the `gain`, by which the tanh fits its input best. The
        # gain changes with the factor.
        for network in (target, result):
            rescale_output(rescaling_layer(network, path, holders), factor)
        layer_without_tanh.weight.copy_(layer_without_tanh.weight.double() / factor)
        layer_with_tanh.weight.copy_(
            layer_with_tanh.weight.double() * gains(alpha, factor) / gain(alpha)
        )


def _input_values(
    target: nn.Module,
    layers: Mapping[str, nn.Module],
    example: Example,
    batches: Iterable[Example],
) -> dict[str, Tensor]:
    """Return values (C, n) of the input of each layer, by the layer's path.

    Args:
        target: The network that has the layers.
        layers: The layers, by path.
        example: A call of the network, in which dead leaves take the place of the images.
        batches: Calls with the user's images. It is empty if the user gave none.
    """
    generator = torch.Generator().manual_seed(0)

    # The values (C, n) of a layer's input x (N, C, places) at some random places.
    def some_values(_: nn.Module, x: Tensor) -> Tensor:
        places = torch.randperm(x.shape[2], generator=generator)[:PLACES].to(x.device)
        return x[:, :, places].transpose(0, 1).flatten(1).float().cpu()

    # The user's images come first.
    parts = observed(target, layers, first_images(target, batches, MOST), some_values)
    values: dict[str, Tensor] = {}
    for path, tensors in parts.items():
        x = torch.cat(tensors, 1)
        if x.shape[1] >= ENOUGH:
            values[path] = x
    if len(values) == len(layers):
        return values

    # Layers of which they give too few values get those on dead leaves.
    generator.manual_seed(0)
    parts = observed(target, layers, dead_leaves(target, example, layers), some_values)
    for path in parts.keys() - values.keys():
        x = torch.cat(parts[path], 1)
        # The network was not trained on dead leaves, so channels have other deviations on them. The
        # input of the tanh is whitened: on images like those of the training its deviation is 1.
        values[path] = x / x.std(1, keepdim=True).clamp_min(1e-30)
    return values


def factors(x: Tensor, alpha: float) -> Tensor:
    """Return the factor by which each channel should be multiplied before a tanh, (C,).

    It is the largest factor, at most 1, with which the tanh is as close to linear in the channel as
    in one of N(0, 1). A channel with values that are not finite gets the factor 1.

    Args:
        x: Values of each channel, (C, n).
        alpha: The alpha of the tanh.
    """
    # The loss is the share of the tanh's variance that is not linear in its input. A channel may
    # lose no more than one with normal values of deviation 1.
    quantiles = torch.special.ndtri((torch.arange(NORMAL) + 0.5) / NORMAL)[None]
    largest_loss = lost(quantiles, torch.tensor([alpha]))

    # Bisection, for all channels at once: k stands for the factor 2^(-k / STEPS), and the smallest
    # k with a loss that is small enough is found.
    low = torch.zeros(len(x))
    high = torch.full((len(x),), float(STEPS * OCTAVES))
    while bool((low < high).any()):
        middle = ((low + high) / 2).floor()
        # NaN is not greater than anything, so a channel with NaN always fits and gets the factor 1.
        fits = ~(lost(x, alpha * 2 ** (-middle / STEPS)) > largest_loss)
        low = torch.where(fits, low, middle + 1)
        high = torch.where(fits, middle, high)
    return 2 ** (-low / STEPS)


def lost(x: Tensor, alpha: Tensor) -> Tensor:
    """Return the share of the variance of tanh(alpha x) that is not linear in x, (C,).

    Args:
        x: Values of each channel, (C, n).
        alpha: The alpha of each channel, (C,), or of all, (1,).
    """
    x = x - x.mean(1, keepdim=True)
    output = torch.tanh(alpha[:, None] * x)
    output = output - output.mean(1, keepdim=True)
    slope = (x * output).mean(1, keepdim=True) / x.square().mean(1, keepdim=True).clamp_min(1e-30)
    return (output - slope * x).square().mean(1) / output.square().mean(1).clamp_min(1e-30)
