"""Where in a buffer a kernel begins is passed by its caller, so that kernels that differ only in that are one.

Equal layers of a model draw their random numbers from seeds that lie in one tensor, each at an offset of its own, and
take parts of one projection. Built into the kernels, the offsets would make as many kernels of what is one. Where a
kernel walks along a buffer, the address that it is given is as aligned as the buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gradsplit.compile_core.ir.loops import Access, Load, LoopNest, Statement, Store, accesses, with_accesses
from gradsplit.compile_core.ir.tensor_spec import TensorSpec

ALIGNED_BYTES = 16


def rebased(
    nest: LoopNest, buffers: Mapping[str, TensorSpec], all_aligned: bool = False
) -> tuple[LoopNest, Mapping[str, int]]:
    """The nest with offsets counted from where it begins in each buffer, and that beginning by buffer.

    Args:
        nest, buffers: a nest and the specs of its buffers.
        all_aligned: addresses of single elements are to be aligned as well.
    """
    moving = {access.buffer for access in accesses(nest) if any(access.strides) or access.gathers}
    bases: dict[str, int] = {}
    for access in accesses(nest):
        bases[access.buffer] = min(access.offset, bases.get(access.buffer, access.offset))
    for name in bases if all_aligned else moving:
        bases[name] -= bases[name] % (ALIGNED_BYTES // buffers[name].dtype.itemsize)
    bases = {name: offset for name, offset in bases.items() if offset}
    if not bases:
        return nest, {}

    def moved(access: Access) -> Access:
        return replace(access, offset=access.offset - bases.get(access.buffer, 0))

    return replace(nest, body=with_accesses(nest.body, moved)), bases


def separated(
    nest: LoopNest, buffers: Mapping[str, TensorSpec]
) -> tuple[LoopNest, Mapping[str, tuple[str, int]]]:
    """``rebased``, and every single element that the nest reads and nothing else there is a buffer of its own.

    Returns:
        The nest, and by the name of each of its buffers the one of ``buffers`` and where in that it begins.
    """
    whole = {access.buffer for access in accesses(nest) if any(access.strides) or access.gathers}
    whole |= {s.access.buffer for s in nest.body if isinstance(s, Store)}
    owners: dict[str, str] = {}
    body: list[Statement] = []
    for statement in nest.body:
        if isinstance(statement, Load) and statement.access.buffer not in whole:
            name = f"{statement.access.buffer}[{statement.access.offset}]"
            owners[name] = statement.access.buffer
            statement = replace(statement, access=replace(statement.access, buffer=name))
        body.append(statement)
    nest, bases = rebased(replace(nest, body=tuple(body)), buffers)
    names = dict.fromkeys(access.buffer for access in accesses(nest))
    return nest, {name: (owners.get(name, name), bases.get(name, 0)) for name in names}
