"""Let other streams have their turn between the steps of a very large body, each of which takes milliseconds."""

from __future__ import annotations

import asyncio

_LARGE = 1 << 19


async def breathe(size: int) -> None:
    """Give way to others where `size` bytes were or will be worked on in one go, if that is much."""
    if size > _LARGE:
        await asyncio.sleep(0)
