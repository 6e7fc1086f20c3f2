"""The graph under construction: torch-level nodes, each run at once on fake tensors for its example value."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.immutable_collections import immutable_list
from torch.fx.node import map_arg

from gradsplit.compile_core.capture.graph.data_sizes import DataSizes
from gradsplit.compile_core.capture.graph.fake_inputs import InnerFakes, layout_of, make_fake
from gradsplit.compile_core.capture.graph.out_arguments import refuse_unlike_out
from gradsplit.compile_core.capture.open_numbers.open_floats import takes_open_floats
from gradsplit.compile_core.capture.open_numbers.symbolic_sizes import SymbolicSizes, TensorSizes
from gradsplit.compile_core.capture.values.base import PlainCall
from gradsplit.compile_core.capture.values.view_copies import nodes_in
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.ir.captured import CapturedGraph, GraphInput, InputKind
from gradsplit.compile_core.ir.data_checks import check_assumption
from gradsplit.compile_core.ir.data_reads import DataReads
from gradsplit.compile_core.ir.number_nodes import number_node
from gradsplit.compile_core.ir.numbers import symbols_of
from gradsplit.compile_core.ir.sources import (
    AttributeSource,
    LocalSource,
    ModuleEntrySource,
    Source,
    path_words,
)
from gradsplit.compile_core.torch_facts.fake_tensors import run_on_fakes, with_kernels_results
from gradsplit.compile_core.torch_facts.symbolic_numbers import depends_on_data
from gradsplit.compile_core.torch_facts.torch_switches import free_guards
from gradsplit.compile_core.torch_facts.wrapper_tensors import inner_tensors

_NO_FAKE_RULE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)


@dataclass(frozen=True)
class InputRecord:
    """An input with its node, the real tensor or number, and what the fake was before the program could change it."""

    entry: GraphInput
    node: fx.Node
    real: torch.Tensor | int | float
    version: int = 0
    layout: tuple[Any, ...] = ()

    def as_given(self) -> GraphInput:
        """The input with an example that requires no gradients where only what the program stored in it does."""
        if (
            not isinstance(self.real, torch.Tensor)
            or self.entry.example.requires_grad == self.real.requires_grad
        ):
            return self.entry
        self.node.meta["example_value"] = self.entry.example.detach()
        return replace(self.entry, example=self.node.meta["example_value"])


class OutputGraph:
    """Builds one fx graph. Node arguments are nodes and literals; fakes live in ``meta["example_value"]``.

    Symbolic numbers are nodes too, made when an operation first takes one: ``size()`` of an input tensor, arithmetic,
    or an input where the program was given the number.
    """

    def __init__(self, sizes: SymbolicSizes, data_reads: DataReads) -> None:
        self.graph = fx.Graph()
        self.is_body = False
        self.data_reads = data_reads
        self.fake_mode = sizes.fake_mode
        self.sizes = sizes
        self.records: list[InputRecord] = []
        self._aliases: list[tuple[fx.Node, torch.Tensor, int]] = []
        self._inner_fakes = InnerFakes(sizes.fake_mode)
        self.held: dict[str, Any] = {}
        self.node_of_source: dict[Source, fx.Node] = {}
        self._number_nodes: dict[sympy.Basic, fx.Node] = {}
        self._float_inputs: dict[Source, fx.Node] = {}
        # The nodes of floats whose examples are plain floats, and what makes such a float stay as it is.
        self.open_floats: dict[fx.Node, Callable[[], float]] = {}
        self.data_sizes = DataSizes()
        self.required_options: dict[str, bool] = {}
        self._last_input: fx.Node | None = None
        self._input_targets: set[str] = set()
        self._named_after_variable: set[fx.Node] = set()

    def add_input(
        self,
        real: torch.Tensor,
        source: Source,
        kind: InputKind,
        sizes: TensorSizes | None = None,
        inner_sizes: Mapping[int, TensorSizes] = MappingProxyType({}),
    ) -> fx.Node:
        """A placeholder for an existing tensor; ``sizes`` where some of them are open, ``inner_sizes`` where some of
        those that it holds are, by their ``id``."""
        fake = make_fake(self.fake_mode, real, sizes, functools.partial(self._inner_fakes.of, inner_sizes))
        node = self.node_of_source[source] = self.add_placeholder(_input_name(source, kind), fake)
        entry = GraphInput(node.name, source, fake, kind)
        self.records.append(InputRecord(entry, node, real, fake._version, layout_of(fake)))
        return node

    def add_number_input(self, source: Source, symbol: sympy.Symbol) -> fx.Node:
        """A placeholder for a symbolic integer that the program was given."""
        example = self.sizes.number(symbol)
        node = self.add_placeholder(_input_name(source, "argument"), example)
        entry = GraphInput(node.name, source, example, "argument")
        self.records.append(InputRecord(entry, node, self.sizes.symbols[symbol].value))
        return node

    def float_input(self, source: Source, real: float, settle: Callable[[], float]) -> fx.Node:
        """The placeholder of a float that may differ at the next call. ``settle`` gives the float and makes it stay.

        Raises:
            NotImplementedError: this graph has no such inputs.
        """
        found = self._float_inputs.get(source)
        if found is None:
            found = self._float_inputs[source] = self.add_placeholder(_input_name(source, "argument"), real)
            self.records.append(InputRecord(GraphInput(found.name, source, real, "argument"), found, real))
            self.open_floats[found] = settle
        return found

    def add_placeholder(self, name: str, example: Any) -> fx.Node:
        """Placeholders come first, in the order in which they are added."""
        with (
            self.graph.inserting_after(self._last_input)
            if self._last_input
            else self.graph.inserting_before(next(iter(self.graph.nodes), None))
        ):
            node = self.graph.placeholder(self._unused_target(name))
        self._last_input = node
        node.meta["example_value"] = example
        return node

    def number(self, expression: sympy.Basic) -> fx.Node | int | float:
        """The node of a symbolic integer; an integer where it has come to be one value.

        Raises:
            NotImplementedError: an operation of the expression has no node.
        """
        found = self._number_nodes.get(expression)
        if found is not None:
            return found
        leaves = {symbol: self._leaf(symbol) for symbol in sorted(symbols_of(expression), key=str)}
        made = number_node(expression, leaves, self._number_operation)
        if isinstance(made, fx.Node):
            self._number_nodes[expression] = made
        return made

    def _leaf(self, symbol: sympy.Symbol) -> fx.Node:
        found = self._number_nodes.get(symbol)
        if found is None:
            at = self.sizes.symbols.get(symbol)
            if at is None:
                found = self.data_sizes.leaf(symbol, self.graph, self.number_operation)
            elif at.read is None:
                found = self.add_number_input(at.source, symbol)
            else:
                tensor, method, dim = at.read
                arguments = (self._node_of(tensor), dim)
                found = self.number_operation(method, arguments, self.sizes.number(symbol))
            self._number_nodes[symbol] = found
        return found

    def _node_of(self, source: Source) -> fx.Node:
        """The node of an input tensor, or of one that an input holds."""
        if source not in self.node_of_source:
            assert isinstance(source, AttributeSource) and source.base is not None
            holder = self._node_of(source.base)
            read = getattr(_fake_of(holder), source.name)
            self.node_of_source[source] = self.number_operation(getattr, (holder, source.name), read)
        return self.node_of_source[source]

    def _number_operation(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> fx.Node:
        return self.number_operation(function, operands, function(*map_arg(operands, _fake_of)))

    def number_operation(
        self, target: Callable[..., Any] | str, operands: tuple[Any, ...], example: Any
    ) -> fx.Node:
        """A node that computes a number; it goes if nothing uses it."""
        op = "call_method" if isinstance(target, str) else "call_function"
        node = self.graph.create_node(op, target, map_arg(operands, self.own_node), {})
        node.meta["example_value"] = example
        node.meta["is_pure"] = True
        return node

    def alias_made(self, node: fx.Node, fake: torch.Tensor) -> None:
        """``fake`` is memory of an input, whose own version tells nothing of changes through the alias."""
        self._aliases.append((node, fake, fake._version))

    def is_changed(self, record: InputRecord) -> bool:
        """Whether the graph writes to an input."""
        through_alias = (
            fake._version != version for node, fake, version in self._aliases if node is record.node
        )
        return record.entry.example._version != record.version or any(through_alias)

    def changes_alias_in(self, memory: set[int]) -> bool:
        """Whether memory of these storages is changed through such an alias."""
        return any(
            fake._version != version and fake.untyped_storage()._cdata in memory
            for _, fake, version in self._aliases
        )

    def hold(self, name: str, value: Any) -> fx.Node:
        """The node of an object that is no tensor, such as the graph of a body; the graph module holds it."""
        used = sum(key.rpartition("_")[0] == name for key in self.held)
        key = f"{name}_{used}"
        self.held[key] = value
        # The graph has no module yet that could tell whether the attribute exists.
        node = self.graph.create_node("get_attr", key)
        node.meta["example_value"] = value
        return node

    def own_node(self, node: fx.Node) -> fx.Node:
        """The node of this graph for a node that an operation reads."""
        if node.graph is not self.graph:
            raise Unsupported("escaped-tensor", f"a tensor ({node.name}) leaves the body that computes it")
        return node

    def _unused_target(self, wanted: str) -> str:
        """Targets are the parameters of the generated ``forward``: ``x[0]`` and ``x_0`` must not share one."""
        numbered = (f"{wanted.rstrip('_')}_{number}" for number in itertools.count(1))
        chosen = next(name for name in itertools.chain([wanted], numbered) if name not in self._input_targets)
        self._input_targets.add(chosen)
        return chosen

    def call(
        self,
        op: str,
        target: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        stack_trace: str,
        example_by: Callable[..., Any] | None = None,
    ) -> fx.Node:
        """Append an operation and run it on the fakes; ``example_by`` is run there in the target's stead.

        Raises Unsupported where fake tensors have no answer (the result depends on data), and PlainCall
        where the operation raises: plain Python will then raise the same for the user.
        """
        if self.open_floats and not takes_open_floats(target):
            args, kwargs = map_arg(args, self._settled), map_arg(kwargs, self._settled)
        args = map_arg(args, self.own_node)
        kwargs = map_arg(kwargs, self.own_node)
        fake_args = map_arg(args, _fake_of)
        fake_kwargs = map_arg(kwargs, _fake_of)
        if target is operator.pow and _is_negative(args[0]) and isinstance(fake_args[1], torch.Tensor):
            target = torch.pow  # the generated ``-2 ** x`` would be ``-(2 ** x)``
        run = example_by or with_kernels_results(target)
        out = [] if fake_kwargs.get("out") is None else nodes_in(kwargs["out"])
        if out:
            with run_on_fakes(self.fake_mode):
                refuse_unlike_out(run, out, fake_args, fake_kwargs)
        counted = [tensor for tensor in map(_fake_of, out) if not tensor.is_inference()]
        versions = [tensor._version for tensor in counted]
        if isinstance(run, types.FunctionType):
            fake_args, fake_kwargs = _as_given(fake_args), _as_given(fake_kwargs)
        try:
            with run_on_fakes(self.fake_mode):
                if isinstance(run, str):
                    example = getattr(fake_args[0], run)(*fake_args[1:], **fake_kwargs)
                else:
                    example = run(*fake_args, **fake_kwargs)
        except GuardOnDataDependentSymNode as error:
            free_guards(error)
            raise Unsupported(
                "data-dependent-size",
                f"what {_shown(target)} does depends on a size that data decides ({error.cond})",
                "say torch._check() of the size before",
            ) from error
        except _NO_FAKE_RULE as error:
            free_guards(error)
            raise Unsupported(
                "no-fake-result",
                f"the result of {_shown(target)} cannot be known without the data ({type(error).__name__})",
                "keep shapes and Python values independent of tensor data",
            ) from error
        except Exception as error:
            given = nodes_in((args, kwargs))
            symbolic = [node for node in given if _is_symbolic(node)]
            bodies = [_fake_of(node) for node in given if isinstance(_fake_of(node), fx.GraphModule)]
            inside = [node for body in bodies for node in body.graph.nodes if node.op != "output"]
            if any(depends_on_data(_fake_of(node)) for node in (*symbolic, *filter(_is_symbolic, inside))):
                free_guards(error)
                explanation = (
                    f"{_shown(target)} with a size that data decides: {type(error).__name__}: {error}"
                )
                raise Unsupported("data-dependent-size", explanation) from error
            if symbolic:
                # Some operations take no symbolic integers: they get the numbers of this call.
                return self.call(op, target, _specialised(args), _specialised(kwargs), stack_trace)
            free_guards(error)
            raise PlainCall(f"{target} raises {type(error).__name__}: {error}") from error
        if any(tensor._version == before for tensor, before in zip(counted, versions, strict=True)):
            # ``kron`` does so: it writes through a view that autograd does not know to be one.
            raise Unsupported(
                "unseen-write", "a result given as out= is written to without a new version of it"
            )
        if type(example) is torch.Tensor and example.is_meta:
            example = self.fake_mode.from_tensor(
                example
            )  # torch.tensor(..., device="meta") passes the mode by
        node = self.graph.create_node(op, target, args, kwargs)
        node.meta["example_value"] = example
        node.meta["stack_trace"] = stack_trace
        self.data_sizes.note(node)
        self.write_checks()
        return node

    def may_check(self) -> bool:
        """Whether a check that fails here leaves what the graph was given as it was."""
        return self.data_reads.changes_last or not any(map(self.is_changed, self.records))

    def write_checks(self) -> None:
        """Write what has been assumed of numbers that depend on data since this was last done.

        Raises:
            Unsupported: nothing in the graph says what such a number is, or what the graph was given is changed by now.
        """
        env = self.fake_mode.shape_env
        assertions = [] if env is None else self.data_sizes.new_assertions(env)
        if assertions and not self.may_check():
            raise Unsupported(
                "data-dependent-size",
                f"{assertions[0]} is assumed of data after an input was changed in place",
            )
        for assertion in assertions:
            try:
                condition = self.number(assertion)
            except NotImplementedError as error:
                explanation = f"no node for what is assumed of data: {assertion}"
                raise Unsupported("data-dependent-size", explanation) from error
            check = self.graph.create_node("call_function", check_assumption, (condition,))
            check.meta["example_value"] = None

    def _settled(self, node: fx.Node) -> fx.Node | float:
        settle = self.open_floats.get(node)
        return node if settle is None else settle()

    def name_after(self, node: fx.Node, variable: str) -> None:
        """Give an operation the name of the first of the user's variables that holds its result."""
        if variable == "self":
            return  # in the generated code, that is the graph module
        if node.op != "placeholder" and node not in self._named_after_variable:
            self._named_after_variable.add(node)
            node._rename(variable)

    def item(self, node: fx.Node, index: Any) -> fx.Node:
        """The node of one part out of a node with several: by position, or by key in a dictionary."""
        item = self.graph.create_node("call_function", operator.getitem, (node, index), {})
        item.meta["example_value"] = node.meta["example_value"][index]
        item.meta["stack_trace"] = node.meta.get("stack_trace", "")
        item.meta["is_pure"] = True
        return item

    def finish(self, outputs: list[fx.Node]) -> CapturedGraph:
        """Close the graph; unused items of multi-output nodes, numbers and inputs are dropped."""
        self.graph.output(tuple(self.own_node(node) for node in outputs))
        for node in reversed(list(self.graph.nodes)):
            if not node.users and (node.op in ("placeholder", "get_attr") or "is_pure" in node.meta):
                self.graph.erase_node(node)
        inputs = tuple(record.as_given() for record in self.records if record.node.users)
        return CapturedGraph(self.make_module("CapturedGraph"), inputs, self.required_options)

    def make_module(self, name: str) -> fx.GraphModule:
        """The graph as a module that has the objects it holds as attributes."""
        return fx.GraphModule(self.held, self.graph, name)

    def has_operations(self) -> bool:
        """Whether there is more than inputs, numbers and modes turned to and fro: any operation may have an effect
        of its own (batch norm writes statistics, dropout draws numbers)."""
        idle = {"is_pure", "turns_mode"}
        return any(node.op != "placeholder" and not idle & node.meta.keys() for node in self.graph.nodes)


def _is_negative(base: Any) -> bool:
    return isinstance(base, (int, float)) and math.copysign(1, base) < 0


def _as_given(arguments: Any) -> Any:
    """Arguments of a node as a function of the program gets them, which may change its lists and dictionaries."""
    if isinstance(arguments, dict):
        return {key: _as_given(value) for key, value in arguments.items()}
    if type(arguments) in (tuple, immutable_list):
        return (tuple if type(arguments) is tuple else list)(map(_as_given, arguments))
    return arguments


def _shown(target: Any) -> str:
    return getattr(target, "__name__", str(target))


def _fake_of(node: fx.Node) -> Any:
    return node.meta["example_value"]


def _is_symbolic(node: fx.Node) -> bool:
    return isinstance(node.meta["example_value"], torch.SymInt)


def _specialised(arguments: Any) -> Any:
    """Arguments of a node with symbolic integers replaced by those of this call."""
    return map_arg(arguments, lambda node: int(_fake_of(node)) if _is_symbolic(node) else node)


def is_fake(value: object) -> bool:
    inner = inner_tensors(value) if isinstance(value, torch.Tensor) else [value]
    return all(isinstance(each, FakeTensor) for each in inner)


def _input_name(source: Source, kind: InputKind) -> str:
    """The placeholder's target: ``p_layer_weight``, ``L_x_``; fx makes the node's name of it, as ``l_x_``."""
    words = path_words(source)
    root = source
    while root.base is not None:
        root = root.base
    of_self = isinstance(root, LocalSource) and root.name == "self"
    if of_self and isinstance(source, ModuleEntrySource) and len(words) > 1:
        words = words[1:]
    if kind == "argument":
        words = ["L", *words, ""]
    else:
        words = [{"parameter": "p", "buffer": "b", "state": "g"}[kind], *words]
    return re.sub(r"\W+", "_", "_".join(words))
