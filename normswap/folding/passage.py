"""The rules of passage: what an affine map, or a positive factor of it, can pass on its way through the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from timm import layers as timm_layers
from torch import fx, nn
from torch.nn.utils import parametrize

from normswap.folding.draft import Draft
from normswap.graph.inspection import LINEAR
from normswap.graph.tracing import Traced, inputs, is_constant_mul, is_mul
from normswap.layers import affine, reparametrized
from normswap.layers.activations import HOMOGENEOUS_FUNCTIONS, RELUS, SILENT, is_homogeneous

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


class Blocked(Exception):
    """Why one way of folding is not open, in a few words."""


def consumers(draft: Draft, module: nn.Module, passes: Callable[[fx.Node], bool]) -> list[str]:
    """Paths of the convolutions that read this site, and nothing else reads it."""
    traced = draft.anatomy.traced
    ends = [end for call in traced.calls[id(module)] for end in _ends(draft, call, passes)]
    for node in ends:
        conv = traced.module(node)
        if not isinstance(conv, LINEAR):
            raise Blocked(f"{name(node)} reads it, not a convolution")
        if str(node.target) == draft.anatomy.classifier:
            raise Blocked(f"the features that {node.target} reads would change")
        check_linear(draft, str(node.target), conv)
        if reparametrized.is_stuck(conv):
            raise Blocked(f"{node.target} adds a scalar to its input")
        if any(call not in ends for call in traced.calls[id(conv)]):
            raise Blocked(f"{node.target} is called elsewhere too, on another input")
        if isinstance(conv, nn.Linear):
            raise Blocked(f"{node.target} is a Linear: which of its inputs a channel becomes is not known")
    if not ends:
        raise Blocked("nothing reads it")
    return distinct(traced.modules, [str(node.target) for node in ends])


def _ends(draft: Draft, start: fx.Node, passes: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
    for user in draft.anatomy.traced.users[start]:
        if user.op == "output":
            raise Blocked("the model returns it")
        if passes(user) and len(inputs(user)) == 1:
            yield from _ends(draft, user, passes)
        else:
            yield user


def passes_positive(draft: Draft, node: fx.Node) -> bool:
    """Whether f(c x) = c f(x) for a positive scale c per channel (once the draft is carried out)."""
    module = draft.anatomy.traced.module(node)
    if module is None:
        return node.target in HOMOGENEOUS_FUNCTIONS or draft.silent(node)
    if draft.empty(str(node.target), module):
        return is_homogeneous(affine.activation(module))
    return draft.silent(node) or isinstance(module, _POOLS) or is_homogeneous(module)


def scalar_readers(draft: Draft, start: fx.Node, main: set[fx.Node]) -> list[str]:
    """Convolutions that read `start` beside the `main` path, through steps that commute with a positive scalar.

    Raises:
        Blocked: something else reads it.
    """
    traced = draft.anatomy.traced

    def passes(node: fx.Node) -> bool:
        return node.target in _SCALAR_FUNCTIONS or is_constant_mul(node) or passes_positive(draft, node)

    found = []
    for user in traced.users[start]:
        if user in main:
            continue
        for end in [*_ends(draft, user, passes)] if passes(user) else [user]:
            conv = traced.module(end)
            if end in main or not isinstance(conv, LINEAR):
                raise Blocked(f"{name(end)} reads it")
            check_linear(draft, str(end.target), conv)
            if reparametrized.is_stuck(conv):
                raise Blocked(f"{end.target} adds a scalar to its input")
            if len(traced.calls[id(conv)]) > 1:
                raise Blocked(f"{end.target} is called more than once")
            found.append(str(end.target))
    return list(dict.fromkeys(found))


def check_linear(draft: Draft, path: str, conv: nn.Module) -> None:
    dressed = reparametrized.is_dressed(conv)
    if not dressed and (type(conv).forward not in _LINEAR_FORWARDS or "forward" in vars(conv)):
        raise Blocked(f"{path} ({type(conv).__name__}) has a forward of its own")
    if dressed and not draft.anatomy.takes_part(path):
        raise Blocked(f"{path} ({type(conv).__name__}) is to stay as it is")
    if not dressed and parametrize.is_parametrized(conv):
        raise Blocked(f"{path} has a parametrized weight")
    if any((conv._forward_hooks, conv._forward_pre_hooks)):
        raise Blocked(f"{path} has forward hooks, which see its output")
    traced = draft.anatomy.traced
    if traced.owners[id(conv.weight)] > 1:
        raise Blocked(f"{path}.weight is shared with another module")
    read = read_directly(traced, conv)
    if read:
        raise Blocked(f"{read} is read elsewhere in forward")


def read_directly(traced: Traced, module: nn.Module) -> str | None:
    """The path of a tensor of `module` that some forward reads by itself, not by calling the module."""
    own = {id(tensor) for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))}
    for node in [*traced.nodes, *traced.hidden]:
        if node.op == "get_attr" and traced.users[node]:
            value: object = traced.modules[""]
            for name in str(node.target).split("."):
                value = getattr(value, name, None)
            if id(value) in own:
                return str(node.target)
    return None


def distinct(modules: dict[str, nn.Module], paths: list[str]) -> list[str]:
    """One path per module, in order."""
    return list({id(modules[path]): path for path in reversed(paths)}.values())[::-1]


def is_flat(draft: Draft, node: fx.Node) -> bool:
    """Whether a Linear surely sees (N, features): its input was flattened from dimension 1, and nothing undid that."""
    above = inputs(node)
    while len(above) == 1:
        node = above[0]
        if node.target in (torch.flatten, "flatten"):
            start = node.args[1] if len(node.args) > 1 else node.kwargs.get("start_dim", 0)
            return bool(start == 1 and node.kwargs.get("end_dim", -1) == -1 and len(node.args) < 3)
        module = draft.anatomy.traced.module(node)
        known = isinstance(module, (nn.Linear, *SILENT, *RELUS)) or (module is not None and affine.is_affine(module))
        if not known and node.target not in (*HOMOGENEOUS_FUNCTIONS, F.dropout, "contiguous"):
            return False
        above = inputs(node)
    return False


def pads(conv: Any) -> bool:
    if isinstance(conv.padding, str):
        return conv.padding != "valid"
    return any(conv.padding) or isinstance(conv, timm_layers.Conv2dSame)


def name(node: fx.Node) -> str:
    return str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", node.name)


def last_linear(draft: Draft, node: fx.Node, before: fx.Node) -> tuple[str, list[str]]:
    """The convolution whose output, but for positively homogeneous steps, is that of `node`; and what else reads it.

    A gate x * g(x) passes a scale c if the first linear map of g is divided by c; those maps are the second result.

    Args:
        before: the node that reads `node`, and from which on nothing changes.

    Raises:
        Blocked: a scale cannot pass.
    """
    traced = draft.anatomy.traced
    passed = {before}
    readers: list[str] = []
    while True:
        if len(traced.users[node]) > 1:
            readers += scalar_readers(draft, node, passed)
        if isinstance(traced.module(node), LINEAR):
            break
        above = traced.main_input(node)
        if above is None or not (is_mul(node) or passes_positive(draft, node)):
            raise Blocked(f"a scale cannot pass {name(node)}")
        passed.add(node)
        node = above
    path = str(node.target)
    conv = traced.modules[path]
    if len(traced.calls[id(conv)]) > 1:
        raise Blocked(f"{path} is called more than once")
    check_linear(draft, path, conv)
    return path, list(dict.fromkeys(readers))
