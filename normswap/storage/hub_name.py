"""The name of a repository on the hub: seen before torch is imported."""

from __future__ import annotations

from normswap.errors import OptionError


def check(repo: str) -> None:
    """See that this is owner/name; which letters they may have, the hub says.

    Raises:
        OptionError: it is not.
    """
    if repo.count("/") != 1:
        raise OptionError(f"'{repo}' is not a name on the hub", remedy="Write it as owner/name")
