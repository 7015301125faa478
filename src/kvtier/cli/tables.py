"""Tables for a terminal. Nothing of them is ever cut off: where the columns don't fit, the table goes on below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

_BETWEEN = 3  # characters between two columns


class Rows:
    """Renders as one table, or as several below each other, each with the columns that identify a row."""

    def __init__(
        self,
        title: str | None,
        columns: Sequence[str],
        rows: Sequence[Sequence[str | Text]],
        right: Sequence[str],
        keys: int,
    ) -> None:
        self._title = title
        self._columns = columns
        self._rows = rows
        self._right = right
        self._keys = range(min(keys, len(columns)))
        self._widths = [self._unbroken_width(column) for column in range(len(columns))]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        for number, columns in enumerate(self._parts(options.max_width)):
            if number:
                yield Text()
            yield self._grid(columns, None if number else self._title, options.max_width)

    def _parts(self, width: int) -> list[list[int]]:
        """Indices of the columns of each table: as many as fit, at least one beside the keys."""
        parts = [list(self._keys)]
        for column in range(len(self._keys), len(self._columns)):
            wider = [*parts[-1], column]
            if len(parts[-1]) == len(self._keys) or self._least_width(wider) <= width:
                parts[-1] = wider
            else:
                parts.append([*self._keys, column])
        return parts

    def _least_width(self, columns: Sequence[int]) -> int:
        return sum(self._widths[column] for column in columns) + _BETWEEN * (len(columns) - 1)

    def _unbroken_width(self, column: int) -> int:
        """With no number and no key wrapped, and no word of a text broken."""
        is_whole = column in self._keys or self._columns[column] in self._right
        cells = {self._columns[column], *(str(row[column]) for row in self._rows)}
        parts = (part for cell in cells for part in (cell.splitlines() if is_whole else cell.split()))
        return max(map(cell_len, parts), default=0)

    def _grid(self, columns: Sequence[int], title: str | None, width: int) -> Table:
        grid = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False, show_edge=False)
        keys_fit = self._least_width(self._keys) <= width
        for column in columns:
            name = self._columns[column]
            is_number = name in self._right
            grid.add_column(
                name,
                justify="right" if is_number else "left",
                no_wrap=is_number or (column in self._keys and keys_fit),
                overflow="fold",
            )
        for row in self._rows:
            grid.add_row(*(row[column] for column in columns))
        return grid


def table(
    title: str | None,
    columns: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    *,
    right: Sequence[str] = (),
    keys: int = 1,
) -> Rows:
    """A plain table; `right` names the columns of numbers, the first `keys` columns say what a row is about."""
    return Rows(title, columns, rows, right, keys)
