"""An exported file, as `export`, `verify` and `inspect` print it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from normswap.cli.tables import facts, few, size
from normswap.plan import Body

CHECKED_ON_NOISE = "on noise only; give --data IMAGES to check it on photographs"


def same(figures: Body) -> str:
    """How many of its answers are the network's."""
    if figures["agreement"] is None:
        return ""
    answers, unit = figures["answers"], figures["unit"]
    of = "" if unit == "images" else f" {unit} of {figures['count']} images"
    return f"{round(figures['agreement'] * answers)} of {answers}{of} ({figures['inputs']})"


def top1(figures: Body) -> str:
    """The accuracies of network and file, on labelled images."""
    if figures["top1"] is None:
        return ""
    source, result = figures["source_top1"], figures["top1"]
    return f"{source:.2f} % -> {result:.2f} % ({result - source:+.2f} points), on {figures['count']} images"


def operators(nodes: Mapping[str, int] | None) -> str:
    """How many there are, and of each kind."""
    listed = ", ".join(f"{count} {kind}" for kind, count in (nodes or {}).items())
    return f"{sum(nodes.values())}: {listed}" if nodes else ""


def described(body: Body) -> None:
    """A file in a few lines: what it takes and gives, how, and where it is from."""
    beside, noted = body["sidecar"], body["metadata"]
    precision = beside.get("precision", {"weights": noted.get("dtype"), "arithmetic": None})
    labels = beside.get("output", {}).get("labels")
    versions = json.loads(noted.get("versions", "{}"))
    facts(
        ("file", f"{body['source']} ({body['bytes'] / 1e6:.1f} MB)"),
        ("format", body["format"]),
        ("precision", ", ".join(f"{part} in {kind}" for part, kind in precision.items() if kind)),
        ("takes", "; ".join(_input(each) for each in _put(beside, "input"))),
        ("resize", _resize(beside.get("resize"))),
        ("normalize", _normalize(beside)),
        ("gives", "; ".join(f"{each['name']} in {each['dtype']}" for each in _put(beside, "output"))),
        ("labels", few(labels) if labels else None),
        ("operators", operators(body["nodes"])),
        ("made from", " ".join(noted[key] for key in ("architecture", "source") if noted.get(key))),
        ("by", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("checked", _checked(beside.get("checked"))),
        ("int8", _quantized(beside.get("quantization"))),
        ("note", None if beside else "`normswap export` did not write it: nothing says how images are prepared for it"),
    )


def _put(beside: Body, name: str) -> Sequence[Body]:
    return [beside[name]] if name in beside else beside.get(f"{name}s", [])


def _input(each: Body) -> str:
    batch, *sides = each["shape"] if "shape" in each else (each["batch"], *each["size"])
    count = "any number of" if batch is None else batch
    return f"{each['name']}: {count} x {size(sides)} in {each['dtype']}"


def _resize(resize: Body | None) -> str | None:
    if resize is None:
        return None
    how = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in resize.items() if name != "to")
    return f"to {size(resize['to'])}, {how}"


def _normalize(beside: Body) -> str | None:
    if "normalize" not in beside:
        return None
    pixels = beside["normalize"]
    return f"mean {few(pixels['mean'])}, std {few(pixels['std'])}" if pixels else "inside: it takes pixels in 0..1"


def _checked(how: Body | str | None) -> str | None:
    if isinstance(how, str):  # why it was not
        return how
    if how is None or how["noise_only"]:
        return "on noise only" if how else None
    return f"on {how['count']} images, relative L2 {how['relative_l2']:.1e}"


def _quantized(how: Body | None) -> str | None:
    if how is None:
        return None
    lost = how["measured"]["lost"]
    cost = "" if lost is None else f", {lost:.2f} points lost on {how['measured']['count']} images"
    return f"{how['weight_bits']} bits, calibrated on {how['calibrated_on']} images{cost}"
