"""The layers that a plan can place."""

from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Return `affine`, which stands in `sites` now: programs of before import it from here."""
    if name == "affine":
        from normswap.sites import affine

        return affine
    raise AttributeError(f"module 'normswap.layers' has no attribute {name!r}")
