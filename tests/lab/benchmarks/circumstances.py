"""What a measurement was made with, for the head of its table."""

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import timm
import torch

import normswap


def lines(command: str, device: str) -> list[str]:
    """Command, machine, versions, commit and date, in Markdown."""
    name = torch.cuda.get_device_name() if device == "cuda" else processor()
    return [
        f"Command: `{command}`",
        "",
        (
            f"On {name}, {torch.get_num_threads()} thread(s); torch {torch.__version__}, timm"
            f" {timm.__version__}, Python {platform.python_version()}; commit {commit()},"
            f" {time.strftime('%Y-%m-%d')}; load {os.getloadavg()[0]:.1f} when it was written."
        ),
        "",
    ]


def commit() -> str:
    """Of the package that was measured, and whether it was changed since; `unknown` outside of a
    checkout.
    """
    name = _git("rev-parse", "--short", "HEAD")
    state = "changed since" if _git("status", "--porcelain", ".") else "clean"
    return f"{name} ({state})" if name else "unknown"


def _git(*words: str) -> str:
    here = Path(normswap.__file__).parent
    return subprocess.run(
        ["git", *words], cwd=here, capture_output=True, text=True, check=False
    ).stdout.strip()


def versions(packages: Iterable[str]) -> str:
    """Of those that are installed."""
    found = []
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package).partition('-')[0]}")
    return ", ".join(found)


def processor() -> str:
    info = Path("/proc/cpuinfo")
    found = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in found if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
