"""Records as tables, by rich, on stdout, at 100 columns or the terminal's width."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

Body = Mapping[str, Any]
_WIDTH = 100


def _out() -> Console:
    width = None if sys.stdout.isatty() else _WIDTH
    return Console(width=width, markup=False, highlight=False, emoji=False)


# --- tables -----------------------------------------------------------------------------------------------------------


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: str = "") -> Table:
    """Columns named in `right` are numbers; a column that is empty in every row is left out."""
    cells = [[_cell(value) for value in row] for row in rows]
    kept = [i for i in range(len(columns)) if any(texts[i] for texts in cells)]
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    numbers = right.split(",")
    for i in kept:
        number = columns[i] in numbers
        table.add_column(columns[i], justify="right" if number else "left", overflow="fold", no_wrap=number or i == 0)
    for texts in cells:
        table.add_row(*(Text(texts[i]) for i in kept))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _facts(pairs: Iterable[tuple[str, Any]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        if value not in (None, ""):
            table.add_row(Text(name), Text(_cell(value)))
    return table


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def _span(pair: Sequence[float] | None) -> str:
    if pair is None:
        return ""
    low, high = (f"{value:.2g}" for value in pair)
    return low if low == high else f"{low} .. {high}"


def _size(size: Sequence[int]) -> str:
    return "x".join(map(str, size))


# --- inspect ----------------------------------------------------------------------------------------------------------


def network(body: Body) -> None:
    """What `summary.of_network` says."""
    out = _out()
    out.print(network_facts(body))
    if body["blocks"]:
        columns: Sequence[str] = ("blocks", "x", "skip", "order", "norms", "last", "gate", "drop path", "alpha")
        out.print(_table("Residual blocks", columns, _block_rows(body["blocks"]), right="x,norms"))
    if body["sites"]:
        kinds = {site["class"] for site in body["sites"]}
        gone = any(site["role"] is None for site in body["sites"])
        title = "Sites of norms" if gone else "Norms" if len(kinds) > 1 else f"Norms, all {min(kinds)}"
        columns = ("path", "class", "channels", "role", "mean", "std", "folding")
        out.print(_table(title, columns, _site_rows(body["sites"], len(kinds) > 1), right="channels"))
    if body["refusals"]:
        rows = [(refusal["path"], refusal["reason"]) for refusal in body["refusals"]]
        out.print(_table("Not looked into", ("path", "reason"), rows))


def network_facts(body: Body) -> Table:
    """The network in a few lines."""
    architecture = f" ({body['architecture']})" if body["architecture"] else ""
    skips = Counter(block["skip"] for block in body["blocks"]) if "blocks" in body else Counter(body["skips"])
    norms = sum(body["norms"].values())
    return _facts(
        (
            ("network", f"{body['source']}: {body['class']}{architecture}"),
            ("input", _size(body["input_size"])),
            ("parameters", f"{body['parameters']:,}"),
            ("converted", " -> ".join(body["plan"])),
            ("blocks", f"{sum(skips.values())} (skip: {_counts(skips)})" if skips else "none"),
            ("norms", f"{norms} ({_counts(body['norms'])})" if norms else "none"),
            ("roles", _counts(body["roles"])),
        )
    )


def _block_rows(blocks: Sequence[Body]) -> Iterator[Sequence[Any]]:
    """Consecutive blocks of a stage that look alike make one row."""

    def look(block: Body) -> tuple[Any, ...]:
        within = [_inside(block["path"], block[name]) for name in ("last", "gate", "drop_path")]
        return block["stage"], block["skip"], block["order"], len(block["norms"]), *within

    for (_, skip, order, norms, *inside), group in groupby(blocks, look):
        alike: list[Body] = list(group)
        first, last = alike[0]["path"], alike[-1]["path"]
        names = first if len(alike) == 1 else f"{first} .. {last}"
        alphas = [block["alpha"] for block in alike if block["alpha"] is not None]
        yield names, len(alike), skip, order, norms, *inside, _span((min(alphas), max(alphas))) if alphas else None


def _inside(block: str, path: str | None) -> str | None:
    """A path as seen from its block."""
    return None if path is None else path.removeprefix(f"{block.partition('+')[0]}.")


def _site_rows(sites: Sequence[Body], with_class: bool) -> Iterator[Sequence[Any]]:
    for site in sites:
        fate = f"refused: {site['refused']}" if site["refused"] else site["folding"]
        parent = site["path"].rpartition(".")[0]
        if fate and parent:  # neighbours by the name they have there
            fate = fate.replace(f"{parent}.", "")
        kind = site["class"] if with_class else None
        yield site["path"], kind, site["channels"], site["role"], _span(site["mean"]), _span(site["std"]), fate


# --- convert and verify -----------------------------------------------------------------------------------------------


def conversion(body: Body) -> None:
    """What `convert` did, or with a dry run would do."""
    out = _out()
    for step in body["steps"]:
        options = ", ".join(f"{name} {value}" for name, value in step["options"].items())
        layers = Counter(edit["layer"] for edit in step["edits"])
        verb = "converted" if body["output"] else "would convert"
        facts = [
            (verb, f"{body['source']} to {step['scheme']}" + (f" ({options})" if options else "")),
            ("norms", _counts(step["outcomes"])),
            ("edits", f"{sum(layers.values())} ({_counts(layers)})" if layers else ""),
        ]
        out.print(_facts(facts))
        if body["output"] is None:
            rows = [_edit_row(edit) for edit in step["edits"]]
            out.print(_table("Plan", ("seat", "layer", "arguments", "reads"), rows))
        elif step["alphas"]:
            out.print(_table("Scalars", ("seat", "alpha"), step["alphas"].items(), right="alpha"))
        _say(out, "note", step["notes"])
        _say(out, "renamed", (f"{old} -> {new}" for old, new in step["renames"]))
        if step["report"]:
            report(out, step["report"])
    for what in ("plan", "output"):
        if body[what]:
            _line(out, f"{'plan saved to' if what == 'plan' else 'written to'} {body[what]}")
    if not body["output"]:
        _line(out, "dry run: no network was written")


def _edit_row(edit: Body) -> Sequence[Any]:
    args = ", ".join(f"{name} {_cell(value) if not isinstance(value, list) else ' '.join(map(str, value))}"
                     for name, value in edit["args"].items())  # fmt: skip
    ways = [_take(take) for take in edit["takes"]] or [""] * len(edit["reads"])
    reads = ", ".join(f"{way} {path}".strip() for way, path in zip(ways, edit["reads"], strict=True))
    return edit["path"], edit["layer"], args, reads


def _take(take: Body) -> str:
    return take["way"] + (":".join(map(str, ("", *take["part"]))) if take["part"] else "")


def _say(out: Console, label: str, lines: Iterable[str], most: int = 20) -> None:
    listed = list(lines)
    for line in listed[:most]:
        _line(out, f"{label}: {line}")
    if len(listed) > most:
        _line(out, f"{label}: ... and {len(listed) - most} more")


def _line(out: Console, text: str) -> None:
    out.print(Text(text), soft_wrap=True)


def report(out: Console, body: Body) -> None:
    """The measurements, one row per precision and input size."""
    claim = "the function is kept" if body["exact"] else "the function changes"
    rows = [
        (
            error["precision"], _size(error["size"]), _small(error["relative_l2"]), _small(error["largest"]),
            f"{100 * error['agreement']:.4g} %" if error["agreement"] is not None else None,
            _small(body["tolerance"].get(error["precision"])) if body["exact"] else None,
            ("ok" if error["within"] else "FAILED") if body["exact"] else "not exact",
        )
        for error in body["logits"]
    ]  # fmt: skip
    columns = ("precision", "input", "relative L2", "max", "agreement", "allowed", "verdict")
    title = f"Verification on {body['inputs']}: {claim}"
    out.print(_table(title, columns, rows, right="relative L2,max,agreement,allowed"))
    _say(out, "vacuous", body["vacuous"], most=5)


def _small(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}" if math.isfinite(value) else "inf"


def verification(body: Body) -> None:
    """What `verify` found."""
    out = _out()
    out.print(_facts((("network", body["directory"]), ("against", body["against"]))))
    if body["source_unchanged"] is False:
        _line(out, "warning: the source is not what it was: its tensors have another hash than when this was made")
    report(out, body["report"])
    if body["data"]:
        data = body["data"]
        facts = (
            ("images", data["count"]),
            ("top-1", f"{data['source']:.2f} % -> {data['result']:.2f} %"),
            ("agreement", f"{100 * data['agreement']:.2f} %"),
        )
        out.print(_facts(facts))
    _line(out, "passed" if body["passed"] else "FAILED: the networks differ")


# --- the others -------------------------------------------------------------------------------------------------------


def evaluation(body: Body) -> None:
    """What `evaluate` measured."""
    facts = (
        ("network", body["source"]),
        ("images", f"{body['count']} of {body['data']}"),
        ("top-1", f"{body['top1']:.2f} %"),
        ("top-5", f"{body['top5']:.2f} %"),
        ("loss", f"{body['loss']:.4f}"),
        ("speed", f"{body['images_per_s']:.0f} images/s"),
    )
    _out().print(_facts(facts))


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def schemes(bodies: Sequence[Body]) -> None:
    """What one can convert to."""
    out = _out()
    for body in bodies:
        only = body["exact_only_with"]
        options = ", ".join(f"{_flag(name)} (default {value})" for name, value in body["options"].items())
        needed = ", ".join(f"{_flag(name)} {body['options'][name]}" for name in only)
        exact = "no" if not body["exact"] else f"with {needed}" if only else "always"
        out.print(Text(body["name"], style="bold"))
        for line in (body["summary"], body["paper"], options and f"options: {options}", f"exact: {exact}"):
            if line:
                out.print(Padding(Text(line), (0, 0, 0, 2)))


def demo(body: Body) -> None:
    """The demo's table."""
    out = _out()
    out.print(network_facts(body["anatomy"]))
    rows = [
        (
            row["network"], row["norms"], f"{row['parameters']:,}", f"{row['top1']:.2f} %",
            f"{100 * row['agreement']:.2f} %", _small(row["relative_l2"]), f"{row['speed']:.2f} x",
        )
        for row in body["rows"]
    ]  # fmt: skip
    columns = ("network", "norms", "parameters", "top-1", "agreement", "relative L2", "speed")
    title = f"Converted, saved, loaded again, and measured on {body['images']} images"
    out.print(_table(title, columns, rows, right=",".join(columns[1:])))
    done = "every figure agrees" if body["passed"] else "FAILED: the converted networks disagree with the source"
    _line(out, f"{done}; {body['seconds']:.0f} s")
