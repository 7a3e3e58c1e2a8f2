"""Whether a network does not run because dtypes differ: of its own tensors, or of what it is given."""

from __future__ import annotations

from torch import Tensor, nn

from normswap.models import calling
from normswap.models.calling import Example
from normswap.models.network_input import runs


def explained(model: nn.Module, example: Example) -> tuple[str, str] | None:
    """Return why a network that did not run on an example does not, and a remedy; None where dtypes are not it."""
    floats = (t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point() or t.is_complex())
    kinds = list(dict.fromkeys(_named(t) for t in floats))
    if any("complex" in kind for kind in kinds):
        return "it has complex weights", "normswap converts networks of real numbers"
    if len(kinds) > 1:
        return f"its tensors are of {' and '.join(kinds)}", "Cast it to one: model.float()"
    wanted, other = calling.anchor(model), example.images
    if wanted.dtype == other.dtype or not runs(model, lambda: example.map(lambda t: t.to(wanted.dtype))):
        return None
    remedy = f"Cast it: x.to(torch.{_named(wanted)}); pixels are normalized, too"
    return f"the input is of {_named(other)}, the network of {_named(wanted)}", remedy


def _named(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
