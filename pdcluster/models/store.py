"""Keep made checkpoints: built aside, renamed into place, locked against a second builder, checked by checksum.

`checksums.json` is written last and holds size, modification time and SHA-256 of every file. A check compares size
and time, which costs nothing at each launch; where a time differs (a copied cache), the SHA-256 decides.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Say = Callable[[str], None]
CHECKSUMS = "checksums.json"


@contextmanager
def lock(directory: Path) -> Iterator[None]:
    """Hold the builders' lock of one checkpoint; waits for another builder to end."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(directory.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make(directory: Path, build: Callable[[Path, Say], None], say: Say) -> None:
    """Build into a directory beside the target, write the checksums, and swap it in."""
    aside = Path(tempfile.mkdtemp(prefix=directory.name + ".", dir=directory.parent))
    try:
        build(aside, say)
        files = sorted(path for path in aside.rglob("*") if path.is_file())
        sums = {str(path.relative_to(aside)): _describe(path) for path in files}
        (aside / CHECKSUMS).write_text(json.dumps(sums, indent=1), encoding="utf-8")
        shutil.rmtree(directory, ignore_errors=True)
        aside.rename(directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def is_sound(directory: Path, say: Say) -> bool:
    """Tell whether a made checkpoint is there, whole and unchanged; says so when it is damaged."""
    try:
        sums = json.loads((directory / CHECKSUMS).read_text(encoding="utf-8"))
        damaged = [name for name, known in sums.items() if not _matches(directory / name, known)]
    except FileNotFoundError:
        return False
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        damaged = [CHECKSUMS]
    if damaged:
        say(f"{directory}: {damaged[0]} is damaged; making the model again")
    return not damaged


def sha256(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _describe(path: Path) -> dict[str, int | str]:
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": sha256(path)}


def _matches(path: Path, known: dict[str, int | str]) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    if status.st_size != known["size"]:
        return False
    return status.st_mtime_ns == known["mtime_ns"] or sha256(path) == known["sha256"]
