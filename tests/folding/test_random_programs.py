"""Random programs: folding keeps the function of any small CNN that shares, forks or overwrites."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings, strategies as st
from support.lived_in_networks import batchnorms, distance, lived_in, run, step, swapped
from torch import Tensor, nn

from normswap.errors import RefusedError
from normswap.folding.plan_builder import NEVER_CALLED
from normswap.layers.scalars import Scale
from normswap.surgery import applying

C = 4
CONVS: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Conv2d(C, C, 3, padding=1),
    lambda: nn.Conv2d(C, C, 1, bias=False),
    lambda: nn.Conv2d(C, C, 3, padding=1, groups=2, bias=False),
    lambda: nn.ConvTranspose2d(C, C, 3, padding=1, groups=2),
)
NORMS = 3
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu in place": functools.partial(F.relu, inplace=True),
    "relu_": torch.relu_,
    "leaky": functools.partial(F.leaky_relu, negative_slope=0.2),
    "silu": F.silu,
    "max": functools.partial(F.max_pool2d, kernel_size=3, stride=1, padding=1),
    "average": functools.partial(F.avg_pool2d, kernel_size=3, stride=1, padding=1),
    "gate": lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
    "contiguous": lambda x: x.contiguous(),
    "square": lambda x: x * x,
    "half": lambda x: 0.5 * x,
}
SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "+": operator.add,
    "torch.add": torch.add,
    "add_": lambda a, b: a.add_(b),
    "+=": operator.iadd,
}
MODULES = ("act", "pool", "identity", "drop", "scale")
Instruction = tuple[str, Any, int, int]


class Program(nn.Module):
    """Runs instructions (kind, name, first, second) on a list of values.

    `name` says which module or function of that kind; `first` and `second` say which values it
    reads, counted back from the newest. The last `outputs` values are returned.
    """

    def __init__(self, code: list[Instruction], outputs: int) -> None:
        super().__init__()
        self.code = code
        self.outputs = outputs
        self.convs = nn.ModuleList(make() for make in CONVS)
        self.norms = nn.ModuleList(nn.BatchNorm2d(C) for _ in range(NORMS))
        self.act = nn.ReLU(inplace=True)
        self.pool = nn.AvgPool2d(3, 1, 1)
        self.identity = nn.Identity()
        self.drop = nn.Dropout(0.5)
        self.scale = Scale(0.7)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for kind, name, first, second in self.code:
            value = values[-1 - first % len(values)]
            other = values[-1 - second % len(values)]
            if kind == "conv":
                new = self.convs[name](value)
            elif kind == "norm":
                new = self.norms[name](value)
            elif kind == "module":
                new = getattr(self, name)(value)
            elif kind == "function":
                new = FUNCTIONS[name](value)
            else:
                new = SUMS[name](value, other)

            values.append(new)

        return torch.cat([value.flatten(1) for value in values[-self.outputs :]], 1)


def instructions() -> st.SearchStrategy[Instruction]:
    # Mostly the newest value.
    recent = st.integers(0, 5).map(lambda back: max(0, back - 2))

    def kind(name: str, names: Any) -> st.SearchStrategy[Instruction]:
        return st.tuples(st.just(name), st.sampled_from(names), recent, recent)

    return st.one_of(
        kind("conv", range(len(CONVS))),
        kind("norm", range(NORMS)),
        kind("norm", range(NORMS)),
        kind("module", MODULES),
        kind("function", sorted(FUNCTIONS)),
        kind("sum", sorted(SUMS)),
    )


programs = st.builds(Program, st.lists(instructions(), min_size=2, max_size=12), st.integers(1, 2))


def prepared(model: nn.Module, seed: int) -> tuple[nn.Module, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    seen, x = torch.randn(2, 3, C, 5, 5, generator=generator, dtype=torch.float64)
    return lived_in(model, seen, seed), x


@settings(max_examples=80)
@given(program=programs, seed=st.integers(0, 3))
def test_folding_is_exact(program: Program, seed: int) -> None:
    model, x = prepared(program, seed)
    reference = run(model, x.clone())
    assume(bool(reference.isfinite().all()))  # squares of squares
    planned, builder = step(model, "folded")
    assert not builder.refusals
    result = applying.apply_step(model, planned)
    assert distance(reference, run(result, x.clone())) <= 1e-10
    uncalled = [path for path, outcome in builder.outcomes.items() if outcome == NEVER_CALLED]
    assert batchnorms(result) == uncalled


# y += x, and then y is read under the name from before.
NAMED_TWICE: list[Instruction] = [("sum", "+=", 0, 2), ("sum", "+", 0, 2)]


@pytest.mark.parametrize("layer", ["act", "identity", "drop"])
def test_a_layer_between_two_names_is_refused(layer: str) -> None:
    """It passes on the memory that it reads, and a scalar in its place would make a copy."""
    torch.manual_seed(0)
    model, _ = prepared(Program([("conv", 0, 0, 0), ("module", layer, 0, 0), *NAMED_TWICE], 1), 0)
    _, builder = step(model, "skipinit")
    assert builder.refusals
    kept = Program([("conv", 0, 0, 0), ("module", layer, 0, 0), ("sum", "+=", 0, 2)], 1)
    model, x = prepared(kept, 0)
    assert distance(run(model, x.clone()), run(swapped(model, "skipinit"), x.clone())) <= 1e-10


@pytest.mark.parametrize(("named", "refused"), [(3, True), (2, False)], ids=["before", "after"])
def test_a_layer_that_writes_into_what_it_reads(named: int, refused: bool) -> None:
    """A later layer may read its result under the name from before; no scalar comes after that."""
    code: list[Instruction] = [
        ("norm", 0, 0, 0),
        ("conv", 1, 0, 0),
        ("module", "act", 0, 0),
        ("conv", 0, 2, 0),
        ("norm", 0, 3, 0),
        ("sum", "+", 0, named),
    ]
    model, x = prepared(Program(code, 1), 0)
    planned, builder = step(model, "skipinit")

    assert bool(builder.refusals) == refused

    if not refused:
        result = applying.apply_step(model, planned)
        assert distance(run(model, x.clone()), run(result, x.clone())) <= 1e-10


@pytest.mark.slow
@settings(max_examples=60)
@given(program=programs, seed=st.integers(0, 3))
def test_skipinit_is_exact_or_refused(program: Program, seed: int) -> None:
    model, x = prepared(program, seed)
    reference = run(model, x.clone())
    assume(bool(reference.isfinite().all()))

    try:
        planned, builder = step(model, "skipinit")
    except RefusedError:
        return

    if not builder.refusals:
        result = applying.apply_step(model, planned)
        assert distance(reference, run(result, x.clone())) <= 1e-10
        assert distance(reference, run(swapped(result, "folded"), x.clone())) <= 1e-10


def test_the_checker_notices() -> None:
    code: list[Instruction] = [("conv", 0, 0, 0), ("norm", 0, 0, 0), ("function", "relu", 0, 0)]
    model, x = prepared(Program(code, 1), 0)
    wrong: Any = swapped(model, "folded")
    with torch.no_grad():
        wrong.convs[0].bias += 1e-6
    assert distance(run(model, x), run(wrong, x)) > 1e-10
    with pytest.raises(IndexError):
        run(Program([("conv", 9, 0, 0)], 1).double(), x)
