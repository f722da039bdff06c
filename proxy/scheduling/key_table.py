"""Which of a few hundred owners have which keys: one integer a key, one bit in it for each owner. Pure.

What a look-up costs grows with the keys of one prompt, not with the number of owners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import compress
from typing import Generic, TypeVar

Owner = TypeVar("Owner")

_FEW = 32  # bits that are faster taken one by one
_BIT_VALUES = bytes.maketrans(b"0", b"\0")


class KeyTable(Generic[Owner]):
    """Sets of owners by key. An owner gets its bit with `bit_of`, and is found until it is retired."""

    def __init__(self) -> None:
        self._bits: dict[int, int] = {}  # key -> owners
        self._owners: list[Owner] = []  # by the place of their bit
        self._bit_of: dict[Owner, int] = {}
        self._free: list[int] = []
        self._live = 0

    def __len__(self) -> int:
        """Return the number of keys that somebody has."""
        return len(self._bits)

    def bit_of(self, owner: Owner) -> int:
        """Return the bit of an owner, a new one if it has none."""
        bit = self._bit_of.get(owner)
        if bit is None:
            if not self._free:
                self._free.append(len(self._owners))
                self._owners.append(owner)
            place = self._free.pop()
            self._owners[place] = owner
            bit = self._bit_of[owner] = 1 << place
            self._live |= bit
        return bit

    def add(self, key: int, bit: int) -> None:
        """Give a key to the owner of this bit."""
        self._bits[key] = self._bits.get(key, 0) | bit

    def drop(self, key: int, bit: int) -> None:
        """Take a key from the owner of this bit, who may be retired."""
        rest = self._bits.get(key, 0) & ~bit
        if rest:
            self._bits[key] = rest
        else:
            self._bits.pop(key, None)

    def retire(self, owner: Owner) -> None:
        """Find this owner no more, though its keys are still here: `release` its bit once they are dropped."""
        self._live &= ~self._bit_of.pop(owner, 0)

    def release(self, bit: int) -> None:
        """Let the next new owner have the bit of a retired one that has no keys left."""
        self._free.append(bit.bit_length() - 1)

    def leading(self, keys: Iterable[int], length: Callable[[int], int]) -> dict[Owner, int]:
        """Return, for each owner of the first key, `length` of how many keys it has without a gap.

        `keys` are taken one by one, and no more of them than somebody has.
        """
        bits, alive, count = self._bits, self._live, 0
        found: dict[Owner, int] = {}
        for key in keys:
            now = bits.get(key, 0) & alive
            if now != alive:
                if count:
                    found |= dict.fromkeys(self._owners_of(alive ^ now), length(count))
                alive = now
                if not alive:
                    return found
            count += 1
        if count:
            found |= dict.fromkeys(self._owners_of(alive), length(count))
        return found

    def _owners_of(self, bits: int) -> Iterable[Owner]:
        owners = self._owners
        if bits.bit_count() > _FEW:
            return compress(owners, f"{bits:b}"[::-1].encode().translate(_BIT_VALUES))
        found = []
        while bits:
            lowest = bits & -bits
            found.append(owners[lowest.bit_length() - 1])
            bits ^= lowest
        return found
