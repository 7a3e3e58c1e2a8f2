"""Where images may be. No torch is imported here."""

import os

from normswap import shipped
from normswap.errors import SourceError

# The words before the slash in the name of a dataset that timm opens.
PREFIXES = ("torch", "hfds", "hfids", "tfds", "wds")
# Words in place of images: noise, or images made from the network's own statistics.
_WORDS = ("noise", "synthetic")


def check(data: str) -> None:
    """Check that what the user named as images exists, or is the name of a dataset.

    Args:
        data: A path, a name such as `torch/cifar10`, or one of the words `demo`, `noise` and
            `synthetic`.

    Raises:
        SourceError: `data` is none of these.
    """
    # `_WORDS` are `noise` and `synthetic`. The word before a slash says that timm opens the
    # dataset, as in `torch/cifar10`.
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
