"""What `--for opacus` adds to a conversion: see `purposes`."""

from __future__ import annotations

from typing import Any

from normswap.folding.draft import Draft
from normswap.graph.inspection import Anatomy
from normswap.schemes.parts.purposes import plan_opacus

PAPER = ""


def exact(options: dict[str, Any]) -> bool:
    return True


def plan(anatomy: Anatomy) -> Draft:
    return plan_opacus(anatomy)
