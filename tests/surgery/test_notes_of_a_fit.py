"""What a fit leaves for the user: the agreement, or why there is none, and each note once."""

from typing import Any

import pytest
import torch
from support.six_networks import images, trained
from torch import Tensor

import normswap
from normswap import provenance
from normswap.copying import duplicate
from normswap.proof import held_out
from normswap.provenance import Provenance

SIXTEEN = images(16, 3)


def with_copies() -> Tensor:
    """Sixteen images, of which two of the four that are held out are the first one again."""
    copies = SIXTEEN.clone()
    copies[3] = copies[7] = copies[0]
    return copies


# The images, how many agreement is measured on, why it is not measured, and what a note says.
FITS: dict[str, tuple[dict[str, Any], int | None, str, str]] = {
    "no images": ({}, None, "", ""),
    "in one batch": ({"calibrate": [SIXTEEN]}, 4, "", ""),
    "in batches of three": ({"calibrate": [*SIXTEEN.split(3)]}, 4, "", ""),
    "with copies": (
        {"calibrate": [*with_copies().split(5)]},
        2,
        "",
        "2 of the held-out images are copies of others, and do not count",
    ),
    "three images": ({"calibrate": [SIXTEEN[:3]]}, None, held_out.TOO_FEW, ""),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", FITS)
def test_agreement_is_measured_on_every_fourth_image_or_it_is_said_why_not(name: str) -> None:
    options, count, unmeasured, said = FITS[name]

    done = normswap.convert(trained("post"), "dyt", inputs=images(2), **options)

    kept = done.report.kept
    assert (None if kept is None else kept.count) == count
    assert done.report.unmeasured == unmeasured
    assert [note for note in done.notes if "copies" in note] == ([said] if said else [])
    assert len(done.notes) == len(set(done.notes))


@pytest.mark.parametrize("scheme", ["folded", "groupnorm", "skipinit"])
def test_what_is_remarked_of_the_source_is_a_note_of_its_conversion(scheme: str) -> None:
    remarks = ("its head is new", "assumed: a mean of 0.5")
    model = provenance.attach(duplicate(trained("post"), {}), Provenance(remarks=remarks))

    done = normswap.convert(model, scheme, inputs=images(2))

    assert tuple(note for note in done.notes if note in remarks) == remarks
    assert torch.equal(done.model.get_parameter("head.weight"), model.get_parameter("head.weight"))
