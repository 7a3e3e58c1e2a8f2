"""The small trained network and its 500 images that ship with the package; as MODEL and as images both are `demo`."""

from pathlib import Path

NAME = "demo"
FOLDER = Path(__file__).parent / "demo_data"
IMAGES = FOLDER / "images.tar"
