"""Counts that all workers of the proxy see: a table of integers, one row a worker, in memory that a fork shares.

Each cell has one writer, its row's worker, so no lock is needed. With one worker it is a table of one row.
"""

from __future__ import annotations

import mmap

_BYTES = 8


class SharedCounts:
    """A table of 64-bit integers; one row is this process's own. Its first `volatile` columns end with a process."""

    def __init__(self, columns: int, rows: int = 1, volatile: int | None = None) -> None:
        self.columns = columns
        self.volatile = columns if volatile is None else volatile
        self.rows = rows
        self._memory = mmap.mmap(-1, max(1, rows * columns) * _BYTES)  # anonymous and shared
        self._cells = memoryview(self._memory).cast("q")
        self._own = 0

    def take_row(self, row: int) -> None:
        """Make a row this process's own, emptied: for a worker, after the fork."""
        self._own = row * self.columns
        self.clear(row)

    def add(self, column: int, change: int) -> None:
        """Change a cell of this process."""
        self._cells[self._own + column] += change

    def put(self, column: int, value: int) -> None:
        """Set a cell of this process."""
        self._cells[self._own + column] = value

    def own(self, column: int) -> int:
        """Return a cell of this process."""
        return self._cells[self._own + column]

    def total(self, column: int) -> int:
        """Return the sum of a column over all workers."""
        if self.rows == 1:
            return self._cells[column]
        return sum(self._cells[column :: self.columns])

    def part(self, column: int, width: int) -> list[list[int]]:
        """Return so many cells from a column on, of every worker."""
        if self.rows == 1:
            return [self._cells[column : column + width].tolist()]
        rows = range(0, self.rows * self.columns, self.columns)
        return [self._cells[start + column : start + column + width].tolist() for start in rows]

    def of(self, row: int, column: int) -> int:
        """Return a cell of any worker."""
        return self._cells[row * self.columns + column]

    def clear(self, row: int) -> None:
        """Empty a row's volatile cells: what a worker that died was serving is over, what its clients used is not."""
        for index in range(row * self.columns, row * self.columns + self.volatile):
            self._cells[index] = 0
