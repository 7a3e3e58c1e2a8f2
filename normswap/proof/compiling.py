"""PROVE, compiled: a network under torch.compile against itself in eager mode.

Outputs are compared, and the gradients of one training step. torch.compile sums in another order,
and pytorch issues #181696 and #183120 report outputs of GroupNorm that differ. An output may be off
by 1e-5 of its size and a gradient by 1e-4, as a relative L2. If eager mode itself is far from its
values in float64, eight times that distance is allowed, but at most ten times the figures above. A
larger error that is still within the eight times is "not proved": rounding may explain it.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normswap.copying import duplicate, to_double
from normswap.errors import VerificationError, explained, first_line
from normswap.graph.recorder import Widening
from normswap.layers.seeding import seeded
from normswap.models.calling import Example, named_tensors
from normswap.models.modes import full_precision, hooked
from normswap.proof import allowance, running
from normswap.proof.allowance import Allowance
from normswap.proof.distance import Outputs, between
from normswap.proof.running import Source
from normswap.proof.where import Departure, first_layer_apart

_GRADIENT_TOLERANCE = 1e-4
# An error may be so many times eager mode's own distance from float64. In a measurement, the
# gradient of a BatchNorm's beta was off by seven times that distance.
_STRAYING = 8
# But it may never be more than so many times the tolerance of any network. In half precision, which
# rounds more, the limit is `allowance.PROVES_NOTHING` instead.
_CAP = 10
# A gradient may be off by this share of the norm of all gradients together. Rounding alone may
# change a gradient that is small beside the others by as much.
_LEAST = 1e-6


@dataclass(frozen=True)
class Deviation:
    """How far one output, or one parameter's gradient, departs from eager mode.

    Args:
        what: The name of the value: `output`, or `gradient of conv1.weight`.
        relative_l2: The distance |compiled - eager| / |eager|.
        allowed: The largest distance that passes.
        rounding: The distance that rounding may explain. It is larger than `allowed` where the
            network enlarges rounding so much that a mistake would not be seen.
    """

    what: str
    relative_l2: float
    allowed: float
    rounding: float = 0.0

    @property
    def passes(self) -> bool:
        """Whether the distance from eager mode is no larger than is allowed. NaN does not pass."""
        return self.relative_l2 <= self.allowed

    @property
    def is_unproved(self) -> bool:
        """Whether the distance from eager mode is too large to pass, but may come from rounding."""
        return not self.passes and self.relative_l2 <= self.rounding

    @property
    def is_output(self) -> bool:
        """Whether the value is an output of the network. Otherwise it is a parameter's gradient."""
        return self.what.startswith("output")


@full_precision()
def compare_compiled(network: Source, example: Example) -> list[Deviation]:
    """Run copies of a network compiled and in eager mode, and return the values that differ most.

    Outputs are compared in eval mode. Gradients are compared in training mode with the same random
    draws. Their loss is a fixed random combination of all outputs. A network without trainable
    parameters has no gradients.

    Args:
        network: The network, which is not changed.
        example: The call.

    Returns:
        The output that departs most, and the gradient that departs most, each relative to what is
        allowed of it. An entry is missing if there are no outputs, or no gradients.

    Raises:
        VerificationError: torch.compile does not work on the network.
    """
    # Eager mode.
    eager = duplicate(network.module, {})
    compiled = duplicate(network.module, {})
    outputs, _ = running.run(eager, example)
    with explained(VerificationError, "the network does not train, so no gradients are compared"):
        gradients = _gradients(eager, example)

    compiled_outputs, compiled_gradients = _run_compiled(
        compiled, example, has_gradients=bool(gradients)
    )

    # The distance of eager mode from float64 tells how much rounding explains. Without float64, or
    # if the user's forward does not run in it, that distance is 0.
    double_outputs = outputs
    double_gradients = gradients
    if network.has_double:
        double_example = example.map_floats(Tensor.double)
        # In the context `Widening`, tensors that a forward makes in float32 are made in float64.
        with suppress(Exception), Widening():
            double_outputs = running.outputs_double(network.module, double_example)
            if gradients:
                double_gradients = _gradients(to_double(network.module), double_example)

    precision = str(network.coarsest_dtype).removeprefix("torch.")
    of_outputs = _deviations(
        example,
        kind="output",
        eager=outputs,
        compiled=compiled_outputs,
        double=double_outputs,
        precision=precision,
        tolerance=allowance.FLOAT32_BASE,
        least=0.0,
    )
    of_gradients = _deviations(
        example,
        kind="gradient of",
        eager=gradients,
        compiled=compiled_gradients,
        double=double_gradients,
        precision=precision,
        tolerance=_GRADIENT_TOLERANCE,
        least=_LEAST,
    )
    # The output and the gradient that are farthest off, relative to what is allowed of each.
    return [
        max(deviations, key=lambda deviation: deviation.relative_l2 / deviation.allowed)
        for deviations in (of_outputs, of_gradients)
        if deviations
    ]


def _run_compiled(
    model: nn.Module, example: Example, *, has_gradients: bool
) -> tuple[Outputs, Outputs]:
    """Compile a network, in place, and return its outputs and its parameters' gradients, by name.

    Args:
        model: A copy of the network, in eager mode.
        example: The call.
        has_gradients: Whether gradients are computed. Otherwise none are returned.

    Raises:
        VerificationError: The network cannot be compiled, or torch.compile is switched off.
    """
    from torch._dynamo.utils import counters
    from torch._inductor import config

    # The network is compiled when it first runs. Then torch has counted one graph more.
    torch._dynamo.reset()
    model.compile()
    graphs = counters["stats"]["unique_graphs"]
    try:
        # With the fallback, random numbers are the same as in eager mode.
        with config.patch(fallback_random=True):
            outputs, _ = running.run(model, example)
            gradients = _gradients(model, example) if has_gradients else {}
    # The compiler and what it calls may raise anything.
    except Exception as error:
        why = first_line(getattr(error, "inner_exception", error))
        remedy = "torch.compile needs a C++ compiler, such as g++, and on a GPU Triton"
        raise VerificationError(
            "torch.compile cannot compile the network here", why, remedy
        ) from None

    if counters["stats"]["unique_graphs"] == graphs:
        raise VerificationError(
            "torch.compile compiled nothing", "it is switched off, as by TORCHDYNAMO_DISABLE=1"
        )
    return outputs, gradients


@full_precision()
def first_compiled_layer_apart(
    network: Source, example: Example, deviations: Iterable[Deviation]
) -> Departure | None:
    """Return the first layer whose output differs too much under torch.compile, or None.

    Hooks on all modules of the compiled network keep their outputs, so torch fuses less than it did
    before. The result is None if no output of the network differs too much, or if no layer does
    with less fusing. The values of functions between modules are not kept, so a function that
    differs is found at the module behind it.

    Args:
        network: The network, which is not changed.
        example: The call.
        deviations: The output and the gradient that differ most, as `compare_compiled` returns
            them.
    """
    from torch._inductor import config

    too_far = [
        deviation for deviation in deviations if deviation.is_output and not deviation.passes
    ]
    if not too_far:
        return None

    compiled = duplicate(network.module, {})
    values: list[Tensor] = []

    def keep(_module: nn.Module, _args: object, output: object) -> None:
        if isinstance(output, Tensor):
            values.append(output.clone())

    # The hooks keep every value that the compiled network computes between modules. One of them is
    # searched for each layer of the network in eager mode.
    torch._dynamo.reset()
    compiled.compile()
    hooks = [module.register_forward_hook(keep) for module in nn.Module.modules(compiled)]
    # With the fallback, random numbers are the same as in eager mode.
    with hooked(hooks), config.patch(fallback_random=True):
        running.run(compiled, example)

    allowed = max(deviation.allowed for deviation in too_far)
    return first_layer_apart(duplicate(network.module, {}), example, values, allowed)


def _gradients(model: nn.Module, example: Example) -> Outputs:
    """Return the parameters' gradients after one backward pass in training mode, by name.

    There are none if no output has a gradient.

    Args:
        model: A copy of the network, which is left in training mode with its gradients.
        example: The call.
    """
    model.train()
    generator = torch.Generator().manual_seed(0)
    with (
        torch.enable_grad(),
        seeded(*{parameter.device for parameter in nn.Module.parameters(model)}),
    ):
        returned = example.call_on_copies(model)
        outputs = [
            output
            for _, output in named_tensors(returned)
            if output.is_floating_point() and output.requires_grad
        ]
        if not outputs:
            return {}

        # The loss is a fixed random combination of all numbers of the outputs.
        factors = [torch.randn(output.shape, generator=generator).to(output) for output in outputs]
        pairs = zip(outputs, factors, strict=True)
        terms = [(output * factor).sum() for output, factor in pairs]
        torch.stack(terms).sum().backward()

    return {
        name: parameter.grad
        for name, parameter in nn.Module.named_parameters(model)
        if parameter.grad is not None
    }


def _deviations(
    example: Example,
    kind: str,
    eager: Outputs,
    compiled: Outputs,
    double: Outputs,
    precision: str,
    tolerance: float,
    least: float,
) -> list[Deviation]:
    """Return how far each output or gradient is from eager mode, with the distance that is allowed.

    Args:
        example: The call.
        kind: The word before each name: "output" or "gradient of".
        eager: The values in eager mode, by name.
        compiled: The values under torch.compile, by name.
        double: The values in eager mode in float64, by name.
        precision: The precision of the network.
        tolerance: The relative L2 that is allowed of any value in float32.
        least: The distance that is allowed of any value, relative to the norm of all values
            together.
    """
    sizes = {name: float(tensor.double().norm()) for name, tensor in eager.items()}
    # The norm of all values together.
    total_size = sum(size * size for size in sizes.values()) ** 0.5

    # The one value of that name. If the name is missing, no values are returned, which makes the
    # distance infinite.
    def only(name: str, values: Outputs) -> Outputs:
        return {name: values[name]} if name in values else {}

    # The relative L2 distance between two values of the name. No error is reported, so no precision
    # is named.
    def apart(name: str, first: Outputs, second: Outputs) -> float:
        error = between(example, only(name, first), only(name, second), precision="")
        return error.relative_l2

    # Half precision rounds more than float32, so its own base may be larger.
    tolerance = max(tolerance, allowance.base_of(precision))
    cap = _CAP * tolerance
    if allowance.is_half(precision):
        cap = allowance.PROVES_NOTHING

    deviations: list[Deviation] = []
    for name, size in sizes.items():
        # `least` is relative to the size of all values together, and `base` to the size of this
        # value. If its size is zero, 1 is taken in its place, to avoid a division by zero.
        base = max(tolerance, least * total_size / (size or 1.0))
        own_change = apart(name, double, eager)
        # The name of an only output is empty. Then `strip` removes the space behind the kind.
        deviation = Deviation(
            what=f"{kind} {name}".strip(),
            relative_l2=apart(name, eager, compiled),
            allowed=Allowance(precision, base, own_change, _STRAYING, cap).most,
            rounding=Allowance(precision, base, own_change, _STRAYING).most,
        )
        deviations.append(deviation)
    return deviations
