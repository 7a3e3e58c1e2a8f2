"""Law: the moments that a norm's output is said to have are those that it has."""

import pytest
import torch
from support.kinds_of_norm import KINDS, WIDTH, Kind
from torch import nn

from normswap.errors import NormswapError
from normswap.sites import affine

# The deviation is that of training, which leaves eps out; or the kind bends its values.
OTHERWISE = ("BatchNorm2d of another eps", "subclass that bends")
PLAIN = [kind for kind in KINDS if not kind.library and kind.name not in OTHERWISE]


def norm_of(kind: Kind) -> nn.Module | None:
    """Return a norm that says its moments, a gamma of which is negative; or None."""
    network, _ = kind.build()
    norm = network.get_submodule("norm")
    if not affine.has_moments(norm) or affine.activation(norm) is not None:
        return None
    with torch.no_grad():
        for name, parameter in norm.named_parameters():
            if name in ("weight", "gamma"):
                parameter[::2].neg_()
    return norm


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.name)
def test_moments_are_those_of_the_output(kind: Kind) -> None:
    try:
        norm = norm_of(kind)
    # Such a norm keeps no statistics that can be read.
    except NormswapError:
        return
    if norm is None:
        return

    # Values whose mean and variance per channel are the norm's own statistics.
    mean, var = affine.statistics(norm)
    sides = {1: (50,), 2: (10, 5), 3: (5, 5, 2)}[kind.rank]
    x = torch.randn(4, WIDTH, *sides, dtype=torch.float64)
    rows = x.transpose(0, 1).flatten(1)
    rows = (rows - rows.mean(1, keepdim=True)) / rows.std(1, correction=0, keepdim=True)
    rows = rows * var[:, None].sqrt() + mean[:, None]
    x = rows.unflatten(1, (4, *sides)).transpose(0, 1)

    with torch.no_grad():
        y = norm(x).transpose(0, 1).flatten(1)

    said_mean, said_deviation = affine.moments(norm)
    assert bool((said_deviation >= 0).all())
    torch.testing.assert_close(said_mean, y.mean(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(said_deviation, y.std(1, correction=0), rtol=1e-3, atol=1e-3)


def test_most_kinds_of_batchnorm_say_theirs() -> None:
    assert sum(norm_of(kind) is not None for kind in PLAIN if "Batch" in kind.name) >= 6
