"""The fixture that tries a scheme on small networks notices a wrong one, and one that breaks."""

from collections.abc import Callable

import pytest
from support.scheme_check import NETWORKS, check, check_scheme as check_scheme

import normswap
from normswap import schemes
from normswap.errors import VerificationError
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.plan import Edit


def halved(anatomy: Anatomy) -> PlanBuilder:
    """Claims to keep the function, and halves what the classifier says."""
    classifier = str(anatomy.classifier)
    builder = PlanBuilder(anatomy)
    builder.replacements[classifier] = Edit(classifier, "Folded", {"gain": 0.5})
    return builder


def broken(anatomy: Anatomy) -> PlanBuilder:
    raise KeyError(anatomy.classifier)


@pytest.fixture(autouse=True)
def few_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemes, "_registered", {})
    monkeypatch.setattr(schemes, "names", lambda: ["affine", "rmsnorm", *schemes._registered])


@pytest.mark.slow
def test_a_scheme_that_keeps_its_word_passes(check_scheme: Callable[..., None]) -> None:
    check_scheme("affine")


def test_what_is_wrong_is_told_from_what_is_refused() -> None:
    normswap.register_scheme("halved", normswap.Scheme(halved))
    normswap.register_scheme("broken", normswap.Scheme(broken))

    with pytest.raises(VerificationError, match=r"halved .* wrong"):
        check(NETWORKS["ResNet"], "halved")
    with pytest.raises(KeyError):
        check(NETWORKS["ResNet"], "broken")


def test_a_target_that_fails_on_the_result_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    normswap.register_scheme("broken", normswap.Scheme(broken))

    with pytest.raises(KeyError):
        check(NETWORKS["ResNet"], "affine")
