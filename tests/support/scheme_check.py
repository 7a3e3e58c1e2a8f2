"""A pytest fixture for whoever adds a scheme: it must keep what it claims.

Every target must take its results, too.

    from support.scheme_check import check_scheme

    def test_my_scheme(check_scheme):
        check_scheme("mine", share=0.5)
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
from torch import nn

from normswap import schemes
from normswap.errors import NormswapError, VerificationError
from normswap.surgery.conversion import convert
from normswap.surgery.network import Network
from support.lived_in_networks import living

_create = partial(timm.create_model, num_classes=10)
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ResNet": partial(_create, "resnet18", channels=(8, 16, 24, 32)),
    "pre-activation": partial(
        _create, "resnetv2_50", layers=(1, 1, 1, 1), channels=(32, 64, 96, 128), stem_chs=16
    ),
    "depthwise": partial(_create, "mobilenetv2_035"),
    "gates": partial(_create, "regnety_002"),
    "dense": partial(_create, "densenet121", growth_rate=8, block_config=(2, 2)),
}
_SIZE = (3, 64, 64)


@pytest.fixture(params=NETWORKS)
def check_scheme(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return `check` for one of `NETWORKS`; a test that takes it runs once with each."""
    return partial(check, NETWORKS[request.param])


def check(create: Callable[[], nn.Module], scheme: str, **options: Any) -> None:
    """Convert a network to the scheme, and the result to every target and back by `unfold`.

    Args:
        create: Makes the network.
        scheme: The name of the scheme.
        options: The options of the scheme.

    Raises:
        VerificationError: A result is not what its scheme claims. The message says whether it is
            the scheme's own result, or a target's.
        Exception: Whatever a scheme raises that is no refusal.
    """
    try:
        conversion = convert(Network(living(create(), *_SIZE)[0], size=_SIZE), scheme, **options)
    except VerificationError as error:
        raise VerificationError(f"{scheme} does not keep what it claims", str(error)) from error

    for target in [*schemes.names(), "unfold"]:
        try:
            convert(Network(conversion.model, size=_SIZE), target)
        except VerificationError as error:
            headline = f"{target} does not take a result of {scheme}"
            raise VerificationError(headline, str(error)) from error
        except NormswapError:
            continue
