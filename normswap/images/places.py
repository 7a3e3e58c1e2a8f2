"""Where images may be. No torch is imported here."""

import os

from normswap import shipped
from normswap.errors import SourceError

# The words before the slash in the name of a dataset that timm opens.
PREFIXES = ("torch", "hfds", "hfids", "tfds", "wds")
# Words in place of images: noise, or images made from the network's own statistics.
_WORDS = ("noise", "synthetic")


def check(data: str) -> None:
    """Check that images may be at a place.

    Args:
        data: The place, as the user named it.

    Raises:
        SourceError: The place is no file, no directory, and no name of a dataset.
    """
    if data in (shipped.NAME, *_WORDS) or data.partition("/")[0].lower() in PREFIXES:
        return
    if not os.path.exists(data):
        raise missing(data)


def missing(data: str) -> SourceError:
    """Return the error about images that do not exist.

    Args:
        data: The path or name that the user gave.
    """
    return SourceError(
        f"{data} does not exist",
        remedy=f"Other datasets start with {', '.join(PREFIXES)} and '/'.",
    )
