"""Charts: marks stand where their values say, and every value is on the chart."""

from __future__ import annotations

import re

import pytest

from normswap.reporting import charts
from normswap.reporting.charts import Rule, Series


def test_marks_are_where_their_values_are() -> None:
    values = [1e-7, 1e-6, 1e-5]
    series = Series("x", [(float(i), value, str(i)) for i, value in enumerate(values)])
    text = charts.over_blocks(
        "a chart", [series], y_label="y", stages=["a", "a", "b"], log=True, rules=[Rule("r", 1e-5)]
    )
    marks = re.findall(r'<circle class="dot" cx="([\d.]+)" cy="([\d.]+)" r="4"/><title>', text)
    centers = [(float(x), float(y)) for x, y in marks]
    assert len(centers) == 3
    (x0, y0), (x1, y1), (x2, y2) = centers
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y0 > y1 > y2
    rule = re.search(r'class="rule" x1="58" x2="468" y1="([\d.]+)"', text)
    assert rule
    assert float(rule[1]) == y2


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_values_off_a_log_axis_become_triangles(value: float) -> None:
    series = Series("x", [(0.0, 1.0, "one"), (1.0, value, "odd")])
    text = charts.over_blocks("a chart", [series], y_label="y", stages=["a", "a"], log=True)
    assert text.count('<path class="dot"') == 1
    assert "nan" not in text
    assert "inf" not in text


@pytest.mark.parametrize("values", [[0.0], [3.0, 3.0], [-5e-9, 2e-9], [0.97, 1.02], [-3.0, 1e6], []])
def test_linear_ticks_hold_the_values(values: list[float]) -> None:
    axis = charts.linear(values, 200, 0)
    assert all(axis.holds(value) for value in values)
    assert 2 <= len(axis.ticks) <= 8
    assert len({axis.label(tick) for tick in axis.ticks}) == len(axis.ticks)


@pytest.mark.parametrize("values", [[1.0], [2e-15, 3e-15], [1e-18, 1.0], [0.2, 30.0], []])
def test_log_ticks_hold_the_values(values: list[float]) -> None:
    axis = charts.logarithmic(values, 200, 0)
    assert all(axis.holds(value) for value in values)
    assert 2 <= len(axis.ticks) <= 9
    assert len({axis.label(tick) for tick in axis.ticks}) == len(axis.ticks)


@pytest.mark.parametrize(
    ("value", "text"),
    [(15000, "15,000"), (0.25, "0.25"), (-2, "\N{MINUS SIGN}2"), (1e9, "1e+09"), (1 / 3, "0.3333"), (0, "0")],
)
def test_numbers(value: float, text: str) -> None:
    assert charts.number(value) == text
