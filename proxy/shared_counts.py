"""Counts that all workers of the proxy see: a table of integers, one row a worker, in memory that a fork shares.

Each cell has one writer, its row's worker, so no lock is needed. With one worker it is a list: nobody else looks.
"""

from __future__ import annotations

import mmap
from collections.abc import MutableSequence

_BYTES = 8


class SharedCounts:
    """A table of 64-bit integers; one row is this process's own. Its first `volatile` columns end with a process.

    `mine` are the cells of this process's row, by column.
    """

    def __init__(self, columns: int, rows: int = 1, volatile: int | None = None) -> None:
        self.columns = columns
        self.volatile = columns if volatile is None else volatile
        self.rows = rows
        self._table: list[MutableSequence[int]] = [[0] * columns]
        if rows > 1:
            memory = mmap.mmap(-1, max(1, rows * columns) * _BYTES)  # anonymous and shared
            cells = memoryview(memory).cast("q")
            self._table = [cells[start : start + columns] for start in range(0, rows * columns, columns)]  # type: ignore[misc]
        self.mine = self._table[0]

    def take_row(self, row: int) -> None:
        """Make a row this process's own, emptied: for a worker, after the fork."""
        self.mine = self._table[row]
        self.clear(row)

    def total(self, column: int) -> int:
        """Return the sum of a column over all workers."""
        if self.rows == 1:
            return self.mine[column]
        return sum([row[column] for row in self._table])

    def totals(self, column: int, width: int) -> list[int]:
        """Return the sums of so many columns from one on."""
        return [self.total(index) for index in range(column, column + width)]

    def part(self, column: int, width: int) -> list[list[int]]:
        """Return so many cells from a column on, of every worker."""
        return [list(row[column : column + width]) for row in self._table]

    def of(self, row: int, column: int) -> int:
        """Return a cell of any worker."""
        return self._table[row][column]

    def clear(self, row: int) -> None:
        """Empty a row's volatile cells: what a worker that died was serving is over, what its clients used is not."""
        for column in range(self.volatile):
            self._table[row][column] = 0
