"""How large the gradient of every kind of parameter is that a conversion adds.

`python tests/lab/benchmarks/added_parameters.py` prints added_parameters.md. A kind is a class of
layers and the name of its parameter; all filters and matrices are one kind.

- `gradient` is the norm of the loss' gradient over all parameters of the kind, on 128 labelled
  images of the demo network, in eval mode.
- `logits` is how far a unit step moves the logits: the root mean square norm of the gradient of the
  logits' sum with random signs, over four draws.
- `share` is the gradient's norm beside the norm over the filters and matrices of the same network:
  with one rate for all, a kind with a large share decides how large that rate may be.
"""

import math
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normswap
from normswap.images.datasets import make_loader

CONVERSIONS: dict[str, tuple[str, dict[str, object]]] = {
    "source, in eval mode": ("", {}),
    "skipinit": ("skipinit", {}),
    "fixup": ("fixup", {}),
    "affine": ("affine", {}),
    "tune": ("tune", {}),
    "groupnorm": ("groupnorm", {}),
    "dyt": ("dyt", {}),
    "weightnorm": ("weightnorm", {}),
    "nf --mean keep": ("nf", {"mean": "keep"}),
    "nf, fitted to synthetic images": ("nf", {"calibrate": "synthetic"}),
}
IMAGES = 128
DRAWS = 4
WEIGHTS = "filters and matrices"


def kinds(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the parameters that learn, by kind."""
    found: dict[str, list[nn.Parameter]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            # A gain of weight norm has the dimensions of a filter, but one number for each.
            is_filter = parameter.ndim > 1 and parameter.numel() > len(parameter)
            kind = WEIGHTS if is_filter else f"{type(module).__name__}.{name}"
            found[kind].append(parameter)
    return {kind: [each for each in group if each.requires_grad] for kind, group in found.items()}


def norm(
    model: nn.Module, scalar: Tensor, groups: dict[str, list[nn.Parameter]]
) -> dict[str, float]:
    """Return the norm of a scalar's gradient for each kind."""
    model.zero_grad()
    scalar.backward(retain_graph=True)
    norms: dict[str, float] = {}
    for kind, group in groups.items():
        squares = [float(each.grad.square().sum()) for each in group if each.grad is not None]
        norms[kind] = math.sqrt(sum(squares))
    return norms


def main() -> None:
    source = normswap.open("demo")
    batches = list(make_loader(source, "demo", workers=0, samples=IMAGES))
    images = torch.cat([batch[0] for batch in batches])
    labels = torch.cat([batch[1] for batch in batches])
    generator = torch.Generator().manual_seed(0)

    print("# The gradients of parameters that a conversion adds\n")
    print(
        "Made by `python tests/lab/benchmarks/added_parameters.py`, with torch"
        f" {torch.__version__}, on {IMAGES} labelled images of `demo`. `gradient` is the norm of"
        " the loss' gradient over all parameters of a kind; `share` is that beside the norm over"
        " all filters and matrices; `logits` is how far a unit step moves the logits.\n"
    )
    print("| conversion | parameter | numbers | gradient | share | logits |")
    print("|---|---|---|---|---|---|")
    for label, (scheme, options) in CONVERSIONS.items():
        model = source
        if scheme:
            model = normswap.convert(source, to=scheme, **options).model
        model = model.eval()
        groups = {kind: group for kind, group in kinds(model).items() if group}
        logits = model(images)
        gradients = norm(model, F.cross_entropy(logits, labels), groups)

        moved: dict[str, float] = defaultdict(float)
        for _ in range(DRAWS):
            signs = torch.randint(0, 2, logits.shape, generator=generator) * 2.0 - 1
            scalar = (logits * signs).sum() / math.sqrt(IMAGES)
            for kind, size in norm(model, scalar, groups).items():
                moved[kind] += size**2 / DRAWS

        of_weights = gradients.get(WEIGHTS, math.nan)
        for kind, group in groups.items():
            count = sum(each.numel() for each in group)
            share = gradients[kind] / of_weights
            figures = f"{gradients[kind]:.3g} | {share:.2g} | {math.sqrt(moved[kind]):.3g}"
            print(f"| `{label}` | `{kind}` | {count} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
