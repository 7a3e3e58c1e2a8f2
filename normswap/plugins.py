"""Entry points of other installed packages, each loaded once, when it is first needed."""

import functools
from importlib.metadata import entry_points

from normswap.errors import OptionError


@functools.cache
def load(group: str) -> None:
    """Import every entry point of `group`, which registers schemes or norms.

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
