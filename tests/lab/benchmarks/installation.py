"""What `pip install -e .` downloads, and what it takes of the disk.

    python tests/lab/benchmarks/installation.py -o tests/lab/benchmarks/installation.md

pip resolves the dependencies for an empty environment (`--dry-run --report`), and the registry says
how large each wheel is. The disk is that of the files of the same packages in the environment that
runs this script. On macOS and Windows torch's wheel holds no CUDA, and needs none of its packages.
"""

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from kept import markdown_head, markdown_row, write_table

ROOT = Path(__file__).resolve().parents[3]
_GPU = ("nvidia-", "cuda-", "triton")
_PLATFORMS = {"macOS": "macosx_14_0_arm64", "Windows": "win_amd64"}


@dataclass(frozen=True)
class Package:
    """A package of an installation.

    Args:
        name: Its name.
        version: Its version.
        url: The address of its wheel.
    """

    name: str
    version: str
    url: str

    @property
    def is_for_gpus(self) -> bool:
        """Whether only a network on a GPU needs it."""
        return self.name.lower().startswith(_GPU)

    def download(self) -> int:
        """Return the bytes of the wheel."""
        request = urllib.request.Request(self.url, method="HEAD")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.headers["Content-Length"])

    def disk(self) -> int:
        """Return the bytes of its files in this environment.

        Raises:
            RuntimeError: This environment has another version.
        """
        installed = importlib.metadata.distribution(self.name)
        if installed.version != self.version:
            raise RuntimeError(f"{self.name} {installed.version} is installed, not {self.version}")
        files = [Path(str(file.locate())) for file in installed.files or ()]
        return sum(file.stat().st_size for file in files if file.is_file())


def resolved(*arguments: str) -> list[Package]:
    """Return what pip would install into an empty environment.

    Args:
        arguments: What is installed, and for which platform.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
        command += ["--ignore-installed", "--report", str(report), *arguments]
        subprocess.run(command, check=True, cwd=folder, capture_output=True)
        items = json.loads(report.read_text(encoding="utf-8"))["install"]
    packages = [
        Package(item["metadata"]["name"], item["metadata"]["version"], item["download_info"]["url"])
        for item in items
    ]
    return [package for package in packages if package.name != "normswap"]


def megabytes(sizes: list[int]) -> str:
    """Return the sum of sizes in bytes, in MB."""
    return f"{sum(sizes) / 1e6:.0f}"


def rows() -> list[str]:
    """Return the lines of the table."""
    packages = resolved("-e", str(ROOT))
    sizes = {package.name: package.download() for package in packages}
    torch = next(package for package in packages if package.name == "torch")
    needed = [package for package in packages if not package.is_for_gpus]

    lines = [markdown_head("system", "packages", "download, MB", "disk, MB")]
    disk = megabytes([package.disk() for package in packages])
    lines.append(markdown_row("Linux", len(packages), megabytes(list(sizes.values())), disk))
    for_gpus = [package for package in packages if package.is_for_gpus]
    download = megabytes([sizes[package.name] for package in for_gpus])
    disk = megabytes([package.disk() for package in for_gpus])
    lines.append(markdown_row("of it for GPUs", len(for_gpus), download, disk))

    for system, platform in _PLATFORMS.items():
        options = ("--no-deps", "--only-binary=:all:", "--target", "there", "--platform", platform)
        (wheel,) = resolved(*options, f"torch=={torch.version}")
        others = [sizes[package.name] for package in needed if package != torch]
        download = megabytes([*others, wheel.download()])
        lines.append(markdown_row(system, len(needed), download, ""))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    output = parser.parse_args().output
    note = (
        "For Python 3.11; `of it for GPUs` are CUDA's libraries and Triton, which torch's wheel for"
        " Linux asks for. Of macOS and Windows only torch's wheel is another one here."
    )
    command = f"benchmarks/installation.py -o {output}"
    write_table(output, "What the installation needs", command, [note, "", *rows()])


if __name__ == "__main__":
    main()
