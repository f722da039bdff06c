"""Print lines of several growing files as they come."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

_POLL_S = 0.3


def follow(paths: Mapping[str, Path], write: Callable[[str], None], *, prefixed: bool) -> None:
    """Print new lines until interrupted; a file that shrinks is read from its start again."""
    offsets = {name: path.stat().st_size for name, path in paths.items()}
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
