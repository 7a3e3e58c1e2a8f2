"""Every code block of docs/ runs, in the order of its page, and prints what the page shows.

Tables are as the scripts write them.
"""

import functools
import inspect
import json
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docs_pages import (
    AFTER_TRAINING,
    PAGES,
    ROOT,
    WITH_TABLES,
    Block,
    after_training,
    blocks,
    filled,
    without_tables,
)
from support import needs
from support.hub_server import hub_server, use_hub

import normswap
from normswap.cli.app import load, main
from normswap.cli.commands import SUMMARIES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def shell(line: str) -> int:
    """The exit code of a command line; what it installs counts as installed, if it is an extra."""
    words = shlex.split(line, comments=True)
    if words[:2] == ["pip", "install"]:
        for extras in re.findall(r"\[(.*?)\]", line):
            assert [extra for extra in extras.split(",") if extra not in EXTRAS] == []
        return 0
    # test_web_page.py does that, and opens the page, too.
    if words[:2] == ["npm", "install"]:
        return 0
    # It runs in this process, as starting one takes longest.
    if words[:2] == ["python", "-c"]:
        exec(words[2], {"__name__": "__main__"})
        return 0
    if words[0] == "python":
        return subprocess.run([sys.executable, *words[1:]], check=False).returncode
    assert words[0] == "normswap", f"no command of a page: {line}"
    return main(words[1:])


def alike(shown: str, printed: str) -> bool:
    """Whether two texts are the same but for white space and what `...` stands for.

    doctest's own `...` wants spaces around it.
    """
    parts = (re.escape(" ".join(part.split())) for part in shown.split("..."))
    return re.fullmatch(".*".join(parts), " ".join(printed.split())) is not None


def run(page: Path, story: list[Block], capture: pytest.CaptureFixture[str]) -> None:
    """Run the blocks of a page in the working directory, and compare what they print."""
    names: dict[str, Any] = {"__name__": "page"}
    printed = ""
    for block in story:
        if block.language == "text":
            assert alike(block.text, printed), (
                f"{page.name} shows\n{block.text}\nbut it printed\n{printed}"
            )
            continue
        capture.readouterr()
        if block.file:
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            exec(compile(block.text, str(page), "exec"), names)
        else:
            assert block.language == "bash"
            for line in block.lines():
                assert shell(line) == block.exit_code, line
        captured = capture.readouterr()
        printed = captured.err if block.exit_code else captured.out


def demand(page: Path) -> None:
    """Leave the test out where a package that the page needs is not installed."""
    for package in sorted({block.needs for block in blocks(page)} - {""}):
        needs.package(package)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory, and a hub on this machine."""
    (tmp_path / "desk").mkdir()
    monkeypatch.chdir(tmp_path / "desk")
    monkeypatch.setenv("COLUMNS", "100")
    with hub_server({}, store=tmp_path / "store") as url:
        use_hub(monkeypatch, url, tmp_path / "home")
        yield tmp_path / "desk"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.usefixtures("desk")
def test_blocks_run(page: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(page, [block for block in blocks(page) if not block.slow], capfd)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of the libraries that pages show
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(block.slow for block in blocks(page))],
    ids=lambda page: page.stem,
)
@pytest.mark.usefixtures("desk")
def test_all_blocks_run(page: Path, capfd: pytest.CaptureFixture[str]) -> None:
    demand(page)
    run(page, blocks(page), capfd)


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries that they show
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.stem)
@pytest.mark.usefixtures("desk")
def test_notebooks_run(notebook: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec(compile("".join(cell["source"]), f"{notebook.name}[{number}]", "exec"), names)


def test_notebooks_are_linked() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert NOTEBOOKS
    assert all(f"notebooks/{notebook.name})" in index for notebook in NOTEBOOKS)


@pytest.mark.parametrize("page", WITH_TABLES, ids=lambda page: page.stem)
def test_tables_are_those_of_the_scripts(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == filled(text)
    rest = without_tables(text)
    tables = re.findall(r"(?:^\|.*\n)+", rest, re.M)
    assert len(tables) == rest.count("<!-- words -->"), "a table that no script wrote"


def test_advise_reads_the_table_of_the_script() -> None:
    assert AFTER_TRAINING.read_text(encoding="utf-8") == after_training()


# Options of other tools that pages name.
OTHER_TOOLS = {
    # pytest and MkDocs
    "--dist",
    "--strict",
    # recipes/zoo.py
    "--images",
    # torchrun
    "--nnodes",
    "--nproc-per-node",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--max-restarts",
    # trtexec, with --stronglyTyped and --noTF32
    "--onnx",
    "--strongly",
    "--no",
    # timm's train.py, validate.py and avg_checkpoints.py
    "--checkpoint",
    "--data-dir",
    "--experiment",
    "--model",
    # accelerate launch
    "--multi-gpu",
    "--num-machines",
    "--machine-rank",
    "--num-processes",
    "--main-process-ip",
    "--main-process-port",
}


@functools.cache
def options() -> set[str]:
    """The names of the options of all commands."""
    names: set[str] = set()
    for command in SUMMARIES:
        for parameter in load(command).params:
            names.update(parameter.opts)
    return names


@pytest.mark.parametrize("page", WITH_TABLES, ids=lambda page: page.stem)
def test_options_exist(page: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text(encoding="utf-8")))
    assert named - options() - OTHER_TOOLS == set()


@pages
def test_the_index_has_it(page: Path) -> None:
    index = ROOT / "docs" / "README.md"
    assert page == index or f"({page.name})" in index.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("```bash\nnormswap schemes --nonsense\n```", "nonsense"),
        ("```bash\nrm -rf it\n```", "no command of a page"),
        ("```bash\npip install 'normswap[nothing]'\n```", "nothing"),
        ("```python\nprint(1)\n```\n```text\n2\n```", "but it printed"),
    ],
)
def test_a_wrong_page_is_seen(
    text: str, why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{text}\n", encoding="utf-8")
    with pytest.raises(AssertionError, match=why):
        run(page, blocks(page), capfd)


def test_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python slow needs=no_such_package\n1\n```\n```bash exit=2\n```\n```python"
        " file=a.py\n```\n",
        encoding="utf-8",
    )
    marks = [(block.slow, block.needs, block.exit_code, block.file) for block in blocks(page)]
    assert marks == [(True, "no_such_package", 0, ""), (False, "", 2, ""), (False, "", 0, "a.py")]
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        demand(page)


def test_every_public_name_has_an_example() -> None:
    """The examples are run as the blocks of their page."""
    code = "\n".join(
        block.text for block in blocks(ROOT / "docs" / "api.md") if block.language == "python"
    )
    names = [name for name in normswap.__all__ if not name.startswith("_")]

    assert [name for name in names if not re.search(rf"normswap\.{name}\b", code)] == []


def test_every_public_function_says_what_it_returns() -> None:
    values = {name: getattr(normswap, name) for name in normswap.__all__}
    functions = [value for value in values.values() if inspect.isfunction(value)]
    documents = {function.__name__: function.__doc__ or "" for function in functions}
    assert [name for name, text in documents.items() if not re.search(r"Returns?\b", text)] == []


def test_what_the_site_makes_of_docstrings_has_one_name_a_line():
    """mkdocstrings takes `first, second:` for one argument's name, and a strict build stops."""
    api = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    paths = re.findall(r"^::: (\S+)$", api, re.MULTILINE)
    assert len(paths) > 20

    several = re.compile(r"^ +[a-z]\w*(?:, [a-z]\w*)+: .*$", re.MULTILINE)
    for path in paths:
        assert several.findall(pkgutil.resolve_name(path).__doc__ or "") == [], path


def arguments_of(public: object) -> set[str]:
    """The parameters of a function, or the fields of a record, without `self` and private ones."""
    parameters = inspect.signature(public).parameters
    return {name for name in parameters if not name.startswith("_")}


def described_in(docstring: str) -> set[str]:
    """The arguments that have a line of their own in the docstring's Args."""
    described: set[str] = set()
    _, _, after = docstring.partition("Args:\n")
    for line in after.splitlines():
        # The section ends at the first line that is not indented.
        if line and not line.startswith(" "):
            break
        described.update(re.findall(r"^ {4}(\w+):", line))
    return described


def test_every_argument_on_the_page_of_python_has_a_line_of_its_own() -> None:
    paths = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.M)
    missing = {}
    for path in paths:
        public = pkgutil.resolve_name(path)
        # The keys of a recipe are listed by `normswap recipes --keys`.
        if path == "normswap.training.recipe.Recipe":
            continue
        silent = arguments_of(public) - described_in(inspect.getdoc(public) or "")
        if silent:
            missing[path] = sorted(silent)

    assert missing == {}
    assert described_in("One.\n\nArgs:\n    first: It is one; second: It is two.\n") == {"first"}
