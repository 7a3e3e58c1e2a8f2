"""Errors of `drawn.py` that are none: (file, the line as it is and as it becomes) -> why nothing tells them apart."""

from __future__ import annotations

EQUIVALENTS: dict[tuple[str, str], str] = {}
