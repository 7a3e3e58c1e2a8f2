"""How many lines each room may have, and all together: whoever adds a feature takes as much out."""

from collections.abc import Mapping
from pathlib import Path

import pytest

import normswap

ROOT = Path(normswap.__file__).parent
TESTS = ROOT.parent / "tests"
# Lines of normswap/, docstrings and blank ones too. "ground": the files that are in no room. What a room needs beyond
# the design's number, another has lent to it; the sum does not move.
ROOMS = {
    "ground": 815, "layers": 2500, "models": 2310, "graph": 1760, "images": 600, "calibration": 2040, "folding": 1520,
    "schemes": 2025, "surgery": 2520, "storage": 700, "analysis": 790, "diagnosis": 1410, "training": 2140,
    "exporting": 2950, "benchmarking": 140, "reporting": 530, "cli": 2725,
}  # fmt: skip
TOGETHER = {"all rooms": 27000, "files of the package": 230, "tests": 32000, "of them the laboratory": 6000}


def lines(files: list[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def room_of(file: Path) -> str:
    parts = file.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else "ground"


def counted() -> dict[str, int]:
    package = sorted(ROOT.rglob("*.py"))
    rooms = {room_of(file): 0 for file in package}
    for file in package:
        rooms[room_of(file)] += lines([file])
    # Whoever installs the plugin of the tests leaves a build folder there.
    tests = [file for file in sorted(TESTS.rglob("*.py")) if "build" not in file.parts]
    laboratory = [file for file in tests if file.is_relative_to(TESTS / "lab")]
    together = (sum(rooms.values()), len(package), lines(tests), lines(laboratory))
    return {**rooms, **dict(zip(TOGETHER, together, strict=True))}


def table(numbers: Mapping[str, int], budgets: Mapping[str, int]) -> str:
    """What there is beside what there may be."""
    rows = [f"{'room':24}{'lines':>8}{'budget':>8}"]
    for name, budget in budgets.items():
        number = numbers.get(name, 0)
        rows.append(f"{name:24}{number:8}{budget:8}{'  over' if number > budget else ''}")
    return "\n".join(rows)


def test_no_room_is_over_its_budget() -> None:
    budgets, numbers = {**ROOMS, **TOGETHER}, counted()
    if any(number > budgets.get(name, 0) for name, number in numbers.items()):
        pytest.fail(f"over budget:\n{table(numbers, budgets)}", pytrace=False)


def test_a_room_that_grows_is_seen() -> None:
    assert table({"attic": 11}, {"attic": 10}).splitlines()[1].endswith("11      10  over")
    assert "over" not in table({"attic": 10}, {"attic": 10})
