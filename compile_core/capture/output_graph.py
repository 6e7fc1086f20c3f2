"""The graph under construction: torch-level nodes, each run at once on fake tensors for its example value."""

from __future__ import annotations

import itertools
import operator
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx.node import map_arg

from compile_core.capture.base import PlainCall
from compile_core.errors import Unsupported
from compile_core.ir.captured import CapturedGraph, GraphInput, InputKind
from compile_core.ir.sources import LocalSource, ModuleEntrySource, Source, path_words

_NO_FAKE_RULE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)


def make_fake_mode() -> FakeTensorMode:
    """The one place where a capture's fake mode is made."""
    return FakeTensorMode()


class OutputGraph:
    """Builds one fx graph. Node arguments are nodes and literals; fakes live in ``meta["example_value"]``."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self.graph = fx.Graph()
        self.fake_mode = fake_mode
        self.inputs: list[GraphInput] = []
        self.real_inputs: list[torch.Tensor] = []
        self.input_nodes: list[fx.Node] = []
        self.input_versions: list[int] = []
        self.held: dict[str, Any] = {}
        self._last_input: fx.Node | None = None
        self._input_targets: set[str] = set()
        self._named_after_variable: set[fx.Node] = set()

    def add_input(self, real: torch.Tensor, source: Source, kind: InputKind) -> fx.Node:
        """A placeholder for an existing tensor."""
        with warnings.catch_warnings():
            # Making a fake of an intermediate result looks at its .grad, which torch warns about.
            warnings.simplefilter("ignore")
            if real.is_inference():
                # Its fake would be one too, and have no version to tell that the program changed it.
                with self.fake_mode:
                    fake = torch.empty_strided(
                        real.shape, real.stride(), dtype=real.dtype, device=real.device
                    )
            else:
                fake = self.fake_mode.from_tensor(real, static_shapes=True)
        node = self.add_placeholder(_input_name(source, kind), fake)
        self.inputs.append(GraphInput(node.name, source, fake, kind))
        self.real_inputs.append(real)
        self.input_nodes.append(node)
        self.input_versions.append(fake._version)
        return node

    def add_placeholder(self, name: str, fake: torch.Tensor) -> fx.Node:
        """Placeholders come first, in the order in which they are added."""
        with (
            self.graph.inserting_after(self._last_input)
            if self._last_input
            else self.graph.inserting_before(next(iter(self.graph.nodes), None))
        ):
            node = self.graph.placeholder(self._unused_target(name))
        self._last_input = node
        node.meta["example_value"] = fake
        return node

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
        args = map_arg(args, self.own_node)
        kwargs = map_arg(kwargs, self.own_node)
        fake_args = map_arg(args, _fake_of)
        fake_kwargs = map_arg(kwargs, _fake_of)
        run = example_by or target
        try:
            with self.fake_mode:
                if isinstance(run, str):
                    example = getattr(fake_args[0], run)(*fake_args[1:], **fake_kwargs)
                else:
                    example = run(*fake_args, **fake_kwargs)
        except _NO_FAKE_RULE as error:
            shown = target if isinstance(target, str) else getattr(target, "__name__", str(target))
            raise Unsupported(
                "no-fake-result",
                f"the result of {shown} cannot be known without the data ({type(error).__name__})",
                "keep shapes and Python values independent of tensor data",
            ) from error
        except Exception as error:
            raise PlainCall(f"{target} raises {type(error).__name__}: {error}") from error
        if type(example) is torch.Tensor and example.is_meta:
            example = self.fake_mode.from_tensor(
                example
            )  # torch.tensor(..., device="meta") passes the mode by
        node = self.graph.create_node(op, target, args, kwargs)
        node.meta["example_value"] = example
        node.meta["stack_trace"] = stack_trace
        return node

    def name_after(self, node: fx.Node, variable: str) -> None:
        """Give an operation the name of the first of the user's variables that holds its result."""
        if node.op != "placeholder" and node not in self._named_after_variable:
            self._named_after_variable.add(node)
            node._rename(variable)

    def item(self, node: fx.Node, index: int) -> fx.Node:
        """The node of one tensor out of a node with several."""
        item = self.graph.create_node("call_function", operator.getitem, (node, index), {})
        item.meta["example_value"] = node.meta["example_value"][index]
        item.meta["stack_trace"] = node.meta.get("stack_trace", "")
        item.meta["is_item"] = True
        return item

    def finish(self, outputs: list[fx.Node]) -> CapturedGraph:
        """Close the graph; unused items of multi-output nodes and unused inputs are dropped."""
        self.graph.output(tuple(self.own_node(node) for node in outputs))
        for node in reversed(list(self.graph.nodes)):
            if not node.users and (node.op in ("placeholder", "get_attr") or "is_item" in node.meta):
                self.graph.erase_node(node)
        kept = [index for index, node in enumerate(self.input_nodes) if node.users]
        module = self.make_module("CapturedGraph")
        inputs = tuple(self.inputs[index] for index in kept)
        return CapturedGraph(module, inputs)

    def make_module(self, name: str) -> fx.GraphModule:
        """The graph as a module that has the objects it holds as attributes."""
        return fx.GraphModule(self.held, self.graph, name)


def _fake_of(node: fx.Node) -> Any:
    return node.meta["example_value"]


def is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor)


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
