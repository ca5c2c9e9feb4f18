"""Tables of text: aligned for the eye, Markdown for a page."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]], *, digits: int = 4) -> str:
    """Lays `rows` out under `header` as an aligned Markdown table.

    Args:
      header: the names of the columns.
      rows: cells; floats are printed with `digits` decimals, None as an empty cell.
      digits: decimals of floats.

    Returns:
      Lines joined by newlines, none at the end. Columns that hold only numbers are aligned to the right.

    Raises:
      ValueError: a row that has not as many cells as the header.
    """
    if any(len(row) != len(header) for row in rows):
        raise ValueError(f"every row needs {len(header)} cells: {', '.join(header)}")
    cells = [[_text(cell, digits) for cell in row] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(header, *cells, strict=True)]
    numeric = [
        bool(rows) and all(cell is None or isinstance(cell, int | float) for cell in column)
        for column in (zip(*rows, strict=True) if rows else [()] * len(header))
    ]
    rule = [
        ("-" * (w + 1) + ":") if right else ("-" * (w + 2)) for w, right in zip(widths, numeric, strict=True)
    ]
    lines = [_line(header, widths, numeric), "|" + "|".join(rule) + "|"]
    return "\n".join(lines + [_line(row, widths, numeric) for row in cells])


def _text(cell: object, digits: int) -> str:
    if cell is None:
        return ""
    text = f"{cell:.{digits}f}" if isinstance(cell, float) else str(cell)
    return text.replace("|", "\\|").replace("\n", " ")


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    padded = [c.rjust(w) if right else c.ljust(w) for c, w, right in zip(cells, widths, numeric, strict=True)]
    return "| " + " | ".join(padded) + " |"
