"""Calls of a DDP module that keep stock DDP's reducer: its own forward, with compiled pieces in place of the module.

What stock DDP does before and after the module runs is its own code: joins, broadcasts of buffers, moves of inputs, the
search for unused parameters. The module's graphs are split on the reducer's buckets (``graph_in_ddp``), graph breaks
are welcome, and any backend will do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.nn.parallel import DistributedDataParallel

from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from gradsplit.compile_core.compiled_calls.compiled_module import CompiledModule
from gradsplit.compile_core.interface.module_compilers import CompileRequest
from gradsplit.compile_core.ir.captured import CapturedGraph
from gradsplit.compile_core.pipeline import compile_graph
from gradsplit.distributed.agreement.agreement import Agreement, agreement_of
from gradsplit.distributed.ddp_module import process_group
from gradsplit.distributed.eligibility import has_own_forward
from gradsplit.distributed.reducer.graph_in_ddp import GraphInDDP, compile_in_ddp


class ReducerWay:
    """Runs calls of one ``DistributedDataParallel`` module, but for the hooks of the module itself.

    Attributes:
        forward: the compiled form of the wrapped module.
        graphs: what it was compiled to, as far as gradients are computed.
    """

    def __init__(self, ddp: DistributedDataParallel, request: CompileRequest) -> None:
        self._ddp = ddp
        self._request = request
        self.graphs: list[GraphInDDP] = []
        self.forward = self._make_forward()

    def _make_forward(self) -> CompiledFunction:
        request = self._request
        module = self._module = self._ddp.module
        return CompiledFunction(
            module._orig_mod if isinstance(module, CompiledModule) else module,
            self._compile,
            fullgraph=request.fullgraph,
            dynamic=request.dynamic,
            cache_limit=request.options.cache_size_limit,
        )

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        ddp = self._ddp
        self._agreement().watch.check_failures(torch.is_grad_enabled() and ddp.require_backward_grad_sync)
        if ddp.module is not self._module:
            self.forward = self._make_forward()
        if has_own_forward(ddp):
            return ddp.forward(*inputs, **kwargs)
        is_reduced = not (ddp._use_python_reducer or ddp._delay_all_reduce_all_params)
        with record_function("DistributedDataParallel.forward"):
            inputs, kwargs = ddp._pre_forward(*inputs, **kwargs)
            with ddp._inside_ddp_forward() if is_reduced else nullcontext():
                output = self.forward(*inputs, **kwargs)
            return ddp._post_forward(output)

    def _compile(
        self, captured: CapturedGraph, inputs: Sequence[Any]
    ) -> Callable[..., Sequence[torch.Tensor]]:
        """Ranks need not have the same graphs, but one that fails here is missed by the others in an all-reduce."""
        request, failures = self._request, self._request.failures_of(captured, inputs)
        with self._agreement().compiling("compiles a graph for stock DDP's reducer"), failures.compiling():
            graph = compile_in_ddp(captured, inputs, request)
            if graph is not None:
                self.graphs.append(graph)
            compiled = graph or compile_graph(
                captured, inputs, backend=request.backend, options=request.options
            )
        return failures.watched(compiled)

    def _agreement(self) -> Agreement:
        return agreement_of(process_group(self._ddp))
