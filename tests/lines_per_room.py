"""The lines of each room of the package and of the tests, beside those of an earlier commit.

`.ci/run` prints this table at its end. It shows a trend and sets no limit. The earlier commit is
the last tag, or, if there is none, the first commit since Monday. A clone without history has no
earlier commit: then the table has the lines of today alone.

    python tests/lines_per_room.py [FILE.json ...]

Each file is what `pytest --core-seconds FILE.json` wrote. A table of the seconds on a core that the
tests of each room took stands below that of the lines.
"""

import datetime
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREES = ("normswap", "tests")


def git(*words: str) -> str:
    """Return what git prints, or nothing if git fails or is not installed."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=False)
    except OSError:
        return ""
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else ""


def earlier_commit() -> tuple[str, str]:
    """Return the commit to compare with, and its description; both are empty if there is none."""
    tag = git("describe", "--tags", "--abbrev=0", "HEAD^")
    if tag:
        return tag, tag

    today = datetime.date.today()
    monday = today - datetime.timedelta(days=today.weekday())
    commits = git("log", "--reverse", "--format=%h", f"--since={monday} 00:00").splitlines()
    head = git("rev-parse", "--short", "HEAD")
    if not commits or commits[0] == head:
        return "", ""
    return commits[0], f"{commits[0]}, the first commit of the week"


def room_of(path: str) -> str:
    """Return the room of a file: a folder of the package or the tests, or the tree itself."""
    tree, *rest = path.split("/")
    return f"{tree}/{rest[0]}/" if len(rest) > 1 else f"{tree}/*.py"


def lines_now() -> Counter[str]:
    """Return the lines of the Python files of each room, as they stand on disk."""
    lines: Counter[str] = Counter()
    for tree in TREES:
        for file in (ROOT / tree).rglob("*.py"):
            text = file.read_text(encoding="utf-8", errors="replace")
            lines[room_of(file.relative_to(ROOT).as_posix())] += len(text.splitlines())
    return lines


def lines_at(commit: str) -> Counter[str]:
    """Return the lines of the Python files of each room in a commit."""
    empty_tree = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
    lines: Counter[str] = Counter()
    for row in git(
        "diff", "--numstat", "--no-renames", empty_tree, commit, "--", *TREES
    ).splitlines():
        added, _, path = row.split("\t", 2)
        if path.endswith(".py"):
            lines[room_of(path)] += int(added)
    return lines


def table(now: Counter[str], before: Counter[str], description: str) -> str:
    """Return the table as text: a row for each room, and one for each tree."""
    now = now + totals(now)
    before = before + totals(before)
    title = "Lines per room" + (f", beside {description}" if before else "")
    rows = [title]
    for room in sorted(now.keys() | before.keys()):
        row = f"{room:<28}{now[room]:>8,}"
        if before:
            row += f"{before[room]:>9,}{now[room] - before[room]:>+8,}"
        rows.append(row)
    return "\n".join(rows)


def totals(lines: Counter[str]) -> Counter[str]:
    """Return the lines of each tree."""
    trees: Counter[str] = Counter()
    for room, count in lines.items():
        trees[room.partition("/")[0]] += count
    return trees


def table_of_seconds(files: list[str]) -> str:
    """Return the core seconds of each room as text, a column for each file that is there."""
    runs = {
        Path(file).stem: json.loads(Path(file).read_text(encoding="utf-8"))["rooms"]
        for file in files
    }
    rows = ["Core seconds per room" + "".join(f"{name:>10}" for name in runs)]

    rooms = sorted({room for seconds in runs.values() for room in seconds})
    for room in rooms:
        figures = [seconds.get(room, 0.0) for seconds in runs.values()]
        rows.append(f"{room:<21}" + "".join(f"{figure:>10,.1f}" for figure in figures))

    sums = [sum(seconds.values()) for seconds in runs.values()]
    rows.append(f"{'in all':<21}" + "".join(f"{total:>10,.1f}" for total in sums))
    return "\n".join(rows)


def main(files: list[str]) -> None:
    """Print the tables.

    Args:
        files: What `pytest --core-seconds` wrote. One that is missing is left out.
    """
    commit, description = earlier_commit()
    before = lines_at(commit) if commit else Counter[str]()
    print(table(lines_now(), before, description))

    written = [file for file in files if Path(file).is_file()]
    if written:
        print(table_of_seconds(written))


if __name__ == "__main__":
    main(sys.argv[1:])
