"""Factors for channels with long tails before a tanh, so that each loses no more than N(0, 1) does.

The loss of a channel x is the share of the variance of tanh(alpha x) that is not linear in x. gamma
compensates a factor before the tanh, so every channel gets the largest factor, at most 1, with a
small enough loss.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from normswap.calibration.channel_values import dead_leaves, observed
from normswap.calibration.checked_batches import first_images
from normswap.layers.dynamic_tanh import gain, gains
from normswap.layers.per_sample import rescale_output, rescaling_layer, without_lead
from normswap.models.calling import Example
from normswap.plan import Step

# At most so many of the user's images are used, with so many values of each channel.
MOST = 512
PLACES = 16
# With fewer values of a channel, dead leaves are used.
ENOUGH = 256
# Factors go down in quarters of an octave, at most so many octaves.
STEPS = 4
OCTAVES = 5
# Quantiles that stand for N(0, 1).
NORMAL = 2**14


@torch.no_grad()
def choose_factors(
    target: nn.Module, result: nn.Module, step: Step, example: Example, batches: Iterable[Example]
) -> None:
    """Set the factor of each channel before a tanh, in place, in both networks.

    The target (`dyt.fitting_target`) has no tanh and computes the same function before and after.
    Images of dead leaves are used where the user's images give too few values.
    """
    holders = {edit.reads[0]: edit.path for edit in step.edits if edit.layer == "Whitened"}
    alphas = {edit.path: edit.args["alpha"] for edit in step.edits if edit.layer == "DynamicTanh"}
    layers = {path: without_lead(target.get_submodule(path)) for path in alphas}
    generator = torch.Generator().manual_seed(0)

    def some_values(_: nn.Module, x: Tensor) -> Tensor:
        places = torch.randperm(x.shape[2], generator=generator)[:PLACES].to(x.device)
        return x[:, :, places].transpose(0, 1).flatten(1).float().cpu()

    parts = observed(target, layers, first_images(target, batches, MOST), some_values)
    values = {
        path: x for path, joined in parts.items() if (x := torch.cat(joined, 1)).shape[1] >= ENOUGH
    }
    if len(values) < len(layers):
        generator.manual_seed(0)
        parts = observed(target, layers, dead_leaves(target, example, layers), some_values)
        for path in parts.keys() - values.keys():
            x = torch.cat(parts[path], 1)
            # The network was not trained on dead leaves, so their deviation is not its images'.
            values[path] = x / x.std(1, keepdim=True).clamp_min(1e-30)
    for path, x in values.items():
        alpha = alphas[path]
        straight = layers[path]
        bent = without_lead(result.get_submodule(path))
        factor = factors(x, alpha).double().to(straight.weight.device)
        for network in (target, result):
            rescale_output(rescaling_layer(network, path, holders), factor)
        straight.weight.copy_(straight.weight.double() / factor)
        bent.weight.copy_(bent.weight.double() * gains(alpha, factor) / gain(alpha))


def factors(x: Tensor, alpha: float) -> Tensor:
    """Return the factor (C,) of each channel for values x (C, n), in quarters of an octave.

    A channel with values that are not finite gets the factor 1.
    """
    quantiles = torch.special.ndtri((torch.arange(NORMAL) + 0.5) / NORMAL)[None]
    most = lost(quantiles, torch.tensor([alpha]))
    low = torch.zeros(len(x))
    high = torch.full((len(x),), float(STEPS * OCTAVES))
    while bool((low < high).any()):
        middle = ((low + high) / 2).floor()
        fits = ~(lost(x, alpha * 2 ** (-middle / STEPS)) > most)
        low = torch.where(fits, low, middle + 1)
        high = torch.where(fits, middle, high)
    return 2 ** (-low / STEPS)


def lost(x: Tensor, alpha: Tensor) -> Tensor:
    """The share of the variance of tanh(alpha x), x (C, n), that is not linear in x."""
    x = x - x.mean(1, keepdim=True)
    bent = torch.tanh(alpha[:, None] * x)
    bent = bent - bent.mean(1, keepdim=True)
    slope = (x * bent).mean(1, keepdim=True) / x.square().mean(1, keepdim=True).clamp_min(1e-30)
    return (bent - slope * x).square().mean(1) / bent.square().mean(1).clamp_min(1e-30)
