"""Law: whatever a check of the doctor yields is told, wherever the check stands."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import normswap
from normswap.diagnosis import doctor
from normswap.diagnosis.findings import Case, Certainty, Finding, Remark

IMAGES = [torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))]


def asks(case: Case) -> Iterator[str]:
    yield "an open question"


def remarks(case: Case) -> Iterator[Remark]:
    yield Remark("a remark")


def finds(case: Case) -> Iterator[Finding]:
    yield Finding(
        "made-up", paths=("1",), evidence="", certainty=Certainty.LIKELY, cost="", mend=""
    )


@pytest.mark.parametrize("on_images", [True, False])
def test_what_a_check_yields_is_told(on_images: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = (remarks, asks)
    monkeypatch.setattr(doctor, "CHECKS", () if on_images else checks)
    monkeypatch.setattr(doctor, "ON_IMAGES", checks if on_images else ())
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()

    notes = normswap.diagnose(network, inputs=IMAGES[0], images=IMAGES).notes

    assert {"an open question", "a remark"} <= {*notes}


def test_a_question_or_a_fault_ends_the_checks_on_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """It explains what later checks would find."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    monkeypatch.setattr(doctor, "CHECKS", ())

    monkeypatch.setattr(doctor, "ON_IMAGES", (asks, finds))
    asked = normswap.diagnose(network, inputs=IMAGES[0], images=IMAGES)
    monkeypatch.setattr(doctor, "ON_IMAGES", (finds, asks))
    found = normswap.diagnose(network, inputs=IMAGES[0], images=IMAGES)

    assert asked.faults == ()
    assert "an open question" in asked.notes
    assert [fault.name for fault in found.faults] == ["made-up"]
    assert "an open question" not in found.notes
