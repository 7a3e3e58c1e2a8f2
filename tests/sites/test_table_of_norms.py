"""Every kind of norm to every target: right, or refused by the one sentence of its site.

The oracle is the source itself, in float64: the forward that its own library wrote.
"""

import functools
import re

import pytest
import torch
from support import needs
from support.kinds_of_norm import BY_NAME, KINDS
from support.lived_in_networks import distance, run
from support.sampled_tables import quick
from torch import Tensor, nn

import normswap
from normswap import schemes
from normswap.errors import NormswapError
from normswap.sites.site import Site

TARGETS = schemes.names()
OPTIONS: dict[str, dict[str, object]] = {"nf": {"mean": "keep"}, "centered-weightnorm": {}}
# What a target says of every network that lacks what it replaces, whatever its norms are.
OTHER_REASONS = re.compile(
    "has no LayerNorm|needs images|calibrate=|are what `[-a-z]+` would place|no convolution to"
    "|stays with its scale and shift: "
)
# Kinds that run by default with every target; the other pairs are slow.
BY_DEFAULT = ("tracked InstanceNorm2d", "BatchNorm1d on series", "computed by forward itself")
PAIRS = [(kind.name, target) for kind in KINDS for target in TARGETS]
DEFAULT_TARGETS = ("affine", "batchnorm", "folded", "frozen-bn", "groupnorm", "tune")
DEFAULT_PAIRS = [(kind, target) for kind in BY_DEFAULT for target in DEFAULT_TARGETS]


@functools.cache
def source(kind: str) -> tuple[nn.Module, Tensor, Site]:
    network, x = BY_NAME[kind].build()
    anatomy = normswap.inspect(network, x)
    return network, x, anatomy.site("norm")


def first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def test_there_are_forty_kinds() -> None:
    assert len(KINDS) >= 40


@pytest.mark.parametrize("pair", quick(PAIRS, DEFAULT_PAIRS), ids=" to ".join)
def test_every_kind_of_norm_is_converted_or_refused_by_its_own_sentence(
    pair: tuple[str, str],
) -> None:
    kind, target = pair
    if BY_NAME[kind].library:
        needs.need(BY_NAME[kind].library)
    network, x, site = source(kind)
    reference = first(run(network, x))

    try:
        done = normswap.convert(network, target, inputs=x, **OPTIONS.get(target, {}))
    except NormswapError as error:
        message = str(error)
        if (kind, target) == ("BatchNorm1d on rows", "instancenorm"):
            assert "group of one element" in message
        elif site.refusal is None:
            assert OTHER_REASONS.search(message), message
        else:
            # `rmsnorm` asks for gamma and beta alone, so it has a sentence of its own.
            sentence = site.refusal_of_gamma if target == "rmsnorm" else site.refusal
            assert str(sentence) in message or OTHER_REASONS.search(message), message
        return

    result = first(run(done.model, x))
    assert bool(torch.isfinite(result).all())
    if done.report.exact:
        assert distance(reference, result) < 1e-10
