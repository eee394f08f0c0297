"""Tables for the terminal."""

from collections.abc import Container, Sequence


def text_table(rows: Sequence[Sequence[str]], text_columns: Container[int]) -> str:
    """Align the columns of a table.

    Args:
        rows: The cells; all rows have as many.
        text_columns: Numbers of the columns that begin at the left; the others, numbers, end at the right.

    Returns:
        A line for each row, without a final line break.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number in text_columns else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
