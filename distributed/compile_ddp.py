"""Compiles ``DistributedDataParallel``: one captured forward, and a backward that reduces gradients as it goes.

Calls bypass ``DDP.forward`` and go to the wrapped module, so what ``DDP.forward`` does besides is done here: buffers
are broadcast, inputs moved to the module's device, ``no_sync()`` obeyed. Features that need stock DDP's reducer keep
it: the module then runs as if it were not compiled, with the reason logged. Which of the two ways is decided at
the first call, by all ranks together, and kept: ranks that reduced different buckets would add up unrelated numbers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel

from bucketing.bucket import BucketPlan
from compile_core.backends.registry import RegionBackend
from compile_core.bind_sizes import GraphOfManySizes
from compile_core.capture import must_run_plain
from compile_core.compiled_function import CompiledFunction, CompileGraph
from compile_core.compiled_module import CompiledModule
from compile_core.errors import InternalError, Unsupported
from compile_core.ir.captured import CapturedGraph
from compile_core.pipeline import CompiledGraph, compile_graph
from compile_core.planners import CompileRequest, forms_of
from distributed.agreement import Decision, agree, check_same_plan
from distributed.ddp_options import DDPOptions
from distributed.ddp_planner import DDPPlanner, process_group
from distributed.eligibility import reason_for_reducer
from distributed.engine_hooks import EngineHooks
from distributed.gradient_buckets import GradientBuckets

logger = logging.getLogger(__name__)


class CompiledDDP:
    """Runs calls of one ``DistributedDataParallel`` module; see ``compile_ddp``."""

    def __init__(self, ddp: DistributedDataParallel, request: CompileRequest, options: DDPOptions) -> None:
        compile_local: CompileGraph = functools.partial(
            compile_graph, backend=request.backend, options=request.options
        )
        limit = request.options.cache_size_limit
        self._ddp = ddp
        self._request = request
        self._options = options
        self._planner = DDPPlanner(ddp)
        self._hooks: EngineHooks | None = None
        # ``None`` until the ranks have agreed; then "" for the in-graph way or the reason against it.
        self._against_in_graph: str | None = None
        self._posted = False
        self._logged: set[str] = set()
        self._ran_in_graph = False
        self._graphs: list[CompiledGraph | GraphOfManySizes] = []
        self._local = CompiledFunction(
            ddp.module,
            compile_local,
            fullgraph=request.fullgraph,
            dynamic=request.dynamic,
            cache_limit=limit,
        )
        self._in_graph = CompiledFunction(
            ddp.module, self._compile_in_graph, fullgraph=True, dynamic=request.dynamic, cache_limit=limit
        )

    @property
    def graphs(self) -> list[CompiledGraph]:
        """What was compiled in the in-graph way."""
        return [program for graph in self._graphs for program in graph.programs]

    @property
    def buckets(self) -> GradientBuckets | None:
        """The gradient buffers of the in-graph way; ``None`` before the first call and in the other way."""
        return self._planner.buckets if self._against_in_graph == "" else None

    @property
    def plan(self) -> BucketPlan | None:
        """The plan of the buckets; ``None`` where ``buckets`` is."""
        return None if self.buckets is None else self.buckets.plan

    @property
    def reason_for_reducer(self) -> str | None:
        """Why the module keeps stock DDP's reducer; ``None`` where it does not, or before the first call."""
        return self._against_in_graph or None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ddp = self._ddp
        if self._against_in_graph:
            return ddp(*args, **kwargs)
        reason = reason_for_reducer(ddp, self._planner.parameters.values())
        synchronised = torch.is_grad_enabled() and ddp.require_backward_grad_sync
        if self._against_in_graph is None and synchronised:
            return self._first_call(reason, args, kwargs)
        if self._against_in_graph is None and reason is not None:
            return ddp(*args, **kwargs)
        args, kwargs = self._prepare(args, kwargs)
        if not synchronised:
            ddp.require_forward_param_sync = False
            return self._local(*args, **kwargs)
        return self._run_synchronised(reason, args, kwargs)

    def _first_call(self, reason: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Decides with the other ranks which way this module goes, and runs the call that way."""
        ddp = self._ddp
        if reason is None and not isinstance(self._request.backend, RegionBackend):
            reason = f"backend {self._request.backend.name!r} takes whole graphs and no schedule"
        if reason is None and must_run_plain():
            reason = "the first call is made under a mode of torch that changes what operators mean"
        if reason is not None:
            self._settle(Decision(reason=reason))
            return ddp(*args, **kwargs)
        args, kwargs = self._prepare(args, kwargs)
        ddp.require_forward_param_sync = True
        self._ran_in_graph = False
        try:
            result = self._in_graph(*args, **kwargs)
        except Unsupported as unsupported:
            # Nothing of the module has run yet.
            if not self._posted and self._request.fullgraph:
                self._settle(Decision(error=str(unsupported)))
                raise
            if not self._posted:
                self._settle(Decision(reason=str(unsupported)))
            return ddp(*args, **kwargs)
        except Exception as error:
            if not self._posted:
                self._settle(Decision(error=f"{type(error).__name__}: {error}"))
            raise
        if not self._posted:
            # The module has run, so it must not run again; but its gradients would be reduced by nobody.
            error = InternalError("a call of the module was neither captured nor refused")
            self._settle(Decision(error=str(error)))
            raise error
        return self._expect_backward(result)

    def _run_synchronised(self, reason: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A later call; whatever happens on this rank, the other ranks' buckets are served."""
        ddp = self._ddp
        ddp.require_forward_param_sync = True
        self._ran_in_graph = False
        if reason is None:
            try:
                return self._expect_backward(self._in_graph(*args, **kwargs))
            except Unsupported as unsupported:
                reason = str(unsupported)
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning("calls of the DDP module run in plain Python, gradients reduced last: %s", reason)
        return self._expect_backward(ddp.module(*args, **kwargs))

    def _expect_backward(self, result: Any) -> Any:
        if self._planner.buckets is None or self._hooks is None:
            return result
        if self._ran_in_graph:
            self._planner.buckets.expecting = True
        else:
            self._hooks.expect_eager()
        return result

    def _prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What ``DDP.forward`` does before it calls the module."""
        ddp = self._ddp
        if ddp._check_sync_bufs_pre_fwd():
            ddp._sync_buffers()
        if ddp.device_ids:
            device = torch.device(ddp.device_type, ddp.device_ids[0])
            moved = _to_kwargs(tuple(args), kwargs, device, ddp.use_side_stream_for_tensor_copies)
            return moved[0][0], moved[1][0]
        return args, kwargs

    def _compile_in_graph(
        self, captured: CapturedGraph, inputs: Sequence[Any]
    ) -> Callable[..., Sequence[torch.Tensor]]:
        assert isinstance(self._request.backend, RegionBackend)
        compiled = compile_graph(
            captured,
            inputs,
            backend=self._request.backend,
            options=self._request.options,
            planner=self._planner,
        )
        assert isinstance(compiled, (CompiledGraph, GraphOfManySizes))
        if self._against_in_graph is None:
            buckets = self._planner.buckets
            if buckets is None:
                raise Unsupported("no-gradients", "no result of the first call needs gradients")
            self._settle(Decision(plan=str(buckets.plan)))
        if self._against_in_graph:
            raise Unsupported("ranks-disagree", self._against_in_graph)
        if self._hooks is None and self._planner.buckets is not None:
            self._hooks = EngineHooks(self._planner.buckets)
        self._graphs.append(compiled)

        def run(*inputs: Any) -> Sequence[torch.Tensor]:
            results = compiled(*inputs)
            self._ran_in_graph = True
            return results

        return run

    def _settle(self, decision: Decision) -> None:
        """Fixes the way for good: in-graph only if every rank can."""
        self._posted = True
        group = process_group(self._ddp)
        decisions = agree(decision, group, self._options.agreement_timeout_s)
        against = [(rank, other.reason) for rank, other in enumerate(decisions) if other.reason]
        if not against and not decision.error:
            check_same_plan(decisions, group)
            self._against_in_graph = ""
            return
        if against:
            rank, reason = against[0]
            self._against_in_graph = f"rank {rank}: {reason}"
            logger.warning("the DDP module keeps stock DDP's reducer (%s)", self._against_in_graph)


def compile_ddp(
    ddp: DistributedDataParallel, request: CompileRequest, options: DDPOptions | None = None
) -> CompiledDDP:
    """What ``compile_core.compile`` makes of a ``DistributedDataParallel`` module.

    Args:
        ddp: the module; its process group is initialised.
        request: the checked arguments of ``compile``.
        options: of data parallelism.

    Raises:
        CompileError: at the first call, when ranks disagree or one does not come.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"compile_ddp takes a DistributedDataParallel module, not {type(ddp).__name__}")
    return CompiledDDP(ddp, request, options or DDPOptions())


def inspect_ddp(compiled: Any) -> CompiledDDP:
    """What runs a compiled DDP module: its plan, its buckets, its graphs.

    Args:
        compiled: what ``compile_core.compile`` made of a ``DistributedDataParallel`` module; or the module itself, if
            it was compiled because a compiled program called it, and of several such forms the last.

    Raises:
        TypeError: anything else.
    """
    runner = compiled
    if isinstance(compiled, CompiledModule):
        runner = compiled._run
    elif isinstance(compiled, DistributedDataParallel) and (forms := forms_of(compiled)):
        runner = forms[-1]
    if not isinstance(runner, CompiledDDP):
        raise TypeError(f"expected a compiled DistributedDataParallel module, not {type(compiled).__name__}")
    return runner
