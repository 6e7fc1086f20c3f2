"""The stages behind capture, for graphs that somebody else captured.

``gradsplit`` is a backend of ``torch.compile``: with it, a program keeps torch's front end and takes this project's
autograd, partition and kernels. It needs nothing of torch's front end but the graph.

Limits: sizes that torch made symbolic are specialised again: each combination of values compiles a graph of its own, up
to ``config.cache_size_limit``, beyond which the graph runs with torch's own kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from compile_core import config
from compile_core.backends.registry import Backend, resolve_backend
from compile_core.options import CompileOptions, parse_options
from compile_core.pipeline import CompiledGraph, compile_module

logger = logging.getLogger(__name__)


def gradsplit(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The default backend of ``compile_core.compile`` as a backend of ``torch.compile``.

    Args:
        gm: a graph of torch-level operations that returns a flat tuple.
        example_inputs: a tensor, real or fake, or a number for each placeholder.
        mode, options: as ``compile_core.compile`` takes them.

    Returns:
        A function of the graph's inputs that equals it, gradients and changes of its inputs included.
    """
    return compile_any_graph(gm, example_inputs, resolve_backend("triton"), parse_options(mode, options))


def compile_any_graph(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], backend: Backend, options: CompileOptions
) -> Callable[..., Any]:
    """``gradsplit`` for any backend."""
    if all(isinstance(example, torch.Tensor) and not _is_symbolic(example) for example in example_inputs):
        return _compile_static(gm, example_inputs, backend, options)
    return _PerSize(gm, backend, options)


class _PerSize:
    """Compiles a graph anew for every combination of its inputs' sizes and numbers."""

    def __init__(self, gm: torch.fx.GraphModule, backend: Backend, options: CompileOptions) -> None:
        self._gm = gm
        self._backend = backend
        self._options = options
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *inputs: Any) -> Any:
        key = tuple(
            (tuple(item.shape), item.stride()) if isinstance(item, torch.Tensor) else item for item in inputs
        )
        run = self._compiled.get(key)
        if run is None:
            limit = self._options.cache_size_limit or config.cache_size_limit
            if len(self._compiled) >= limit:
                return self._gm(*inputs)
            run = self._compiled[key] = self._specialise(inputs)
        return run(*(item for item in inputs if isinstance(item, torch.Tensor)))

    def _specialise(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The graph with its numbers in place of their placeholders."""
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(self._gm.graph, {}))
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        pairs = zip(placeholders, inputs, strict=True)
        numbers = {node: item for node, item in pairs if not isinstance(item, torch.Tensor)}
        for node in graph.nodes:
            node.args = torch.fx.map_arg(node.args, lambda arg: numbers.get(arg, arg))
            node.kwargs = torch.fx.map_arg(node.kwargs, lambda arg: numbers.get(arg, arg))
        for node in numbers:
            graph.erase_node(node)
        tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
        return _compile_static(torch.fx.GraphModule(self._gm, graph), tensors, self._backend, self._options)


def _compile_static(
    gm: torch.fx.GraphModule, examples: Sequence[torch.Tensor], backend: Backend, options: CompileOptions
) -> Callable[..., Any]:
    against = _reason_against(gm, examples)
    if against:
        logger.warning("a graph runs with torch's own kernels: %s", against)
        return gm
    compiled = compile_module(gm, _fakes(examples), examples, backend=backend, options=options)
    if not isinstance(compiled, CompiledGraph):
        return compiled
    changed = [mutation.input for mutation in compiled.partitioned.signature.mutated]
    if not changed:
        return compiled

    def run(*tensors: torch.Tensor) -> Any:
        # Whoever captured the graph need not have checked that inputs lie apart in memory at every call.
        places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        if any(places.count(places[position]) > 1 for position in changed):
            return gm(*tensors)
        return compiled(*tensors)

    return run


def _reason_against(gm: torch.fx.GraphModule, examples: Sequence[torch.Tensor]) -> str:
    """What the stages would silently take for something else: they know plain tensors by sizes and strides."""
    for example in examples:
        if type(example) not in (torch.Tensor, torch.nn.Parameter, FakeTensor):
            return f"an input is a {type(example).__name__}"
        if (
            example.layout is not torch.strided
            or example.is_quantized
            or example.is_conj()
            or example.is_neg()
        ):
            return "an input is sparse, quantised, or a lazily negated or conjugated view"
    (results,) = next(node for node in reversed(gm.graph.nodes) if node.op == "output").args
    for result in results if isinstance(results, (tuple, list)) else [None]:
        if not isinstance(result, torch.fx.Node) or not isinstance(
            result.meta.get("example_value"), torch.Tensor
        ):
            return "a result is not a tensor"
    return ""


def _fakes(examples: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Static fake tensors of one new mode, whatever mode the examples belong to."""
    with FakeTensorMode():
        return [
            torch.empty_strided(
                tuple(map(int, example.shape)),
                tuple(map(int, example.stride())),
                dtype=example.dtype,
                device=example.device,
            ).requires_grad_(example.requires_grad)
            for example in examples
        ]


def _is_symbolic(example: torch.Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in (*example.shape, *example.stride()))
