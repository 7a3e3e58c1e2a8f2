"""The page of docs/browser.md in a browser: an exported file in onnxruntime-web says what ONNX
Runtime says in Python.

onnxruntime-web is what `npm install` of that page gets, fetched once into the user's cache; nothing
of it is kept here.
"""

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from docs_pages import ROOT, blocks
from PIL import Image
from support import needs
from support.browser import CHROMIUM, FLAGS
from timm.data import create_transform

from normswap import shipped
from normswap.cli.app import main
from normswap.exporting import formats, sidecar

PAGE = blocks(ROOT / "docs" / "browser.md")
HTML = (ROOT / "docs" / "page" / "index.html").read_text(encoding="utf-8")
PACKAGE = next(
    found[0] for block in PAGE if (found := re.findall(r"npm install (\S+)", block.text))
)
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "normswap-tests"
SIZES = {
    "wide": (90, 64),
    "large and tall": (131, 260),
}  # (width, height), beside the images as they are
# in a frame, so that the page itself stays as it is shown
WATCH = """<!doctype html><link rel="icon" href="data:,"><iframe src="index.html?{query}"></iframe>
<script>
setInterval(() => {{
  const page = document.querySelector("iframe").contentDocument;
  const found = [...page.querySelectorAll("figure")];
  const text = page.querySelector("main")?.lastChild?.data;
  const lines = (one) => [...one.querySelectorAll("li")].map((line) => line.textContent);
  if (text) console.log("FAILED " + text + " END");
  if (found.length == {count}) console.log("SHOWN" + JSON.stringify(found.map(lines)) + "END");
}}, 200)</script>"""
pytestmark = pytest.mark.slow


def package() -> Path:
    """The unpacked onnxruntime-web, or a skip that says why there is none."""
    home = CACHE / PACKAGE
    if not home.exists():
        needs.need("onnxruntime-web", shutil.which("npm") is not None, "npm is not installed")
        CACHE.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", PACKAGE, "--silent", "--pack-destination", str(CACHE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        failure = f"npm cannot fetch {PACKAGE}: {done.stderr.strip()[-200:]}"
        needs.need("onnxruntime-web", done.returncode == 0, failure)
        packed = CACHE / done.stdout.split()[-1]
        with tarfile.open(packed) as files:
            files.extractall(home.with_suffix(".part"), filter="data")
        home.with_suffix(".part").rename(home)
        packed.unlink()

    return home / "package"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder with the page, the package and images of several sizes; and its address."""
    needs.need("chromium", CHROMIUM is not None)
    folder = tmp_path_factory.mktemp("site")
    (folder / "node_modules").mkdir()
    (folder / "node_modules" / "onnxruntime-web").symlink_to(package())
    (folder / "index.html").write_text(HTML, encoding="utf-8")

    with tarfile.open(shipped.FOLDER / "images.tar") as images:
        members = [one for one in images.getmembers() if one.isfile()][::60]
        for i, member in enumerate(members):
            images.extract(member, folder / "unpacked", filter="data")
            here = (folder / "unpacked" / member.name).rename(folder / f"{i}.jpg")
            for name, size in SIZES.items():
                Image.open(here).resize(size).save(folder / f"{i} {name}.png")

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=folder)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def shown(folder: Path, address: str, model: str, images: list[str]) -> list[list[str]]:
    """What the page shows for each image, best first."""
    query = "&".join([f"model={model}", *(f"image={name}" for name in images)])
    (folder / "watch.html").write_text(
        WATCH.format(query=query, count=len(images)), encoding="utf-8"
    )
    command = [
        str(CHROMIUM),
        *FLAGS,
        f"--user-data-dir={folder / 'profile'}",
        f"{address}/watch.html",
    ]

    found = None
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as browser:
        timer = threading.Timer(120, browser.kill)
        timer.start()
        assert browser.stderr
        for line in browser.stderr:
            if found := re.search(r"(SHOWN|FAILED)(.*)END", line):
                break
        timer.cancel()
        browser.terminate()

    assert found, "nothing after two minutes"
    assert found[1] == "SHOWN", found[2]

    return list(json.loads(found[2].replace('\\"', '"')))


def asked(file: Path, image: Path) -> tuple[Callable[[np.ndarray], np.ndarray], np.ndarray]:  # type: ignore[type-arg]
    """A file's answers in ONNX Runtime, and the pixels of an image, preprocessed by timm."""
    body: Any = sidecar.body_of(file, {})
    transform: Any = create_transform(
        tuple(body["input"]["size"]),
        **(body["normalize"] or {"mean": (0, 0, 0), "std": (1, 1, 1)}),
        **{key: body["resize"][key] for key in ("crop_pct", "crop_mode", "interpolation")},
    )
    session = onnxruntime.InferenceSession(file)
    pixels = transform(Image.open(image).convert("RGB"))[None].numpy()
    return lambda x: session.run([body["output"]["name"]], {body["input"]["name"]: x})[0][0], pixels


def answers(file: Path, image: Path) -> dict[str, float]:
    """What ONNX Runtime says to it in Python, by label."""
    run, pixels = asked(file, image)
    return dict(
        zip(sidecar.body_of(file, {})["output"]["labels"], run(pixels).tolist(), strict=True)
    )


def shaken(file: Path, image: Path) -> float:
    """How far an answer in Python moves if one pixel in a hundred is rounded the other way."""
    run, pixels = asked(file, image)
    generator = np.random.default_rng(0)
    steps = generator.choice([-1, 0, 1], size=(16, *pixels.shape), p=[0.005, 0.99, 0.005]) / 255
    moved = [run(np.clip(pixels + step, 0, 1).astype(np.float32)) for step in steps]
    return float(np.abs(np.stack(moved) - run(pixels)).max())


INT8 = ["--precision", "int8", "--calibrate", str(shipped.FOLDER / "images.tar")]
RESIZED = {"to": [73, 73], "crop_pct": 0.875}  # of 64: nine pixels are cropped, an odd number
CROPPED = {**RESIZED, "crop_mode": "center", "interpolation": "bicubic"}
SQUASHED = {**RESIZED, "crop_mode": "squash", "interpolation": "bilinear"}


@pytest.mark.parametrize(
    ("name", "options", "resize", "near"),
    [
        ("fp32", [], None, 0.01),
        ("int8", INT8, None, None),  # as far as pixels that are rounded otherwise move it: `shaken`
        ("cropped", ["--normalize"], CROPPED, 0.05),
        ("squashed", ["--softmax"], SQUASHED, 0.01),
    ],
)
def test_same_top5(
    site: tuple[Path, str],
    name: str,
    options: list[str],
    resize: dict[str, Any] | None,
    near: float | None,
) -> None:
    folder, address = site
    file = folder / f"{name}.onnx"
    assert main(["export", str(shipped.FOLDER), "-o", str(file), *options]) == 0

    if resize:
        body: Any = sidecar.body_of(file, {})
        sidecar.write(formats.sidecar_of(file), {**body, "resize": resize})

    images = sorted(path.name for path in folder.glob("[0-9]*"))
    for image, lines in zip(images, shown(folder, address, file.name, images), strict=True):
        wanted = answers(file, folder / image)
        apart = shaken(file, folder / image) if near is None else near
        best = sorted(wanted, key=lambda label: -wanted[label])[:5]
        found = {line.split()[0]: float(line.split()[1]) for line in lines}
        assert found == pytest.approx({label: wanted[label] for label in found}, abs=apart), image
        if image.endswith("jpg"):  # nothing is scaled down: pixel by pixel what Pillow makes of it
            assert list(found) == best, image
        ranked = [wanted[label] for label in found]  # else what is next to equal may change places
        assert ranked == pytest.approx([wanted[label] for label in best], abs=2 * apart), image


def test_what_it_cannot_do_it_says(site: tuple[Path, str]) -> None:
    folder, address = site
    (image,) = sorted(path.name for path in folder.glob("0*.jpg"))
    with pytest.raises(AssertionError, match="nowhere"):
        shown(folder, address, "nowhere.onnx", [image])
