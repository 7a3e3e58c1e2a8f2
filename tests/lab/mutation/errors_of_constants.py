"""Planted errors: the constants of papers and libraries."""

from __future__ import annotations

from planted_error import Planted

PAPERS = ("tests/schemes/test_paper_constants.py",)
_DIM = 'dim = 1 if getattr(new, "transposed", False) else 0\n        weight = new.weight.detach().clone()\n        '
_DIM_0 = "dim = 0\n        weight = new.weight.detach().clone()\n        "

ERRORS = (
    Planted("Hanin's rule", "normswap/schemes/residual_scale.py", "0.9**block", "0.9 ** (block - 1)", PAPERS),
    Planted("Szegedy's rule", "normswap/schemes/residual_scale.py", "(1.0, 0.2)", "(1.0, 0.3)", PAPERS),
    Planted("Arpit's rule", "normswap/schemes/residual_scale.py", "1 / depth)", "depth**-0.5)", PAPERS),
    Planted(
        "RescaleNet's branch",
        "normswap/schemes/residual_scale.py",
        "math.sqrt(1 / (block + depth))",
        "math.sqrt(1 / (block + depth - 1))",
        PAPERS,
    ),
    Planted(
        "RescaleNet's skip",
        "normswap/schemes/residual_scale.py",
        "math.sqrt(1 - 1 / (block + depth))",
        "math.sqrt(1 - 1 / (2 * depth))",
        PAPERS,
    ),
    Planted("Balduzzi's rule", "normswap/schemes/residual_scale.py", "(math.sqrt(0.5), ", "(0.5, ", PAPERS),
    Planted(
        "Fixup's exponent is that of two convolutions",
        "normswap/schemes/parts/fixup_scalars.py",
        "(-1 / (2 * len(convs) - 2))",
        "(-1 / 2)",
        PAPERS,
    ),
    Planted(
        "Fixup counts one convolution less",
        "normswap/schemes/parts/fixup_scalars.py",
        "(-1 / (2 * len(convs) - 2))",
        "(-1 / (2 * len(convs) - 4 + 1e-9 + 2 * (len(convs) == 2)))",
        PAPERS,
    ),
    Planted(
        "weight norm of transposed convolutions is per input",
        "normswap/layers/weight_norm.py",
        _DIM + "norm =",
        _DIM_0 + "norm =",
        PAPERS,
    ),
    Planted(
        "spectral norm of transposed convolutions is of another matrix",
        "normswap/layers/weight_norm.py",
        _DIM + "dead =",
        _DIM_0 + "dead =",
        PAPERS,
    ),
    Planted(
        "norms that stay lose their momentum",
        "normswap/layers/site_norm.py",
        'getattr(old, "momentum", 0.1)',
        "0.1",
        PAPERS,
    ),
    Planted(
        "norms that stay lose their eps",
        "normswap/layers/site_norm.py",
        "(affine.epsilon(old), getattr",
        "(1e-5, getattr",
        PAPERS,
    ),
    Planted(
        "frozen norms lose their eps",
        "normswap/layers/site_norm.py",
        "count, eps = live.num_features, live.eps",
        "count, eps = live.num_features, 1e-5",
        PAPERS,
    ),
    Planted(
        "norms put back have another momentum",
        "normswap/layers/site_norm.py",
        "else (1e-5, 0.1)",
        "else (1e-5, 0.01)",
        PAPERS,
    ),
    Planted(
        "norms put back have another eps",
        "normswap/layers/site_norm.py",
        "else (1e-5, 0.1)",
        "else (1e-3, 0.1)",
        PAPERS,
    ),
    Planted(
        "norms that data will fill lose their eps",
        "normswap/layers/site_norm.py",
        'getattr(old, "eps", 1e-5), momentum=0.1, ghost=0',
        "1e-5, momentum=0.1, ghost=0",
        PAPERS,
    ),
    Planted(
        "the smallest rate of layers is none",
        "normswap/analysis/weight_decay.py",
        "max(min_scale, layer_decay ** (top - layer))",
        "layer_decay ** (top - layer)",
        PAPERS,
    ),
    Planted(
        "the smallest rate of layers is the largest",
        "normswap/analysis/weight_decay.py",
        "max(min_scale, layer_decay",
        "min(min_scale or 1.0, layer_decay",
        PAPERS,
    ),
    Planted(
        "--group-size is a number of groups",
        "normswap/schemes/groupnorm.py",
        "max(channels // group_size, 1) if group_size",
        "min(channels, group_size) if group_size",
        PAPERS,
    ),
    Planted(
        "--group-size does nothing",
        "normswap/schemes/groupnorm.py",
        "max(channels // group_size, 1) if group_size else groups",
        "groups",
        PAPERS,
    ),
    Planted(
        "--for opacus says that it changes the function",
        "normswap/schemes/purposes/opacus.py",
        "may_do_nothing=True,",
        "may_do_nothing=True, exact=False,",
        PAPERS,
    ),
    Planted(
        "--for federated says that it changes the function",
        "normswap/schemes/purposes/federated.py",
        "may_do_nothing=True,",
        "may_do_nothing=True, exact=False,",
        PAPERS,
    ),
)
