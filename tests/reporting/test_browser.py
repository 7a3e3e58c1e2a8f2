"""The look of the report: its contrast, and in a browser light and dark, narrow and wide, with a silent console."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, FLAGS
from PIL import Image
from reports import source

import normswap
from normswap.reporting import page, report
from normswap.storage.checkpoint import open_model

FRAME = """<!doctype html><title>frame</title><style>:root {{ color-scheme: light dark }} body {{ margin: 0 }}</style>
<link rel="icon" href="data:,"><iframe src="page.html" style="width: {width}px; height: 2400px; border: 0"></iframe>"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    home = tmp_path_factory.mktemp("browser")
    done = normswap.convert(open_model(str(source(home / "v2", "v2"))), "skipinit")
    return page.render(report.collect(normswap.save(done, home / "result")))


def look(html: str, folder: Path, width: int, *, dark: bool = False) -> tuple[list[str], Image.Image]:
    """What the page says in the console, its last line `WIDTH content frame`, and a screenshot of it."""
    probe = "<script>console.log('WIDTH', document.documentElement.scrollWidth, innerWidth)</script></body>"
    (folder / "page.html").write_text(html.replace("</body>", probe))
    # in a frame, because headless Chromium has no windows narrower than 500 pixels
    (folder / "frame.html").write_text(FRAME.format(width=width))
    shot, scheme = folder / "shot.png", f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [str(CHROMIUM), *FLAGS, scheme, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},2400",
               f"--screenshot={shot}", f"file://{folder / 'frame.html'}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return said, Image.open(shot).convert("RGB").crop((0, 0, width, 2400))


def widths(said: list[str]) -> tuple[int, int]:
    found = re.search(r"WIDTH (\d+) (\d+)", said[-1])
    assert found
    return int(found[1]), int(found[2])


def colours(picture: Image.Image) -> int:
    counted = picture.getcolors(1 << 24)
    assert counted is not None
    return len(counted)


def needs_browser(test: Any) -> Any:
    """Mark a test that starts Chromium: slow, and left out where there is none."""
    return pytest.mark.slow(pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")(test))


@needs_browser
@pytest.mark.parametrize(("dark", "width"), [(False, 400), (True, 1400)], ids=["light, narrow", "dark, wide"])
def test_renders(written: str, tmp_path: Path, dark: bool, width: int) -> None:
    said, picture = look(written, tmp_path, width, dark=dark)
    assert len(said) == 1, said
    content, frame = widths(said)
    assert content <= frame == width
    corner = picture.getpixel((2, 2))
    assert isinstance(corner, tuple)
    assert (sum(corner) < 150) is dark
    assert colours(picture) > 200


@needs_browser
def test_a_bad_page_is_noticed(tmp_path: Path) -> None:
    wide = "<script>console.error('broken')</script><div style='width: 900px'>x</div>"
    said, picture = look(f"<!doctype html><body>{wide}</body>", tmp_path, 400)
    assert len(said) == 2
    content, frame = widths(said)
    assert content > frame
    assert colours(picture) < 200


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_contrast(theme: int) -> None:
    """WCAG 2.1: 4.5 for text, 3 for graphics."""
    css = (Path(normswap.__file__).parent / "reporting/report.css").read_text()
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", re.findall(r":root \{(.*?)\}", css, re.DOTALL)[theme]))

    def contrast(one: str, two: str) -> float:
        low, high = sorted((luminance(colours[one]), luminance(colours[two])))
        return (high + 0.05) / (low + 0.05)

    for ground in ("paper", "card", "band"):
        assert all(contrast(text, ground) >= 4.5 for text in ("ink", "quiet", "link"))
        assert all(contrast(f"c{i}", ground) >= 3 for i in range(1, 6))
    assert min(contrast("good", "good-paper"), contrast("bad", "bad-paper"), contrast("ink", "note-paper")) >= 4.5
