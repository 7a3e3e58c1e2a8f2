"""Copies of networks, beside what `copy.deepcopy` makes of them."""

from __future__ import annotations

import copy
import functools
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from normswap.copying import duplicate, to_double, twin


class Holder(nn.Module):
    """A module that holds the objects that it is given, by name."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2)
        self.two = nn.BatchNorm1d(2)
        vars(self).update(held)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))

    def bound(self) -> nn.Module:
        return self


class Its(Holder):
    """A module whose class says itself how it is copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Its:
        new = Its(copied=True)
        memo[id(self)] = new
        return new


def shared() -> Holder:
    cache: dict[str, Any] = {"rows": [1, 2]}
    made = Holder(mine=cache, again=[cache, cache["rows"]])
    vars(made.one)["theirs"] = cache
    return made


def circular() -> Holder:
    row: list[Any] = []
    row.append(row)
    return Holder(row=row)


def one_memory() -> Holder:
    made = Holder()
    whole = torch.arange(4.0)
    made.one.register_buffer("whole", whole)
    made.two.register_buffer("part", whole[:2])
    return made


def methods() -> Holder:
    made = Holder()
    vars(made).update(
        call=made.bound, later=functools.partial(Holder.bound, made), tied=made.one.weight
    )
    return made


# What holds of each network, and so must hold of its copy.
SAME: dict[str, Callable[[nn.Module], Any]] = {
    "shared": lambda m: m.mine is m.one.theirs is m.again[0] and m.mine["rows"] is m.again[1],
    "circular": lambda m: m.row[0] is m.row,
    "one_memory": lambda m: (
        m.one.whole.untyped_storage().data_ptr() == m.two.part.untyped_storage().data_ptr()
    ),
    "methods": lambda m: m.call() is m and m.later() is m and m.tied is m.one.weight,
}
MAKERS = {one.__name__: one for one in (shared, circular, one_memory, methods)}


@pytest.mark.parametrize("name", SAME)
def test_what_is_one_thing_stays_one(name: str) -> None:
    model = MAKERS[name]()
    for copied in (copy.deepcopy(model), duplicate(model, {})):
        assert SAME[name](copied)
        assert SAME[name](model)


class Point(NamedTuple):
    """A tuple of a class of its own."""

    x: int
    rows: list[int]


@dataclass
class Notes:
    """A record of a user."""

    rows: list[int]


VALUES: dict[str, Callable[[], Any]] = {
    "arguments of a partial": lambda: functools.partial(F.interpolate, torch.ones(1, 1, 2), 4),
    "keywords of a partial": lambda: functools.partial(F.interpolate, scale_factor=2),
    "both of a partial": lambda: functools.partial(F.pad, torch.ones(2), pad=[1, 2], value=3.0),
    "a partial of a partial": lambda: functools.partial(functools.partial(pow, 2), mod=5),
    "a list in a dict": lambda: {"a": [1, {2: (3, [4])}], None: {5}},
    "an ordered dict": lambda: OrderedDict(b=[1], a=[2]),
    "a counter": lambda: Counter("aab"),
    "a dict with a default": lambda: defaultdict(list, a=[1]),
    "a queue": lambda: deque([1, [2]], maxlen=3),
    "a named tuple": lambda: Point(1, [2]),
    "a record": lambda: Notes([1]),
    "a size": lambda: torch.Size([2, 3]),
    "a slice": lambda: slice(1, 9, 2),
    "frozen": lambda: frozenset({1, 2}),
    "bytes": lambda: bytearray(b"ab"),
    "a tensor": lambda: torch.arange(3, dtype=torch.int16),
    "a dtype": lambda: torch.bfloat16,
}


def described(value: Any) -> Any:
    """All that is in a value, so that two can be compared."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, functools.partial):
        return value.func, described(value.args), described(value.keywords)
    if isinstance(value, dict):
        extra = getattr(value, "default_factory", None)
        return type(value), extra, [(key, described(entry)) for key, entry in value.items()]
    if isinstance(value, list | tuple | deque):
        return type(value), getattr(value, "maxlen", None), [described(each) for each in value]
    return type(value), value


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("copying", [twin, lambda model: duplicate(model, {}), to_double])
def test_a_copy_holds_all_that_the_original_holds(
    name: str, copying: Callable[[nn.Module], Any]
) -> None:
    model = Holder(kept=VALUES[name]())

    copied = copying(model)

    assert described(copied.kept) == described(model.kept) == described(VALUES[name]())


@pytest.mark.parametrize(
    "kept", [[1], {"a": [2]}, (3, [4]), {5}, OrderedDict(b=6), torch.zeros(2), nn.Linear(1, 1)]
)
def test_nothing_is_shared(kept: Any) -> None:
    model = Holder(kept=kept)
    copied = duplicate(model, {})
    ours = copied.kept
    theirs = copy.deepcopy(kept)

    assert type(ours) is type(theirs)
    assert ours is not kept

    if isinstance(kept, tuple):
        assert ours[1] is not kept[1]
    if isinstance(kept, dict) and "a" in kept:
        assert ours["a"] is not kept["a"]
    mine = {t.data_ptr() for m in (model, kept) if isinstance(m, nn.Module) for t in m.parameters()}

    assert not mine & {t.data_ptr() for t in copied.parameters()}


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv3_small_050", "vit_tiny_patch16_224"])
def test_a_copy_has_the_same_state_in_memory_of_its_own(name: str) -> None:
    model = timm.create_model(name, num_classes=3)
    next(iter(model.parameters())).requires_grad_(False)
    mine = dict(model.named_parameters())
    copied = duplicate(model, {})

    assert [type(m) for m in copied.modules()] == [type(m) for m in model.modules()]

    for key, ours in copied.named_parameters():
        assert torch.equal(ours, mine[key])
        assert ours.data_ptr() != mine[key].data_ptr()
        assert ours.requires_grad is mine[key].requires_grad

    assert copied.state_dict().keys() == model.state_dict().keys()


def test_what_cannot_be_copied_is_shared_and_nothing_else() -> None:
    model = Holder(lock=threading.Lock(), beside=[1])
    history = torch.ones(2, requires_grad=True) * 2
    vars(model.one)["cache"] = history
    copied: Any = duplicate(model, {})

    assert copied.lock is model.lock
    assert copied.beside is not model.beside
    assert copied.one.cache is history
    assert copied.one.weight is not model.one.weight


def test_who_says_how_it_is_copied_is_copied_so() -> None:
    model = nn.Sequential(Its(copied=False), parametrizations.weight_norm(nn.Linear(2, 2)))
    copied: Any = duplicate(model, {})

    assert copied[0].copied
    assert copied[1].weight is not model[1].weight
    assert torch.equal(copied[1].weight, model[1].weight)
    assert (
        copied[1].parametrizations.weight.original0
        is not model[1].parametrizations.weight.original0
    )  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_module_is_copied() -> None:
    net = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    net.append(net[1])
    before = copy.deepcopy(net.state_dict())

    copied = duplicate(net, {})
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(1)

    assert copied[1] is copied[2]
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert torch.equal(copied.state_dict()[name], before[name] + 1)


def test_what_takes_a_place_takes_it_everywhere() -> None:
    model = Holder()
    vars(model)["again"] = [model.two]
    new = nn.Identity()
    copied: Any = duplicate(model, {id(model.two): new})
    assert copied.two is new
    assert copied.again == [new]


def test_a_twin_has_the_parameters_and_its_own_buffers() -> None:
    model: Any = Holder().train()
    copied: Any = twin(model)

    assert copied.one.weight is model.one.weight
    assert copied.two.running_mean is not model.two.running_mean
    assert not copied.training
    assert not copied.two.training
    assert model.two.training


class Made:
    """Its state is made when it is asked for, and is nobody's afterwards."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return Made, (self.number,), {"number": self.number, "more": [self.number] * 3}


def test_nothing_takes_the_identity_of_what_was_copied_before() -> None:
    memo: dict[int, Any] = {}
    copied: Any = duplicate(Holder(many=[Made(i) for i in range(500)]), memo)
    assert [one.number for one in copied.many] == list(range(500))
    assert [one.more for one in copied.many] == [[i] * 3 for i in range(500)]
    assert len(memo[id(memo)]) >= 1000  # states and their parts, each 500 times


class Stubborn(nn.Parameter):
    """A parameter whose class cannot be copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("no")


def test_a_parameter_that_cannot_be_copied_is_cloned_and_stays_one() -> None:
    model = nn.Linear(2, 2)
    model.weight = Stubborn(torch.ones(2, 2), requires_grad=False)
    copied: Any = duplicate(model, {})

    assert isinstance(copied.weight, nn.Parameter)
    assert copied.weight is not model.weight
    assert copied.weight.data_ptr() != model.weight.data_ptr()
    assert not copied.weight.requires_grad
    assert torch.equal(copied.weight, model.weight)
