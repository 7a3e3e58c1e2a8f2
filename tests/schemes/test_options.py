"""The records of the schemes' options: they match the plans, refuse what cannot be, and need no
torch.
"""

import inspect
import subprocess
import sys
import typing

import pytest

from normswap import schemes
from normswap.errors import OptionError
from normswap.schemes.catalogue import PURPOSES, TARGETS, Function
from normswap.schemes.groupnorm import nearest_divisor
from normswap.schemes.scheme import Option, Range
from normswap.surgery import conversion


def test_every_keyword_of_a_plan_has_a_record() -> None:
    for name, scheme in {**TARGETS, **PURPOSES}.items():
        assert isinstance(scheme.plan, Function)
        signature = inspect.signature(scheme.plan.load())
        keywords = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
        assert keywords == [option.name for option in scheme.options], name


def test_defaults_are_allowed_and_every_option_has_a_line_of_help() -> None:
    for option, names in schemes.all_options().values():
        option.check(option.default)
        assert option.help
        assert names


@pytest.mark.parametrize(
    ("scheme", "options", "why"),
    [
        ("groupnorm", {"groups": 0}, "groups=0 is not a whole number >= 1"),
        ("groupnorm", {"groups": True}, "groups=True is not a whole number >= 1"),
        ("groupnorm", {"groups": 2.0}, "groups=2.0 is not a whole number >= 1"),
        ("groupnorm", {"group_size": -1}, "group_size=-1 is not a whole number >= 0"),
        ("layernorm", {"relative_eps": -1.0}, r"relative_eps=-1.0 is not in \[0, inf\)"),
        ("layernorm", {"relative_eps": float("nan")}, "relative_eps=nan is not in"),
        ("dyt", {"bend": 0}, r"bend=0 is not in \(0, 4\]"),
        ("dyt", {"bend": 4.1}, r"bend=4.1 is not in \(0, 4\]"),
        (
            "skipinit",
            {"alpha": float("inf")},
            "alpha=inf is not 'match' or 'inv-sqrt-depth' or a finite number",
        ),
        ("skipinit", {"alpha": None}, "alpha= is not"),
        ("nf", {"stem": "zero"}, "stem=\"zero\" is not 'fit' or 'keep'"),
        ("residual-scale", {"rule": "golden"}, 'rule="golden" is not .balduzzi. or'),
        ("batchnorm", {"ghost_batch": "4"}, 'ghost_batch="4" is not a whole number >= 0'),
    ],
)
def test_what_an_option_may_not_be(scheme: str, options: dict[str, object], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        schemes.chosen(scheme, options)


def test_what_an_option_may_be() -> None:
    assert schemes.chosen("dyt", {"bend": 4}).options["bend"] == 4
    assert (
        schemes.chosen("groupnorm", {"groups": 4, "group_size": 0}).options["groups"] == 4
    )  # 0: `groups` says it
    assert schemes.chosen("layernorm", {"relative_eps": 0}).options["relative_eps"] == 0
    assert schemes.chosen("skipinit", {"alpha": "0.5"}).options["alpha"] == 0.5


def test_only_what_differs_from_the_default_is_told() -> None:
    changes = {"relative_eps": 1, "only": ["x"]}
    assert schemes.changed("groupnorm", {"groups": 1, **changes}) == changes
    assert schemes.changed("nobody-knows", {"groups": 1}) == {"groups": 1}


def test_the_placeholder_of_a_number_or_a_word() -> None:
    assert (
        Option("a", object, "x", metavar="NUMBER", choices=("x", "y")).placeholder == "x|y|NUMBER"
    )
    assert Option("a", int, 1).placeholder == "INT"
    assert str(Range(0, 4, low_open=True, high_open=False)) == "(0, 4]"


def test_options_are_read_without_torch() -> None:
    code = (
        "import sys; from normswap import schemes; assert schemes.all_options(); assert 'torch' not"
        " in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_option_of_a_scheme_has_a_type() -> None:
    own = {option.name for scheme in TARGETS.values() for option in scheme.options}
    assert "groupnorm: relative_eps=9.0, eps, in multiples" in (conversion.convert.__doc__ or ""), (
        "for help()"
    )
    assert own | {"only", "skip", "purpose"} == set(
        typing.get_type_hints(conversion.ConvertOptions)
    )


@pytest.mark.parametrize("channels", [1, 7, 12, 30, 48, 64])
def test_groups_are_the_nearest_number_that_divides_the_channels(channels: int) -> None:
    """The smaller one wins a tie, as 4 and 6 of 12 are equally near 5."""
    divisors = [each for each in range(1, channels + 1) if channels % each == 0]

    for groups in range(1, channels + 5):
        found = nearest_divisor(channels, groups)
        nearest = min(abs(each - groups) for each in divisors)
        assert found == next(each for each in divisors if abs(each - groups) == nearest)
