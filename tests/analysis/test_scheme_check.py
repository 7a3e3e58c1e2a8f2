"""`normswap schemes NAME --check`: a scheme walked over small networks, and on to the next targets."""

from __future__ import annotations

import pytest
from commands import Capture, run_json

import normswap
from normswap import schemes
from normswap.analysis import scheme_check
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.plan import Edit


def halved(anatomy: Anatomy) -> PlanBuilder:
    """Claims to keep the function, and halves what the classifier says."""
    builder = PlanBuilder(anatomy)
    builder.replacements[str(anatomy.classifier)] = Edit(str(anatomy.classifier), "Folded", {"gain": 0.5})
    return builder


def broken(anatomy: Anatomy) -> PlanBuilder:
    """Raises what no scheme should."""
    raise KeyError(anatomy.classifier)


@pytest.fixture(autouse=True)
def one_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheme_check, "NETWORKS", {"ResNet": scheme_check.NETWORKS["ResNet"]})
    monkeypatch.setattr(schemes, "_registered", {})
    monkeypatch.setattr(schemes, "names", lambda: ["affine", "folded", "rmsnorm", "skipinit", *schemes._registered])


def test_a_scheme_is_walked_to_the_next_targets_and_back() -> None:
    rows = {row.path: row for row in scheme_check.walk("affine")}
    assert [path[1:] for path in rows] == [(), *((target,) for target in [*schemes.names(), "unfold"])]
    assert rows["affine", "rmsnorm"].why.startswith("the network has no LayerNorm")
    for targets in (("affine",), ("affine", "folded"), ("affine", "skipinit"), ("affine", "unfold")):
        distance = rows[targets].distance
        assert distance is not None
        assert distance < 1e-12
    assert not any(row.wrong for row in rows.values())


def test_what_is_wrong_is_told_from_what_is_refused() -> None:
    normswap.register_scheme("halved", normswap.Scheme(halved))
    normswap.register_scheme("broken", normswap.Scheme(broken))
    (wrong,), (crashed,) = scheme_check.walk("halved"), scheme_check.walk("broken")
    assert wrong.wrong
    assert "wrong" in wrong.why
    assert crashed.wrong
    assert crashed.why.startswith("KeyError")


def test_the_command_prints_the_walk(capfd: Capture) -> None:
    bodies = run_json(capfd, "schemes", "affine", "--check")
    assert [body["path"][-1] for body in bodies] == ["affine", *schemes.names(), "unfold"]
