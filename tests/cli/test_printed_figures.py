"""Law of figures: each line that is printed has the figure of its own key, in the unit it names."""

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from support.command_line import Capture

from normswap.cli import tables
from normswap.cli.commands import (
    advise_command,
    decay_command,
    evaluate_command,
    inspect_command,
    push_command,
    spp_command,
    sweep_command,
    verify_command,
)
from normswap.training.sweep import Line

# No two numbers of a record are the same, so that none stands for another.
EVALUATED: dict[str, Any] = {
    "source": "net",
    "data": "images",
    "top1": 61.234,
    "top5": 87.654,
    "loss": 1.23456,
    "count": 421,
    "images_per_s": 917.3,
    "against": {
        "source": "other",
        "top1": 59.871,
        "agreement": 0.93214,
        "enough": True,
        "verdict": "MEASURED",
    },
}
ON_IMAGES: dict[str, Any] = {
    "count": 421,
    "source": 61.234,
    "result": 59.871,
    "relative_l2": 0.01234,
    "agreement": 0.93214,
}
# An exported file, with what was measured when it was written.
OF_FILE: dict[str, Any] = {
    "source": "net.onnx",
    "bytes": 2_345_678,
    "format": "onnx",
    "nodes": {"Conv": 5, "Relu": 3},
    "metadata": {"architecture": "resnet18", "source": "net", "dtype": "fp16"},
    "sidecar": {
        "mean": [0.485, 0.456, 0.406],
        "checked": {
            "relative_l2": 0.01234,
            "tolerance": 0.25,
            "count": 421,
            "inputs": "images of demo",
            "agreement": 0.9,
            "answers": 500,
            "unit": "maps",
            "source_top1": 61.234,
            "top1": 59.871,
        },
    },
}
DECAY: dict[str, Any] = {"source": "net", "policy": "timm", "frozen": 7, "roles": []}
FACTS: dict[str, tuple[Callable[..., None], Mapping[str, Any], dict[str, str]]] = {
    "evaluate": (
        evaluate_command._print,
        EVALUATED,
        {
            "network": "net",
            "images": "421 of images",
            "top-1": "61.23 %",
            "top-5": "87.65 %",
            "loss": "1.2346",
            "speed": "917 images/s",
            "against": "other: top-1 59.87 %",
            "agreement": "MEASURED, 93.21 %",
        },
    ),
    "verify": (
        verify_command._print_data,
        ON_IMAGES,
        {
            "images": "421",
            "top-1": "61.23 % -> 59.87 %",
            "relative L2": "1.2e-02",
            "agreement": "93.21 %",
        },
    ),
    "verify, without labels": (
        verify_command._print_data,
        {"count": 421, "relative_l2": 0.01234, "agreement": None},
        {"images": "421", "relative L2": "1.2e-02"},
    ),
    "inspect, of a file": (
        tables.print_file,
        OF_FILE,
        {
            "file": "net.onnx (2.3 MB)",
            "format": "onnx",
            "operators": "8: 5 Conv, 3 Relu",
            "made from": "resnet18 net",
            "mean": "0.485 0.456 0.406",
            "checked": "relative L2 1.2e-02, allowed 2.5e-01; 421 samples, images of demo",
            "agreement": "450 of 500 maps of 421 images (images of demo)",
            "top-1": "61.23 % -> 59.87 % (-1.36 points), on 421 images",
        },
    ),
    "decay": (
        decay_command._print,
        DECAY,
        {"network": "net", "policy": "timm", "frozen tensors": "7"},
    ),
}


@pytest.mark.parametrize("name", FACTS)
def test_each_fact_has_the_figure_of_its_key(name: str, capfd: Capture) -> None:
    show, body, expected = FACTS[name]

    show(body)

    lines = [re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in printed(capfd)]
    assert {line[0]: line[1] for line in lines if line[0] in expected} == expected


def printed(capfd: Capture) -> list[str]:
    return [line for line in capfd.readouterr().out.splitlines() if line.strip()]


def cells(lines: list[str], first: str) -> list[str]:
    """The cells of the row of a table that begins with this word."""
    (line,) = [line for line in lines if line.split()[:1] == [first]]
    return [cell.strip() for cell in re.split(r"\s{2,}|[│┃|]", line) if cell.strip()]


def test_a_row_of_a_sweep_has_its_own_figures(capfd: Capture) -> None:
    best = Line(lr=0.25, runs=6, mean=91.234, std=0.356, counted=4, lost=2, full=True, best=True)
    poor = Line(lr=0.5, runs=5, mean=None, std=None, counted=0, lost=3, full=False)
    body = {
        "lines": [vars(best), vars(poor)],
        "counted": 4,
        "seeds": 7,
        "notes": ["a note"],
        "files": ["runs.csv"],
        "recipe": "mine.yaml",
    }

    sweep_command._print(["net", "train.epochs=3"], body)

    lines = printed(capfd)
    assert "best 4 of 7 runs" in lines[0]
    assert cells(lines, "0.25") == ["0.25", "91.23 ± 0.36", "4", "6", "2", "best"]
    assert cells(lines, "0.5") == ["0.5", "0", "5", "3"]
    assert "a note" in lines
    assert "written to runs.csv" in lines
    assert lines[-1].endswith(
        "normswap finetune net train.epochs=3 --recipe mine.yaml optim.lr=0.25"
    )


def test_rows_of_tables_have_the_figures_of_their_columns(capfd: Capture) -> None:
    role = {"role": "gamma", "decay": False, "tensors": 12, "values": 345, "reason": "a scale"}
    decay_command._print({**DECAY, "roles": [role]})
    assert cells(printed(capfd), "gamma") == ["gamma", "no", "12", "345", "a scale"]

    point = {
        "block": "layer1",
        "mean_sq": 0.125,
        "variance": 2.5,
        "branch_variance": 0.375,
        "added_variance": 4.25,
    }
    spp_command._print({"curves": {"net": [point]}, "inputs": {"net": "noise"}, "files": []})
    numbers = [float(cell) for cell in cells(printed(capfd), "layer1")[1:]]
    assert numbers == [0.125, 2.5, 0.375, 4.25]

    norm = {
        "path": "bn1",
        "class": "BatchNorm2d",
        "channels": 64,
        "role": "stem",
        "mean": [-0.5, 0.25],
        "std": [0.125, 2.0],
        "constant": 0.0312,
        "removed": 0.17,
        "folding": "into conv1",
        "refused": "",
    }
    (row,) = inspect_command._norm_rows(
        [
            norm,
        ]
    )
    assert row[:4] == ("bn1", "BatchNorm2d", 64, "stem")
    assert row[6:] == ("3%", "17%", "into conv1")
    ((*_, refused),) = inspect_command._norm_rows([{**norm, "refused": "no statistics"}])
    assert refused == "refused: no statistics"


def test_tops_that_were_reached_elsewhere_are_explained_if_one_is_shown(capfd: Capture) -> None:
    targets = [
        {"target": "skipinit", "exact": True, "why": "scalars"},
        {"target": "groupnorm", "exact": False, "why": "groups"},
    ]
    elsewhere = {"ended": {"skipinit": "93.4"}, "task": "CIFAR-10"}

    advise_command._print_targets(targets, elsewhere)
    some = printed(capfd)
    advise_command._print_targets(targets, {**elsewhere, "ended": {}})
    none = printed(capfd)

    assert cells(some, "skipinit") == ["skipinit", "kept", "93.4", "scalars"]
    assert cells(some, "groupnorm") == ["groupnorm", "approximate", "groups"]
    assert "CIFAR-10" in some[-1]
    assert cells(none, "skipinit") == ["skipinit", "kept", "scalars"]
    assert not any("CIFAR-10" in line for line in none)


def test_a_long_cell_is_shown_whole_in_a_narrow_terminal(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    path = "backbone." + "layer1.block7." * 6 + "norm"

    tables.table("", ("path", "n"), [(path, 12)], right=("n",))

    rows = printed(capfd)[2:]
    assert "".join(row[:34].strip().removesuffix(" 12").strip() for row in rows) == path


ROWS = [
    ("layer1.0.bn1", "BatchNorm2d", 64, "folds into backbone.layer1.0.conv1"),
    ("layer1.0.downsample.1", "SynchronizedBatchNorm2d", 128, "stays, as two layers read it"),
    ("head", "", 2048, ""),
]


@pytest.mark.parametrize("columns", [10, 40, 70, 90, 110, 300])
def test_no_word_of_a_table_is_cut_in_a_pipe(
    columns: int, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`| grep` finds a key, however narrow the terminal behind it is."""
    monkeypatch.setenv("COLUMNS", str(columns))

    tables.table("", ("path", "kind", "channels", "what becomes of it"), ROWS, right=("channels",))

    lines = printed(capfd)
    words = " ".join(lines).split()
    for row in ROWS:
        assert [word for word in " ".join(map(str, row)).split() if word not in words] == []
    if columns >= 110:
        assert len(lines) == 2 + len(ROWS), "there is room for every cell"
    if columns >= 90:
        assert max(map(len, lines)) <= columns


def test_of_many_warnings_about_a_proof_five_are_printed_and_the_others_counted(
    capfd: Capture,
) -> None:
    error = {"precision": "float32", "size": (3, 8, 8), "relative_l2": 0.5, "largest": 1.0}
    report = {
        "exact": False,
        "inputs": "noise",
        "logits": [{**error, "answer": "", "axis": 1}],
        "remarks": [f"remark {number}" for number in range(7)],
    }

    tables.print_proof(report)

    warnings = [line for line in printed(capfd) if line.startswith("warning: ")]
    assert warnings[:5] == [f"warning: remark {number}" for number in range(5)]
    assert warnings[5:] == ["warning: ... and 2 more"]


def test_the_axis_of_an_agreement_is_named_once_if_it_is_no_axis_of_classes(
    capfd: Capture,
) -> None:
    error = {"precision": "float32", "size": (3, 8, 8), "relative_l2": None, "largest": 0.25}
    of_axes = [("masks, axis 3", 3), ("", 2), ("scores, axis 1", 1), ("masks, axis 3", 3)]
    logits = [{**error, "answer": answer, "axis": axis} for answer, axis in of_axes]

    tables.print_proof({"exact": False, "inputs": "noise", "logits": logits, "remarks": []})

    lines = printed(capfd)
    assert [line for line in lines if "axis" in line] == ["agreement: by masks, axis 3"]
    # A distance that was not measured is an empty column.
    rows = [line.split() for line in lines if "float32" in line]
    assert rows == [["float32", "3x8x8", "2.5e-01"]] * 4


@pytest.mark.parametrize(
    ("alone", "call"),
    [(True, 'timm.create_model("hf-hub:me/net", pretrained=True)'), (False, "MODEL hf-hub:me/net")],
)
def test_a_pushed_network_is_named_as_it_is_loaded(alone: bool, call: str, capfd: Capture) -> None:
    body = {"files": ["a", "b"], "url": "https://hub/me/net", "repo": "me/net", "alone": alone}

    push_command._print(body)

    *lines, last = printed(capfd)
    assert [line.split(maxsplit=1) for line in lines] == [
        ["pushed", "a, b"],
        ["to", "https://hub/me/net"],
    ]
    assert call in last


@pytest.mark.parametrize(
    ("pair", "text"),
    [
        (None, ""),
        ((0.125, 4.0), "0.12 .. 4"),
        ((-3.0, -1.5), "-3 .. -1.5"),
        ((0.251, 0.249), "0.25"),
        ((0.0, 1e-9), "0 .. 1e-09"),
    ],
)
def test_a_range_is_written_from_the_smallest_to_the_largest(
    pair: tuple[float, float] | None, text: str
) -> None:
    assert tables.span(pair) == text
