"""Undress: turn every BatchNorm (and every scalar or affine layer of an earlier conversion) into plain weights.

Each site is y = act(s * x + t). In this order: fold it back into the convolutions before it; or forward into the
unpadded convolutions after it; or, before a ReLU, move |s| through the ReLU into the next convolutions' inputs and
keep a shift (`ChannelBias`); or keep it as a `ChannelAffine`, which is always exact. The algebra is in
`layers.Folded` and `affine.split`; this file only decides, from the graph, who takes in whom, and says why not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from timm import layers as timm_layers
from torch import fx, nn
from torch.nn.utils import parametrize

from normswap import affine, layers
from normswap.anatomy import LINEAR, Anatomy
from normswap.plan import Edit
from normswap.tracing import inputs

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
_SILENT = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, timm_layers.DropPath, timm_layers.DropBlock2d)
_POOLS = (
    nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, timm_layers.BlurPool2d,
)  # fmt: skip
_RELUS = (nn.ReLU, nn.LeakyReLU)
_RELU_FUNCTIONS = (F.relu, F.relu_, torch.relu, torch.relu_, F.leaky_relu, "relu", "relu_")
_SCALAR_FUNCTIONS = (
    *_RELU_FUNCTIONS, torch.mean, torch.flatten, torch.amax, F.adaptive_avg_pool2d, F.avg_pool2d, F.max_pool2d,
    "mean", "view", "reshape", "flatten", "permute", "transpose", "contiguous", "unsqueeze", "squeeze", "amax",
)  # fmt: skip


@dataclass
class Take:
    """What one convolution takes in, collected until its single edit is written."""

    reads: list[tuple[str, str]] = field(default_factory=list)
    gain: float = 1.0
    in_gain: float = 1.0

    def edit(self, path: str) -> Edit:
        # what comes before the convolution is taken in first; among those after it, the nearest first
        reads = sorted(self.reads, key=lambda read: not read[1].startswith("before"))
        args: dict[str, Any] = {"takes": [how for _, how in reads]} if reads else {}
        args |= {name: value for name in ("gain", "in_gain") if (value := getattr(self, name)) != 1.0}
        return Edit(path, "Folded", args, tuple(read for read, _ in reads))


@dataclass
class Draft:
    """Edits in the making, and for every site what happens to it and why (`verdicts`)."""

    anatomy: Anatomy
    takes: dict[str, Take] = field(default_factory=dict)
    seats: dict[str, Edit] = field(default_factory=dict)
    verdicts: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def take(self, path: str) -> Take:
        return self.takes.setdefault(path, Take())

    def seat(self, path: str, layer: str, **args: Any) -> None:
        self.seats[path] = Edit(path, layer, args)

    def edits(self) -> tuple[Edit, ...]:
        return (*(take.edit(path) for path, take in self.takes.items()), *self.seats.values())

    def silent(self, node: fx.Node) -> bool:
        """Whether `node` passes its input on unchanged in eval mode, once the draft is carried out."""
        module = self.anatomy.traced.module(node)
        if module is None:
            asleep = node.target is F.dropout and node.kwargs.get("training") is False
            return asleep or node.op == "call_method" and node.target == "contiguous"
        if isinstance(module, _SILENT) or isinstance(module, layers.Vacant) and module.act is None:
            return True
        edit = self.seats.get(str(node.target))
        return edit is not None and edit.layer == "Vacant" and affine.activation(module) is None


class Blocked(Exception):  # noqa: N818 - a verdict, not an error
    """Why one way of folding is not open, in a few words."""


def undress(anatomy: Anatomy) -> Draft:
    """Decide what happens to every affine site of the network.

    Sites that cannot be read (no running statistics, unknown subclasses, untraceable surroundings) are in
    `refusals`; norms with per-sample statistics are left alone.
    """
    draft = Draft(anatomy)
    traced = anatomy.traced
    reached: set[int] = set()
    for node in traced.graph.nodes:
        module = traced.module(node)
        if module is None or id(module) in reached or not affine.is_affine(module):
            continue
        reached.add(id(module))
        _undress_site(draft, str(node.target), module)
    for path, module in traced.modules.items():
        if affine.is_batchnorm(module) and id(module) not in reached:
            outer = next((p for p in traced.opaque if path.startswith(f"{p}.")), None)
            if outer:
                draft.refusals[path] = f"it is inside {outer}, which cannot be traced: {traced.opaque[outer]}"
            else:
                draft.verdicts[path] = "never called by forward"
    return draft


def _undress_site(draft: Draft, path: str, module: nn.Module) -> None:
    why = affine.refusal(module)
    if why:
        draft.refusals[path] = why
        return
    reasons = []
    for way in (_fold_back, _fold_forward, _move_scale):
        try:
            draft.verdicts[path] = way(draft, path, module)
        except Blocked as reason:
            reasons.append(str(reason))
        else:
            return
    if isinstance(module, (layers.ChannelAffine, layers.ChannelBias, layers.Scale)):
        draft.verdicts[path] = f"stays: {reasons[0]}"
    else:
        draft.seat(path, "ChannelAffine")
        draft.verdicts[path] = f"keeps scale and shift: {reasons[0]}"


def _fold_back(draft: Draft, path: str, module: nn.Module) -> str:
    """Into the convolutions before: exact if all they ever produce goes through this very module."""
    traced = draft.anatomy.traced
    calls = traced.calls[id(module)]
    sources = dict.fromkeys(_source(draft, call) for call in calls)
    for source in sources:
        conv = traced.module(source)
        assert conv is not None
        check_linear(draft, str(source.target), conv)
        if isinstance(conv, nn.Linear) and affine.channels(module) > 1 and not _is_flat(source):
            raise Blocked(f"{source.target} is a Linear whose output may have more than two dimensions")
        if any(node not in sources for node in traced.calls[id(conv)]):
            raise Blocked(f"{source.target} is called elsewhere too, without this norm")
    convs = list(dict.fromkeys(str(source.target) for source in sources))
    for conv_path in _distinct(traced.modules, convs):
        draft.take(conv_path).reads.append((path, "after"))
    draft.seat(path, "Vacant")
    return f"folds into {', '.join(convs)}"


def _source(draft: Draft, call: fx.Node) -> fx.Node:
    """The convolution call whose output `call` alone reads."""
    traced = draft.anatomy.traced
    node, above = call, inputs(call)
    while True:
        if len(above) != 1:
            raise Blocked("it has no convolution before it")
        node = above[0]
        if isinstance(traced.module(node), LINEAR) or not draft.silent(node):
            break
        if len(traced.users[node]) > 1:
            raise Blocked(f"{node.target} has another consumer")
        above = inputs(node)
    if not isinstance(traced.module(node), LINEAR):
        raise Blocked(f"it follows {_name(node)}, not a convolution")
    if len(traced.users[node]) > 1:
        raise Blocked(f"{node.target} has another consumer")
    return node


def _fold_forward(draft: Draft, path: str, module: nn.Module) -> str:
    """Into the convolutions after it, when nothing lies between and they pad nothing."""
    if affine.activation(module) is not None:
        raise Blocked("an activation follows")
    convs = _consumers(draft, module, draft.silent)
    for conv_path in convs:
        conv: Any = draft.anatomy.traced.modules[conv_path]
        if isinstance(conv, nn.Linear) or conv.transposed or _pads(conv):
            raise Blocked(f"{conv_path} pads its input with zeros, which the shift would have to move")
    for conv_path in convs:
        draft.take(conv_path).reads.append((path, "before"))
    draft.seat(path, "Vacant")
    return f"folds forward into {', '.join(convs)}"


def _move_scale(draft: Draft, path: str, module: nn.Module) -> str:
    """|s| through the ReLU into the next convolutions' inputs; a shift per channel stays."""
    if isinstance(module, (layers.ChannelBias, layers.Scale)):
        raise Blocked("its scale cannot move")
    act = affine.activation(module)
    if not _is_relu(act):
        raise Blocked(f"it is followed by {type(act).__name__}, which a scale cannot pass")
    convs = _consumers(draft, module, lambda node: passes_positive(draft, node))
    for conv_path in convs:
        draft.take(conv_path).reads.append((path, "before-magnitude"))
    dtype = next(draft.anatomy.traced.modules[convs[0]].parameters()).dtype
    signed = bool((affine.split(module, dtype)[1] != 1).any())
    draft.seat(path, "ChannelBias", signed=signed)
    return f"scale moves to {', '.join(convs)}; a shift stays"


def _consumers(draft: Draft, module: nn.Module, passes: Callable[[fx.Node], bool]) -> list[str]:
    """Paths of the convolutions that read this site, and nothing else reads it."""
    traced = draft.anatomy.traced
    ends = [end for call in traced.calls[id(module)] for end in _ends(draft, call, passes)]
    for node in ends:
        conv = traced.module(node)
        if not isinstance(conv, LINEAR):
            raise Blocked(f"{_name(node)} reads it, not a convolution")
        if str(node.target) == draft.anatomy.classifier:
            raise Blocked(f"the features that {node.target} reads would change")
        check_linear(draft, str(node.target), conv)
        if any(call not in ends for call in traced.calls[id(conv)]):
            raise Blocked(f"{node.target} is called elsewhere too, on another input")
        if isinstance(conv, nn.Linear):
            raise Blocked(f"{node.target} is a Linear: which of its inputs a channel becomes is not known")
    if not ends:
        raise Blocked("nothing reads it")
    return _distinct(traced.modules, [str(node.target) for node in ends])


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
        return node.target in _RELU_FUNCTIONS or draft.silent(node)
    edit = draft.seats.get(str(node.target))
    if edit is not None and edit.layer == "Vacant":
        return _is_relu(affine.activation(module))
    return draft.silent(node) or isinstance(module, _POOLS) or _is_relu(module) or _is_vacant_relu(module)


def scalar_readers(draft: Draft, start: fx.Node, main: set[fx.Node]) -> list[str]:
    """Convolutions that read `start` beside the `main` path, through steps that commute with a positive scalar.

    Raises:
        Blocked: something else reads it.
    """
    traced = draft.anatomy.traced

    def passes(node: fx.Node) -> bool:
        constant = node.target in (operator.mul, torch.mul) and len(inputs(node)) == 1
        return node.target in _SCALAR_FUNCTIONS or constant or passes_positive(draft, node)

    found = []
    for user in traced.users[start]:
        if user in main:
            continue
        for end in [*_ends(draft, user, passes)] if passes(user) else [user]:
            conv = traced.module(end)
            if end in main or not isinstance(conv, LINEAR):
                raise Blocked(f"{_name(end)} reads it")
            check_linear(draft, str(end.target), conv)
            if len(traced.calls[id(conv)]) > 1:
                raise Blocked(f"{end.target} is called more than once")
            found.append(str(end.target))
    return list(dict.fromkeys(found))


def check_linear(draft: Draft, path: str, conv: nn.Module) -> None:
    if type(conv).forward not in _LINEAR_FORWARDS:
        raise Blocked(f"{path} ({type(conv).__name__}) has a forward of its own")
    if parametrize.is_parametrized(conv):
        raise Blocked(f"{path} has a parametrized weight")
    if any((conv._forward_hooks, conv._forward_pre_hooks)):
        raise Blocked(f"{path} has forward hooks, which see its output")
    traced = draft.anatomy.traced
    weight: Any = conv.weight
    owners = {id(m) for m in traced.modules.values() if any(p is weight for p in m._parameters.values())}
    if len(owners) > 1:
        raise Blocked(f"{path}.weight is shared with another module")
    if any(node.op == "get_attr" and traced.users[node] and _attribute(traced.modules[""], node) is weight
           for node in traced.graph.nodes):  # fmt: skip
        raise Blocked(f"{path}.weight is read elsewhere in forward")


def _attribute(root: nn.Module, node: fx.Node) -> Any:
    value: Any = root
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    return value


def _distinct(modules: dict[str, nn.Module], paths: list[str]) -> list[str]:
    """One path per module, in order."""
    return list({id(modules[path]): path for path in reversed(paths)}.values())[::-1]


def _is_flat(node: fx.Node) -> bool:
    """Whether a Linear surely sees (N, features): its input was flattened from dimension 1."""
    above = inputs(node)
    while len(above) == 1:
        node = above[0]
        start = node.args[1] if len(node.args) > 1 else node.kwargs.get("start_dim", 0)
        if node.target in (torch.flatten, "flatten"):
            return start == 1 and node.kwargs.get("end_dim", -1) == -1 and len(node.args) < 3
        if node.op == "call_module":
            return False
        above = inputs(node)
    return False


def _pads(conv: Any) -> bool:
    if isinstance(conv.padding, str):
        return conv.padding != "valid"
    return any(conv.padding) or isinstance(conv, timm_layers.Conv2dSame)


def _is_relu(act: nn.Module | None) -> bool:
    if isinstance(act, nn.Sequential):
        return all(_is_relu(part) for part in act)
    return act is None or type(act) in _RELUS or isinstance(act, _SILENT)


def _is_vacant_relu(module: nn.Module) -> bool:
    return isinstance(module, layers.Vacant) and _is_relu(module.act)


def _name(node: fx.Node) -> str:
    return str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", node.name)
