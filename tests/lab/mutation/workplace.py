"""A copy of the checkout in which errors are planted, and what the tests say of it there."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]
_SERVER = multiprocessing.get_context("forkserver")  # imports what takes long once, and forks
_SERVER.set_forkserver_preload([
    "pytest", "hypothesis", "timm", "torchvision", "accelerate", "torch._dynamo", "torch.onnx", "onnxscript",
    "onnxruntime", "matplotlib.figure", "optuna", "opacus", "transformers", "segmentation_models_pytorch",
])  # fmt: skip
# of pytest's: passed; failed; a file that cannot be imported, or has no such test. A process that breaks ends with 1.
_CODES = {0: 0, 1: 100, 2: 101, 4: 101}
LIMIT = 900  # seconds for the tests of one error: a test that then still runs has noticed
_FIRST = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


class Outcome(NamedTuple):
    """What the tests said: did they fail, and which of them first?"""

    killed: bool
    first: str


@contextmanager
def copied() -> Iterator[Path]:
    """A temporary copy of what git knows or would add: package, tests, recipes."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        place = Path(name)
        for file in filter(None, listed.split("\0")):
            if (ROOT / file).is_file():
                (place / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, place / file)
        yield place


@contextmanager
def written(file: Path, text: str) -> Iterator[None]:
    """For a while, the file has this text."""
    before = file.read_text(encoding="utf-8")
    file.write_text(text, encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(before, encoding="utf-8")


def outcome_of(place: Path, tests: Sequence[str], limit: float = LIMIT) -> Outcome:
    """Run some tests in the copy, up to the first that fails, in a process of their own.

    Raises:
        SystemExit: pytest itself broke.
    """
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "said"
        process = _SERVER.Process(target=_run, args=(place, list(tests), said))
        process.start()
        process.join(limit)
        if process.exitcode is None:
            process.kill()
            process.join()
            return Outcome(True, f"none in {limit:.0f} s")
        text = said.read_text(encoding="utf-8")
    found = _FIRST.search(text)
    if process.exitcode not in _CODES.values():
        raise SystemExit(f"{' '.join(tests)} cannot be run: {text[-300:].strip()}")
    return Outcome(process.exitcode != _CODES[0], found.group(1) if found else "")


def _run(place: Path, tests: list[str], said: Path) -> None:
    """In a process that has imported what takes long, but nothing of the package."""
    with said.open("w", encoding="utf-8") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    assert "normswap" not in sys.modules
    os.chdir(place)
    os.environ.update(PYTHONPATH=str(place), OMP_NUM_THREADS="1", COLUMNS="1000")
    sys.path[:] = [str(place), *(one for one in sys.path if ROOT not in (Path(one), *Path(one).parents))]
    sys.dont_write_bytecode = True
    logging.getLogger("torch.utils._pytree").disabled = True  # it logs where torchao is imported for the first time
    main = sys.modules["__main__"]  # ours: processes that a test starts would import it again, and fail
    main.__spec__ = None
    main.__dict__.pop("__file__", None)
    import pytest

    # plugins that are there already have nothing to be rewritten
    quiet = ["-p", "no:cacheprovider", "--tb=no", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    sys.exit(_CODES.get(int(pytest.main(["-x", "-q", *quiet, *tests])), 2))


def compile_all(place: Path) -> None:
    """Write the byte code of package and tests. Later runs write none, and do not take that of a file that has changed:
    files of the copy are as old as in the checkout, a planted one is new."""
    env = {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
    collect = ["pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests"]
    for words in (["compileall", "-q", "normswap"], collect):
        subprocess.run([sys.executable, "-m", *words], cwd=place, env=env, stdout=subprocess.DEVNULL, check=True)


def check_the_copy(place: Path) -> None:
    """Raises:
    SystemExit: Python finds another package than the copy.
    """
    code = "import normswap; print(normswap.__file__)"
    env = {**os.environ, "PYTHONPATH": str(place)}
    found = subprocess.run([sys.executable, "-c", code], cwd=place, env=env, capture_output=True, text=True, check=True)
    if place.resolve() not in Path(found.stdout.strip()).resolve().parents:
        raise SystemExit(f"tests would not see what is planted: Python finds {found.stdout.strip()}")


def circumstance() -> Any:
    """Of all tables of the repository."""
    sys.path.insert(0, str(ROOT / "tests" / "lab" / "benchmarks"))
    import circumstances

    return circumstances
