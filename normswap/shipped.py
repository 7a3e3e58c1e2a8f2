"""What is shipped with the code: recipes, the networks that only recipes use, and the demo.

In a checkout the recipes' folder stands beside the package; an installation has it inside the
package. `demo` is a small trained network that comes with the package, with 500 test images. It
names the network where a MODEL is asked for, and the images where images are asked for.
"""

import importlib.util
import sys
from pathlib import Path

NAME = "demo"
FOLDER = Path(__file__).parent / "demo_data"
IMAGES = FOLDER / "images.tar"
# Files of the recipes' folder that are no recipes: the zoo's manifest, and a task of SkyPilot.
NO_RECIPES = ("zoo.yaml", "finetune.sky.yaml")
# Files of the recipes' folder that register their networks with timm.
_NETWORKS = ("wide_resnet.py",)


def recipes() -> Path:
    """Return the folder of the recipes that come with normswap.

    It lies inside the installed package, or beside the package in a clone of the repository.
    """
    package = Path(__file__).parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def register_networks() -> None:
    """Register with timm the networks that only recipes of this package use.

    Their files lie beside the recipes. Importing a file registers its networks, so each file is
    imported only once.
    """
    for file in (recipes() / name for name in _NETWORKS):
        name = f"normswap.recipes.{file.stem}"
        if name in sys.modules:
            continue

        spec = importlib.util.spec_from_file_location(name, file)
        if spec is not None and spec.loader is not None:
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
