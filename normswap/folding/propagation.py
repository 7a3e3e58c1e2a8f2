"""The rules of propagation: what an affine map, or a positive factor of it, can pass on its way through the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from timm import layers as timm_layers
from torch import fx, nn
from torch.nn.utils import parametrize

from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.node_reader import LINEAR
from normswap.graph.tracing import inputs, is_constant_mul, is_mul
from normswap.layers import affine, own_forwards, reparametrized
from normswap.layers.activations import HOMOGENEOUS_FUNCTIONS, IDENTITIES, RELUS, is_homogeneous

_LINEAR_FORWARDS = {
    nn.Linear.forward,
    nn.Conv1d.forward,
    nn.Conv2d.forward,
    nn.Conv3d.forward,
    nn.ConvTranspose1d.forward,
    nn.ConvTranspose2d.forward,
    nn.ConvTranspose3d.forward,
    timm_layers.Conv2dSame.forward,
    timm_layers.Linear.forward,
}
_POOLS = (
    nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, timm_layers.BlurPool2d,
)  # fmt: skip
_SCALAR_FUNCTIONS = (
    *HOMOGENEOUS_FUNCTIONS, torch.mean, torch.flatten, torch.amax, F.adaptive_avg_pool2d, F.avg_pool2d, F.max_pool2d,
    "mean", "view", "reshape", "flatten", "permute", "transpose", "contiguous", "unsqueeze", "squeeze", "amax",
)  # fmt: skip


class NotFoldable(Exception):  # noqa: N818 - a reason, no error
    """Why one way of folding is not open, in a few words."""


def consumers(builder: PlanBuilder, module: nn.Module, propagates: Callable[[fx.Node], bool]) -> list[str]:
    """Paths of the convolutions that read this module, and nothing else reads it."""
    traced = builder.anatomy.traced
    ends = [end for call in traced.calls[id(module)] for end in _ends(builder, call, propagates)]
    for node in ends:
        conv = traced.module(node)
        if not isinstance(conv, LINEAR):
            raise NotFoldable(f"{name(node)} reads it, not a convolution")
        if str(node.target) == builder.anatomy.classifier:
            raise NotFoldable(f"the features that {node.target} reads would change")
        check_linear(builder, str(node.target), conv)
        if reparametrized.keeps_input_bias(conv):
            raise NotFoldable(f"{node.target} adds a scalar to its input")
        if any(call not in ends for call in traced.calls[id(conv)]):
            raise NotFoldable(f"{node.target} is called elsewhere too, on another input")
        if isinstance(conv, nn.Linear):
            raise NotFoldable(f"{node.target} is a Linear: which of its inputs a channel becomes is not known")
    if not ends:
        raise NotFoldable("nothing reads it")
    return distinct(traced.modules, [str(node.target) for node in ends])


def _ends(builder: PlanBuilder, start: fx.Node, propagates: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
    for user in builder.anatomy.traced.users[start]:
        if user.op == "output":
            raise NotFoldable("the model returns it")
        if propagates(user) and len(inputs(user)) == 1:
            yield from _ends(builder, user, propagates)
        else:
            yield user


def propagates_scale(builder: PlanBuilder, node: fx.Node) -> bool:
    """Whether f(c x) = c f(x) for a positive scale c per channel (once the plan is carried out)."""
    module = builder.anatomy.traced.module(node)
    if module is None:
        return node.target in HOMOGENEOUS_FUNCTIONS or builder.is_identity(node)
    if builder.is_removed(str(node.target), module):
        return is_homogeneous(affine.activation(module))
    return builder.is_identity(node) or isinstance(module, _POOLS) or is_homogeneous(module)


def scalar_readers(builder: PlanBuilder, start: fx.Node, main: set[fx.Node]) -> list[str]:
    """Convolutions that read `start` beside the `main` path, through steps that commute with a positive scalar.

    Raises:
        NotFoldable: something else reads it.
    """
    traced = builder.anatomy.traced

    def propagates(node: fx.Node) -> bool:
        return node.target in _SCALAR_FUNCTIONS or is_constant_mul(node) or propagates_scale(builder, node)

    readers = []
    for user in traced.users[start]:
        if user in main:
            continue
        for end in [*_ends(builder, user, propagates)] if propagates(user) else [user]:
            conv = traced.module(end)
            if end in main or not isinstance(conv, LINEAR):
                raise NotFoldable(f"{name(end)} reads it")
            check_linear(builder, str(end.target), conv)
            if reparametrized.keeps_input_bias(conv):
                raise NotFoldable(f"{end.target} adds a scalar to its input")
            if len(traced.calls[id(conv)]) > 1:
                raise NotFoldable(f"{end.target} is called more than once")
            readers.append(str(end.target))
    return list(dict.fromkeys(readers))


def check_linear(builder: PlanBuilder, path: str, conv: nn.Module) -> None:
    """Check that a linear layer can absorb its neighbours."""
    made_anew = reparametrized.is_reparametrized(conv)
    known = type(conv).forward in _LINEAR_FORWARDS and "forward" not in vars(conv)
    if not made_anew and not known and not own_forwards.computes(conv):
        raise NotFoldable(f"{path} ({type(conv).__name__}) has a forward of its own")
    if made_anew and not builder.anatomy.takes_part(path):
        raise NotFoldable(f"{path} ({type(conv).__name__}) is to stay as it is")
    if not made_anew and parametrize.is_parametrized(conv):
        raise NotFoldable(f"{path} has a parametrized weight")
    if any((conv._forward_hooks, conv._forward_pre_hooks)):
        raise NotFoldable(f"{path} has forward hooks, which see its output")
    traced = builder.anatomy.traced
    if traced.owners[id(conv.weight)] > 1:
        raise NotFoldable(f"{path}.weight is shared with another module")
    read = traced.read_directly(conv)
    if read:
        raise NotFoldable(f"{read} is read elsewhere in forward")


def distinct(modules: dict[str, nn.Module], paths: list[str]) -> list[str]:
    """One path per module, in order."""
    return list({id(modules[path]): path for path in reversed(paths)}.values())[::-1]


def is_flat(builder: PlanBuilder, node: fx.Node) -> bool:
    """Whether a Linear surely sees (N, features): its input was flattened from dimension 1, and nothing undid that."""
    above = inputs(node)
    while len(above) == 1:
        node = above[0]
        if node.target in (torch.flatten, "flatten"):
            start = node.args[1] if len(node.args) > 1 else node.kwargs.get("start_dim", 0)
            return bool(start == 1 and node.kwargs.get("end_dim", -1) == -1 and len(node.args) < 3)
        module = builder.anatomy.traced.module(node)
        known = isinstance(module, (nn.Linear, *IDENTITIES, *RELUS)) or (
            module is not None and affine.is_affine(module)
        )
        if not known and node.target not in (*HOMOGENEOUS_FUNCTIONS, F.dropout, "contiguous"):
            return False
        above = inputs(node)
    return False


def name(node: fx.Node) -> str:
    """The name of what the node calls."""
    return str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", node.name)


def last_linear(builder: PlanBuilder, node: fx.Node, before: fx.Node) -> tuple[str, list[str]]:
    """The convolution whose output, but for positively homogeneous steps, is that of `node`; and what else reads it.

    A gate x * g(x) propagates a scale c if the first linear map of g is divided by c; those maps are the second result.

    Args:
        before: the node that reads `node`, and from which on nothing changes.

    Raises:
        NotFoldable: a scale cannot pass.
    """
    traced = builder.anatomy.traced
    passed = {before}
    readers: list[str] = []
    while True:
        if len(traced.users[node]) > 1:
            readers += scalar_readers(builder, node, passed)
        if isinstance(traced.module(node), LINEAR):
            break
        above = traced.main_input(node)
        if above is None or not (is_mul(node) or propagates_scale(builder, node)):
            raise NotFoldable(f"a scale cannot pass {name(node)}")
        passed.add(node)
        node = above
    path = str(node.target)
    conv = traced.modules[path]
    if len(traced.calls[id(conv)]) > 1:
        raise NotFoldable(f"{path} is called more than once")
    check_linear(builder, path, conv)
    return path, list(dict.fromkeys(readers))
