"""The README's two set-up commands, so that CI runs what the README says.

`python tests/readme_commands.py tests` prints the command that runs the tests, `demo` the other.
"""

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
# How each command ends, by the name that it is asked for by.
_ENDINGS = {"demo": "normswap demo", "tests": "pytest -n 2 --dist worksteal"}


def blocks(language: str) -> list[str]:
    """Return the README's fenced code blocks of one language."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.M | re.S)
    return [block.strip() for block in pattern.findall(README.read_text(encoding="utf-8"))]


def command(name: str) -> str:
    """Return the command that runs the demo (`demo`), or the one that runs the tests (`tests`)."""
    (found,) = [block for block in blocks("bash") if block.endswith(_ENDINGS[name])]
    return found


if __name__ == "__main__":
    print(command(sys.argv[1]))
