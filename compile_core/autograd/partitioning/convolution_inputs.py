"""Large inputs of convolutions that the backward writes again, where a kernel of it has what they are computed from.

What a norm and an activation make of a convolution's result is saved for the gradient of the next weight, although the
result is saved, too: of a network of convolutions nearly everything is there twice. The kernel that the gradient of
that input goes to reads the result anyway and can write the input besides. So the gradient of the weight is made after
it, by a call of its own; a call for both gradients makes one after the other, too.

It costs a write of what is not saved, which the minimum cut does not know of. So it is done with the largest such
inputs alone, up to a part of what is saved: those of the first layers, mostly, which lie in memory the longest.

Limits: sizes that are open, and inputs that several convolutions read, are left as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gradsplit.compile_core.autograd.operators.graph_nodes import descendants, memory_of
from gradsplit.compile_core.autograd.operators.kinds import is_fusible, is_recomputable, is_view
from gradsplit.compile_core.autograd.partitioning.min_cut import (
    FEW,
    LARGE_BYTES,
    CutProblem,
    bytes_of,
    is_returned,
)
from gradsplit.compile_core.ir.numbers import is_number
from gradsplit.compile_core.ir.tensor_spec import TensorSpec

aten = torch.ops.aten

# What is saved is written and read, with its gradient, eight times and more in a step: to write so small a part of it
# once more is a hundredth of the traffic.
_PART_OF_SAVED = 12


@dataclass(frozen=True)
class Rewritten:
    """What a backward writes again.

    Attributes:
        saved: what to save instead, in graph order.
        copied: the forward's inputs among it that plain PyTorch does not save: they may be changed before the backward,
            which reads copies.
        convolutions: by the backward of a convolution whose input is written again, a value that is there before and
            lies in memory as that does.
    """

    saved: Sequence[Node]
    copied: Set[Node]
    convolutions: Mapping[Node, Node]


def write_again(problem: CutProblem, saved: Sequence[Node]) -> Rewritten:
    """What to save instead of ``saved`` where convolutions are on a GPU."""
    place = {node: number for number, node in enumerate(problem.graph.nodes)}
    left = sum(bytes_of(node) for node in saved if problem.is_computed(node)) // _PART_OF_SAVED
    kept, gone, convolutions = set(saved), set[Node](), dict[Node, Node]()
    for node in sorted(filter(_is_large, saved), key=lambda node: (-bytes_of(node), place[node])):
        if bytes_of(node) > left:
            continue
        sources, convolution = _sources(problem, kept | gone, node), _convolution(problem, kept, node)
        large = [source for source in sources if not _is_small_beside(source, node)]
        is_there = len(large) == 1 and large[0].op != "placeholder" and large[0] not in gone
        if convolution is None or not is_there:
            continue
        alike = [value for value in (large[0], _arguments(convolution)[0]) if _is_alike(value, node)]
        if alike and _is_read_beside(problem, kept - {node}, large[0], convolution):
            convolutions[convolution] = alike[0]
            kept = (kept - {node}) | sources
            gone.add(node)
            left -= bytes_of(node)
    copied = {node for node in kept.difference(saved) if node.op == "placeholder"}
    return Rewritten(sorted(kept, key=place.__getitem__), copied, convolutions)


def _is_large(node: Node) -> bool:
    return node.meta["val"].device.type == "cuda" and bytes_of(node) >= LARGE_BYTES


def _is_small_beside(source: Node, node: Node) -> bool:
    """Whether to read a value costs nothing beside another."""
    one, other = TensorSpec.of(source.meta["val"]), TensorSpec.of(node.meta["val"])
    return not one.is_open and one.device == other.device and one.numel * FEW < other.numel


def _is_alike(one: Node, other: Node) -> bool:
    return TensorSpec.of(one.meta["val"]) == TensorSpec.of(other.meta["val"])


def _sources(problem: CutProblem, kept: Set[Node], node: Node) -> set[Node]:
    """What a saved value may be computed from again, by kernels: other saved values, and small ones to save for it.

    Nothing if it must be saved itself, or if something else might be read than what it was computed from.
    """
    if TensorSpec.of(node.meta["val"]).is_open or is_view(node) or is_returned(node):
        return set()
    sources, seen, frontier = set[Node](), {node}, [node]
    while frontier:
        computed = frontier.pop()
        if not is_recomputable(computed) or computed in problem.orders:
            return set()
        for source in computed.all_input_nodes:
            if source in seen or is_number(source):
                continue
            seen.add(source)
            if source in kept or source.op == "placeholder" or _is_to_be_saved(source, node):
                sources.add(source)
            else:
                frontier.append(source)
    noticed = {memory_of(result) for result in problem.noticed}
    are_tensors = all(isinstance(source.meta.get("val"), torch.Tensor) for source in sources)
    if not are_tensors or any(memory_of(source) in noticed for source in sources):
        return set()
    new = [source for source in sources if source not in kept]
    return sources if all(_is_small_beside(source, node) for source in new) else set()


def _is_to_be_saved(source: Node, node: Node) -> bool:
    """Whether a value must be saved for another, or is so small that a kernel to compute it again would cost more."""
    if not is_recomputable(source):
        return True
    return bool(source.all_input_nodes) and not is_view(source) and _is_small_beside(source, node)


def _convolution(problem: CutProblem, kept: Set[Node], node: Node) -> Node | None:
    """The backward of a convolution that needs a value as its input, if the backward needs the value for nothing else
    before it has the gradient of this input."""
    readers = {*_readers(problem, kept, node)}
    for reader in readers:
        if reader.target is aten.convolution_backward.default:
            gradient, image, weight, *_, mask = _arguments(reader)
            is_its_input = image is node and node not in (gradient, weight)
            if is_its_input and mask[1] and readers <= descendants([reader]):
                return reader
    return None


def _arguments(convolution: Node) -> Sequence[Any]:
    return convolution.args


def _readers(problem: CutProblem, kept: Set[Node], node: Node) -> Iterator[Node]:
    """What reads in the backward a value, or what is computed again of it."""
    for computed in _computed_again(problem, kept, node):
        yield from (user for user in computed.users if user in problem.only_backward)


def _computed_again(problem: CutProblem, kept: Set[Node], node: Node) -> set[Node]:
    """A value, and what the backward may compute of it since it is not saved."""
    found, frontier = {node}, [node]
    while frontier:
        for user in frontier.pop().users:
            is_free = user not in problem.only_backward and user not in kept and user not in found
            if is_free and is_recomputable(user):
                found.add(user)
                frontier.append(user)
    return found


def _is_read_beside(problem: CutProblem, kept: Set[Node], source: Node, convolution: Node) -> bool:
    """Whether the kernel that the gradient of a convolution's input goes to reads ``source``."""
    read = _computed_again(problem, kept, source)
    seen, frontier = set[Node](), [result for result in convolution.users if result.args[1] == 0]
    while frontier:
        for user in frontier.pop().users:
            if user in seen or not is_fusible(user):
                continue
            seen.add(user)
            if not read.isdisjoint(user.all_input_nodes):
                return True
            if is_recomputable(user):
                frontier.append(user)
    return False


def make_gradients_apart(backward: GraphModule, convolutions: Mapping[str, str]) -> None:
    """Gives these backwards of convolutions a call for the input's gradient, which the rest need not wait for.

    Of the input that call reads no elements, only how they lie in memory: it is given the value of the other name.
    """
    nodes = {node.name: node for node in backward.graph.nodes}
    for name, alike in convolutions.items():
        _make_apart(nodes[name], nodes[alike])
    backward.recompile()


def _make_apart(node: Node, alike: Node) -> None:
    gradient, _, *settings, (_, *others) = _arguments(node)
    value, *values = node.meta["val"]
    arguments = (gradient, alike, *settings, [True, False, False])
    with node.graph.inserting_before(node):
        apart = node.graph.call_function(aten.convolution_backward.default, arguments)
    apart.meta = {**node.meta, "val": (value, None, None)}
    for result in list(node.users):
        if result.args[1] == 0:
            result.args = (apart, 0)
    node.args = (*node.args[:-1], [False, *others])
    node.meta = {**node.meta, "val": (None, *values)}
