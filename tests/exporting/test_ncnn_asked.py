"""ncnn without pnnx and ncnn: what both are asked, and what stands in the file."""

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.stand_in_tools import (
    METADATA,
    Record,
    install,
    require_two,
    two_contents,
    two_inputs,
)

from normswap.errors import RefusedError, quiet
from normswap.exporting import ncnn_file

# The graph as pnnx writes it. The layers in0 and out1 have names of values, which stay.
GRAPH = """7767517
7 8
Input in0 0 1 in0
Input in1 0 1 in1
Convolution conv 1 1 in0 1 0=4 1=3
Split copies 1 2 1 out0 2
BinaryOp mul 2 1 2 in1 3 0=2
Convolution again 1 1 3 4 0=4 1=1
Reduction out1 1 1 4 out1 0=3 -23303=2,1,2
"""
NAMED = """7767517
7 8
Input in0 0 1 view
Input in1 0 1 other
Convolution conv 1 1 view 1 0=4 1=3
Split copies 1 2 1 wide 2
BinaryOp mul 2 1 2 other 3 0=2
Convolution again 1 1 3 4 0=4 1=1
Reduction out1 1 1 4 narrow 0=3 -23303=2,1,2
"""
TEXTS = {**METADATA, "inputs": "view other", "outputs": "wide narrow"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the file that is written."""
    made = tmp_path / "written"
    made.mkdir()
    return made


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """The folder in which the stand-in of pnnx leaves what it was given."""
    made = tmp_path / "record"
    made.mkdir()
    (made / "graph").write_text(GRAPH, encoding="utf-8")
    return made


def install_pnnx(monkeypatch: pytest.MonkeyPatch, record: Path, *lines: str) -> None:
    """Put a script in the place of pnnx, which keeps what it is given."""
    script = record / "pnnx.sh"
    kept = shlex.quote(str(record))
    begin = [
        "#!/bin/sh",
        f"kept={kept}",
        'echo "$@" >> "$kept/words"',
        'cp "$1" "$kept/given.pt"',
        'pwd > "$kept/place"',
    ]
    script.write_text("\n".join([*begin, *lines, ""]), encoding="utf-8")
    script.chmod(0o755)
    install(monkeypatch, "pnnx", EXEC_PATH=str(script))


def given(record: Path) -> Any:
    """The network that pnnx was given last."""
    # torch warns that its reader is an old one.
    with quiet():
        return torch.jit.load(record / "given.pt")


def install_layers(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    """Put in the place of ncnn one that lacks these layers."""
    install(monkeypatch, "ncnn", layer_to_index=lambda kind: -1 if kind in missing else 0)


WRITES = ('cp "$kept/graph" network.ncnn.param', "printf weights > network.ncnn.bin")


@pytest.mark.parametrize("half", [False, True])
def test_a_file_has_our_names_and_metadata(
    half: bool, folder: Path, record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_pnnx(monkeypatch, record, *WRITES)
    install_layers(monkeypatch)
    file = folder / "net.param"

    ncnn_file.write(two_contents(half=half), file)

    (words,) = (record / "words").read_text(encoding="utf-8").splitlines()
    assert words.split()[1:] == [f"fp16={int(half)}"]
    require_two(given(record), half=half)
    # It works beside the file, where the next export would find what it leaves. It left nothing.
    assert Path((record / "place").read_text(encoding="utf-8").strip()).parent == folder.resolve()
    assert {each.name for each in folder.iterdir()} == {"net.param", "net.bin"}
    assert file.with_suffix(".bin").read_bytes() == b"weights"
    assert file.read_text(encoding="utf-8").startswith(NAMED)
    assert ncnn_file.metadata(file) == TEXTS
    assert [*ncnn_file.nodes(file).items()] == [
        ("Convolution", 2),
        ("BinaryOp", 1),
        ("Reduction", 1),
    ]


@pytest.mark.parametrize(
    ("lines", "missing", "said"),
    [
        (("echo first >&2", "echo last >&2", "echo >&2", "exit 3"), (), "pnnx cannot .* last"),
        # A byte of Latin-1, as a compiled program may write on any system.
        ((r"printf 'caf\351 last\n' >&2", "exit 3"), (), "pnnx cannot .* last"),
        (("exit 3",), (), "it ends with 3"),
        ((*WRITES, "exit 3"), (), "it ends with 3"),
        ((WRITES[0],), (), "it ends with 0"),
        ((WRITES[1],), (), "it ends with 0"),
        (WRITES, ("Split", "BinaryOp", "Reduction"), "ncnn cannot .* no layer BinaryOp, Reduction"),
    ],
)
def test_what_the_tools_refuse_is_said(
    lines: tuple[str, ...],
    missing: tuple[str, ...],
    said: str,
    folder: Path,
    record: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_pnnx(monkeypatch, record, *lines)
    install_layers(monkeypatch, *missing)

    with pytest.raises(RefusedError, match=said):
        ncnn_file.write(two_contents(half=False), folder / "net.param")

    assert not [*folder.iterdir()]
    # It was also asked for the network in simpler operators.
    assert len((record / "words").read_text(encoding="utf-8").splitlines()) == 2
    require_two(given(record), half=False)


class Net:
    """A network of ncnn, whose outputs are its inputs plus their numbers of letters.

    Args:
        fails: The call that cannot read its file.
        inner: The names of the values inside.
    """

    def __init__(self, fails: str = "", inner: tuple[str, ...] = ()) -> None:
        self.opt = Record(num_threads=0)
        self.fails = fails
        self.inner = inner
        self.read: list[str] = []
        self.light: list[bool] = []

    def load_param(self, file: str) -> int:
        self.read.append(file)
        return int(self.fails == "param")

    def load_model(self, file: str) -> int:
        self.read.append(file)
        return int(self.fails == "model")

    def input_names(self) -> list[str]:
        return ["first", "second"]

    def output_names(self) -> list[str]:
        return ["second", "first"]

    def blobs(self) -> list[Any]:
        return [Record(name=name) for name in self.inner]

    def create_extractor(self) -> Any:
        given: dict[str, Any] = {}
        names = {"wide": "view", "narrow": "other"}

        def extract(name: str) -> tuple[int, Any]:
            return 0, given[names.get(name, name)] + len(name)

        return Record(set_light_mode=self.light.append, input=given.__setitem__, extract=extract)


class Mat:
    """A tensor of ncnn, which shares its numbers with numpy until it is cloned."""

    def __init__(self, values: np.ndarray) -> None:
        assert values.flags.c_contiguous
        self.values = values

    def clone(self) -> np.ndarray:
        return self.values.copy()


def opened(
    monkeypatch: pytest.MonkeyPatch, folder: Path, text: str, net: Net, **inside: bool
) -> Any:
    install(
        monkeypatch,
        "ncnn",
        Net=lambda: net,
        Mat=Mat,
        layer_to_index=lambda kind: -1 if kind == "Lacking" else 0,
    )
    file = folder / "net.param"
    file.write_text(text, encoding="utf-8")
    return ncnn_file.open(file, **inside)


# The names of the values that a file gives, by whether it has our metadata and `inside`.
GIVEN = {
    (True, False): ("wide", "narrow"),
    (True, True): ("view", "other", "view"),
    (False, False): ("second", "first"),
    (False, True): ("first", "second", "first"),
}


@pytest.mark.parametrize(("ours", "inside"), GIVEN)
def test_a_file_is_run_by_its_names(
    ours: bool, inside: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = GIVEN[ours, inside]
    net = Net(inner=GIVEN[ours, True])
    lines = [f'# normswap.{key} "{TEXTS[key]}"' for key in ("inputs", "outputs")]
    text = "\n".join([NAMED, *lines]) if ours else GRAPH
    view, other = two_inputs()
    # As a view of other memory, it is not contiguous.
    view = view.transpose(2, 3).contiguous().transpose(2, 3)

    asked_inside = {"inside": True} if inside else {}
    runs = opened(monkeypatch, folder, text, net, **asked_inside)
    answers = runs(view, other)

    assert len(answers) == len(names)
    for answer, name in zip(answers, names, strict=True):
        tensor = view if name in ("wide", "view", "first") else other
        torch.testing.assert_close(answer, tensor + len(name))
    assert net.read == [str(folder / "net.param"), str(folder / "net.bin")]
    # ncnn frees values early unless they are asked for.
    assert net.light == [not inside]
    assert net.opt.num_threads == torch.get_num_threads()
    assert not net.opt.use_fp16_packed
    assert not net.opt.use_fp16_storage
    assert not net.opt.use_fp16_arithmetic
    with pytest.raises(ValueError, match="one image at a time, not 2"):
        runs(view.repeat(2, 1, 1, 1), other)


@pytest.mark.parametrize("fails", ["param", "model"])
@pytest.mark.parametrize(
    ("text", "said"), [(GRAPH, r"net\.param"), (f"{GRAPH}Lacking x 0 0\n", "no layer Lacking")]
)
def test_a_file_that_ncnn_does_not_read_is_said(
    fails: str, text: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=said):
        opened(monkeypatch, folder, text, Net(fails))
