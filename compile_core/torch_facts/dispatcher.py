"""Torch's dispatcher: keys, which kernels there are, and how operators behave on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Node

from gradsplit.compile_core.torch_facts.private_parts import private

aten = torch.ops.aten

has_kernel_for_key = private(
    "torch._C:_dispatch_has_kernel_for_dispatch_key", "which operators are made of others"
)
dispatch_keys = private("torch._C:_dispatch_keys", "a guard: a tensor's dispatch keys")
ForceDispatchKeyGuard = private("torch._C:_ForceDispatchKeyGuard", "tracing with the caller's dispatch keys")
included_keys = private("torch._C:_dispatch_tls_local_include_set", "tracing with the caller's dispatch keys")
excluded_keys = private("torch._C:_dispatch_tls_local_exclude_set", "tracing with the caller's dispatch keys")
enable_python_dispatcher = private("torch._dispatch.python:enable_python_dispatcher", "shapes of results")
suggest_memory_format = private("torch._prims_common:suggest_memory_format", "strides of results")
# Of zeros that have no memory: some gradients (``sgn``'s) and some tangents are such.
is_zero_tensor = private("torch:Tensor._is_zerotensor", "tensors without memory, which kernels cannot read")
efficient_zeros = private("torch:_efficientzerotensor", "a guard: which tensors have no memory")
is_alias_of = private("torch._C:_is_alias_of", "whether two tensors share memory")


# Torch's functionalization, which turns writes in place into new values while a graph is traced.

_PURPOSE = "tracing programs that write in place"

to_functional = private("torch:_to_functional_tensor", _PURPOSE)
from_functional = private("torch:_from_functional_tensor", _PURPOSE)
is_functional = private("torch:_is_functional_tensor", _PURPOSE)
mirror_autograd_meta = private("torch:_mirror_autograd_meta_to", _PURPOSE)
sync = private("torch:_sync", _PURPOSE)
enable_functionalization = private("torch:_enable_functionalization", _PURPOSE)
disable_functionalization = private("torch:_disable_functionalization", _PURPOSE)
has_data_mutation = private("torch:_functionalize_has_data_mutation", _PURPOSE)
count_writes = private("torch:_functionalize_mutation_counter", _PURPOSE)
replace_value = private("torch:_functionalize_replace", _PURPOSE)
commit_update = private("torch:_functionalize_commit_update", _PURPOSE)


@contextmanager
def without_functionalization() -> Iterator[None]:
    """For what is done below it while it is on."""
    disable_functionalization()
    try:
        yield
    finally:
        enable_functionalization(reapply_views=True)


# Products of matrices, which libraries compute on every device.
MATRIX_PRODUCTS = frozenset([aten.mm, aten.bmm, aten.addmm, aten.baddbmm])


# Which operators draw random numbers, or are there for what they raise.

# In the ``meta`` of a node: the program has called it, reads nothing of it, and may see it raise.
KEPT = "kept"
# What these say is known by the trace.
_KNOWN = (aten.sym_constrain_range, aten.sym_constrain_range_for_size, aten._assert_tensor_metadata)


def is_check(node: Node) -> bool:
    """Whether the operator gives and changes nothing, and so is there for what it raises: where a number is not as
    assumed, or a matrix has no inverse."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.overloadpacket in _KNOWN:
        return False
    return not target._schema.returns and not target._schema.is_mutable


def acts(node: Node) -> bool:
    """Whether the operator does something though nobody reads what it gives."""
    return is_random(node) or is_check(node) or KEPT in node.meta


def is_needed_unread(node: Node) -> bool:
    """Whether a node stays in a graph where nobody reads it, for ``eliminate_dead_code``."""
    return node.op in ("placeholder", "output") or acts(node)


def tags_by_name(target: Any) -> set[torch.Tag]:
    """The tags of all forms of torch's operator that a captured call, of a function or method, is named like."""
    packet = getattr(
        torch.ops.aten, target if isinstance(target, str) else getattr(target, "__name__", ""), None
    )
    return (
        set()
        if packet is None
        else {tag for name in packet.overloads() for tag in getattr(packet, name).tags}
    )


def is_random(node: Node) -> bool:
    """Whether the node moves a generator; attention without dropout does not, though its operator can."""
    return is_random_call(node.target, node.args, node.kwargs)


def draws_in_memory_order(node: Node) -> bool:
    """Whether torch gives random numbers to the node's elements as these lie in memory: a GPU's kernels by the order of
    the strides, and several to a thread where there are no gaps and the first is aligned. Attention goes by an
    element's index, and what has sizes alone by the order of dims."""
    if not is_random(node) or not node.all_input_nodes:
        return False
    assert isinstance(node.target, torch._ops.OpOverload)
    return all(argument.name != "dropout_p" for argument in node.target._schema.arguments)


def is_random_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """``is_random`` of a call of an operator."""
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p")
            return bool((argument.default_value if given is None else given) != 0)
    return True
