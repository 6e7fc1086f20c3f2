"""What the capture stage hands on: a graph of torch-level operations, and the conditions under which it
holds."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from gradsplit.compile_core.errors import CodeLocation, InternalError, Unsupported
from gradsplit.compile_core.ir.sources import AttributeSource, LocalSource, ModuleEntrySource, Source
from gradsplit.compile_core.ir.tensor_spec import TensorSpec

InputKind = Literal["parameter", "buffer", "argument", "state"]

# What a guard's condition says, where it is one of the common ones; else "expression".
GuardKind = Literal[
    "expression",
    "type",
    "identity",
    "same",
    "distinct",
    "length",
    "keys",
    "absent",
    "present",
    "equal",
    "all_false",
    "tensor",
    "apart",
]


@dataclass(frozen=True)
class GraphInput:
    """One tensor that the graph reads, or one symbolic number.

    ``kind`` is ``parameter`` or ``buffer`` for entries of a module's tables, ``argument`` for tensors that
    are reached from the call's arguments, ``state`` for globals, closures and plain attributes of modules.
    ``example`` is a fake tensor; two inputs never have the same source, nor are they the same tensor object.

    An integer argument of the program that may differ at the next call is an input as well; its example is a SymInt.
    So is a float; its example is the float of this call.
    """

    name: str
    source: Source
    example: Any
    kind: InputKind

    @property
    def is_open(self) -> bool:
        """Whether it is symbolic, or a tensor with a symbolic size or stride."""
        return is_symbolic_number(self.example) or self.example._has_symbolic_sizes_strides


def input_kind(source: Source) -> InputKind:
    """The kind of the input that lies at a source; see ``GraphInput``."""
    if isinstance(source, ModuleEntrySource):
        return "parameter" if source.table == "_parameters" else "buffer"
    root: Source = source
    through_object = False
    while root.base is not None:
        own_attribute = isinstance(root, AttributeSource) and root.name == "__dict__"
        through_object = through_object or isinstance(root, ModuleEntrySource) or own_attribute
        root = root.base
    plain = isinstance(root, LocalSource) and not through_object and root.name != "self"
    return "argument" if plain else "state"


@dataclass(frozen=True)
class CapturedGraph:
    """Torch-level graph: one placeholder per input in order, one output node with a flat tuple of tensors.

    ``required_options`` are the options that the graph is compiled with, whatever the user chose, since the program
    asks for gradients where the graph ends, by ``create_graph=True`` or with respect to one of the graph's own values,
    or retains those of one.

    ``end_at_data`` is given where sizes or numbers depend on data though nobody asked for it. Whoever cannot compile
    such a graph as a whole raises; then this is called, and the next capture ends its graph where the data are read.
    """

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    required_options: Mapping[str, bool] = field(default_factory=dict)
    end_at_data: Callable[[], None] | None = None

    @property
    def has_open_sizes(self) -> bool:
        return any(entry.is_open for entry in self.inputs)

    def __str__(self) -> str:
        return print_captured_graph(self)


def is_symbolic_number(example: object) -> bool:
    """Whether an example value is a number that differs between calls."""
    return isinstance(example, (torch.SymInt, torch.SymFloat, float))


@dataclass(frozen=True)
class Guard:
    """A condition over the sources, as a Python expression.

    ``{0}``, ``{1}`` … in the condition stand for the sources, ``{c0}``, ``{c1}`` … for the held constants.
    ``text`` says in words what must hold. ``kind`` says the same as the condition, about the same constants.
    ``place`` is the line of the program that ran when it was made, with its code.
    """

    sources: tuple[Source, ...]
    condition: str
    constants: tuple[Any, ...]
    text: str
    kind: GuardKind = "expression"
    place: tuple[types.CodeType, int] | None = field(default=None, compare=False)

    @property
    def location(self) -> CodeLocation | None:
        """The line of the program that is the reason for it, if one is."""
        return None if self.place is None else CodeLocation.of(*self.place)


@dataclass(frozen=True)
class RunnerCode:
    """Generated Python that calls the graph, replays side effects and rebuilds what the frame returns.

    It defines ``run(graph, inputs, <the frame's arguments as l_name>)``; ``constants`` are its globals. Where the
    graph raises it calls ``run_again([error], <the frame's arguments>)``, which who runs it provides.

    ``result_lines`` do no more than rebuild what the frame returns, from the graph's results ``out``; ``changes``
    says in words what else the runner does.
    """

    text: str
    constants: dict[str, Any]
    result_lines: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ResumePoint:
    """The rest of a frame after a graph break, which stack values and locals are passed to.

    With ``cells_argument`` the tuple of its closure cells comes before them. The runner hands it on under
    ``name``. Who runs the runner provides that and ``compiled_form(callable)`` for what the frame calls at the break,
    and follows what comes out, which may be a continuation.
    """

    name: str
    rest: Any
    cells_argument: bool


@dataclass(frozen=True)
class CapturedFrame:
    """The whole of what stage 0 stores for one call of a function under certain conditions.

    ``graph`` is None when the frame does no tensor work. ``arguments`` are the frame's argument names in
    order.
    ``break_reason`` says why the capture ended before the function returned, None if it did not. ``runner``
    is None for a frame that could not be captured at all: while the guards hold, it runs as plain Python.
    ``resume`` are the points where the frame goes on after a graph break, two after a branch that depends
    on data. ``writes_inputs``: the graph changes inputs. ``late_guards`` gives all guards again where sizes are
    symbolic: a backend that asks for their values adds some.
    """

    graph: CapturedGraph | None
    guards: tuple[Guard, ...]
    arguments: tuple[str, ...]
    runner: RunnerCode | None
    break_reason: Unsupported | None = None
    resume: tuple[ResumePoint, ...] = ()
    late_guards: Callable[[], tuple[Guard, ...]] | None = None
    writes_inputs: bool = False


def print_captured_graph(graph: CapturedGraph) -> str:
    """The graph as text with stable names: one line per node, with the spec of its value."""
    return "\n".join(_print_nodes(graph.module, {entry.name: entry.kind for entry in graph.inputs}))


def _print_nodes(module: fx.GraphModule, kinds: dict[str, InputKind]) -> list[str]:
    lines = []
    for node in module.graph.nodes:
        example = node.meta.get("example_value")
        shown = _show_example(example)
        if node.op == "placeholder":
            lines.append(f"{node.name}: {shown} = {kinds.get(node.name, 'input')}")
        elif node.op == "output":
            lines.append(f"return {_show_argument(node.args[0])}")
        elif isinstance(example, fx.GraphModule):
            lines += [f"{node.name}:", *(f"    {line}" for line in _print_nodes(example, {}))]
        elif node.op == "get_attr":
            lines.append(f"{node.name}: {type(example).__name__}")
        else:
            arguments = [_show_argument(argument) for argument in node.args]
            arguments += [f"{key}={_show_argument(value)}" for key, value in node.kwargs.items()]
            if node.op == "call_method":
                call = f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
            else:
                call = f"{_show_target(node.target)}({', '.join(arguments)})"
            lines.append(f"{node.name}: {shown} = {call}")
    return lines


def verify_captured_graph(graph: CapturedGraph) -> None:
    """Check the promises of CapturedGraph; raises InternalError with the node and the rule that it breaks."""
    nodes = list(graph.module.graph.nodes)
    names = [node.name for node in nodes if node.op == "placeholder"]
    if names != [entry.name for entry in graph.inputs]:
        raise InternalError(f"placeholders {names} do not match the inputs {[e.name for e in graph.inputs]}")
    if len({entry.source for entry in graph.inputs}) != len(graph.inputs):
        raise InternalError("two inputs have the same source")
    outputs = [node for node in nodes if node.op == "output"]
    if len(outputs) != 1 or nodes[-1] is not outputs[0]:
        raise InternalError("a graph ends with its only output node")
    returned = outputs[0].args[0]
    if not isinstance(returned, tuple) or not all(isinstance(item, fx.Node) for item in returned):
        raise InternalError(f"the output is not a flat tuple of nodes: {returned}")
    for node in nodes:
        if node.op == "output":
            continue
        if node.op not in ("placeholder", "get_attr", "call_function", "call_method"):
            raise InternalError(f"node {node.name}: op {node.op} does not belong in a captured graph")
        if "example_value" not in node.meta:
            raise InternalError(f"node {node.name} has no example_value")
    for item in returned:
        if not isinstance(item.meta["example_value"], torch.Tensor):
            raise InternalError(f"the output {item.name} is not a tensor")


def _show_example(example: object) -> str:
    if is_symbolic_number(example):
        return str(example)
    if isinstance(example, torch.Tensor):
        return str(TensorSpec.of(example)) if example.layout == torch.strided else str(example.layout)
    if isinstance(example, (tuple, list)):
        return "(" + ", ".join(_show_example(item) for item in example) + ")"
    return type(example).__name__


def _show_argument(argument: object) -> str:
    if isinstance(argument, (tuple, list)):
        shown = ", ".join(_show_argument(item) for item in argument)
        return f"[{shown}]" if isinstance(argument, list) else f"({shown})"
    if isinstance(argument, slice):
        parts = (argument.start, argument.stop, argument.step)
        return f"slice({', '.join(_show_argument(part) for part in parts)})"
    return str(argument) if isinstance(argument, fx.Node) else repr(argument)


def _show_target(target: object) -> str:
    module = getattr(target, "__module__", None) or ""
    name = getattr(target, "__name__", None) or str(target)
    for long, short in (("torch.nn.functional", "F"), ("torch._C._nn", "F"), ("_operator", "operator")):
        if module == long:
            return f"{short}.{name}"
    if module in ("builtins", "torch.functional", "torch._VF") or not module:
        return name
    return f"{module}.{name}"
