"""What starts processes; the table of backends by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pdcluster.backends.base import Backend
from pdcluster.backends.local import LocalBackend

BACKENDS: Mapping[str, Callable[..., Backend]] = {"local": LocalBackend}
