"""Entry points of other installed packages, each loaded once, when it is first of use."""

import functools
from importlib.metadata import entry_points

from normswap.errors import OptionError


@functools.cache
def load(group: str) -> None:
    """Import every entry point of `group`, which registers what it brings; raises OptionError: one
    fails.
    """
    for point in entry_points(group=group):
        try:
            point.load()
        except Exception as error:  # somebody else's code
            why = f"{type(error).__name__}: {error}"
            raise OptionError(
                f"the plugin {point.value} cannot be loaded", why, "Mend or uninstall it"
            ) from error
