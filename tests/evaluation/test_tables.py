"""Tables are aligned, and Markdown."""

import pytest

from jaxir.evaluation.tables import format_table


def test_aligned_markdown():
    table = format_table(["system", "nDCG@10", "n"], [["bm25", 0.47541, 52], ["a|b", None, 1000]])
    assert table.splitlines() == [
        "| system | nDCG@10 |    n |",
        "|--------|--------:|-----:|",
        "| bm25   |  0.4754 |   52 |",
        "| a\\|b   |         | 1000 |",
    ]


def test_digits_and_no_rows():
    assert "77.15" in format_table(["all"], [[77.1549]], digits=2)
    assert format_table(["a", "b"], []).splitlines() == ["| a | b |", "|---|---|"]


def test_a_row_of_another_width_is_a_bug():
    with pytest.raises(ValueError, match="2 cells"):
        format_table(["a", "b"], [[1]])
