"""The last lines of logs, and further lines as they come."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

_POLL_S = 0.3


def tail(path: Path, lines: int) -> tuple[list[str], int]:
    """Return the last lines of a text file and the offset where they end; nothing and 0 if it doesn't exist."""
    try:
        with path.open("rb") as file:
            last = deque(file, maxlen=lines)
            return [line.decode("utf-8", errors="replace").rstrip("\n") for line in last], file.tell()
    except FileNotFoundError:
        return [], 0


def follow(
    paths: Mapping[str, Path], starts: Mapping[str, int], write: Callable[[str], None], *, prefixed: bool
) -> None:
    """Print lines from the given offsets on until interrupted; a file that shrinks is read from its start again."""
    offsets = dict(starts)
    rests = dict.fromkeys(paths, "")
    while True:
        for name, path in paths.items():
            offsets[name], text = _read_from(path, offsets[name])
            *lines, rests[name] = (rests[name] + text).split("\n")
            for line in lines:
                write(f"{name} | {line}" if prefixed else line)
        time.sleep(_POLL_S)


def _read_from(path: Path, offset: int) -> tuple[int, str]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(offset if offset <= size else 0)
            data = file.read()
            return file.tell(), data.decode("utf-8", errors="replace")
    except FileNotFoundError:
        return 0, ""
