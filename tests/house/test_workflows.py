"""The files by which outsiders see the tests: they parse, and say what pyproject.toml says."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import needs

from normswap import reading

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
SCHEMAS = {
    "workflows/ci.yml": "vendor.github-workflows",
    "workflows/release.yml": "vendor.github-workflows",
    "dependabot.yml": "vendor.dependabot",
    "ISSUE_TEMPLATE/bug.yml": "vendor.github-issue-forms",
    "ISSUE_TEMPLATE/wish.yml": "vendor.github-issue-forms",
    "ISSUE_TEMPLATE/config.yml": "vendor.github-issue-config",
}


def parsed(name: str) -> Any:
    return reading.parse_yaml((GITHUB / name).read_text(encoding="utf-8"))


def scripts(workflow: Any) -> list[str]:
    """What the steps of a workflow run in a shell."""
    steps: list[Any] = []
    for job in workflow["jobs"].values():
        steps += job["steps"]
    return [step["run"] for step in steps if "run" in step]


def test_every_file_has_a_schema() -> None:
    files = {path.relative_to(GITHUB).as_posix() for path in GITHUB.rglob("*.yml")}
    assert files == set(SCHEMAS)


def test_ci_runs_what_is_run_here_on_the_lowest_python() -> None:
    workflow = parsed("workflows/ci.yml")
    lowest = re.search(
        r'requires-python = ">=([0-9.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )
    assert lowest is not None
    pythons = workflow["jobs"]["linux"]["strategy"]["matrix"]["python"]

    assert pythons[0] == lowest[1]
    assert all(isinstance(version, str) for version in pythons), "3.10 is no number"
    assert ".ci/run" in scripts(workflow)
    for words in " ".join(scripts(workflow)).split():
        if words.startswith(("tests/", ".ci/")):
            assert (ROOT / words).is_file(), words


def test_a_release_is_built_as_here_and_needs_no_token() -> None:
    workflow = parsed("workflows/release.yml")
    assert ".ci/release" in scripts(workflow)
    publish = workflow["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert "secrets" not in (GITHUB / "workflows/release.yml").read_text(encoding="utf-8")


def test_a_report_of_an_error_asks_the_doctor() -> None:
    fields = {field["id"]: field for field in parsed("ISSUE_TEMPLATE/bug.yml")["body"]}
    assert "normswap doctor MODEL --json" in fields["doctor"]["attributes"]["description"]
    assert fields["doctor"]["validations"]["required"]


@pytest.mark.parametrize("name", SCHEMAS)
def test_github_can_read_it(name: str) -> None:
    needs.need("check_jsonschema")
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", SCHEMAS[name]]
    done = subprocess.run([*check, str(GITHUB / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
