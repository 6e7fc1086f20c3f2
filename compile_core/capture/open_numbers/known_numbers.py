"""What a program may decide by: a number that follows from tensors of one element on the CPU, as step counts are.

The few operations that lead to it are run on copies of these tensors, at capture and then as a guard before each call,
which holds the outcome of the decision, not the number: a count that passes a threshold makes one more capture.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from gradsplit.compile_core.capture.open_numbers.drawn_ends import (
    Ends,
    ends_of_draw,
    fills,
    is_truth,
    keep_order,
    place_of,
)
from gradsplit.compile_core.capture.values.base import CaptureState
from gradsplit.compile_core.capture.values.view_copies import memory_of, nodes_in

_MOST_STEPS = 48
_MAKERS = (torch.tensor, torch.zeros, torch.ones, torch.full)
# What gives the same on every device, so that it may be asked of short tensors of a GPU, too.
_ALIKE = frozenset([
    *_MAKERS, torch.arange, torch.cat, operator.getitem, operator.add, operator.sub, operator.mul, operator.neg,
    *("to", "float", "new_tensor", "clone", "detach", "item"),
])  # fmt: skip
_MOST_ELEMENTS = 4096
_READING = ["item", "clone", "detach", "to", "float", "double", "neg", "sqrt", "add", "sub", "mul"]
_COMPARING = ["eq", "ne", "lt", "le", "gt", "ge"]
_CHANGING = ["add_", "sub_", "mul_", "div_", "fill_", "zero_", "copy_"]
_COMPUTING = ["log2", "log", "exp", "round", "floor", "ceil"]
_METHODS = frozenset([*_READING, *_COMPUTING, *_COMPARING, *_CHANGING])
_FUNCTIONS = frozenset([float, *_MAKERS, *(getattr(torch, name) for name in _COMPUTING)])

# One step: the function or the method's name, its arguments and the name of its result. A guard lives longer than the
# graph, of which it must hold nothing.
_Step = tuple[Callable[..., Any] | str, tuple[Any, ...], dict[str, Any], str]


@dataclass(frozen=True)
class _Result:
    """What an earlier step has given, as an argument."""

    name: str


def decision_by(
    state: CaptureState, node: Node, decide: Callable[[Any], int], text: str, keeps_order: bool = False
) -> int | None:
    """The outcome of ``decide(number)``, which is guarded; None where the number does not follow from known ones, nor
    from drawn ones of which all would decide alike: numbers in order, if that is kept, or truth values."""
    found = _steps_to(state, node)
    if found is None or (found[1] and not (keeps_order or is_truth(node))):
        return None
    inputs, draws, steps = found
    names, wanted = [place.name for place in inputs], node.name

    def outcome(*tensors: torch.Tensor) -> int | None:
        decided = set()
        for drawn in zip(*draws.values(), strict=True) if draws else [()]:
            with torch.no_grad():
                values = {
                    name: tensor.detach().clone()
                    for name, tensor in zip((*names, *draws), (*tensors, *drawn), strict=True)
                }
                decided.add(decide(_run(steps, values, wanted)))
            if draws and not all(torch.as_tensor(value).isfinite().all() for value in values.values()):
                return None
        return decided.pop() if len(decided) == 1 else None

    records = [next(r for r in state.graph.records if r.node is place) for place in inputs]
    value = outcome(*(record.real for record in records))
    sources = [record.entry.source for record in records]
    if sources and value is not None:
        given = ", ".join(f"{{{index}}}" for index in range(len(sources)))
        state.guards.add(sources, f"{{c0}}({given}) == {value}", [outcome], f"({text}) == {value}")
    return value


def constant_in(state: CaptureState, node: Node) -> Any:
    """The number in a tensor that the program makes of nothing but constants; None of another."""
    inputs, draws, steps = _steps_to(state, node) or ([node], {}, [])
    return None if inputs or draws else _run(steps, {}, node.name).item()


def _steps_to(state: CaptureState, node: Node) -> tuple[list[Node], dict[str, Ends], list[_Step]] | None:
    """The inputs, draws and operations, in order, that a number is made by; also those that change a tensor on the
    way."""
    if node.graph is not state.graph.graph:
        return None
    needed: set[Node] = set()
    draws: dict[Node, Ends] = {}
    waiting = [node]
    while waiting:
        used = waiting.pop()
        if used in needed:
            continue
        needed.add(used)
        if len(needed) > _MOST_STEPS:
            return None
        ends = ends_of_draw(used)
        if ends is None:
            waiting += _operands(used)
        else:
            draws[used] = ends
        # What a tensor holds that is the number itself may change after it was made.
        waiting += (user for user in _writers(used) if user < node or place_of(used) == place_of(node))
    chosen = [step for step in sorted(needed) if step not in draws and not fills(step, draws)]
    reals = {record.node: record.real for record in state.graph.records}
    inputs = [earlier for earlier in chosen if earlier.op == "placeholder"]
    made = [earlier for earlier in chosen if earlier.op != "placeholder"]
    steps = [_step_of(earlier, needed) for earlier in made]
    known = all(_is_number(place, reals.get(place)) for place in inputs)
    if not known or None in steps or not keep_order(made, draws):
        return None
    ends_of = {draw.name: ends for draw, ends in draws.items()}
    return inputs, ends_of, [step for step in steps if step is not None]


def _operands(node: Node) -> list[Node]:
    """Of the lists that a foreach operation changes only what is needed itself."""
    return nodes_in((node.args[1:], node.kwargs)) if _is_foreach(node) else node.all_input_nodes


def _writers(node: Node) -> list[Node]:
    """What may change a tensor, itself or through a view of it."""
    if not isinstance(node.meta.get("example_value"), torch.Tensor):
        return []
    found = []
    for user in node.users:
        result = user.meta.get("example_value")
        if not _only_reads(user) or isinstance(result, (list, tuple)):
            found.append(user)
        elif isinstance(result, torch.Tensor) and memory_of(user) == memory_of(node):
            found += _writers(user)
    return found


def _is_foreach(node: Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return name.startswith("_foreach_") and name.endswith("_") and isinstance(node.args[0], (list, tuple))


def _only_reads(node: Node) -> bool:
    """Whether an operation is known to change none of its arguments."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "_")
    known = isinstance(target, str) or getattr(target, "__module__", None) in ("_operator", None)
    in_place = (
        name.endswith("_") or (name.startswith("i") and hasattr(operator, f"__{name}__")) or name == "setitem"
    )
    return known and not in_place and node.kwargs.get("out") is None


def _step_of(node: Node, needed: set[Node]) -> _Step | None:
    """How an operation is run; None where it is none of numbers, or not the same each time."""
    example, target = node.meta["example_value"], node.target
    if _is_foreach(node):
        kept = [item for item in node.args[0] if item in needed]  # type: ignore[union-attr]
        return target, _with_results((kept, *node.args[1:])), _with_results(dict(node.kwargs)), node.name
    is_number = isinstance(example, (bool, int, float)) or _is_scalar(example)
    if target in _ALIKE and (is_number or _is_short(example)):
        is_number = is_known = True
    elif isinstance(target, str):
        is_known = target in _METHODS
    else:
        is_known = target in _FUNCTIONS or getattr(target, "__module__", None) == "_operator"
    if not is_number or not is_known:
        return None
    return target, _with_results(node.args), _with_results(dict(node.kwargs)), node.name


def _with_results(arguments: Any) -> Any:
    """With results of other nodes by name, and all on the CPU."""

    def result(argument: Any) -> Any:
        if isinstance(argument, torch.device):
            return torch.device("cpu")
        return _Result(argument.name) if isinstance(argument, Node) else argument

    return map_aggregate(arguments, result)


def _is_scalar(tensor: Any) -> bool:
    """Whether it is a tensor of one element; one with dims has it as a row of what a loop goes through does."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
        return False
    return all(type(size) is int and size == 1 for size in tensor.shape)


def _is_short(tensor: Any) -> bool:
    if not isinstance(tensor, torch.Tensor) or any(type(size) is not int for size in tensor.shape):
        return False
    return tensor.numel() <= _MOST_ELEMENTS


def _is_number(node: Node, real: Any) -> bool:
    return _is_scalar(real) and not real.dtype.is_complex and not real.requires_grad


def _run(steps: Sequence[_Step], values: dict[str, Any], wanted: str) -> Any:
    def real(argument: Any) -> Any:
        return values[argument.name] if isinstance(argument, _Result) else argument

    for target, args, kwargs, name in steps:
        given, named = map_aggregate(args, real), map_aggregate(kwargs, real)
        if isinstance(target, str):
            values[name] = getattr(given[0], target)(*given[1:], **named)
        else:
            values[name] = target(*given, **named)
    return values[wanted]
