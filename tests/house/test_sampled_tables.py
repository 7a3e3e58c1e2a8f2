"""A row that is added to a table of tests moves no other row into the default run, or out of it."""

from support.sampled_tables import one_in, pairs, sampled

ROWS = [f"row{number}" for number in range(20)]
COLUMNS = ["first", "second", "third"]


def test_every_row_and_column_is_in_a_default_pair() -> None:
    found = pairs(COLUMNS, ROWS)

    assert {row for _, row in found} == {*ROWS}
    assert {column for column, _ in found} == {*COLUMNS}
    assert len(found) < len(ROWS) + len(COLUMNS)


def test_a_new_row_moves_no_pair() -> None:
    before = pairs(ROWS, COLUMNS)
    after = pairs(["new", *ROWS], COLUMNS)

    assert {pair for pair in after if pair[0] != "new"} == before


def test_a_new_case_moves_no_case() -> None:
    before = one_in(ROWS, 3)

    assert 0 < len(before) < len(ROWS)
    assert one_in(["new", *ROWS], 3) - {"new"} == before


def test_one_case_runs_by_default_at_least() -> None:
    for row in ROWS:
        assert one_in([row], 1000) == {row}

    assert sum(not param.marks for param in sampled(ROWS, 1000)) == 1
