"""What is shipped with the code: recipes, the networks that only they use, and the demo.

In a checkout the recipes' folder stands beside the package, installed within it. The demo is a
small trained network and its 500 images; as MODEL and as images both are `demo`.
"""

import importlib.util
import sys
from pathlib import Path

NAME = "demo"
FOLDER = Path(__file__).parent / "demo_data"
IMAGES = FOLDER / "images.tar"


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
