"""Entry points of other installed packages, each loaded once, when it is first needed."""

import functools
from importlib.metadata import entry_points

from normswap.errors import OptionError


@functools.cache
def load(group: str) -> None:
    """Import the plugins that other installed packages declare, which register schemes or norms.

    Args:
        group: The name of the group of entry points under which they are declared.

    Raises:
        OptionError: An entry point cannot be imported.
    """
    for point in entry_points(group=group):
        try:
            point.load()
        # The entry point is another package's code, which may raise anything.
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise OptionError(
                f"the plugin {point.value} cannot be loaded", why, "Mend or uninstall it"
            ) from error
