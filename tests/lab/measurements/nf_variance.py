"""Brock et al. 2021 (arXiv:2101.08692), section 4: the variance along timm's own nf_resnet50 at initialization.

Theory: 1 + alpha^2 after a stage's first block, whose shortcut starts anew from variance 1, and alpha^2 more after
every further block. It holds if the shortcut of a stage's first block, which averages 2 x 2 pixels and convolves them,
keeps the variance, if channels are alike, and if what enters has unit variance. On white noise none of that is so:
timm scales the stem's filters by ReLU's gamma though no ReLU comes before them (x 2.94), and the mean of four unrelated
pixels has a quarter of their variance, which the next stages inherit, as beta is the analytic deviation.

So the input is made to be what the theory supposes, and the network stays as timm made it: white within a pixel's
neighbourhood (so that the stem's filters, 7 x 7 x 3, see as many independent values, and its channels are alike), and
smooth from one cell of 4 x 4 pixels, what a pixel after the stem has seen, to the next (so that neighbours after
the stem agree). One factor on the input makes the variance after the first block what it should be; the other fifteen
blocks are the test. Zero padding at the borders still costs variance, the more the smaller the maps, hence 768 pixels.

    python tests/lab/measurements/nf_variance.py -o nf.png       # two minutes of CPU time
"""

from __future__ import annotations

import timm
import torch
from matplotlib.figure import Figure
from stacks import average, options, table, worst
from torch import Tensor
from torch.nn.functional import pixel_shuffle

from normswap.analysis import plots
from normswap.analysis.signal_propagation import awake, expected_nf, signal
from normswap.graph import inspection
from normswap.surgery.network import Network

CELL = 4  # the stride of the stem, its pooling included


def textured(n: int, side: int, seed: int) -> Tensor:
    """Every pixel of a cell of 4 x 4, and every channel, from a field of its own with amplitudes of 1 / f^3.

    (n, 3, side, side), unit variance.
    """
    cells = side // CELL
    noise = torch.randn(n, 3 * CELL**2, cells, cells, generator=torch.Generator().manual_seed(seed))
    frequency = (torch.fft.rfftfreq(cells)[None, :] ** 2 + torch.fft.fftfreq(cells)[:, None] ** 2).sqrt()
    frequency[0, 0] = 1 / cells
    fields = torch.fft.irfft2(torch.fft.rfft2(noise) * frequency**-3, s=(cells, cells))
    return pixel_shuffle(fields / fields.std(), CELL)


def measure(name: str, x: Tensor, seed: int) -> tuple[list[float], list[float]]:
    """Variance after each block, and what theory expects, of timm's network as it is on `x` times one factor."""
    torch.manual_seed(seed)
    model = awake(timm.create_model(name))
    seen = inspection.inspect(model)
    wanted = expected_nf(seen)
    assert wanted is not None
    parts = list(x.split(2))
    first = signal(Network(model), parts)[0].variance
    # from the first shortcut's convolution on everything is homogeneous: one factor on the input is one on every block
    scale = (wanted[0] / first) ** 0.5
    return [point.variance for point in signal(Network(model), [scale * part for part in parts])], wanted


def compare(name: str = "nf_resnet50", *, seeds: int, batch: int, side: int) -> dict[str, list[float]]:
    """Averages over seeds: on the textured input, on white noise, and theory."""
    found: dict[str, list[list[float]]] = {"textured": [], "white": []}
    for seed in range(seeds):
        white = torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(seed))
        for what, x in (("textured", textured(batch, side, seed)), ("white", white)):
            variance, wanted = measure(name, x, seed)
            found[what].append(variance)
    return {**{what: average(runs) for what, runs in found.items()}, "theory": wanted}


def main() -> None:
    args = options(__doc__, seeds=1, batch=12, side=768)
    found = compare(seeds=args.seeds, batch=args.batch, side=args.side)
    theory = found["theory"]
    table(
        "block|textured|white noise|theory",
        list(zip(range(1, 17), found["textured"], found["white"], theory, strict=True)),
    )
    for what in ("textured", "white"):
        print(f"{what}: off by at most {100 * worst(found[what], theory):.0f} %")
    if args.output:
        figure = Figure(figsize=(7, 4.6), layout="constrained")
        axes = figure.subplots()
        x = range(1, 17)
        axes.plot(x, theory, color="0.35", linewidth=4, alpha=0.4, label="theory, 1 + $\\alpha^2$ per block")
        axes.fill_between(
            x, [0.8 * v for v in theory], [1.2 * v for v in theory], color="0.35", alpha=0.12, label="± 20 %"
        )
        plots.line(axes, x, found["textured"], 0, "white at the stem, smooth after it")
        plots.line(axes, x, found["white"], 1, "white noise")
        plots.label_axes(
            axes, "residual block", "Average channel variance, nf_resnet50", "activation units²", log=False
        )
        axes.legend(fontsize=10, loc="center right", bbox_to_anchor=(1, 0.47))
        print(f"written to {plots.save(figure, args.output)}")


if __name__ == "__main__":
    main()
