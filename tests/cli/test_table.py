"""Tables for the terminal."""

import pytest

from clipwise.cli.table import table


def test_columns_are_aligned() -> None:
    lines = table(["", "ECE"], [["long name", "1.0%"], ["x", "12.5%"]]).splitlines()
    assert [len(line) for line in lines] == [len(lines[1])] * 4
    assert lines[3].endswith("12.5%")


def test_ragged_rows_are_refused() -> None:
    with pytest.raises(ValueError):
        table(["a", "b"], [["1", "2", "3"]])
