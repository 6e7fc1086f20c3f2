"""The stages after capture, for graphs that somebody else captured.

``gradsplit`` is a backend of ``torch.compile``: with it, a program keeps torch's front end and takes this project's
autograd, partition and kernels. It needs nothing of torch's front end but the graph. Conditions on sizes that torch
made symbolic go to its ShapeEnv, which torch looks at when the backend has ended.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gradsplit.compile_core.backends.registry import DEFAULT_BACKEND, Backend, GraphBackend, resolve_backend
from gradsplit.compile_core.ir.captured import is_symbolic_number
from gradsplit.compile_core.many_sizes.graph_of_many_sizes import GraphOfManySizes
from gradsplit.compile_core.options import CompileOptions, parse_options
from gradsplit.compile_core.pipeline import CompiledGraph, compile_module
from gradsplit.compile_core.torch_facts.apart_from_torch_compile import outside_of_its_compilation
from gradsplit.compile_core.torch_facts.fakes_like import fakes_like
from gradsplit.compile_core.torch_facts.symbolic_numbers import value_at_compilation

logger = logging.getLogger(__name__)


def gradsplit(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The default backend of ``gradsplit.compile`` as a backend of ``torch.compile``.

    Args:
        gm: a graph of torch-level operations that returns a flat tuple.
        example_inputs: a tensor, real or fake, or a symbolic number for each placeholder.
        mode, options: as ``gradsplit.compile`` takes them.

    Returns:
        A function of the graph's inputs that equals it, gradients and changes of its inputs included. A graph that the
        stages have no rule for runs with torch's own kernels, with the reason logged.
    """
    return compile_any_graph(
        gm, example_inputs, resolve_backend(DEFAULT_BACKEND), parse_options(mode, options)
    )


def compile_any_graph(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], backend: Backend, options: CompileOptions
) -> Callable[..., Any]:
    """``gradsplit`` for any backend."""
    if isinstance(backend, GraphBackend):
        return compile_module(gm, example_inputs, example_inputs, backend=backend, options=options)
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    examples = [
        node.meta.get("example_value", given)
        for node, given in zip(placeholders, example_inputs, strict=True)
    ]
    against = _reason_against(gm, examples)
    if against:
        logger.warning("a graph runs with torch's own kernels: %s", against)
        return gm
    inputs = fakes_like(examples, value_at_compilation)
    with outside_of_its_compilation():
        compiled = compile_module(gm, fakes_like(examples), inputs, backend=backend, options=options)
    if not isinstance(compiled, (CompiledGraph, GraphOfManySizes)):
        return compiled
    changed = [mutation.input for mutation in compiled.partitioned.signature.mutated]
    if not changed:
        return compiled

    def run(*inputs: Any) -> Any:
        # Whoever captured the graph need not have checked that inputs lie apart in memory at every call.
        tensors = {k: given for k, given in enumerate(inputs) if isinstance(given, torch.Tensor)}
        places = {k: tensor.untyped_storage().data_ptr() for k, tensor in tensors.items()}
        count = Counter(places.values())
        if any(count[places[position]] > 1 for position in changed):
            return gm(*inputs)
        return compiled(*inputs)

    return run


def _reason_against(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> str:
    """What the stages would silently take for something else: they know plain tensors by sizes and strides."""
    for example in examples:
        if is_symbolic_number(example):
            continue
        if type(example) not in (torch.Tensor, torch.nn.Parameter, FakeTensor):
            return f"an input is a {type(example).__name__}"
        is_lazy = example.is_conj() or example.is_neg()
        if example.layout is not torch.strided or example.is_quantized or is_lazy:
            return "an input is sparse, quantised, or a lazily negated or conjugated view"
    (results,) = next(node for node in reversed(gm.graph.nodes) if node.op == "output").args
    for result in results if isinstance(results, (tuple, list)) else [None]:
        example = result.meta.get("example_value") if isinstance(result, torch.fx.Node) else None
        if not isinstance(example, torch.Tensor):
            return "a result is not a tensor"
    return ""
