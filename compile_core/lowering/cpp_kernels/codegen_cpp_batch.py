"""C++ source of a batch: the members' elements, laid end to end, are what threads share.

One function has the loop, over a range of any member's only axis; its text does not depend on how many members there
are, so compiling it takes no longer than for one. A table has the members' first elements in the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from math import prod

import torch

from gradsplit.compile_core.ir.kernels import KERNEL_SYMBOL, KernelSource
from gradsplit.compile_core.ir.loops import LoopNest, NestBatch
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.lowering.cpp_kernels.codegen_cpp import (
    LONG_KERNEL_COST,
    entry_function,
    parameters,
    pointer,
)
from gradsplit.compile_core.lowering.cpp_kernels.codegen_cpp_body import BodyWriter, axis_loop
from gradsplit.compile_core.lowering.nests.order_axes import with_strides
from gradsplit.compile_core.lowering.nests.passes import analyse, buffers_of, statement_cost, stored_buffers
from gradsplit.compile_core.lowering.tiling.tiling_cpp import GRAIN_COST, CpuTiling


def generate_cpp_batch(batch: NestBatch, buffers: Mapping[str, TensorSpec]) -> KernelSource:
    """C++ for a valid batch over CPU buffers, whose kernel takes the buffers of the members one after the other.

    Raises:
        Unsupported: a dtype that C++ kernels do not handle (complex, quantised).
    """
    template = _over_one_axis(batch.members[0])
    names = buffers_of(template)
    pointers = [
        pointer(k, buffers[name].dtype, name in stored_buffers(template)) for k, name in enumerate(names)
    ]
    analysis = analyse(template, 0)
    writer = BodyWriter(
        analysis,
        CpuTiling(0, (1,), tiled_axis=None, split_axis=None, chunks=1, apart=(0,), owner=None, grain=1),
        buffers,
        {name: k for k, name in enumerate(names)},
    )
    (walk,) = analysis.passes
    numbers = sorted((*walk.before, *walk.values, *walk.stores))
    sizes = [prod(member.extents) for member in batch.members]
    element_cost = max(1, sum(map(statement_cost, template.body)) // 4)
    arguments = ", ".join(f"({one.kind})q[{k}]" for k, one in enumerate(pointers))
    given = [name for member in batch.members for name in buffers_of(member)]
    lines = [
        f"static int {KERNEL_SYMBOL}_member(int64_t begin, int64_t end, {parameters(pointers)}) {{",
        "  int bad = 0;",
        *(f"  {line}" for line in writer.section(numbers, [axis_loop(0, "begin", "end")], (), ())),
        "  return bad;",
        "}",
        f"static int {KERNEL_SYMBOL}_loops(void **p) {{",
        f"  static const int64_t starts[] = {{{', '.join(map(str, accumulate(sizes, initial=0)))}}};",
        f"  if (starts[{len(sizes)}] == 0) return 0;",
        f"  return parallel_ranges(starts[{len(sizes)}], {max(1, GRAIN_COST // element_cost)},",
        "                         [&](int64_t begin, int64_t end) {",
        "    int bad = 0;",
        "    int64_t member = 0;",
        "    while (starts[member + 1] <= begin) ++member;",
        f"    for (; member < {len(sizes)} && starts[member] < end; ++member) {{",
        "      const int64_t from = begin > starts[member] ? begin : starts[member];",
        "      const int64_t to = end < starts[member + 1] ? end : starts[member + 1];",
        "      if (from == to) continue;",
        f"      void **q = p + member * {len(names)};",
        f"      bad |= {KERNEL_SYMBOL}_member(from - starts[member], to - starts[member], {arguments});",
        "    }",
        "    return bad;",
        "  });",
        "}",
        *entry_function(len(given), "p", releases_lock=sum(sizes) * 4 * element_cost > LONG_KERNEL_COST),
    ]
    return KernelSource(batch.name, "cpp", "\n".join(lines), tuple(given), torch.device("cpu"))


def _over_one_axis(nest: LoopNest) -> LoopNest:
    """A nest over a single point as one over an axis of one."""
    return nest if nest.extents else replace(nest, extents=(1,), body=with_strides(nest, lambda _: (0,)))
