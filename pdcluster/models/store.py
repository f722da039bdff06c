"""Keep made checkpoints: built aside, renamed into place, locked against a second builder, checked by checksum.

`checksums.json` is written last and holds size, modification time and SHA-256 of every file. A check compares size
and time, which costs nothing at each launch, where hashing smollm2's 538 MB would add a second or so; where only a
time differs (a copied cache), the SHA-256 decides. What this cannot see is damage that keeps both size and time, such
as a failing disk's: remove the directory to have the model made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Say = Callable[[str], None]
CHECKSUMS = "checksums.json"


@contextmanager
def lock(directory: Path, say: Say) -> Iterator[None]:
    """Hold the builders' lock of one checkpoint; says so while it waits for another builder to end."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(directory.name + ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that is making {directory.name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make(directory: Path, build: Callable[[Path, Say], None], say: Say) -> None:
    """Build into a directory beside the target, write the checksums, and swap it in; the caller holds the lock."""
    aside = directory.with_name(directory.name + ".part")
    shutil.rmtree(aside, ignore_errors=True)  # left by a builder that was killed
    aside.mkdir()
    try:
        build(aside, say)
        files = sorted(path for path in aside.rglob("*") if path.is_file())
        sums = {str(path.relative_to(aside)): _describe(path) for path in files}
        (aside / CHECKSUMS).write_text(json.dumps(sums, indent=1), encoding="utf-8")
        shutil.rmtree(directory, ignore_errors=True)
        aside.rename(directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def damage(directory: Path) -> list[str] | None:
    """Return the files that are missing or changed: empty when all is whole, None when nothing was ever made."""
    try:
        sums = json.loads((directory / CHECKSUMS).read_text(encoding="utf-8"))
        return [name for name, known in sums.items() if not _matches(directory / name, known)] if sums else [CHECKSUMS]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return [CHECKSUMS]


def is_sound(directory: Path, say: Say) -> bool:
    """Tell whether a made checkpoint is there and whole; says so when it is damaged. The caller holds the lock."""
    damaged = damage(directory)
    if damaged:
        say(f"{directory}: {damaged[0]} is damaged; making the model again")
    return damaged == []


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
