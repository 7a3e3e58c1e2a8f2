"""What commands print on stdout: JSON, or tables and lines by rich at the terminal's width; in a
pipe COLUMNS, or 100.

rich is imported inside functions: it takes a third of the time that `normswap --help` has.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from normswap.plan import Body
from normswap.schemes import changed, get

if TYPE_CHECKING:
    from rich.console import RenderableType

_WIDTH = 100
# A table shows so many values of a list.
_FEW = 4
_COLUMNS = ("precision", "input", "relative L2", "max", "agreement", "allowed", "verdict")
TOO_LITTLE = "FAILED: they agree on less than --min-kept asks"
Said = TypeVar("Said", Body, Sequence[Body])


def show(body: Said, as_json: bool, human: Callable[[Said], None], *following: object) -> None:
    """Print `body` as strict JSON, or let `human` print it, and then the words of the command that
    follows.
    """
    if as_json:
        print(json.dumps(plain(body), indent=2, allow_nan=False))
        return
    human(body)
    if following:
        next_step(*following)


def plain(value: object) -> object:
    """`value` as JSON has it: numbers that are not finite become null, paths text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _print(renderable: RenderableType, least: int = 0) -> None:
    """Print it; in a pipe without the blanks that fill its lines up, and at least so wide."""
    from rich.console import Console

    width = (
        None if sys.stdout.isatty() else max(shutil.get_terminal_size((_WIDTH, 0)).columns, least)
    )
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(renderable)
    sys.stdout.writelines(f"{text.rstrip()}\n" for text in captured.get().splitlines())


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Sequence[str] = (),
) -> None:
    """Print a table, without the columns that are empty in every row; `right`: numbers, which are
    never wrapped.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = [[cell(value) for value in row] for row in rows]
    # As a part of the table the title would be wrapped to the table's width.
    if title:
        _print(Text(title, style="bold"))
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    filled = [i for i in range(len(columns)) if any(texts[i] for texts in cells)]
    for i in filled:
        number = columns[i] in right
        shown.add_column(
            columns[i], justify="right" if number else "left", no_wrap=number, overflow="fold"
        )
    for texts in cells:
        shown.add_row(*(Text(texts[i]) for i in filled))
    _print(shown)


def facts(*pairs: tuple[str, object]) -> None:
    """Names and what goes with them; those without are left out. In a pipe a path is never cut."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, show_header=False, pad_edge=False)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    names = [0]
    words = [0]
    for name, value in pairs:
        if value not in (None, ""):
            grid.add_row(Text(name), Text(cell(value)))
            names.append(len(name))
            words += map(len, cell(value).split())
    _print(grid, max(names) + 2 + max(words))


def next_step(*words: object) -> None:
    """The command that most people want next, as the last line; words in capitals stand for what is
    the reader's.
    """
    print(f"next: normswap {shlex.join(map(str, words))}")


def listing(label: str, lines: Iterable[str], most: int = 20) -> None:
    """Lines that begin with the same word, not too many of them; `PATH: text` is printed once for
    all paths with it.
    """
    listed: list[str] = []
    groups: dict[str, list[tuple[str, str, str]]] = {}
    for line in lines:
        # A line without a path is a group by itself.
        groups.setdefault(line.partition(": ")[2] or line, []).append(line.partition(": "))
    for group in groups.values():
        paths = [path for path, _, _ in group]
        _, colon, said = group[0]
        if len(paths) > _FEW:
            paths = [*paths[:3], f"{len(paths) - 3} more"]
        listed.append(f"{', '.join(paths)}{colon}{said}")
    for text in listed[:most]:
        print(f"{label}: {text}")
    if len(listed) > most:
        print(f"{label}: ... and {len(listed) - most} more")


def network(body: Body) -> None:
    """Print a network in a few lines, as `inspect` and `demo` do."""
    architecture = f" ({body['architecture']})" if body["architecture"] else ""
    skips = (
        Counter(block["skip"] for block in body["blocks"])
        if "blocks" in body
        else Counter(body["skips"])
    )
    norms = sum(body["norms"].values())
    facts(
        ("network", f"{body['source']}: {body['class']}{architecture}"),
        ("input", size(body["input_size"])),
        ("parameters", f"{body['parameters']:,}"),
        ("converted", " -> ".join(body["plan"])),
        ("blocks", f"{sum(skips.values())} (skip: {counts(skips)})" if skips else "none"),
        ("norms", f"{norms} ({counts(body['norms'])})" if norms else "none"),
        ("roles", counts(body["roles"])),
    )


def cell(value: object) -> str:
    """Anything, as it stands in a table."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def few(values: Sequence[object]) -> str:
    """Write the first values, and how many there are where those are not all."""
    shown = " ".join(cell(value) for value in values[:_FEW])
    if len(values) > _FEW:
        shown += f" ... ({len(values)} in all)"
    return shown


def text(value: object) -> str:
    """A record, a list or a value in one line: `mean 0.5 0.5 0.5, std 0.2 0.2 0.2`."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text(item)}" for name, item in value.items() if item is not None)
    if isinstance(value, list | tuple):
        return few([text(item) for item in value])
    return cell(value)


def counts(counted: Mapping[str, int]) -> str:
    """`3 identity, 1 projection`."""
    return ", ".join(f"{count} {name}" for name, count in counted.items() if count)


def span(pair: Sequence[float] | None) -> str:
    """`0.1 .. 0.4`, or one number where both are the same."""
    if pair is None:
        return ""
    return " .. ".join(dict.fromkeys(f"{value:.2g}" for value in pair))


def size(sides: Sequence[int]) -> str:
    """`3x224x224`."""
    return "x".join(map(str, sides))


def small(value: float | None) -> str:
    """An error: `2.1e-07`."""
    if value is None:
        return ""
    return f"{value:.1e}"


def print_conversion(body: Body) -> None:
    """Print every step, and where the result is."""
    for step in body["steps"]:
        print_step(body["source"], step, dry=body["output"] is None)
    if body["plan"]:
        print(f"plan saved to {body['plan']}")
    if body["output"]:
        print(f"written to {body['output']}")
    else:
        print("dry run: no network was written")


def print_step(source: str, step: Body, *, dry: bool) -> None:
    """Print one step; `dry`: it was planned, not carried out."""
    options = ", ".join(
        f"{name} {value}" for name, value in changed(step["scheme"], step["options"]).items()
    )
    report = step["report"]
    facts(
        (
            "would convert" if dry else "converted",
            f"{source} to {step['scheme']}" + (f" ({options})" if options else ""),
        ),
        # `unfold`, which is exact, is no scheme that could fit values.
        (
            "result",
            report
            and verdict(report, fits=not report["exact"] and get(step["scheme"]).fit is not None),
        ),
        ("norms", counts(step["outcomes"]) or counts(step["left"])),
    )
    if dry:
        edits = [
            (edit["path"], edit["layer"], text(edit["args"]), ", ".join(edit["reads"]))
            for edit in step["edits"]
        ]
        table("Plan (--json has all)", ("path", "layer", "arguments", "reads"), edits)
    elif step["alphas"]:
        table("Scalars", ("path", "alpha"), step["alphas"].items(), right=("alpha",))
    listing("note", step["notes"])
    listing("renamed", (f"{old} -> {new}" for old, new in step["renames"]))
    if report:
        proof(report)


def verdict(body: Body, *, fits: bool = False) -> str:
    """Say what the result keeps of its source; `fits`: whether the scheme can fit its values to
    images.
    """
    if body["exact"]:
        last = body["logits"][-1]
        measured = f"relative L2 {small(last['relative_l2'])} in {last['precision']}"
        allowed = f"allowed {small(body['tolerance'].get(last['precision']))}"
        is_kept = all(error["within"] for error in body["logits"])
        return (
            f"{'kept exactly' if is_kept else 'FAILED: not the function of the source'}:"
            f" {measured}, {allowed}"
        )
    if body.get("kept"):
        return f"kept: {body['kept']['said']}"
    if body["unmeasured"]:
        return f"not known: {body['unmeasured']}"
    remedy = ": pass --calibrate IMAGES (25 or more, no labels needed) to fit and measure it"
    return f"not known{remedy if fits else ''}"


def proof(body: Body) -> None:
    """Print the measurements, one row per precision and input size; `verdict` says what they mean."""
    exact = body["exact"]
    rows: list[list[object]] = []
    for error in body["logits"]:
        row = [
            error["precision"],
            size(error["size"]),
            small(error["relative_l2"]),
            small(error["largest"]),
        ]
        if exact:
            same = "" if error["agreement"] is None else f"{100 * error['agreement']:.4g} %"
            outcome = "ok" if error["within"] else "FAILED"
            row += [same, small(body["tolerance"].get(error["precision"])), outcome]
        rows.append(row)
    title = "Verification on {}" if exact else "Distance from the source on {}"
    table(title.format(body["inputs"]), _COLUMNS[: len(rows[0])], rows, right=_COLUMNS[2:6])
    # A classifier's scores, on axis 1, need no word.
    answers = [
        error["answer"] for error in body["logits"] if error["answer"] and error["axis"] != 1
    ]
    listing("agreement", dict.fromkeys(f"by {answer}" for answer in answers))
    listing("warning", body["vacuous"], most=5)


def same(figures: Body) -> str:
    """How many answers of a file are those of its network."""
    if figures["agreement"] is None:
        return ""
    answers = figures["answers"]
    unit = figures["unit"]
    of = "" if unit == "images" else f" {unit} of {figures['count']} images"
    return f"{round(figures['agreement'] * answers)} of {answers}{of} ({figures['inputs']})"


def top1(figures: Body) -> str:
    """The accuracies of network and file, on labelled images."""
    if figures["top1"] is None:
        return ""
    source = figures["source_top1"]
    result = figures["top1"]
    return (
        f"{source:.2f} % -> {result:.2f} % ({result - source:+.2f} points), on {figures['count']}"
        " images"
    )


def operators(nodes: Mapping[str, int] | None) -> str:
    """How many there are, and of each kind."""
    if not nodes:
        return ""
    return f"{sum(nodes.values())}: {counts(nodes)}"


def described(body: Body) -> None:
    """A file in a few lines, and what its sidecar says of what it takes and gives."""
    noted = body["metadata"]
    sidecar = body["sidecar"]
    if isinstance(figures := sidecar.get("checked"), dict):
        distance = (
            f"relative L2 {small(figures['relative_l2'])}, allowed {small(figures['tolerance'])}"
        )
        checked = f"{distance}; {figures['count']} samples, {figures['inputs']}"
        sidecar = {
            **sidecar,
            "checked": checked,
            "agreement": same(figures),
            "top-1": top1(figures),
        }
    missing = "`normswap export` did not write it: nothing says how images are prepared for it"
    facts(
        ("file", f"{body['source']} ({body['bytes'] / 1e6:.1f} MB)"),
        ("format", body["format"]),
        ("operators", operators(body["nodes"])),
        (
            "made from",
            " ".join(
                dict.fromkeys(noted[key] for key in ("architecture", "source") if noted.get(key))
            ),
        ),
        *((name, text(value)) for name, value in sidecar.items()),
        ("note", None if sidecar else missing),
    )
