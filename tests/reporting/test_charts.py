"""Charts: marks stand where their values say, and every value is on the chart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from normswap.reporting import charts, figures, records, tables
from normswap.reporting.charts import Chart, Rule, Series
from normswap.reporting.records import BlockFact


def marks(text: str) -> dict[str, tuple[float, float]]:
    """Where the mark with each tooltip stands."""
    found = re.findall(
        r'<title>([^<]*)</title>(?:(?!<title>).)*?<use href="#\w+" x="([\d.]+)" y="([\d.]+)"', text, re.S
    )
    return {name: (float(x), float(y)) for name, x, y in found}


def test_marks_are_where_their_values_are() -> None:
    values = [1e-7, 1e-6, 1e-5]
    series = Series("x", [(float(i), value, f"mark {i}") for i, value in enumerate(values)], line="solid")
    text = charts.over_blocks(
        "a chart", [series], y_label="y", stages=["a", "a", "b"], log=True, rules=[Rule("r", 1e-5)]
    )
    (x0, y0), (x1, y1), (x2, y2) = (marks(text)[f"mark {i}"] for i in range(3))
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y0 > y1 > y2
    assert f'"M {x0} {y0}\nL {x1} {y1}\nL {x2} {y2}\n"' in text
    rule = re.search(r'<path d="M [\d.]+ ([\d.]+)\nL [\d.]+ ([\d.]+)\n"[^>]*stroke-dasharray', text)
    assert rule
    assert [float(y) for y in rule.groups()] == pytest.approx([y2, y2], abs=0.01)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_values_off_a_log_axis_become_triangles(value: float) -> None:
    def drawn(value: float) -> str:
        series = Series("x", [(0.0, 1.0, "one"), (1.0, value, "odd")])
        return charts.over_blocks("a chart", [series], y_label="y", stages=["a", "a"], log=True)

    text = drawn(value)
    shapes = re.findall(r'<path id="\w+" d="([^"]+)"', text)
    assert [shape.count("L") for shape in shapes if "C" not in shape] == [2]
    assert not any("C" not in shape for shape in re.findall(r'<path id="\w+" d="([^"]+)"', drawn(2.0)))
    (x, bottom), (odd, y) = marks(text)["one"], marks(text)["odd"]
    assert odd > x
    assert y == bottom if value <= 0 else 0 < y < bottom - 100
    assert "nan" not in text
    assert "inf" not in text


def test_bars_are_as_high_as_their_counts() -> None:
    text = charts.histogram("a histogram", [0, 1, 2, 3], [10, 0, 40], colour=1, x_label="x", y_label="y")
    corner = r"[\d.]+ ([\d.]+)"
    bars = re.findall(rf"<title>(\d+) between[^<]*</title>\s*<path d=\"M {corner}\nL [\d.]+ [\d.]+\nL {corner}", text)
    heights = {int(count): float(low) - float(high) for count, low, high in bars}
    assert heights.keys() == {10, 40}
    assert heights[40] == pytest.approx(4 * heights[10], rel=1e-3)
    assert ">0</text>" in charts.histogram("a histogram", [1, 2, 3], [10, 40], colour=1, x_label="x", y_label="y")


def check_ticks(values: Sequence[float], *, log: bool) -> None:
    """The axis holds the values, between two and nine ticks with different labels."""
    chart = Chart("x", "y")
    low, high = chart.scale(values, log=log)
    assert all(low <= value <= high for value in values)
    ticks = [tick for tick in chart.axes.get_yticks() if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9) or not log]
    assert 2 <= len(ticks) <= 9
    write = charts.power if log else charts.number
    assert len({write(tick) for tick in ticks}) == len(ticks)


@pytest.mark.parametrize("values", [[0.0], [3.0, 3.0], [-5e-9, 2e-9], [0.97, 1.02], [-3.0, 1e6], []])
def test_linear_ticks_hold_the_values(values: list[float]) -> None:
    check_ticks(values, log=False)


@pytest.mark.parametrize("values", [[1.0], [2e-15, 3e-15], [1e-18, 1.0], [0.2, 30.0], []])
def test_log_ticks_hold_the_values(values: list[float]) -> None:
    check_ticks(values, log=True)


@pytest.mark.parametrize(
    ("value", "text"),
    [(15000, "15,000"), (0.25, "0.25"), (-2, "\N{MINUS SIGN}2"), (1e9, "1e+09"), (1 / 3, "0.3333"), (0, "0")],
)
def test_numbers(value: float, text: str) -> None:
    assert charts.number(value) == text


def test_colours_are_the_page_s_own() -> None:
    """Nothing drawn keeps a colour of its own, so that all follows the page to dark."""
    text = charts.over_blocks("a chart", [Series("x", [(0.0, 1.0, "one")], drop=True)], y_label="y", stages=["a"])
    assert "var(--c1)" in text
    assert not re.search(r"#[0-9a-f]{6}\b(?![\w-]*\")", re.sub(r'(id|href)="[^"]*"|url\(#\w+\)', "", text))


def test_marks_of_two_looks_and_lines_to_the_axis() -> None:
    """Lines down to the axis are drawn where they are asked for, and nowhere else."""

    def paths(*, drop: bool) -> int:
        series = Series("x", [(0.0, 1.0, "one"), (1.0, 2.0, "two")], drop=drop)
        text = charts.over_blocks("a chart", [series], y_label="y", stages=["a", "a"])
        return len(re.findall(r'<path d="M ([\d.]+) [\d.]+\nL \1 [\d.]+\n"', text))

    assert paths(drop=True) == paths(drop=False) + 2


def test_a_band_is_as_wide_as_its_stage() -> None:
    chart = Chart("x", "y")
    chart.bands(["a", "b", "b", "c", "c", "c"])
    spans = [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in chart.axes.patches]  # type: ignore[attr-defined]
    assert spans == [(-0.5, 0.5), (2.5, 5.5)]  # every other stage is shaded


def test_a_histogram_ends_where_its_edges_do(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Chart] = []
    monkeypatch.setattr(Chart, "svg", lambda self, label: seen.append(self) or "")
    charts.histogram("a histogram", [1, 2, 3, 5], [10, 0, 40], colour=1, x_label="x", y_label="y")
    assert seen[0].axes.get_xlim() == (1, 5)


def test_signal_is_drawn_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks whose variances are alike do not look far apart."""
    asked: list[dict[str, Any]] = []
    drawn: list[Series] = []
    monkeypatch.setattr(
        charts, "over_blocks", lambda label, series, **options: drawn.extend(series) or asked.append(options) or ""
    )
    point = SimpleNamespace(depth=1, block="b", stage="a", added_variance=3.0, branch_variance=3.0)
    facts = SimpleNamespace(against="source", signal={"before": (point,), "after": (point,)})
    figures._signal(facts, "added_variance", "title", "variance")  # type: ignore[arg-type]
    assert len({series.colour for series in drawn}) == len(drawn) == 2
    assert asked[0]["zero"]
    assert not asked[0]["log"]


def test_roles_have_different_colours() -> None:
    assert len(set(records.COLOURS.values())) == len(records.COLOURS)


@pytest.mark.parametrize(
    ("members", "text"), [([0, 1, 2], "a … c"), ([0, 2], "a, c"), ([2, 3], "c, d"), ([0, 1, 3, 4], "a … b, d … e")]
)
def test_neighbours_in_a_stage_are_one_run(members: list[int], text: str) -> None:
    blocks = [BlockFact(path, stage, "", ()) for path, stage in zip("abcde", "11122", strict=True)]
    assert re.sub(r"<[^>]*>", "", tables._runs(members, blocks)) == text
