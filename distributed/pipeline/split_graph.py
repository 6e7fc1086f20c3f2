"""Cuts an exported graph into stages, each an exported graph of its own."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from gradsplit.compile_core.export.conditions import ExportedTensor
from gradsplit.compile_core.export.exported import Exported, verify_exported
from gradsplit.compile_core.export.module_tree import Tree
from gradsplit.compile_core.export.print_program import show_spec
from gradsplit.compile_core.ir.tensor_spec import contiguous_strides
from gradsplit.compile_core.torch_facts.symbolic_numbers import value_at_compilation
from gradsplit.distributed.pipeline.graph_facts import GraphFacts, is_dense, is_part
from gradsplit.distributed.pipeline.layout import Edge, PipelineLayout, StageLayout


@dataclass(frozen=True)
class Split:
    """Stages as exported graphs, and how they hang together."""

    stages: tuple[Exported, ...]
    layout: PipelineLayout


def split_graph(
    exported: Exported,
    facts: GraphFacts,
    cuts: Sequence[int],
    seconds: Sequence[float],
    microbatches: int,
) -> Split:
    """The stages that cuts at these positions make."""
    return _Splitter(exported, facts, cuts).split(seconds, microbatches)


class _Splitter:
    def __init__(self, exported: Exported, facts: GraphFacts, cuts: Sequence[int]) -> None:
        self.exported, self.facts, self.count = exported, facts, len(cuts) + 1
        self.last = len(cuts)
        self.output = list(exported.graph.nodes)[-1]
        self.stage_of: dict[fx.Node, int] = {}
        for position, node in enumerate(facts.nodes):
            if node in facts.constant:
                continue
            own = sum(cut <= position for cut in cuts)
            self.stage_of[node] = (
                self.stage_of[node.all_input_nodes[0]]
                if is_part(node, facts.values) and node.all_input_nodes[0] in self.stage_of
                else own
            )
        self.readers = self._find_readers()
        self.edges: list[Edge] = []
        self.edge_of: dict[fx.Node, int] = {}
        self._find_edges()
        self.node_of = {edge: node for node, edge in self.edge_of.items()}

    def _find_readers(self) -> dict[fx.Node, list[int]]:
        """By value: the stages that read it, itself or through what they compute anew."""
        readers: dict[fx.Node, set[int]] = {}
        for node in reversed(self.exported.graph.nodes):
            if node.op == "placeholder":
                continue
            if node is self.output:
                own = {self.last}
            else:
                own = {self.stage_of[node]} if node in self.stage_of else readers.get(node, set())
            for source in node.all_input_nodes:
                readers.setdefault(source, set()).update(own)
        return {node: sorted(found) for node, found in readers.items()}

    def _find_edges(self) -> None:
        for node, readers in sorted(self.readers.items(), key=lambda item: item[0]):
            if node in self.facts.constant:
                continue
            kind = node.meta.get("kind")
            if kind in ("argument", "buffer", "constant"):
                continue  # read from the call, or held by each stage
            producer = readers[0] if kind == "parameter" else self.stage_of[node]
            consumers = tuple(stage for stage in readers if stage != producer)
            if not consumers:
                continue
            value = self.facts.values[node]
            strides = value.stride() if is_dense(value) else contiguous_strides(tuple(value.shape))
            self.edge_of[node] = len(self.edges)
            self.edges.append(
                Edge(
                    node.meta["path"] if kind == "parameter" else node.name,
                    producer,
                    consumers,
                    tuple(map(self.facts.symbols.text, value.shape)),
                    tuple(map(self.facts.symbols.text, strides)),
                    str(value.dtype).removeprefix("torch."),
                    value.requires_grad,
                    kind == "parameter",
                )
            )

    def split(self, seconds: Sequence[float], microbatches: int) -> Split:
        owned = self._owned_tensors()
        stages, layouts = [], []
        for stage in range(self.count):
            graph, inputs, outputs, threaded = self._graph_of(stage)
            measured = [k for k in inputs if k < 0 and self._is_measured(-1 - k, stage)]
            arguments = tuple(self._argument(position, edge) for position, edge in enumerate(inputs))
            names = owned[stage]
            result = (
                self.exported.result
                if stage == self.last
                else {"tuple": [{"tensor": k} for k in range(len(outputs))]}
            )
            tensors = [{"tensor": k} for k in range(len(inputs))]
            part = Exported(
                f"stage {stage} of {self.exported.name}",
                graph,
                {"tuple": [{"tuple": tensors}, {"dict": []}]},
                (),
                result,
                arguments,
                (),
                _pruned(self.exported.modules, names),
                {name: tensor for name, tensor in self.exported.tensors.items() if name in names},
                self.exported.training,
                self.exported.device,
            )
            verify_exported(part)
            stages.append(part)
            layouts.append(self._layout_of(stage, inputs, outputs, measured, threaded, seconds, part))
        layout = PipelineLayout(
            self.exported.name,
            uuid.uuid4().hex,
            tuple(layouts),
            tuple(self.edges),
            self.exported.call,
            self.exported.parameter_names,
            self.exported.arguments,
            self._conditions(),
            tuple(self.exported.module().state_dict()),
            microbatches,
        )
        return Split(tuple(stages), layout)

    def _conditions(self) -> tuple[str, ...]:
        """What must hold of the sizes of a call, where to cut included."""
        found = [text for text in self.facts.symbols.conditions() if ".stride()" not in text]
        return tuple(dict.fromkeys([*self.exported.conditions, *found]))

    def _owned_tensors(self) -> list[set[str]]:
        """By stage the names of the parameters, buffers and constants that it holds; the first has those that the
        graph does not read."""
        owned: list[set[str]] = [set() for _ in range(self.count)]
        for node in self.exported.graph.find_nodes(op="placeholder"):
            kind, path = node.meta["kind"], node.meta["path"]
            readers = self.readers.get(node, [])
            if kind == "parameter":
                owned[readers[0] if readers else 0].add(path)
            elif kind != "argument":
                for stage in readers or [0]:
                    owned[stage].add(path)
        owned[0] |= set(self.exported.tensors) - set().union(*owned)
        return owned

    def _argument(self, position: int, edge: int) -> ExportedTensor:
        place = f"args[{position}]"
        if edge < 0:
            given = self.exported.arguments[-edge - 1]
            return ExportedTensor(
                place, given.dtype, given.device, given.sizes, given.example, given.requires_grad
            )
        found = self.edges[edge]
        sizes = tuple(size if isinstance(size, int) else None for size in found.sizes)
        example = tuple(map(value_at_compilation, self.facts.values[self.node_of[edge]].shape))
        return ExportedTensor(place, found.dtype, self.exported.device, sizes, example, found.requires_grad)

    def _is_measured(self, argument: int, stage: int) -> bool:
        """Whether a stage reads only the sizes of an argument."""
        return all(
            user is not self.output and self.facts.is_number(user)
            for node in self.exported.graph.find_nodes(op="placeholder")
            if node.meta["kind"] == "argument" and node.meta["path"] == argument
            for user in node.users
            if stage in self._stages_of(user)
        )

    def _stages_of(self, node: fx.Node) -> Sequence[int]:
        """The stages that compute a node."""
        if node is self.output:
            return [self.last]
        return [self.stage_of[node]] if node in self.stage_of else self.readers.get(node, ())

    def _graph_of(self, stage: int) -> tuple[fx.Graph, list[int], list[int], list[int]]:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        inputs: list[int] = []
        for node in self.exported.graph.nodes:
            if node.op == "output" or stage not in self.readers.get(node, ()):
                continue
            edge = self.edge_of.get(node)
            is_edge = edge is not None and self.edges[edge].producer != stage
            if is_edge or node.meta.get("kind") == "argument":
                copies[node] = graph.create_node("placeholder", node.name, name=node.name)
                copies[node].meta = {
                    "kind": "argument",
                    "path": len(inputs),
                    "spec": show_spec(self.facts.values[node]),
                }
                inputs.append(edge if edge is not None else -1 - node.meta["path"])
            elif node.op == "placeholder":
                copies[node] = graph.node_copy(node)
        for node in self.facts.nodes:
            is_here = self.stage_of.get(node) == stage
            if is_here or (node in self.facts.constant and stage in self.readers.get(node, ())):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        if stage == self.last:
            graph.output(tuple(copies[node] for node in self.output.args[0]))  # type: ignore[union-attr]
            return graph, inputs, [], []
        outputs = [position for position, edge in enumerate(self.edges) if edge.is_sent_by(stage)]
        results = [copies[self.node_of[position]] for position in outputs]
        threaded = []
        for position, edge in enumerate(self.edges):
            is_taken = stage in edge.consumers or (edge.is_state and edge.producer == stage)
            if not (is_taken and edge.requires_grad and edge.reader_after(stage) is not None):
                continue
            value = copies[self.node_of[position]]
            if len(value.users) > 1:
                copy = graph.call_method("clone", (value,))
                copy.meta = {"spec": value.meta["spec"]}
                results.append(copy)
                threaded.append(position)
        graph.output(tuple(results))
        return graph, inputs, [*outputs, *threaded], threaded

    def _layout_of(
        self,
        stage: int,
        inputs: Sequence[int],
        outputs: Sequence[int],
        measured: Sequence[int],
        threaded: Sequence[int],
        seconds: Sequence[float],
        part: Exported,
    ) -> StageLayout:
        here = [
            position for position, node in enumerate(self.facts.nodes) if self.stage_of.get(node) == stage
        ]
        draws = [draw for position in here for draw in self.facts.draws.get(self.facts.nodes[position], [])]
        return StageLayout(
            tuple(inputs),
            tuple(outputs),
            tuple(measured),
            tuple(threaded),
            tuple(draws),
            sum(seconds[position] for position in here),
            sum(tensor.nbytes for tensor in part.tensors.values()),
            sum(self.facts.bytes_of(self.facts.nodes[position]) for position in here),
        )


def _pruned(tree: Tree, names: set[str]) -> Tree:
    """The modules that hold tensors of these names."""
    if "same_as" in tree:
        return tree
    modules = {name: _pruned(child, names) for name, child in tree["modules"].items()}
    return {
        "parameters": {
            name: given for name, given in tree["parameters"].items() if given is None or given in names
        },
        "buffers": {
            name: given for name, given in tree["buffers"].items() if given[0] is None or given[0] in names
        },
        "modules": modules,
    }
