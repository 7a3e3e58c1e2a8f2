"""The house rules: rooms stand on each other in one order, and nobody reaches into another file.

Every import counts, also those inside functions: they start a command faster, they do not make a
rule void.
"""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import needs
from support.room_order import FLOOR

import normswap

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(normswap.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
TERMINAL = {"typer", "rich", "click"}
# The file of the public names, and the door.
FACE = {"", "__main__"}
Edges = dict[str, set[str]]


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@functools.cache
def imports(text: str) -> tuple[str, ...]:
    """Return the absolute names that a file imports: for `from a import b` both `a` and `a.b`."""
    return tuple(_imports(text))


def _imports(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def edges_of(texts: dict[str, str]) -> Edges:
    """The files that each file imports, by name.

    A folder's own `__init__` counts only if no file in the folder is imported.
    """
    edges: Edges = {}
    for name, text in texts.items():
        ours = [target for target in imports(text) if target.startswith("normswap.")]
        found = {target.removeprefix("normswap.") for target in ours} & texts.keys()
        parents = {
            target for target in found if any(other.startswith(f"{target}.") for other in found)
        }
        edges[name] = found - parents
    return edges


@functools.cache
def house() -> Edges:
    return edges_of({name_of(file): file.read_text(encoding="utf-8") for file in FILES})


def reach(edges: Edges, start: str) -> set[str]:
    """Everything that importing `start` imports, itself left out unless it is in a circle."""
    seen: set[str] = set()
    ahead = [*edges[start]]
    while ahead:
        name = ahead.pop()
        if name not in seen:
            seen.add(name)
            ahead += edges[name]
    return seen


def circles(edges: Edges) -> list[str]:
    return [name for name in edges if name in reach(edges, name)]


def climbs(edges: Edges) -> list[str]:
    """Imports of a room above one's own, or of one beside it."""
    found = []
    for name, targets in edges.items():
        for target in sorted(targets - FACE) if name not in FACE else ():
            mine = name.split(".")[0]
            theirs = target.split(".")[0]
            if mine != theirs and FLOOR[theirs] >= FLOOR[mine]:
                found.append(f"{name} -> {target}")
    return found


def reaches_in(text: str) -> list[str]:
    """Private names of other files of the package that a file uses."""
    modules: set[str] = set()
    found = []

    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "normswap":
            modules |= {alias.asname or alias.name for alias in node.names}
            found += [alias.name for alias in node.names if private(alias.name)]

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = node.value.id
            if owner in modules and owner.islower() and private(node.attr):
                found.append(f"{owner}.{node.attr}")

    return found


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def public_functions() -> set[str]:
    return {name for name in dir(normswap) if name.islower() and not name.startswith("_")}


def test_the_order_names_every_room() -> None:
    there = {
        path.stem
        for path in ROOT.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert there - {"__init__", "__main__"} == FLOOR.keys()


def test_imports_run_in_no_circle() -> None:
    assert circles(house()) == []


def test_imports_point_down() -> None:
    assert climbs(house()) == []


def test_nobody_uses_what_is_private_to_another_file() -> None:
    assert {
        name_of(file): found
        for file in FILES
        if (found := reaches_in(file.read_text(encoding="utf-8")))
    } == {}


def test_the_terminal_stays_in_its_room() -> None:
    uses = {
        name_of(file): {name.split(".")[0] for name in imports(file.read_text(encoding="utf-8"))}
        & TERMINAL
        for file in FILES
    }
    assert [name for name, roots in uses.items() if roots and name.split(".")[0] != "cli"] == []


def test_files_say_what_they_are() -> None:
    texts = {name_of(file): file.read_text(encoding="utf-8") for file in FILES}
    assert [name for name, text in texts.items() if not ast.get_docstring(ast.parse(text))] == []


def test_nothing_has_the_name_of_a_public_function() -> None:
    assert [
        path
        for path in ROOT.rglob("*")
        if path.stem in public_functions() and "__pycache__" not in str(path)
    ] == []


def crowded(text: str) -> list[str]:
    """Functions with more than eight parameters, `self` and `**options` counted."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    counts = {
        node.name: (
            len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
            + bool(node.args.vararg)
            + bool(node.args.kwarg)
        )
        for node in functions
    }
    return [name for name, count in counts.items() if count > 8]


def test_functions_take_at_most_eight_parameters() -> None:
    assert {
        name_of(file): found
        for file in FILES
        if (found := crowded(file.read_text(encoding="utf-8")))
    } == {}


def test_folders_are_named_when_packed() -> None:
    packed = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "setuptools"
    ]["packages"]
    folders = {".".join(("normswap", *file.parent.relative_to(ROOT).parts)) for file in FILES}
    assert set(packed) == folders | {"normswap.recipes"}


LIGHT = """
import importlib, sys
for module in ("", ".plan", ".errors", ".schemes", ".training.recipe", ".cli.app"):
    importlib.import_module(f"normswap{module}")
    assert not {"torch", "timm"} & sys.modules.keys(), module
from normswap.cli.app import main
for command in ("--help", "schemes", "schemes dyt --json"):
    main(command.split())
    assert not {"torch", "timm"} & sys.modules.keys(), command
"""


def test_light_modules_and_commands_do_not_import_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_public_names_are_there() -> None:
    names = dir(normswap)
    assert len(set(names)) == len(names)

    for name in names:
        assert getattr(normswap, name) is not None
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    imported = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and "normswap" in str(node.module)
    ]

    declared = {alias.asname or "open" for node in imported for alias in node.names}
    # Names of commands work in Python, and are not listed beside the functions' own.
    assert set(names) == declared - set(normswap._COMMANDS)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = normswap.nonsense


# What the room `sites` has for other rooms to ask, beside its records.
ASKED_ELSEWHERE = {"Pair", "Statistics", "output_moments", "register_norm"}
CLASSIFYING = ("affine", "known_norms", "position_norms")
NORM_CLASS = re.compile(r"(Batch|Layer|Group|Instance|Response|RMS|Rms)Norm")


def classifies(text: str) -> list[str]:
    """Return where a file decides by itself what kind of norm a module is."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("normswap.sites"):
            names = {alias.name for alias in node.names}
            file = str(node.module).rpartition(".")[2]
            if file in CLASSIFYING:
                found += sorted(names - ASKED_ELSEWHERE)
            elif file == "sites":
                found += sorted(names & set(CLASSIFYING))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            kinds = ast.unparse(node.args[1])
            if NORM_CLASS.search(kinds):
                found.append(kinds)
    return found


def test_what_a_module_is_is_decided_in_its_room() -> None:
    elsewhere = [file for file in FILES if name_of(file).split(".")[0] not in ("sites", "layers")]
    found = {name_of(file): classifies(file.read_text(encoding="utf-8")) for file in elsewhere}
    assert {name: asked for name, asked in found.items() if asked} == {}


def test_an_asking_elsewhere_is_seen() -> None:
    assert classifies("from normswap.sites import affine, own_forwards") == ["affine"]
    assert classifies("from normswap.sites.known_norms import Pair, kind_of") == ["kind_of"]
    assert classifies("isinstance(norm, (nn.Linear, nn.BatchNorm2d))") != []
    assert classifies("from normswap.sites.site import site_of\nisinstance(x, nn.Linear)") == []


# The keywords of `open`, and the functions that read or write text: with the place of their mode,
# "r" by default, or with None if they have no mode. `Path.open` has its mode in the first place.
OPENING = {"mode", "buffering", "errors", "newline", "closefd", "opener"}
TEXTS = {"read_text": None, "write_text": None, "TextIOWrapper": None, "open": 1, "fdopen": 1}
MODE = re.compile("[rwaxbt+]+")


def decodes(call: ast.Call) -> bool:
    """Whether a call reads or writes text, or opens a text file, or runs a process for its text."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if "text" in keywords or "universal_newlines" in keywords:
        return ast.unparse(call.func).startswith("subprocess.")

    is_method = isinstance(call.func, ast.Attribute)
    name = ast.unparse(call.func).rpartition(".")[2]
    if name not in TEXTS:
        return False
    place = TEXTS[name]
    if place is None:
        return True
    if is_method and name == "open":
        place = 0

    mode = keywords.get("mode", ast.Constant("r"))
    if len(call.args) > place:
        mode = call.args[place]
    # Other things than files are opened, too: a network, or an image by its path.
    is_mode = isinstance(mode, ast.Constant) and MODE.fullmatch(str(mode.value))
    return bool(is_mode) and keywords.keys() <= OPENING and "b" not in mode.value


def without_encoding(text: str) -> list[str]:
    """Return the calls that leave the encoding of a text to the system: UTF-8 on Linux alone."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return [
        ast.unparse(call)
        for call in calls
        if decodes(call) and "encoding" not in {keyword.arg for keyword in call.keywords}
    ]


def test_every_text_has_an_encoding() -> None:
    found = {name_of(file): without_encoding(file.read_text(encoding="utf-8")) for file in FILES}
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_every_file_that_tests_and_recipes_read_has_an_encoding() -> None:
    """What a process prints is in the encoding of its system."""
    found: dict[str, list[str]] = {}
    for folder in ("tests", "recipes"):
        for file in sorted((ROOT.parent / folder).rglob("*.py")):
            calls = without_encoding(file.read_text(encoding="utf-8"))
            found[str(file)] = [call for call in calls if not call.startswith("subprocess.")]
    assert {name: calls for name, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "call",
    [
        "(folder / 'a').read_text()",
        "self.file.write_text(text)",
        "open(file)",
        "open(file, 'w', newline='')",
        "file.open()",
        "file.open('a')",
        "file.open(mode='r')",
        "os.fdopen(handle, 'w')",
        "io.TextIOWrapper(stream)",
        "subprocess.run(command, text=True)",
    ],
)
def test_a_text_without_encoding_is_seen(call: str) -> None:
    assert without_encoding(call) == [call]
    assert without_encoding(f"{call[:-1]}, encoding='utf-8')".replace("(, ", "(")) == []


def test_bytes_and_what_is_no_file_need_no_encoding() -> None:
    for call in (
        "file.open('rb')",
        "open(file, mode='wb')",
        "os.open(file, os.O_RDWR)",
        "Image.open(file)",
        "form.open(file, inside=True)",
        "run.open(resume=True)",
        "subprocess.run(command)",
    ):
        assert without_encoding(call) == []


PLANTED = {
    "layers.scale": "from normswap.graph import tracing",
    "graph.tracing": "def f():\n    from normswap.layers.scale import Scale",
    "training.engine": "import normswap.reporting.page",
    "reporting.page": "from normswap import errors",
    "errors": "",
    "graph": "",
}


def test_the_checkers_notice() -> None:
    edges = edges_of(PLANTED)
    assert edges["graph.tracing"] == {"layers.scale"}  # also inside a function
    assert circles(edges) == ["layers.scale", "graph.tracing"]
    assert climbs(edges) == ["layers.scale -> graph.tracing", "training.engine -> reporting.page"]
    assert climbs({"cli.app": {"errors"}, "errors": {"plan"}, "": {"cli.app"}}) == [
        "errors -> plan"
    ]
    assert reaches_in(
        "from normswap.graph import tracing\nfrom normswap.plan import _step\ntracing._where(1)"
    ) == ["_step", "tracing._where"]
    assert (
        reaches_in("import torch\ntorch._C\nself._x\nfrom normswap.plan import Plan\nPlan._body")
        == []
    )
    assert "convert" in public_functions()
    assert crowded(
        "def f(a, b, c, d, e, f, g, h): ...\ndef g(self, a, b, c, d, *e, f, g, **h): ..."
    ) == ["g"]


pytest_plugins = ["pytester"]
# A test file that skips, and whether that is declared.
SKIPS = {
    "by a function": ("def test_one():\n    needs.need('chromium', False)", "skipped"),
    "by the marker": ("@mark.needs('Linux', False)\ndef test_one(): ...", "skipped"),
    "by the marker, but it is there": ("@mark.needs('Linux', True)\ndef test_one(): ...", "passed"),
    "the whole file": ("needs.package('no_such_package')", "skipped"),
    "by pytest": ("def test_one():\n    pytest.skip('no time today')", "failed"),
    "by pytest's marker": ("@mark.skipif(True, reason='no time')\ndef test_one(): ...", "errors"),
    "by unittest": ("def test_one():\n    raise unittest.SkipTest('no time today')", "failed"),
    "the whole file, by pytest": ("pytest.importorskip('no_such_package')", "errors"),
    "of what is not declared": ("def test_one():\n    needs.need('time', False)", "failed"),
}


@pytest.mark.parametrize("name", SKIPS)
def test_only_declared_skips_pass(
    name: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, outcome = SKIPS[name]
    monkeypatch.setitem(needs.DECLARED, "no_such_package", "nobody has it")
    pytester.makeconftest((Path(__file__).parents[1] / "conftest.py").read_text(encoding="utf-8"))
    pytester.makeini("[pytest]\nmarkers =\n    needs: as in pyproject.toml\n")
    program = "import unittest\nimport pytest\nfrom pytest import mark\nfrom support import needs\n"
    pytester.makepyfile(f"{program}{body}\n")

    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")

    result.assert_outcomes(**{outcome: 1})


def test_names_of_test_files_are_unique() -> None:
    """Pytest collects two files of one name as one, and fails."""
    names = [file.name for file in (ROOT.parent / "tests").rglob("test_*.py")]

    assert [name for name in names if names.count(name) > 1] == []
