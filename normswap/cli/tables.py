"""What commands print on stdout: JSON, or tables and lines that rich sets.

The width is the terminal's; in a pipe it is COLUMNS, or else 100. rich is imported inside
functions: it takes a third of the time that `normswap --help` has.
"""

from __future__ import annotations

import math
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from normswap.cli.terminal import abandon_stdout, remark, say, say_json, styled
from normswap.errors import printable
from normswap.plan import Body
from normswap.schemes import changed, get

if TYPE_CHECKING:
    from rich.console import RenderableType

_WIDTH = 100
# Blanks between two columns of a table.
_BETWEEN = 3
# Of a list of values, a table shows this many.
_FEW = 4
_COLUMNS = ("precision", "input", "relative L2", "max", "agreement", "allowed", "verdict")
# Keys of a record that name what a command has written.
_WRITTEN = ("output", "url", "file", "files")
TOO_LITTLE = "NOT ENOUGH: they agree on less than --min-kept asks"
Printed = TypeVar("Printed", Body, Sequence[Body])


def show(
    body: Printed, as_json: bool, print_body: Callable[[Printed], None], *next_command: object
) -> None:
    """Print what a command has to say, as JSON or for a person.

    Args:
        body: The records that --json prints.
        as_json: Whether strict JSON is printed. Then nothing else is.
        print_body: Prints `body` for a person.
        next_command: The words of the command that most people want next. It is printed for a
            person as the last line. Without words there is no such line.
    """
    if as_json:
        _print_all(body, lambda: say_json(plain(body)))
        return

    def for_a_person() -> None:
        print_body(body)
        if next_command:
            next_step(*next_command)

    _print_all(body, for_a_person)


def _print_all(body: object, print_body: Callable[[], None]) -> None:
    """Print the result of a command, even if stdout takes no text (disk full, pipe closed).

    A command that has written its files has done its work, so the error is not raised then. A
    remark on stderr tells of it.

    Args:
        body: The records of the command, some of which name what it has written.
        print_body: Prints them.
    """
    try:
        print_body()
        sys.stdout.flush()
    except OSError as error:
        # `_WRITTEN` has the keys under which records name what a command has written.
        has_written = isinstance(body, Mapping) and any(body.get(key) for key in _WRITTEN)
        if not has_written:
            raise
        abandon_stdout()
        remark([f"all is written, but stdout takes no text: {error.strerror or error}"])


def plain(value: object) -> object:
    """Return `value` as JSON has it: infinite numbers and NaN become null, paths become text."""
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
    """Print what rich renders. A pipe gets no blanks at the ends of lines.

    Args:
        renderable: A text, table or grid of rich's.
        least: The width that is used in a pipe if COLUMNS is smaller.
    """
    from rich.console import Console

    # In a terminal rich finds the width by itself.
    width = None
    if not sys.stdout.isatty():
        width = max(shutil.get_terminal_size((_WIDTH, 0)).columns, least)

    console = Console(width=width, markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(renderable)
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Sequence[str] = (),
) -> None:
    """Print a table, without the columns that are empty in every row.

    If the output goes into a pipe, the table is so wide that no word, such as a key, is cut.

    Args:
        title: The line above the table. An empty one is not printed.
        columns: The names of the columns.
        rows: The cells of each row, one for each column.
        right: The columns of numbers, which stand at the right and are never wrapped.
    """
    from rich import box
    from rich.table import Table

    cells = [[cell(value) for value in row] for row in rows]
    # As a part of the table the title would be wrapped to the table's width.
    if title:
        _print(styled(title, "bold"))

    # Columns without a value are left out.
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    filled = [i for i in range(len(columns)) if any(row[i] for row in cells)]
    texts = {i: [columns[i], *(printable(row[i]) for row in cells)] for i in filled}
    widths = _widths_in_a_pipe(texts, {i for i in filled if columns[i] in right})
    in_terminal = sys.stdout.isatty()
    for i in filled:
        is_number = columns[i] in right
        shown.add_column(
            columns[i],
            justify="right" if is_number else "left",
            no_wrap=is_number,
            overflow="fold",
            width=None if in_terminal else widths[i],
        )
    for row in cells:
        shown.add_row(*(styled(row[i]) for i in filled))
    _print(shown, sum(widths.values()) + _BETWEEN * len(widths))


def _widths_in_a_pipe(texts: Mapping[int, Sequence[str]], whole: Collection[int]) -> dict[int, int]:
    """Return the width of each column of a table, so that no word is cut.

    What is left of the line goes to the columns that lack least, and in equal parts to the others.

    Args:
        texts: The texts of each column, its heading among them.
        whole: The columns of which no cell is wrapped.
    """
    from rich.cells import cell_len

    widths: dict[int, int] = {}
    lacking: dict[int, int] = {}
    for i, column in texts.items():
        longest = max(map(cell_len, column))
        words = [word for text in column for word in text.split()]
        widths[i] = longest if i in whole else max(map(cell_len, words), default=1)
        lacking[i] = longest - widths[i]

    line = shutil.get_terminal_size((_WIDTH, 0)).columns
    left = max(line - sum(widths.values()) - _BETWEEN * len(widths), 0)
    for served, i in enumerate(sorted(lacking, key=lambda i: lacking[i])):
        more = min(lacking[i], left // (len(lacking) - served))
        widths[i] += more
        left -= more
    return widths


def facts(*pairs: tuple[str, object]) -> None:
    """Print names and values in two columns. A pair without a value is left out.

    If the output goes into a pipe, the lines are so wide that no word, such as a path, is cut.

    Args:
        pairs: The name and the value of each line.
    """
    from rich.table import Table

    grid = Table(box=None, show_header=False, pad_edge=False)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")

    longest_name = 0
    longest_word = 0
    for name, value in pairs:
        if value in (None, ""):
            continue
        grid.add_row(styled(name), styled(cell(value)))
        longest_name = max(longest_name, len(name))
        longest_word = max([longest_word, *map(len, cell(value).split())])
    _print(grid, longest_name + 2 + longest_word)


def next_step(*words: object) -> None:
    """Print the command that most people want next. The reader replaces words in capitals."""
    say(f"next: normswap {shlex.join(map(str, words))}")


def listing(label: str, lines: Iterable[str], most: int = 20) -> None:
    """Print lines that begin with the same word.

    Lines of the form `PATH: text` with the same text are printed as one line with all the paths.

    Args:
        label: The word that each printed line begins with.
        lines: The lines.
        most: How many lines are printed at most. A last line says how many are left.
    """
    groups: dict[str, list[tuple[str, str, str]]] = {}
    for line in lines:
        path, colon, text = line.partition(": ")
        # A line without a path is a group by itself.
        groups.setdefault(text or line, []).append((path, colon, text))

    printed: list[str] = []
    for group in groups.values():
        # Up to four paths are named. Of more, three are named and the others counted.
        paths = [path for path, _, _ in group]
        _, colon, text = group[0]
        if len(paths) > _FEW:
            paths = [*paths[:3], f"{len(paths) - 3} more"]
        printed.append(f"{', '.join(paths)}{colon}{text}")

    for line in printed[:most]:
        say(f"{label}: {line}")
    if len(printed) > most:
        say(f"{label}: ... and {len(printed) - most} more")


def print_network(body: Body) -> None:
    """Print a network in a few lines, as `inspect` and `demo` do."""
    name = f"{body['source']}: {body['class']}"
    if body["architecture"]:
        name += f" ({body['architecture']})"

    # `inspect` lists the blocks. `demo` has counted them by the kind of their skip connection.
    if "blocks" in body:
        skips = Counter(block["skip"] for block in body["blocks"])
    else:
        skips = Counter(body["skips"])
    blocks = "none"
    if skips:
        blocks = f"{sum(skips.values())} (skip: {counts(skips)})"

    norm_count = sum(body["norms"].values())
    norms = "none"
    if norm_count:
        norms = f"{norm_count} ({counts(body['norms'])})"

    facts(
        ("network", name),
        ("input", size(body["input_size"])),
        ("parameters", f"{body['parameters']:,}"),
        ("converted", " -> ".join(body["plan"])),
        ("blocks", blocks),
        ("norms", norms),
        ("roles", counts(body["roles"])),
    )


def cell(value: object) -> str:
    """Return a value as it stands in a table: None is empty, a float has four digits."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def few(values: Sequence[object]) -> str:
    """Return values in one line. Of many, only the first are shown, and the number of all."""
    shown = " ".join(cell(value) for value in values[:_FEW])
    if len(values) > _FEW:
        shown += f" ... ({len(values)} in all)"
    return shown


def one_line(value: object) -> str:
    """Return a record, a list or a value in one line: `mean 0.5 0.5 0.5, std 0.2 0.2 0.2`."""
    if isinstance(value, Mapping):
        entries = [f"{name} {one_line(item)}" for name, item in value.items() if item is not None]
        return ", ".join(entries)
    if isinstance(value, list | tuple):
        return few([one_line(item) for item in value])
    return cell(value)


def counts(counted: Mapping[str, int]) -> str:
    """Return counts by name in one line, without zeros: `3 identity, 1 projection`."""
    return ", ".join(f"{count} {name}" for name, count in counted.items() if count)


def span(pair: Sequence[float] | None) -> str:
    """Return a range of numbers as `0.1 .. 0.4`, or as one number if both look alike.

    Args:
        pair: The smallest and the largest number. None gives an empty text.
    """
    if pair is None:
        return ""
    # A dict has each text once, so two numbers that are written alike become one.
    return " .. ".join(dict.fromkeys(f"{value:.2g}" for value in pair))


def size(sides: Sequence[int]) -> str:
    """Return a shape in words, such as `3x224x224`."""
    return "x".join(map(str, sides))


def small(value: float | None) -> str:
    """Return an error as it is printed, such as `2.1e-07`. None gives an empty text."""
    if value is None:
        return ""
    return f"{value:.1e}"


def print_conversion(body: Body) -> None:
    """Print every step of a conversion, and where its result is."""
    for step in body["steps"]:
        print_step(body["source"], step, dry=body["output"] is None)

    if body["plan"]:
        say(f"plan saved to {body['plan']}")
    if body["output"]:
        say(f"written to {body['output']}")
    else:
        say("dry run: no network was written")


def print_step(source: str, step: Body, *, dry: bool) -> None:
    """Print one step of a conversion.

    Args:
        source: The name of the network that is converted.
        step: The step's record, as `summary.of_step` makes it.
        dry: Whether the step was only planned, not carried out.
    """
    target = f"{source} to {step['scheme']}"
    options = changed(step["scheme"], step["options"])
    if options:
        target += f" ({one_line(options)})"

    # A step that was only planned has no report. `unfold` is exact, and is no scheme that could fit
    # values.
    report = step["report"]
    result = None
    if report:
        can_fit = not report["exact"] and get(step["scheme"]).fit is not None
        result = verdict(report, can_fit=can_fit)

    # Norms are counted by what became of them or, if that is not known, by their class.
    facts(
        ("would convert" if dry else "converted", target),
        ("result", result),
        ("norms", counts(step["outcomes"]) or counts(step["left"])),
    )
    if dry:
        _print_edits(step["edits"])
    elif step["alphas"]:
        table("Scalars", ("path", "alpha"), step["alphas"].items(), right=("alpha",))
    listing("note", step["notes"])
    listing("renamed", (f"{old} -> {new}" for old, new in step["renames"]))
    if report:
        print_proof(report)


def _print_edits(edits: Iterable[Body]) -> None:
    """Print the edits of a plan: which layer comes to which path."""
    rows: list[tuple[str, ...]] = []
    for edit in edits:
        arguments = one_line(edit["args"])
        rows.append((edit["path"], edit["layer"], arguments, ", ".join(edit["reads"])))
    table("Plan (--json has all)", ("path", "layer", "arguments", "reads"), rows)


def verdict(report: Body, *, can_fit: bool = False) -> str:
    """Return the sentence that says how well a network agrees with its source.

    It begins with PROVED, NOT PROVED, WRONG, MEASURED or `not known`.

    Args:
        report: The report of a conversion or comparison.
        can_fit: Whether the scheme can fit its values to images. The sentence then proposes it.
    """
    # A conversion that claims to be exact is proved or not. The last measurement is named.
    if report["exact"]:
        last = report["logits"][-1]
        precision = last["precision"]
        measured = f"relative L2 {small(last['relative_l2'])} in {precision}"
        allowed = f"allowed {small(report['tolerance'].get(precision))}"
        if report["unproved"]:
            return f"NOT PROVED: {report['unproved']}"
        beginning = "WRONG: not the function of the source"
        if report["passed"]:
            beginning = "PROVED, kept exactly"
        return f"{beginning}: {measured}, {allowed}"

    # Another conversion is measured on held-out images, if there are any.
    if report.get("kept"):
        return f"MEASURED: {report['kept']['said']}"
    if report["unmeasured"]:
        return f"not known: {report['unmeasured']}"
    if can_fit:
        return (
            "not known: pass --calibrate IMAGES (25 or more, no labels needed) to fit and measure"
            " it"
        )
    return "not known"


def print_proof(report: Body) -> None:
    """Print the measurements of a report: a row for each precision and input size.

    `verdict` says what they mean.
    """
    is_exact = report["exact"]
    rows: list[list[object]] = []
    for error in report["logits"]:
        row: list[object] = [
            error["precision"],
            size(error["size"]),
            small(error["relative_l2"]),
            small(error["largest"]),
        ]
        if is_exact:
            agreement = ""
            if error["agreement"] is not None:
                agreement = f"{100 * error['agreement']:.4g} %"
            allowed = small(report["tolerance"].get(error["precision"]))
            row += [agreement, allowed, "ok" if error["within"] else "too far"]
        rows.append(row)

    # The rows of a conversion that is not exact have the first four columns only.
    title = "Verification on {}" if is_exact else "Distance from the source on {}"
    table(title.format(report["inputs"]), _COLUMNS[: len(rows[0])], rows, right=_COLUMNS[2:6])

    # Agreement is counted by the largest value along an axis. For a classifier's scores, on axis 1,
    # that goes without saying. For another output it is printed.
    answers = [
        error["answer"] for error in report["logits"] if error["answer"] and error["axis"] != 1
    ]
    listing("agreement", dict.fromkeys(f"by {answer}" for answer in answers))
    listing("warning", report["remarks"], most=5)


def same_answers(figures: Body) -> str:
    """Return in words how many answers of an exported file equal its network's answers.

    The text is empty if that was not counted.
    """
    if figures["agreement"] is None:
        return ""

    answers = figures["answers"]
    count = f"{round(figures['agreement'] * answers)} of {answers}"
    if figures["unit"] != "images":
        count += f" {figures['unit']} of {figures['count']} images"
    return f"{count} ({figures['inputs']})"


def top1_change(figures: Body) -> str:
    """Return top-1 of a network and of its exported file, in words. Empty without labels."""
    if figures["top1"] is None:
        return ""

    source = figures["source_top1"]
    result = figures["top1"]
    return (
        f"{source:.2f} % -> {result:.2f} % ({result - source:+.2f} points), on {figures['count']}"
        " images"
    )


def operators(nodes: Mapping[str, int] | None) -> str:
    """Return how many operators a file has, and how many of each kind."""
    if not nodes:
        return ""
    return f"{sum(nodes.values())}: {counts(nodes)}"


def print_file(body: Body) -> None:
    """Print an exported file in a few lines, with what its sidecar says of inputs and outputs.

    The sidecar is FILE.preprocess.json, which `normswap export` writes beside the file.

    Args:
        body: The record that --json prints.
    """
    # The figures of the check at export are printed as text.
    sidecar = dict(body["sidecar"])
    figures = sidecar.get("checked")
    if isinstance(figures, dict):
        distance = (
            f"relative L2 {small(figures['relative_l2'])}, allowed {small(figures['tolerance'])}"
        )
        samples = f"{figures['count']} samples, {figures['inputs']}"
        sidecar["checked"] = f"{distance}; {samples}"
        sidecar["agreement"] = same_answers(figures)
        sidecar["top-1"] = top1_change(figures)

    # A file names its architecture and its source, which may be the same.
    metadata = body["metadata"]
    origins = [metadata[key] for key in ("architecture", "source") if metadata.get(key)]
    note = None
    if not sidecar:
        note = "`normswap export` did not write it: nothing says how images are prepared for it"
    facts(
        ("file", f"{body['source']} ({body['bytes'] / 1e6:.1f} MB)"),
        ("format", body["format"]),
        ("operators", operators(body["nodes"])),
        ("made from", " ".join(dict.fromkeys(origins))),
        *((name, one_line(value)) for name, value in sidecar.items()),
        ("note", note),
    )
