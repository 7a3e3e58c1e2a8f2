"""The layers that a plan can place."""

from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Return the module `sites.affine` for the name `affine`, as older programs import it."""
    if name == "affine":
        from normswap.sites import affine

        return affine
    raise AttributeError(f"module 'normswap.layers' has no attribute {name!r}")
