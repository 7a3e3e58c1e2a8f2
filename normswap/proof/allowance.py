"""How large an error is explained by rounding: what is allowed in each precision, and why.

Exact conversions must agree to a relative L2 error of 1e-5 in float32, and of 1e-12 in float64,
where a correct fold is off by 1e-14 and a wrong eps by 1e-4. A network may enlarge rounding errors
from layer to layer. Then the error may be a few times as large as what rounding alone changes in
the source. This is measured by changing the last digit of its input or its weights, and in half
precision by comparing the source with itself in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normswap.copying import duplicate, to_double
from normswap.models.calling import Example
from normswap.proof.distance import Error, Outputs, between
from normswap.proof.running import outputs_double, run

FLOAT32_BASE = 1e-5
FLOAT64_BASE = 1e-12
# In float64 never more than this is allowed, however much the network enlarges rounding.
FLOAT64_CAP = 1e-8
# If the network does not run in float64, which would decide, never more than this is allowed in
# float32.
FLOAT32_CAP = 1e-4
# At a residual block never more than this is allowed, if float64 does not decide.
_BLOCK_CAP = 0.05
# How many times the change by the last digit is allowed in float32.
STRAYING = 4
# How many times the change by the last digit is allowed in float64.
_CONDITION = 32
# Three times what half precision costs the source is allowed: ten networks under eight schemes were
# off by up to 2.1.
ROUNDING = 3
# Where half precision moves more of the output than this share, it proves little.
COARSE = 0.1
# If an error of this share of a value's size is allowed, anything may pass.
PROVES_NOTHING = 0.5
# On how many inputs that differ in the last digit the distance to float64 is measured, where one
# input says too little about rounding.
_MOVED = 8
# With fewer numbers than this in the outputs, one error may be several times their mean. Then the
# largest error counts.
_FEW = 8


@dataclass(frozen=True)
class Allowance:
    """The largest relative L2 error that passes in one precision.

    Args:
        precision: The precision, such as "float32".
        base: What is allowed in any network.
        own_change: How far rounding alone moves the source's values. It is infinite where even
            their shapes change.
        factor: An error may be so many times as large as `own_change`.
        cap: The most that is allowed, however far rounding moves the values.
        how: Words that say what `own_change` is. A report prints "3e-04, 4 times" and then `how`.
    """

    precision: str
    base: float
    own_change: float = 0.0
    factor: float = 1.0
    cap: float = math.inf
    how: str = ""

    @property
    def most(self) -> float:
        """The largest relative L2 error that passes."""
        # If even the shapes change, the own change is no measure of rounding.
        if math.isinf(self.own_change):
            return self.base
        return max(self.base, min(self.cap, self.factor * self.own_change))

    @property
    def proves_nothing(self) -> bool:
        """Whether the largest error that passes is so large that a wrong result would pass."""
        return self.most >= PROVES_NOTHING

    @property
    def is_coarse(self) -> bool:
        """Whether the precision has 16 bits, and rounding moves so much that little is proved."""
        return is_half(self.precision) and COARSE < self.own_change < math.inf

    def __str__(self) -> str:
        if self.most == self.base:
            return f"{self.most:.0e}"
        return f"{self.most:.0e}, {self.factor:g} times {self.how}"


def is_half(precision: str) -> bool:
    """Whether numbers of a precision, such as "float16", have 16 bits."""
    return torch.finfo(getattr(torch, precision)).bits == 16


def base_of(precision: str) -> float:
    """Return the relative L2 error that is allowed in every network.

    Args:
        precision: The precision that both networks run in, such as "float32".
    """
    if precision == "float64":
        return FLOAT64_BASE
    if is_half(precision):
        return torch.finfo(getattr(torch, precision)).eps
    return FLOAT32_BASE


def of_outputs(precision: str, own_change: float, *, decides: bool = False) -> Allowance:
    """Return how large an error may be at the outputs of a result.

    Args:
        precision: The precision that both networks run in.
        own_change: How far rounding alone moves the source's outputs, as a relative L2.
        decides: Whether the verdict depends on this precision alone, as the network does not run in
            float64. In float32 the allowed error is then limited.
    """
    base = base_of(precision)
    last_digit = "what the last digit of its input or weights changes in the source"
    if precision == "float64":
        return Allowance(precision, base, own_change, _CONDITION, FLOAT64_CAP, last_digit)

    if is_half(precision):
        how = f"what {precision} costs the source, against float64"
        return Allowance(precision, base, own_change, ROUNDING, how=how)

    # If float64 decides, float32 needs no limit: float64 finds the mistakes that pass in float32.
    cap = FLOAT32_CAP if decides else math.inf
    return Allowance(precision, base, own_change, STRAYING, cap, last_digit)


def of_block(precision: str, own_change: float, *, by_double: bool, decides: bool) -> Allowance:
    """Return how large an error may be at the output of a residual block.

    Args:
        precision: The precision that both networks run in.
        own_change: How far rounding alone moves the block's output in the source, as a relative L2.
        by_double: Whether the own change is the distance to float64. Otherwise it is the distance
            to a run whose input or weights differ in the last digit.
        decides: Whether this precision decides, because float64 has not shown that the outputs are
            right. Then the allowed error is limited, however much the network enlarges rounding.
    """
    factor = float(STRAYING if precision == "float32" else _CONDITION)
    if by_double:
        factor = float(ROUNDING)
    cap = _BLOCK_CAP if decides else math.inf
    return Allowance(precision, base_of(precision), own_change, factor, cap)


def apart(precision: str, example: Example, outputs: Outputs, others: Outputs) -> float:
    """Return the relative L2 distance between two runs of the source on a call.

    It is infinite where names or shapes of the outputs differ, and 0 where values are not finite.

    Args:
        precision: The precision of the runs.
        example: The call.
        outputs: The outputs of one run, by name.
        others: The outputs of the other run, by name.
    """
    difference = between(example, outputs, others, precision=precision).relative_l2
    have_same_shapes = outputs.keys() == others.keys() and all(
        outputs[name].shape == others[name].shape for name in outputs
    )
    # An infinite distance in spite of equal shapes comes from values that are not finite.
    if have_same_shapes and math.isinf(difference):
        return 0.0
    return difference


def in_the_last_digit(example: Example) -> Example:
    """Return the example with every floating-point number changed in its last digit.

    Each is multiplied by 1 + 4 eps, which moves it by a few units in the last place.
    """
    return example.map_floats(lambda tensor: tensor * (1 + 4 * torch.finfo(tensor.dtype).eps))


def in_other_digits(
    model: nn.Module, example: Example, dtype: torch.dtype
) -> Iterator[tuple[nn.Module, Example]]:
    """Yield two pairs (network, call) whose outputs differ from the network's by rounding alone.

    In the first pair the call has another last digit, in the second the network's weights have.

    Args:
        model: The network.
        example: The call.
        dtype: The dtype of the copy with other weights: float64, or the network's own.
    """
    yield model, in_the_last_digit(example)
    yield with_other_digits(model, dtype), example


@torch.no_grad()
def with_other_digits(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a network with every parameter changed in its last digit.

    Args:
        model: The network.
        dtype: The dtype of the copy: float64, or the network's own.
    """
    changed = to_double(model) if dtype == torch.float64 else duplicate(model, {})
    generator = torch.Generator().manual_seed(0)
    for parameter in nn.Module.parameters(changed):
        if parameter.is_floating_point():
            signs = torch.randint(2, parameter.shape, generator=generator) * 2 - 1
            last_digit = 4 * torch.finfo(parameter.dtype).eps
            parameter.mul_(1 + last_digit * signs.to(parameter))
    return changed


def cost_of_half(
    model: nn.Module,
    example: Example,
    outputs: Outputs,
    error: Error,
    *,
    has_double: bool,
    seed: int,
) -> float:
    """Return the relative L2 between the source's outputs in half precision and in float64.

    The rounding of a few numbers may be small by chance. So if the result's error is larger than
    this distance allows, the distance is also measured on inputs that differ in the last digit, and
    the larger figure is returned. Without a float64 copy only these inputs say something.

    Args:
        model: The source.
        example: The call.
        outputs: The source's outputs for the call, by name: all of them, or the one that is
            measured.
        error: The error of the result at these outputs.
        has_double: Whether the source has a float64 copy.
        seed: The seed of the changes in the last digit.
    """
    precision = error.precision
    # Without a float64 copy, or if the user's forward does not run in float64, the outputs in half
    # precision stand in for those in float64. Then `cost` is 0, and the distance comes from the
    # inputs with other last digits.
    double_outputs = outputs
    if has_double:
        with suppress(Exception):
            double_outputs = outputs_double(model, example.map_floats(Tensor.double))
    double_outputs = {name: double_outputs[name] for name in outputs if name in double_outputs}

    # This distance is enough if the result's error is allowed with it, or can never be allowed.
    cost = apart(precision, example, double_outputs, outputs)
    if error.relative_l2 <= ROUNDING * cost or math.isinf(error.relative_l2):
        return cost

    # Each of the other inputs is moved by one unit in the last place, up or down by chance.
    generator = torch.Generator().manual_seed(seed)

    def moved(tensor: Tensor) -> Tensor:
        signs = 2 * torch.randint(2, tensor.shape, generator=generator).to(tensor) - 1
        return tensor * (1 + torch.finfo(tensor.dtype).eps * signs)

    costs: list[float] = []
    for _ in range(_MOVED):
        # The forward need not take such inputs either.
        with suppress(Exception):
            others, _ = run(model, example.map_floats(moved))
            others = {name: others[name] for name in outputs if name in others}
            costs.append(apart(precision, example, double_outputs, others))
    if not costs:
        return cost

    # With few numbers in the outputs, the distance scatters from run to run, so the largest one
    # counts. With many, the root mean square of the runs is steady.
    if sum(value.numel() for value in outputs.values()) < _FEW:
        return max(cost, *costs)
    root_mean_square = math.sqrt(sum(other * other for other in costs) / len(costs))
    return max(cost, root_mean_square)
