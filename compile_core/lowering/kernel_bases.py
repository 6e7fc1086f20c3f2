"""What a kernel reads at one place is addressed by its caller, so that kernels that differ only in that place are one.

Equal layers of a model draw their random numbers from seeds that lie in one tensor, each at an offset of its own. Built
into the kernels, the offsets would make as many kernels of what is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from compile_core.ir.loops import Access, Load, LoopNest, Statement, Store


def rebased(nest: LoopNest) -> tuple[LoopNest, Mapping[str, int]]:
    """The nest with such places counted from the first of each buffer, and the offset of that by buffer."""
    accesses = [s.access for s in nest.body if isinstance(s, Load | Store)]
    moving = {access.buffer for access in accesses if any(access.strides) or access.gathers}
    bases: dict[str, int] = {}
    for access in accesses:
        if access.buffer not in moving:
            bases[access.buffer] = min(access.offset, bases.get(access.buffer, access.offset))
    bases = {name: offset for name, offset in bases.items() if offset}
    if not bases:
        return nest, {}

    def moved(access: Access) -> Access:
        return replace(access, offset=access.offset - bases.get(access.buffer, 0))

    body: list[Statement] = [
        replace(s, access=moved(s.access)) if isinstance(s, Load | Store) else s for s in nest.body
    ]
    return replace(nest, body=tuple(body)), bases
