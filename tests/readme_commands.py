"""The README's two set-up commands, for CI to run what the README says: `python
tests/readme_commands.py tests`.
"""

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def blocks(language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return [
        block.strip()
        for block in re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.M | re.S)
    ]


def command(which: str) -> str:
    """The command that runs the demo, or the one that runs the tests."""
    ending = {"demo": "normswap demo", "tests": "pytest -n 2 --dist worksteal"}[which]
    (found,) = [block for block in blocks("bash") if block.endswith(ending)]
    return found


if __name__ == "__main__":
    print(command(sys.argv[1]))
