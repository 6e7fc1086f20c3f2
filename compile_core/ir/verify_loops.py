"""Rules that every loop program keeps.

The lowering and the fusion promise them, the code generators rely on them: statements are in SSA form and of
the right dtypes; every access stays inside its buffer; no two points of a nest store to one element, unless they
combine values with what is there, which is then all that the nest does with the buffer; what a store writes does not
vary where its address stands still; steps read only what was written before; nobody writes inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

import torch

from gradsplit.compile_core.errors import InternalError
from gradsplit.compile_core.ir.loops import (
    MEMORY_REDUCTIONS,
    REDUCTIONS,
    SCALAR_OPERATIONS,
    Access,
    Apply,
    AttentionNest,
    BandNest,
    Constant,
    ExternCall,
    Load,
    LoopNest,
    LoopProgram,
    NestBatch,
    Position,
    ProductNest,
    Reduce,
    Statement,
    Step,
    Store,
    View,
    combined_buffers,
    operands,
    varied_axes,
)
from gradsplit.compile_core.ir.print_loops import axis_name, print_statement
from gradsplit.compile_core.ir.step_effects import mutated, reads, views_in, writes
from gradsplit.compile_core.ir.tensor_spec import HALF_FLOATS, TensorSpec

_COMPUTE_DTYPES = frozenset(
    {
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32,
        torch.float64,
    }
)  # fmt: skip
_TO_BOOL = frozenset(
    {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not", "isnan", "isinf"}
)  # fmt: skip


def verify_program(program: LoopProgram) -> None:
    """Checks a whole program.

    Raises:
        InternalError: names the step, the statement and the rule that it breaks.
    """
    for name in (*program.inputs, *program.destinations, *program.constants):
        _rule(name in program.buffers, program.name, f"{name} has no spec")
    known = set(program.inputs) | set(program.constants)
    empty = {name for name, spec in program.buffers.items() if not spec.numel}
    written: set[str] = set()
    for number, step in enumerate(program.steps):
        label = f"{program.name}, step {number}, {_step_name(step)}"
        missing = reads(step) - known - empty
        if isinstance(step, LoopNest):
            verify_nest(step, program.buffers, label)
        elif isinstance(step, ProductNest):
            _check_product(step, program.buffers, label)
        elif isinstance(step, AttentionNest):
            _check_attention(step, program.buffers, label)
        elif isinstance(step, BandNest):
            _check_bands(step, program.buffers, label)
        elif isinstance(step, NestBatch):
            _check_batch(step, program.buffers, label)
        else:
            for view in views_in([step.arguments, dict(step.keywords), dict(step.out)]):
                _check_view(view, program.buffers, label)
            missing -= {view.buffer for view in step.out.values()}
        _rule(not missing, label, f"reads {sorted(missing)} before anything wrote it")
        given = (set(program.inputs) | set(program.constants)) - set(program.overwritten)
        forbidden = (writes(step) - mutated(step)) & given
        _rule(not forbidden, label, f"writes the input or constant {sorted(forbidden)}")
        unknown = writes(step) - set(program.buffers)
        _rule(not unknown, label, f"writes {sorted(unknown)}, which have no spec")
        known |= writes(step)
        written |= writes(step)
    for name in program.destinations:
        _rule(name in written or name in empty, program.name, f"destination {name} is never written")
    for view in program.outputs:
        if view is not None:
            _check_view(view, program.buffers, f"{program.name}, outputs")
            written_or_given = view.buffer in known or view.buffer in empty
            _rule(written_or_given, program.name, f"returns {view.buffer}, which nothing wrote")


def _step_name(step: Step) -> str:
    if isinstance(step, ExternCall):
        return f"call of {step.target}"
    kinds = {
        LoopNest: "nest", ProductNest: "product", AttentionNest: "attention", BandNest: "bands", NestBatch: "batch",
    }  # fmt: skip
    return f"{kinds[type(step)]} {step.name}"


def _check_product(step: ProductNest, buffers: Mapping[str, TensorSpec], label: str) -> None:
    verify_nest(step.epilogue, buffers, label)
    for view in (step.left, step.right):
        _check_view(view, buffers, label)
    *batch, rows, inner = step.left.shape
    extents = step.epilogue.extents
    _rule(step.right.shape[:-1] == (*batch, inner), label, "multiplies matrices that do not fit")
    _rule(
        sum(step.axes) == len(extents) and not step.epilogue.reduced_axes,
        label,
        "has other axes than its result",
    )
    first, second = step.axes[0], step.axes[0] + step.axes[1]
    sizes = (prod(extents[:first]), prod(extents[first:second]), prod(extents[second:]))
    _rule(sizes == (prod(batch), rows, step.right.shape[-1]), label, "has an epilogue of another size")
    overwritten = {step.left.buffer, step.right.buffer} & writes(step)
    _rule(not overwritten, label, f"overwrites its operand {sorted(overwritten)}")


def _check_attention(step: AttentionNest, buffers: Mapping[str, TensorSpec], label: str) -> None:
    body = step.body
    nest = body.nest
    _check_body(nest, buffers, label)
    views = [*step.operands, *step.lists, *(view for view in step.results if view is not None)]
    for view in views:
        _check_view(view, buffers, label)
    query, key, value = step.operands[:3]
    batch, heads, queries, elements = query.shape
    shape = (batch, heads, queries, key.shape[2])
    firsts = [sum(body.axes[:dim]) for dim in range(5)]
    sizes = tuple(prod(nest.extents[a:b]) for a, b in pairwise(firsts))
    _rule(sizes == shape, label, f"has a body over {sizes} for scores of {shape}")
    _rule(key.shape[3] == elements and key.shape[:3] == value.shape[:3], label, "has keys that do not fit")
    _rule(key.shape[0] == batch and heads % key.shape[1] == 0, label, "has heads that do not fit")
    _rule(len(step.lists) in (2, 4), label, "has lists of neither some blocks nor some and whole ones")
    _rule(len(step.operands) == (3 if step.part == "forward" else 6), label, "has other operands")
    values = [body.keep, body.changed, *([] if body.gradient is None else [body.gradient])]
    _rule(not any(isinstance(nest.body[value], Store) for value in values), label, "names a store as a value")
    _rule((body.gradient is None) == (step.part == "forward"), label, "has a gradient in the forward only")
    overwritten = {view.buffer for view in (*step.operands, *step.lists)} & writes(step)
    _rule(not overwritten, label, f"overwrites its operand {sorted(overwritten)}")


def _check_bands(step: BandNest, buffers: Mapping[str, TensorSpec], label: str) -> None:
    nest = step.rows
    _check_body(nest, buffers, label)
    _rule(len(nest.extents) == 2 and nest.reduced_axes == 1, label, "has other axes than rows and columns")
    rows, columns = nest.extents
    _rule(rows % step.band == 0, label, "its last band is shorter")
    for value, name in step.sums:
        _rule(not isinstance(nest.body[value], Store), label, f"%{value} is no value")
        _rule(buffers[name].shape == (rows // step.band, columns), label, f"{name} is no row a band")
        _rule(buffers[name].is_contiguous, label, f"{name} is not contiguous")


def _check_batch(batch: NestBatch, buffers: Mapping[str, TensorSpec], label: str) -> None:
    first = batch.members[0]
    written: set[str] = set()
    for member in batch.members:
        verify_nest(member, buffers, f"{label}, nest {member.name}")
        same_space = (member.extents, member.reduced_axes) == (first.extents, first.reduced_axes)
        both_lists = len(member.extents) == len(first.extents) <= 1
        both_lists = both_lists and not member.reduced_axes and not first.reduced_axes
        _rule(same_space or both_lists, label, "its nests are neither over one axis nor over equal ones")
        same_kinds = [type(s) for s in member.body] == [type(s) for s in first.body]
        _rule(same_kinds, label, f"{member.name} is another loop than {first.name}")
        _rule(not writes(member) & written, label, "two of its nests write one buffer")
        written |= writes(member)
    for member in batch.members:
        _rule(not reads(member) & (written - writes(member)), label, f"{member.name} reads what others write")


def verify_nest(nest: LoopNest, buffers: Mapping[str, TensorSpec], label: str = "") -> None:
    """Checks one nest against the specs of its buffers."""
    label = label or f"nest {nest.name}"
    _rule(any(isinstance(s, Store) for s in nest.body), label, "stores nothing")
    _check_body(nest, buffers, label)


def _check_body(nest: LoopNest, buffers: Mapping[str, TensorSpec], label: str) -> None:
    rank = len(nest.extents)
    _rule(0 <= nest.reduced_axes <= rank, label, "has more reduced axes than axes")
    for number, statement in enumerate(nest.body):
        where = f"{label}, {print_statement(number, statement)}"
        for operand in operands(statement):
            in_order = 0 <= operand < number and not isinstance(nest.body[operand], Store)
            _rule(in_order, where, f"%{operand} is no earlier value")
        _check_dtypes(statement, nest.body, nest.reduced_axes, buffers, where)
        if isinstance(statement, (Load, Store)):
            _check_access(statement, nest, buffers, where)
        if isinstance(statement, Position):
            _rule(len(statement.strides) == rank, where, "needs one stride per axis")
        if isinstance(statement, Reduce) and statement.operation.startswith("arg"):
            _rule(nest.reduced_axes == 1, where, "a position needs a single reduced axis")
    varying = varied_axes(nest)
    combined = combined_buffers(nest)
    for number, statement in enumerate(nest.body):
        if isinstance(statement, Store) and statement.reduction is None:
            _check_store(statement, nest, varying, f"{label}, {print_statement(number, statement)}")
        if isinstance(statement, Load | Store) and statement.access.buffer in combined:
            where = f"{label}, {print_statement(number, statement)}"
            is_combined = isinstance(statement, Store) and statement.reduction in MEMORY_REDUCTIONS
            _rule(is_combined, where, "the nest also combines values in the buffer")
            is_narrow = buffers[statement.access.buffer].dtype in HALF_FLOATS
            _rule(not is_narrow, where, "each sum would be rounded to 16 bits")


def _rule(holds: bool, where: str, rule: str) -> None:
    if not holds:
        raise InternalError(f"{where}: {rule}")


def _check_dtypes(
    statement: Statement,
    body: Sequence[Statement],
    reduced_axes: int,
    buffers: Mapping[str, TensorSpec],
    where: str,
) -> None:
    def dtype_of(value: int) -> torch.dtype:
        definition = body[value]
        assert not isinstance(definition, Store)
        return definition.dtype

    if isinstance(statement, (Load, Store)):
        _rule(statement.access.buffer in buffers, where, f"{statement.access.buffer} has no spec")
        if statement.mask is not None:
            _rule(dtype_of(statement.mask) == torch.bool, where, "the mask is no bool")
        for gather in statement.access.gathers:
            dtype = dtype_of(gather.value)
            is_integer = not dtype.is_floating_point and dtype != torch.bool
            _rule(is_integer, where, "a gathered index is no integer")
    if isinstance(statement, Store):
        return
    _rule(statement.dtype in _COMPUTE_DTYPES, where, f"{statement.dtype} is no dtype to compute in")
    if isinstance(statement, Constant):
        fitting = {bool: torch.bool, int: None, float: None}.get(type(statement.value), torch.bool)
        is_bool = statement.dtype == torch.bool
        _rule((fitting == torch.bool) == is_bool, where, "the constant's dtype does not fit its value")
    if isinstance(statement, Reduce):
        _rule(reduced_axes > 0, where, "there is no reduced axis")
        _rule(statement.operation in REDUCTIONS, where, "there is no such reduction")
        expected = dtype_of(statement.argument)
        is_position = statement.operation.startswith("arg")
        same = statement.dtype == (torch.int64 if is_position else expected)
        _rule(same, where, "a reduction yields the dtype of its argument, a position int64")
    if isinstance(statement, Apply):
        _check_operation(statement, [dtype_of(argument) for argument in statement.arguments], where)


def _check_operation(statement: Apply, dtypes: Sequence[torch.dtype], where: str) -> None:
    _rule(statement.operation in SCALAR_OPERATIONS, where, "there is no such operation")
    count = SCALAR_OPERATIONS[statement.operation]
    _rule(len(dtypes) == count, where, f"takes {count} arguments")
    _rule((statement.parameter is not None) == (statement.operation == "round_to"), where, "parameter")
    if statement.operation == "cast":
        return
    if statement.operation == "where":
        _rule(dtypes[0] == torch.bool, where, "the condition is no bool")
        dtypes = dtypes[1:]
    _rule(len(set(dtypes)) == 1, where, "the arguments' dtypes differ")
    expected = torch.bool if statement.operation in _TO_BOOL else dtypes[0]
    if statement.operation == "random_word":
        expected = torch.int32
    _rule(statement.dtype == expected, where, f"yields {expected}")


def _check_access(
    statement: Load | Store, nest: LoopNest, buffers: Mapping[str, TensorSpec], where: str
) -> None:
    access, spec = statement.access, buffers[statement.access.buffer]
    _rule(len(access.strides) == len(nest.extents), where, "needs one stride per axis")
    if statement.mask is not None or 0 in nest.extents:
        return  # a mask keeps addresses inside; which, is known only at run time
    low, high = _reach(access, nest.extents)
    _rule(low >= 0 and high < max(spec.span, 1), where, f"reaches [{low}, {high}] of {spec.span} elements")


def _reach(access: Access, extents: Sequence[int]) -> tuple[int, int]:
    low = high = access.offset
    moves = [(extent - 1) * stride for extent, stride in zip(extents, access.strides, strict=True)]
    moves += [(gather.size - 1) * gather.stride for gather in access.gathers]
    for move in moves:
        low, high = low + min(move, 0), high + max(move, 0)
    return low, high


def _check_store(store: Store, nest: LoopNest, varying: Sequence[frozenset[int]], where: str) -> None:
    access = store.access
    parallel = len(nest.extents) - nest.reduced_axes
    moving = [
        (abs(stride), extent)
        for stride, extent in zip(access.strides, nest.extents, strict=True)
        if stride and extent != 1
    ]
    # Which points a mask leaves out, as those past the end of a shorter last part, is known only at run time.
    is_known = store.mask is None and not access.gathers
    reached = 0
    for stride, extent in sorted(moving):
        _rule(stride > reached or not is_known, where, "two points store to one element")
        reached += stride * (extent - 1)
    depends = varying[store.value] | (varying[store.mask] if store.mask is not None else frozenset())
    for axis, (stride, extent) in enumerate(zip(access.strides, nest.extents, strict=True)):
        if stride or extent <= 1 or access.gathers:
            continue
        _rule(axis >= parallel, where, f"the address stands still along the parallel axis {axis_name(axis)}")
        _rule(axis not in depends, where, f"the value varies along {axis_name(axis)}, the address does not")


def _check_view(view: View, buffers: Mapping[str, TensorSpec], where: str) -> None:
    _rule(view.buffer in buffers, where, f"{view.buffer} has no spec")
    if 0 in view.shape:
        return
    access = Access(view.buffer, view.stride, view.offset)
    low, high = _reach(access, view.shape)
    span = buffers[view.buffer].span
    _rule(
        low >= 0 and high < span, where, f"view of {view.buffer} reaches [{low}, {high}] of {span} elements"
    )
