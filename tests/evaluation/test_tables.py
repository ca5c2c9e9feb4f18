from jaxir.evaluation.text_tables import format_table


def test_aligned_markdown():
    table = format_table(["system", "nDCG@10", "n"], [["bm25", 0.47541, 52], ["a|b", None, 1000]])
    assert table.splitlines() == [
        "| system | nDCG@10 |    n |",
        "|--------|--------:|-----:|",
        "| bm25   |  0.4754 |   52 |",
        "| a\\|b   |         | 1000 |",
    ]


def test_latex():
    rows = [["x & y_1", 0.5, 3], ["100 %", 0.25, None]]
    table = format_table(["system", "P@1", "n"], rows, digits=2, style="latex")
    assert table.splitlines() == [
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"system    &  P@1 & n \\",
        r"\midrule",
        r"x \& y\_1 & 0.50 & 3 \\",
        r"100 \%    & 0.25 &   \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
