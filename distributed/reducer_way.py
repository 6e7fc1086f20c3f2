"""Calls of a DDP module that keep stock DDP's reducer: its own forward, with compiled pieces in place of the module.

What stock DDP does before and after the module runs is its own code: joins, broadcasts of buffers, moves of inputs, the
search for unused parameters. The module's graphs are split on the reducer's buckets (``graph_in_ddp``), graph breaks
are welcome, and any backend will do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.nn.parallel import DistributedDataParallel

from compile_core.compiled_function import CompiledFunction
from compile_core.compiled_module import CompiledModule
from compile_core.hooked_modules import HookedCalls, has_hooks
from compile_core.ir.captured import CapturedGraph
from compile_core.pipeline import compile_graph
from compile_core.planners import CompileRequest
from distributed.graph_in_ddp import compile_in_ddp


class ReducerWay:
    """Runs calls of one ``DistributedDataParallel`` module; called as the module is.

    Attributes:
        forward: the compiled form of the wrapped module.
    """

    def __init__(self, ddp: DistributedDataParallel, request: CompileRequest) -> None:
        module = ddp.module
        self._ddp = ddp
        self.forward = CompiledFunction(
            module._orig_mod if isinstance(module, CompiledModule) else module,
            functools.partial(_compile, request=request),
            fullgraph=request.fullgraph,
            dynamic=request.dynamic,
            cache_limit=request.options.cache_size_limit,
        )
        self._hooked = HookedCalls(DistributedDataParallel.forward.__code__, lambda method: self._run)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ddp = self._ddp
        if type(ddp).forward is not DistributedDataParallel.forward:
            return ddp(*args, **kwargs)
        return self._hooked(ddp, *args, **kwargs) if has_hooks(ddp) else self._run(*args, **kwargs)

    def _run(self, *inputs: Any, **kwargs: Any) -> Any:
        """``DistributedDataParallel.forward``."""
        ddp = self._ddp
        is_reduced = not (ddp._use_python_reducer or ddp._delay_all_reduce_all_params)
        with record_function("DistributedDataParallel.forward"):
            inputs, kwargs = ddp._pre_forward(*inputs, **kwargs)
            with ddp._inside_ddp_forward() if is_reduced else nullcontext():
                output = self.forward(*inputs, **kwargs)
            return ddp._post_forward(output)


def _compile(
    captured: CapturedGraph, inputs: Sequence[Any], request: CompileRequest
) -> Callable[..., Sequence[torch.Tensor]]:
    return compile_in_ddp(captured, inputs, request) or compile_graph(
        captured, inputs, backend=request.backend, options=request.options
    )
