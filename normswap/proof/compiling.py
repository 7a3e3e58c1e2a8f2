"""PROVE, compiled: a network under torch.compile against itself in eager mode.

Outputs are compared, and the gradients of one training step. torch.compile sums in another order,
and pytorch issues #181696 and #183120 report outputs of GroupNorm that differ. An output may be off
by 1e-5 of its size and a gradient by 1e-4, or either by eight times what eager mode is off float64.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normswap.copying import duplicate, to_double
from normswap.errors import VerificationError, first_line
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
# Times eager mode's own distance from float64: the gradient of a BatchNorm's beta was off by seven
# times.
_STRAYING = 8
# A gradient may be off by this share of all gradients together, which rounding alone may change by
# as much.
_LEAST = 1e-6


@dataclass(frozen=True)
class Deviation:
    """How far one output, or one parameter's gradient, departs from eager mode.

    Args:
        what: Its name: `output`, or `gradient of conv1.weight`.
        relative_l2: The distance |compiled - eager| / |eager|.
        allowed: The largest distance that passes.
    """

    what: str
    relative_l2: float
    allowed: float

    @property
    def is_output(self) -> bool:
        return self.what.startswith("output")


@full_precision()
def compare(network: Source, example: Example) -> list[Deviation]:
    """Run copies of a network compiled and in eager mode, and return what departs most.

    Outputs are compared in eval mode. Gradients are those of a fixed random combination of all
    outputs, in training mode, with the same random draws; a network without trainable parameters
    has none.

    Raises:
        VerificationError: Torch.compile does not work on the network.
    """
    from torch._dynamo.utils import counters
    from torch._inductor import config

    eager = duplicate(network.module, {})
    compiled = duplicate(network.module, {})
    outputs, _ = running.run(eager, example)
    try:
        gradients = _gradients(eager, example)
    except RuntimeError:
        gradients = {}
    torch._dynamo.reset()
    compiled.compile()
    graphs = counters["stats"]["unique_graphs"]
    try:
        # Random numbers are those of eager mode then.
        with config.patch(fallback_random=True):
            compiled_outputs, _ = running.run(compiled, example)
            compiled_gradients = _gradients(compiled, example) if gradients else {}
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
    double_outputs = outputs
    double_gradients = gradients
    if network.has_double:
        double_example = example.map_floats(Tensor.double)
        double_outputs = running.outputs_double(network.module, double_example)
        with Widening():
            double_gradients = (
                _gradients(to_double(network.module), double_example) if gradients else {}
            )
    departures = _departures(
        example, "output", outputs, compiled_outputs, double_outputs, allowance.FLOAT32_BASE, 0.0
    )
    steps = _departures(
        example,
        "gradient of",
        gradients,
        compiled_gradients,
        double_gradients,
        _GRADIENT_TOLERANCE,
        _LEAST,
    )
    return [
        max(each, key=lambda error: error.relative_l2 / error.allowed)
        for each in (departures, steps)
        if each
    ]


@full_precision()
def first_compiled_layer_apart(
    network: Source, example: Example, deviations: Iterable[Deviation]
) -> Departure | None:
    """Return the first layer whose output departs under torch.compile, or None.

    The compiled network then gives the outputs of all layers, which makes torch fuse less. None is
    returned where no output departs, or where no layer does under these conditions. A function has
    no value; one before a module that departs is named with it.
    """
    from torch._inductor import config

    allowed = [
        each.allowed for each in deviations if each.is_output and each.relative_l2 > each.allowed
    ]
    if not allowed:
        return None
    compiled = duplicate(network.module, {})
    values = list[Tensor]()

    def keep(_module: nn.Module, _args: object, output: object) -> None:
        if isinstance(output, Tensor):
            values.append(output.clone())

    torch._dynamo.reset()
    compiled.compile()
    hooks = [module.register_forward_hook(keep) for module in compiled.modules()]
    with hooked(hooks), config.patch(fallback_random=True):
        running.run(compiled, example)
    return first_layer_apart(duplicate(network.module, {}), example, values, max(allowed))


def _gradients(model: nn.Module, example: Example) -> Outputs:
    """Return the parameters' gradients after one backward, by name.

    Raises:
        RuntimeError: There are none.
    """
    model.train()
    generator = torch.Generator().manual_seed(0)
    with torch.enable_grad(), seeded(*{parameter.device for parameter in model.parameters()}):
        outputs = [
            t
            for _, t in named_tensors(example.map(torch.clone).call(model))
            if t.is_floating_point()
        ]
        factors = [torch.randn(t.shape, generator=generator).to(t) for t in outputs]
        torch.stack(
            [(t * factor).sum() for t, factor in zip(outputs, factors, strict=True)]
        ).sum().backward()

    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _departures(
    example: Example,
    kind: str,
    eager: Outputs,
    compiled: Outputs,
    double: Outputs,
    tolerance: float,
    least: float,
) -> list[Deviation]:
    sizes = {name: float(tensor.double().norm()) for name, tensor in eager.items()}
    whole = sum(size * size for size in sizes.values()) ** 0.5

    def apart(name: str, a: Outputs, b: Outputs) -> float:
        first, second = ({name: t[name]} if name in t else {} for t in (a, b))
        return between(example, first, second, precision="").relative_l2

    departures: list[Deviation] = []
    for name, size in sizes.items():
        base = max(tolerance, least * whole / (size or 1.0))
        allowed = Allowance("", base, apart(name, double, eager), _STRAYING)
        off = apart(name, eager, compiled)
        departures.append(Deviation(f"{kind} {name}".strip(), off, allowed.most))
    return departures
