"""Keys of dictionaries and sets whose hash is not that of a literal: computed by the program, or an address."""

from __future__ import annotations

from typing import Any

from gradsplit.compile_core.capture.values.base import CaptureState, Value
from gradsplit.compile_core.capture.values.constants import ConstantValue


class ComputedKey:
    """Hashes as the program's ``__hash__`` said and compares with its ``__eq__``, run symbolically."""

    def __init__(self, state: CaptureState, value: Value, hashed: int) -> None:
        self.state = state
        self.value = value
        self.hashed = hashed

    def __hash__(self) -> int:
        return self.hashed

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ComputedKey):
            return self.value is other.value or self.state.equal(self.value, other.value)
        return self.state.equal(self.value, ConstantValue(other))


class IdentityValue(Value):
    """What ``id()`` gives: a number that may be compared and be a key, but not be known."""

    cls = int

    def __init__(self, value: Value) -> None:
        self.value = value

    def describe(self) -> str:
        return f"the id of {self.value.describe()}"

    def truth(self, state: CaptureState) -> bool:
        return True

    def hash_key(self, state: CaptureState) -> Any:
        return self.value
