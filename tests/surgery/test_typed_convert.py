"""Editors and type checkers know the options of `normswap.convert`."""

import typing

from normswap.schemes.catalogue import TARGETS
from normswap.surgery import conversion


def test_every_option_of_a_scheme_has_a_type() -> None:
    own = {option.name for scheme in TARGETS.values() for option in scheme.options}
    assert "groupnorm: relative_eps=9.0, eps, in multiples" in (conversion.convert.__doc__ or ""), "for help()"
    assert own | {"only", "skip", "purpose"} == set(typing.get_type_hints(conversion.ConvertOptions))
