"""The settings of weight decay: policies and ranges of numbers, checked before torch is imported."""

from __future__ import annotations

from normswap.errors import OptionError, spelled

POLICIES = ("kim2022", "timm", "all", "weights-only")


def check(policy: str, *, layer_decay: float | None = None, **at_least_zero: float | None) -> None:
    """Check the settings of `param_groups`.

    Args:
        at_least_zero: by name, numbers that are not negative.

    Raises:
        OptionError: unknown policy, or a number out of range.
    """
    if policy not in POLICIES:
        raise OptionError(f"unknown policy {policy!r}", remedy=f"Known: {', '.join(POLICIES)}")
    for name, value in at_least_zero.items():
        if value is not None and not 0 <= value < float("inf"):
            raise OptionError(f"{spelled(name, value)} is not a number >= 0")
    if layer_decay is not None and not 0 < layer_decay <= 1:
        raise OptionError(f"{spelled('layer_decay', layer_decay)} is not in (0, 1]")
