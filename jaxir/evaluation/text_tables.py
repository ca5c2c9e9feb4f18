"""Formats tables as aligned Markdown or LaTeX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

Style = Literal["markdown", "latex"]


def format_table(
    header: Sequence[str], rows: Sequence[Sequence[object]], *, digits: int = 4, style: Style = "markdown"
) -> str:
    """Returns an aligned Markdown table, or a LaTeX tabular (for booktabs), without a final line break.

    Floats have `digits` decimals. None makes an empty cell. Columns of numbers are aligned to the right.
    """
    texts = [[_text(cell, digits) for cell in row] for row in rows]
    header, *cells = [[_ESCAPED[style](text) for text in line] for line in (header, *texts)]
    widths = [max(len(text) for text in column) for column in zip(header, *cells, strict=True)]
    numeric = [
        bool(rows) and all(cell is None or isinstance(cell, int | float) for cell in column)
        for column in (zip(*rows, strict=True) if rows else [()] * len(header))
    ]
    if style == "latex":
        columns = "".join("r" if right else "l" for right in numeric)
        head, *body = [_line(row, widths, numeric, " & ") + r" \\" for row in (header, *cells)]
        lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body]
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])
    rule = [
        ("-" * (w + 1) + ":") if right else ("-" * (w + 2)) for w, right in zip(widths, numeric, strict=True)
    ]
    head, *body = [f"| {_line(row, widths, numeric, ' | ')} |" for row in (header, *cells)]
    return "\n".join([head, "|" + "|".join(rule) + "|", *body])


def caption(text: str, style: Style) -> str:
    """Returns a table's caption as printed above the table: in LaTeX each line becomes a comment."""
    return "\n".join(f"% {line}" for line in text.splitlines()) if style == "latex" else text


def _text(cell: object, digits: int) -> str:
    if cell is None:
        return ""
    text = f"{cell:.{digits}f}" if isinstance(cell, float) else str(cell)
    return text.replace("\n", " ")


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool], between: str) -> str:
    padded = [c.rjust(w) if right else c.ljust(w) for c, w, right in zip(cells, widths, numeric, strict=True)]
    return between.join(padded)


_LATEX = {**{sign: f"\\{sign}" for sign in "&%$#_{}"}, "\\": r"\textbackslash{}", "±": r"$\pm$"}
_LATEX |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}", "<": "$<$", ">": "$>$"}
_ESCAPED: dict[str, Callable[[str], str]] = {
    "markdown": lambda text: text.replace("|", "\\|"),
    "latex": lambda text: text.translate(str.maketrans(_LATEX)),
}
