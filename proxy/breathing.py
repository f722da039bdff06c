"""Let other streams have their turn between the steps of a very large body, each of which takes milliseconds."""

from __future__ import annotations

import asyncio

# Bytes that are worked on in one go from which on others should have their turn before and after.
LARGE = 1 << 19


async def breathe() -> None:
    """Give way to others."""
    await asyncio.sleep(0)
