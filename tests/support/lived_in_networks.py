"""Networks that look as if they had been trained, and the yardstick the tests measure with.

A fresh timm network zeroes the last gamma of every branch and knows nothing of its statistics:
whole branches can be lost in it unseen. Here every gamma and beta is random, some gammas are
negative or zero, and each norm's statistics are measured on what reaches it (as training mode
would) and then perturbed, so that the input moves the output.
"""

from typing import Any

import torch
from timm.layers.norm_act import FrozenBatchNormAct2d
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.ops.misc import FrozenBatchNorm2d

from normswap import schemes
from normswap.analysis import block_signals
from normswap.folding.overwriting import aliasing_conflicts
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph import inspection
from normswap.graph.inspection import Anatomy
from normswap.plan import Step
from normswap.surgery import applying

BATCHNORMS = (_BatchNorm, FrozenBatchNorm2d, FrozenBatchNormAct2d)
# The fractions of the gammas that are negative, and zero.
NEGATIVE = 0.2
ZERO = 0.1


def lived_in(model: nn.Module, x: Tensor, seed: int = 0) -> nn.Module:
    """Return `model` itself, in float64 and eval mode, with norms as if trained on `x`.

    Args:
        model: A network with BatchNorms of any class.
        x: Images (N, C, H, W); the norms' statistics are measured on them, and perturbed.
        seed: The seed of the random numbers.
    """
    model.double().eval()
    generator = torch.Generator().manual_seed(seed)
    norms = [module for module in model.modules() if isinstance(module, BATCHNORMS)]
    for norm in norms:
        _randomize(norm, generator)
    _measured(model, x, generator)
    return model


def living(model: nn.Module, *shape: int) -> tuple[nn.Module, Tensor]:
    """The network after `lived_in`, in float32, and three random inputs of this shape for it."""
    torch.manual_seed(0)
    x = torch.randn(3, *shape)
    return lived_in(model, x).float(), x


def calm(model: nn.Module, x: Tensor, seed: int = 0) -> nn.Module:
    """The network after `lived_in`, with branches that add little, as those of trained networks do.

    The last gamma of each branch is 0.3 times as large. Then rounding errors do not grow from block
    to block, and float32 is as near to float64 at the logits as it is in trained networks.
    """
    # NFNets start with branches that add nothing.
    model.load_state_dict(block_signals.awake(model).state_dict())
    lived_in(model, x, seed)
    with torch.no_grad():
        for block in inspection.inspect(model).blocks:
            if block.last is not None:
                model.get_submodule(block.last).weight.mul_(0.3)
    _measured(model, x, torch.Generator().manual_seed(seed))
    return model


def _measured(model: nn.Module, x: Tensor, generator: torch.Generator) -> None:
    """Set each norm's statistics to those of its input when the network runs on x, perturbed."""
    norms: list[Any] = [module for module in model.modules() if isinstance(module, BATCHNORMS)]
    handles = [
        norm.register_forward_pre_hook(_measure(generator))
        for norm in norms
        if norm.running_var is not None
    ]
    with torch.no_grad():
        model(x.double())
    for handle in handles:
        handle.remove()


def _randomize(norm: Any, generator: torch.Generator) -> None:
    gamma = norm.weight
    beta = norm.bias
    if gamma is None:
        return

    # Each gamma draws a lot: zero, negative or positive. There is one of each of the first two,
    # however narrow the network.
    lots = torch.rand(gamma.shape, generator=generator, dtype=torch.float64)
    lots[:2] = torch.tensor([0.0, NEGATIVE])[: len(lots)]

    value = torch.rand(gamma.shape, generator=generator, dtype=torch.float64) + 0.5
    value = torch.where(lots < NEGATIVE + ZERO, -value, value)
    with torch.no_grad():
        gamma.copy_(torch.where(lots < ZERO, torch.zeros_like(value), value))
        beta.copy_(0.3 * torch.randn(beta.shape, generator=generator, dtype=torch.float64))


def _measure(generator: torch.Generator) -> Any:
    """A forward pre-hook that sets a norm's statistics to those of its input, perturbed."""

    def hook(norm: Any, args: tuple[Tensor, ...]) -> None:
        values = args[0].transpose(0, 1).flatten(1)
        noise = torch.randn(len(values), generator=generator, dtype=torch.float64)
        spread = torch.rand(len(values), generator=generator, dtype=torch.float64) * 0.5 + 0.75
        variance = values.var(1, correction=0).clamp_min(1e-3)
        norm.running_mean.copy_(values.mean(1) + 0.1 * noise * variance.sqrt())
        norm.running_var.copy_(variance * spread)

    return hook


def batchnorms(model: nn.Module) -> list[str]:
    """Paths of every module that is, by its class, a BatchNorm."""
    return [path for path, module in model.named_modules() if isinstance(module, BATCHNORMS)]


# The anatomies of the networks that tests share, each read when it is first asked for.
_shared: dict[nn.Module, Anatomy | None] = {}


def shared(model: nn.Module) -> nn.Module:
    """Return `model` itself, which no test may change; `seen` reads its anatomy once."""
    _shared[model] = None
    return model


def seen(model: nn.Module) -> Anatomy:
    """Return the anatomy of a network."""
    anatomy = _shared.get(model) or inspection.inspect(model)
    if model in _shared:
        _shared[model] = anatomy
    return anatomy


def step(model: nn.Module | Anatomy, to: str, **options: Any) -> tuple[Step, PlanBuilder]:
    """The plan of one conversion, and the builder that it comes from."""
    options = schemes.chosen(to, options).options
    anatomy = model if isinstance(model, Anatomy) else seen(model)
    builder = schemes.get(to).plan(anatomy, **options)
    builder.refusals.update(aliasing_conflicts(builder))
    return Step(to, options, builder.edits()), builder


def swapped(model: nn.Module, to: str, **options: Any) -> nn.Module:
    """The converted network, without the library's own verification."""
    planned, builder = step(model, to, **options)
    assert not builder.refusals, builder.refusals
    return applying.apply_step(model, planned)


@torch.no_grad()
def run(model: nn.Module, *x: Any) -> Tensor:
    """The unfused forward in eval mode: the oracle. The model is left in eval mode."""
    return model.eval()(*x)


def distance(reference: Tensor, value: Tensor) -> float:
    """The relative L2 distance; the absolute one from a reference of zeros.

    It is infinite for a value of another shape, or one that is not finite.
    """
    if reference.shape != value.shape or not bool(torch.isfinite(value).all()):
        return float("inf")
    return float((value - reference).norm() / (reference.norm() or 1))
