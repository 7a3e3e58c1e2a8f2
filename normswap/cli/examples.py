"""The examples at the end of every --help, with the network and the images that ship with normswap where they do."""

from __future__ import annotations


def examples(*commands: str) -> str:
    """An epilog of these command lines, which are not wrapped."""
    return "\n".join(["\b", "Examples:", *(f"  normswap {command}" for command in commands)])
