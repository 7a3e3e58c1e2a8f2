"""The folder of what is shipped beside the code: recipes, and the networks that only they use.

In a checkout it stands beside the package, installed within it.
"""

import importlib.util
import sys
from pathlib import Path


def recipes() -> Path:
    """Return where the shipped recipes are."""
    package = Path(__file__).parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def register_networks() -> None:
    """Import the Python files beside the recipes, once: their networks register with timm then."""
    for file in sorted(recipes().glob("*.py")):
        name = f"normswap.recipes.{file.stem}"
        spec = None if name in sys.modules else importlib.util.spec_from_file_location(name, file)
        if spec is not None and spec.loader is not None:
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
