"""PROVE: run source and result on the same inputs, and say by how much they differ, where, and whether that is enough.

Exact conversions must agree to a relative L2 error of 1e-5 in float32 at the logits, and of 1e-12 in float64, where
a correct fold is off by 1e-14 and a wrong eps by 1e-4. Networks in half precision get the float32 tolerance times
the ratio of the machine epsilons. Where the source itself strays from its own float64 values by more than the
tolerance (a chaotic network), four times that is allowed in float32, and float64 decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normswap.errors import VerificationError
from normswap.graph.inspection import Anatomy
from normswap.models.modes import evaluating
from normswap.surgery.applying import to_double

FLOAT32_TOLERANCE, FLOAT64_TOLERANCE = 1e-5, 1e-12
_HARDLY = 1e-4  # an input or a branch that moves the output by less proves nothing


@dataclass(frozen=True)
class Error:
    """How far a result is from its reference: at the logits, or at the output of the module `site`.

    Args:
        relative_l2: |a - b| / |a|; largest: max |a - b| / max |a|; cosine: of the flattened tensors.
        agreement: fraction of inputs with the same argmax (logits only).
    """

    site: str
    precision: str
    size: tuple[int, ...]
    relative_l2: float
    largest: float
    cosine: float
    agreement: float | None = None


@dataclass(frozen=True)
class Report:
    """What was measured, and the verdict.

    Args:
        exact: whether the conversion claims to keep the function.
        passed: an exact one keeps it within tolerance; an approximate one gives finite numbers.
        inputs: what the networks were run on.
        logits: one error per precision and input size.
        sites: errors at the residual blocks' outputs, in float32.
        tolerance: the largest relative L2 error allowed, by precision.
        vacuous: what the measurement cannot see: branches, or an input, that hardly move the output.
        accuracy: top-1 in percent of source and result on labelled data, where given.
    """

    exact: bool
    passed: bool
    inputs: str
    logits: tuple[Error, ...]
    sites: tuple[Error, ...] = ()
    tolerance: dict[str, float] = field(default_factory=dict)
    vacuous: tuple[str, ...] = ()
    accuracy: dict[str, float] = field(default_factory=dict)

    @property
    def worst(self) -> Error:
        """The largest relative L2 error at the logits in the network's own precision."""
        own = [error for error in self.logits if error.precision != "float64"] or list(self.logits)
        return max(own, key=lambda error: error.relative_l2)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(body: dict[str, Any]) -> Report:
        errors = {
            name: tuple(Error(**{**e, "size": tuple(e["size"])}) for e in body[name]) for name in ("logits", "sites")
        }
        return Report(**{**body, **errors, "vacuous": tuple(body["vacuous"])})


def noise(model: nn.Module, size: Sequence[int], *, batch: int = 2, seed: int = 0) -> list[Tensor]:
    """Batches of N(0, 1) inputs (batch, C, H, W) on the model's device: at 64 and at 97 pixels where the model accepts
    that, else at its own `size` (C, H, W).

    Raises:
        VerificationError: the model runs on none of them.
    """
    like = next(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    channels, height, width = size
    found: list[Tensor] = []
    why = ""
    shapes = dict.fromkeys((min(height, side), min(width, side)) for side in (64, 97, max(height, width)))
    for i, shape in enumerate(shapes):
        if found:  # one more image at a second size, which `compare` leaves out if the network does not take it
            return [*found, torch.randn(1, channels, *shape, generator=generator).to(like)] if i < 2 else found
        x = torch.randn(batch, channels, *shape, generator=generator).to(like)
        try:
            _run(model, x[:1], ())
        except (RuntimeError, AssertionError, ValueError) as error:
            why = str(error).split("\n")[0]
        else:
            found.append(x)
    if not found:
        raise VerificationError(f"the network does not run on an input of size {tuple(size)}", why)
    return found


def verify(
    source: nn.Module,
    result: nn.Module,
    inputs: Sequence[Tensor] | Tensor | None = None,
    *,
    size: Sequence[int] = (3, 224, 224),
    exact: bool = True,
    seed: int = 0,
) -> Report:
    """Measure how far `result` is from `source`, in their own precision; neither is changed.

    Args:
        inputs: batches (N, C, H, W); by default N(0, 1) noise of at most `size`, from `seed`.
        exact: whether they should agree; else the report passes if the numbers are finite.
    """
    if inputs is None:
        return compare(source, result, noise(source, size, seed=seed), exact=exact, described=described(seed))
    return compare(source, result, [inputs] if isinstance(inputs, Tensor) else inputs, exact=exact)


def described(seed: int) -> str:
    """How reports call the default inputs."""
    return f"N(0, 1) noise, seed {seed}"


def compare(
    source: nn.Module,
    result: nn.Module,
    inputs: Sequence[Tensor],
    *,
    exact: bool = True,
    anatomy: Anatomy | None = None,
    precise: Precise | None = None,
    described: str = "given inputs",
) -> Report:
    """Run both networks in eval mode and compare them.

    Args:
        inputs: batches (N, C, H, W) in the networks' dtype.
        exact: whether the result claims to compute what the source computes.
        anatomy: of the source: errors are then measured at every block too, and branches checked for life.
        precise: the comparison in float64, on the beginning of the first batch (`compare_double`).
        described: what the inputs are, for the report.
    """
    own = _precision(source)
    blocks = () if anatomy is None else tuple(b for b in anatomy.blocks if b.path in anatomy.traced.modules and b.path)
    tails = tuple(b.tail for b in blocks if b.tail)
    logits: list[Error] = []
    sites: list[Error] = []
    vacuous: list[str] = []
    stray = 0.0
    for i, x in enumerate(inputs):
        paths = tuple(b.path for b in blocks)
        try:
            a, at = _run(source, x, (*paths, *tails) if i == 0 else paths)
        except (RuntimeError, AssertionError, ValueError) as error:
            if i == 0 or x.shape[-2:] == inputs[0].shape[-2:]:
                raise VerificationError(f"the source does not run on {tuple(x.shape)}", str(error)) from None
            continue
        b, bt = _run(result, x, paths)
        logits.append(_error("logits", own, x, a, b))
        if i == 0:
            if precise is not None:
                logits.insert(0, precise.error)
                stray = _error("", own, x, precise.reference, a[: len(precise.reference)]).relative_l2
            sites = [_error(path, own, x, at[path], bt[path]) for path in paths if path in at and path in bt]
            vacuous = _vacuous(a, at, blocks)
    tolerance = {own: max(FLOAT32_TOLERANCE * max(1.0, _coarseness(own)), 4 * stray), "float64": FLOAT64_TOLERANCE}
    finite = all(e.relative_l2 < float("inf") for e in logits)
    within = finite and all(e.relative_l2 <= tolerance[e.precision] for e in logits)
    return Report(exact, within if exact else finite, described, tuple(logits), tuple(sites), tolerance, tuple(vacuous))


@dataclass(frozen=True)
class Precise:
    """A comparison in float64: the error, and the source's output that it was measured on."""

    error: Error
    reference: Tensor


def compare_double(source: nn.Module, make: Callable[[], nn.Module], inputs: Sequence[Tensor]) -> Precise | None:
    """Compare the source in float64 with a result that `make` makes in float64, never rounded to less, on the first
    image. Before anything else is made, as the float64 result is the largest thing in a conversion.

    Returns:
        None for networks that are in float64 already, and where there is no float64 (MPS).
    """
    x = inputs[0][:1].double() if inputs[0].device.type != "mps" else None
    if x is None or _precision(source) == "float64":
        return None
    reference = run_double(source, x)
    return Precise(_error("logits", "float64", x, reference, _run(make(), x, ())[0]), reference)


def run_double(model: nn.Module, x: Tensor) -> Tensor:
    """The flattened outputs in float64. Each module gets float64 tensors for the time its forward runs only, so that
    the whole network never exists twice; where a forward reads another module's tensors, it does.
    """
    lent: dict[nn.Module, dict[str, Tensor]] = {}

    def lend(module: nn.Module, _args: Any) -> None:
        tensors = {**module._parameters, **module._buffers}
        lent[module] = {name: t.data for name, t in tensors.items() if t is not None and t.is_floating_point()}
        for name, tensor in lent[module].items():
            _hold(module, name, tensor.double())

    def back(module: nn.Module, *_: Any) -> None:
        for name, tensor in lent.pop(module).items():
            _hold(module, name, tensor)

    owners = [module for module in model.modules() if module._parameters or module._buffers]
    handles = [hook for m in owners for hook in (m.register_forward_pre_hook(lend), m.register_forward_hook(back))]
    try:
        return _run(model, x, ())[0]
    except RuntimeError:  # dtypes were mixed
        pass
    finally:
        for handle in handles:
            handle.remove()
        for module in list(lent):
            back(module)
    return _run(to_double(model), x, ())[0]


def _hold(module: nn.Module, name: str, tensor: Tensor) -> None:
    parameter = module._parameters.get(name)
    if parameter is not None:
        parameter.data = tensor
    else:
        module._buffers[name] = tensor


def _precision(model: nn.Module) -> str:
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def _coarseness(precision: str) -> float:
    return torch.finfo(getattr(torch, precision)).eps / torch.finfo(torch.float32).eps


@torch.no_grad()
def _run(model: nn.Module, x: Tensor, paths: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
    """The flattened outputs in eval mode, and those of the modules at `paths`; the model is left as it was."""
    seen: dict[str, Tensor] = {}

    def keep(path: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                seen[path] = output.clone()  # in-place activations would overwrite it

        return hook

    present = dict(model.named_modules())
    handles = [present[path].register_forward_hook(keep(path)) for path in dict.fromkeys(paths) if path in present]
    try:
        with evaluating(model):
            output = model(x)
    finally:
        for handle in handles:
            handle.remove()
    leaves = [leaf.flatten(1) for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return torch.cat(leaves, 1), seen


def _error(site: str, precision: str, x: Tensor, a: Tensor, b: Tensor) -> Error:
    logits = site == "logits"
    agreement = float((a.argmax(1) == b.argmax(1)).float().mean()) if logits else None
    a, b = a.double().flatten(), b.double().flatten()
    if a.shape != b.shape or not bool(torch.isfinite(b).all()) or not bool(torch.isfinite(a).all()):
        return Error(site, precision, tuple(x.shape), float("inf"), float("inf"), 0.0, agreement)
    difference, norm = a - b, a.norm()
    if not norm:
        zero = float(b.norm())
        return Error(site, precision, tuple(x.shape), zero, zero, 1.0 if not zero else 0.0, agreement)
    return Error(
        site,
        precision,
        tuple(x.shape),
        float(difference.norm() / norm),
        float(difference.abs().max() / a.abs().max()),
        float((a @ b) / (norm * b.norm()).clamp_min(1e-300)),
        agreement,
    )


def _vacuous(logits: Tensor, seen: dict[str, Tensor], blocks: Sequence[Any]) -> list[str]:
    found = []
    if len(logits) > 1:
        moves = (logits - logits.mean(0)).norm() / logits.norm().clamp_min(1e-30)
        if not moves > _HARDLY:
            found.append(f"the input moves the output by {float(moves):.0e} of its size only")
    for block in blocks:
        if block.tail in seen and block.path in seen:
            share = seen[block.tail].norm() / seen[block.path].norm().clamp_min(1e-30)
            if not share > _HARDLY:
                found.append(f"{block.path}: the branch is {float(share):.0e} of the block's output")
    return found
