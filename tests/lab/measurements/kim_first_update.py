"""Kim et al. 2022 (arXiv:2205.07260), figure 6: the first update of the gammas against their initial value.

Where a norm follows (gamma_other), the loss does not change if all gammas of the layer are multiplied by c, so their
gradient goes as 1 / c. Only the direction of such gammas counts, and an update of size g turns it by g / c: the first
step of SGD moves gamma / |gamma| by as much as 1 / c^2, slope -2 in log-log. This is the effective learning rate of van
Laarhoven 2017 (arXiv:1706.05350, section 3), and why small gammas learn fast. gamma_last, after which no norm stands
before the skip path joins, is no such case.

The text of Kim et al. was not at hand; that figure 6 shows the update relative to gamma is inferred from its slope.

    python tests/lab/measurements/kim_first_update.py -o update.png       # two minutes of CPU time
"""

from __future__ import annotations

import math

import timm
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from stacks import options, slope, table
from torch import nn

from normswap.analysis import plots
from normswap.graph import inspection

CHANNELS = (16, 32, 64, 128)


def first_updates(role: str, gamma: float, *, seed: int, batch: int, side: int) -> tuple[float, float]:
    """|update| and |update| / |gamma| after one SGD step with lr 1, of all gammas of a role, which start at `gamma`."""
    torch.manual_seed(seed)
    model = timm.create_model("resnet18", channels=CHANNELS, num_classes=10, zero_init_last=False).double().train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-15  # else it is seen beside the variance of a layer with a small gamma
    chosen = [model.get_submodule(norm.path).weight for norm in inspection.inspect(model).norms if norm.role == role]
    for weight in chosen:
        nn.init.constant_(weight, gamma)
    x, labels = torch.randn(batch, 3, side, side).double(), torch.randint(10, (batch,))
    F.cross_entropy(model(x), labels).backward()
    update = math.sqrt(sum(float(weight.grad.square().sum()) for weight in chosen if weight.grad is not None))
    return update, update / math.sqrt(sum(float(weight.detach().square().sum()) for weight in chosen))


def compare(
    *, seeds: int, batch: int, side: int, powers: tuple[int, ...] = (-4, -3, -2, -1, 0, 1, 2, 3, 4)
) -> dict[str, tuple[list[float], list[float]]]:
    """By role: geometric means over seeds of |update| and |update| / |gamma|, at gamma = 2^power."""
    found = {}
    for role in ("other", "last"):
        runs = [
            [first_updates(role, 2.0**power, seed=seed, batch=batch, side=side) for seed in range(seeds)]
            for power in powers
        ]
        raw, relative = ([math.exp(sum(math.log(r[i]) for r in run) / seeds) for run in runs] for i in (0, 1))
        found[f"gamma_{role}"] = raw, relative
    return found


def main() -> None:
    args = options(__doc__, seeds=5, batch=32, side=32)
    powers = tuple(range(-5, 6))
    found = compare(seeds=args.seeds, batch=args.batch, side=args.side, powers=powers)
    for name, (raw, relative) in found.items():
        log = [[math.log2(v) for v in values] for values in (raw, relative)]
        wanted = " (theory -1, -2)" if name == "gamma_other" else ""
        print(f"\n{name}: slope of |update| {slope(powers, log[0]):.4f}, of |update| / |gamma| "
              f"{slope(powers, log[1]):.4f}{wanted}")  # fmt: skip
        table("gamma|update|update / gamma", [(2.0**p, a, b) for p, a, b in zip(powers, raw, relative, strict=True)])
    if args.output:
        figure = Figure(figsize=(7, 5), layout="constrained")
        axes = figure.subplots()
        x = [2.0**power for power in powers]
        middle = found["gamma_other"][1][len(x) // 2]
        axes.plot(x, [middle / g**2 for g in x], color="0.35", linewidth=4, alpha=0.45, label="slope -2")
        for i, (name, (_, relative)) in enumerate(found.items()):
            plots.line(axes, x, relative, i, f"$\\{name.replace('_', '_{')}}}$")
        plots.label_axes(axes, "initial gamma", "First update / gamma (norms)", "learning rate = 1", log=True)
        axes.set_xscale("log", base=2)
        axes.autoscale(axis="y")
        axes.legend(fontsize=11)
        axes.set_title(f"ResNet-18 (narrow), {args.seeds} seeds, batch {args.batch}", fontsize=12)
        print(f"\nwritten to {plots.save(figure, args.output)}")


if __name__ == "__main__":
    main()
