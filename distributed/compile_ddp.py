"""Compiles ``DistributedDataParallel``: chooses on which of two ways a module's gradients are reduced.

The in-graph way is the rule. Features that need stock DDP's reducer keep it, with the reason logged. Which of the
two it is is decided at the first synchronised call, by all ranks together, and kept: ranks that reduced different
buckets would add up unrelated numbers.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from gradsplit.bucketing.bucket import BucketPlan
from gradsplit.bucketing.cost_model import CostModel
from gradsplit.bucketing.merge_plan import MergePlan
from gradsplit.compile_core.backends.registry import DEFAULT_BACKEND, RegionBackend
from gradsplit.compile_core.compiled_calls.compiled_module import CompiledModule, wrap_module
from gradsplit.compile_core.compiled_calls.hooked_modules import HookedCalls, has_hooks
from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.interface.module_compilers import CompileRequest, forms_of, remember_call
from gradsplit.compile_core.options import compilation_is_off
from gradsplit.compile_core.pipeline import CompiledGraph
from gradsplit.compile_core.torch_facts.torchs_stance import stance
from gradsplit.distributed.agreement.agreement import agreement_of
from gradsplit.distributed.ddp_module import parameter_names, process_group
from gradsplit.distributed.ddp_options import DDPOptions
from gradsplit.distributed.eligibility import (
    Wrappings,
    is_joining,
    reason_for_reducer,
    reason_of_call,
    shares_parameters,
)
from gradsplit.distributed.gradients.buckets import Buckets
from gradsplit.distributed.in_graph_way import InGraphWay, is_synchronised, what_is_reduced
from gradsplit.distributed.reducer_way import ReducerWay

logger = logging.getLogger(__name__)


class CompiledDDP:
    """Runs calls of one ``DistributedDataParallel`` module, ``ddp``; see ``compile_ddp``.

    Attributes:
        reducer_way: what runs the calls that keep stock DDP's reducer.
    """

    def __init__(
        self, ddp: DistributedDataParallel, request: CompileRequest, options: DDPOptions | None = None
    ) -> None:
        self.ddp = ddp
        self._request = request
        self._options = options or DDPOptions()
        self._names = parameter_names(ddp)
        self._group = process_group(ddp)
        # Made before the ranks have agreed where a call is not synchronised: one rank may evaluate alone.
        self._in_graph: InGraphWay | None = None
        # ``None`` until the ranks have agreed; then "" for the in-graph way or the reason against it.
        self._against_in_graph: str | None = None
        self._reason_before = ""
        self.reducer_way = ReducerWay(ddp, request)
        # From now on this rank says where it is: others may come to a first step that it does not come to.
        agreement_of(self._group)
        self._logged: set[str] = set()
        Wrappings.begin()
        self._shares_parameters, self._asked_at = False, -1
        for form in forms_of(ddp):
            if isinstance(form, CompiledDDP):
                form.give_back_optimizer()
        if self._options.step_in_backward is not None:
            if reason := self._own_reason_for_reducer():
                raise ValueError(_no_step(reason))
            self._in_graph = InGraphWay(ddp, request, self._options, self._names)
        # It lies among the constants of code, where Python's collector does not look.
        run = weakref.WeakMethod(self._run)
        self._hooked = HookedCalls(type(ddp).forward.__code__, lambda method: run() or method)

    @property
    def options(self) -> DDPOptions:
        """What the user chose."""
        return self._options

    @property
    def graphs(self) -> list[CompiledGraph]:
        """What was compiled in the in-graph way."""
        return [] if self._in_graph is None else self._in_graph.graphs

    @property
    def buckets(self) -> Buckets | None:
        """The gradients of the in-graph way; ``None`` before the first call and in the other way."""
        return None if self._in_graph is None or self.reason_for_reducer else self._in_graph.buckets

    @property
    def plan(self) -> BucketPlan | None:
        """The plan of the buckets; ``None`` before the first and where ``buckets`` is."""
        return None if self.buckets is None else self.buckets.plan

    @property
    def costs(self) -> CostModel | None:
        """What the plan was chosen from; ``None`` before it is settled."""
        return None if self.buckets is None or self._in_graph is None else self._in_graph.settler.costs

    @property
    def merge_plan(self) -> MergePlan | None:
        """The plan chosen from measured costs, with reasons; ``None`` before it is settled."""
        return None if self.buckets is None or self._in_graph is None else self._in_graph.settler.chosen

    @property
    def reason_for_reducer(self) -> str | None:
        """Why a call made now would keep stock DDP's reducer; ``None`` where it would not. Before ranks have agreed it
        is this rank's own reason."""
        if self._against_in_graph:
            return self._against_in_graph
        reason = reason_of_call(self.ddp)
        if not reason and self._against_in_graph is None:
            reason = self._own_reason_for_reducer() or self._reason_shared()
        return reason or None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if stance() == "force_eager":
            if self._options.step_in_backward is not None:
                raise CompileError(_no_step("the stance is force_eager"))
            return self.ddp(*args, **kwargs)
        if has_hooks(self.ddp):
            return self._hooked(self.ddp, *args, **kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        before, way = self._in_graph, self._way()
        if before is not None and before is not way:
            # The backward to come is the other's, though a forward before may have had none.
            before.communicator.expecting = False
        return way(*args, **kwargs)

    def _way(self) -> InGraphWay | ReducerWay:
        """That of a call made now."""
        ddp = self.ddp
        if process_group(ddp) is not self._group:
            self._begin_anew()
        if self._against_in_graph == "" and self._reason_shared():
            self._begin_anew()
        # In a join() there is no agreement: a rank that has no inputs left makes no call.
        if is_synchronised(ddp) and not is_joining(ddp):
            if self._against_in_graph is None:
                self._agree_on_way()
            elif self._against_in_graph == "":
                self._agree_on_call()
        if against := self.reason_for_reducer:
            if self._options.step_in_backward is not None:
                self.give_back_optimizer()
                raise CompileError(_no_step(against))
            if not self._against_in_graph and against not in self._logged:
                self._logged.add(against)
                logger.warning("calls of the DDP module keep stock DDP's reducer: %s", against)
            return self.reducer_way
        if self._in_graph is None:
            self._in_graph = InGraphWay(ddp, self._request, self._options, self._names)
        return self._in_graph

    def _begin_anew(self) -> None:
        """The module reduces over another process group now (``DDP._update_process_group``), or on the other way."""
        self._group, self._against_in_graph, self._reason_before = process_group(self.ddp), None, ""
        self.give_back_optimizer()
        self._in_graph = None

    def give_back_optimizer(self) -> None:
        """The program steps the optimizer of ``step_in_backward`` itself from now on, as with a form without it."""
        if self._in_graph is not None:
            self._in_graph.give_back_optimizer()

    def _own_reason_for_reducer(self) -> str:
        if self._options.overlap == "reducer":
            return 'overlap="reducer" was chosen'
        if not isinstance(self._request.backend, RegionBackend):
            return f"backend {self._request.backend.name!r} takes whole graphs and no schedule"
        return reason_for_reducer(self.ddp)

    def _reason_shared(self) -> str:
        """The reason that comes with other DDP modules: asked again when there is a new one, and kept, since modules
        may go earlier on one rank than on another."""
        if not self._shares_parameters and self._asked_at != Wrappings.count:
            self._asked_at = Wrappings.count
            self._shares_parameters = shares_parameters(self.ddp)
        return "another DDP module has some of its parameters" if self._shares_parameters else ""

    def _agree_on_call(self) -> None:
        """The program may switch on, and off, what needs stock DDP's reducer: on all ranks, or buckets would not meet.

        Raises:
            CompileError: one rank has not done so; on every rank.
        """
        reason = reason_of_call(self.ddp)
        if reason != self._reason_before:
            what = f"keeps stock DDP's reducer: {reason}" if reason else "leaves stock DDP's reducer again"
            agreement = agreement_of(process_group(self.ddp))
            agreement.settle(what, self._options.agreement_timeout_s)
            self._reason_before = reason

    def _agree_on_way(self) -> None:
        """Fixes the way: in-graph only if every rank can.

        Raises:
            CompileError: the ranks' gradients cannot be averaged; on every rank.
        """
        ddp, reason = self.ddp, self._own_reason_for_reducer() or self._reason_shared()
        facts = {} if reason else what_is_reduced(ddp, self._options, self._names)
        verdict = agreement_of(process_group(ddp)).settle(
            "asks how gradients are to be reduced", self._options.agreement_timeout_s, facts, reason
        )
        self._against_in_graph = verdict.reason
        if not self._against_in_graph:
            return
        logger.warning("the DDP module keeps stock DDP's reducer (%s)", self._against_in_graph)
        if self._options.gradient_compression:
            logger.warning("its gradients are not compressed: register a communication hook for that")


def _no_step(reason: str) -> str:
    return (
        f"step_in_backward needs gradients to be reduced by the compiled backward, but {reason}: compile without it "
        "and call optimizer.step()"
    )


def compile_ddp(
    ddp: DistributedDataParallel,
    ddp_options: DDPOptions | None = None,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    backend: str | Callable[..., Any] = DEFAULT_BACKEND,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """``gradsplit.compile`` for a ``DistributedDataParallel`` module, with settings of data parallelism.

    Args:
        ddp: the module.
        ddp_options: the settings.
        fullgraph, dynamic, backend, mode, options: as ``gradsplit.compile`` takes them.

    Returns:
        A module with the same parameters, attributes and state_dict.

    Raises:
        TypeError: another module, or an argument of the wrong type.
        ValueError: as ``gradsplit.compile`` does.
        CompileError: at the first call, when ranks disagree or one does not come.
    """
    if isinstance(ddp, CompiledModule):
        ddp = ddp._orig_mod  # type: ignore[assignment]
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"compile_ddp takes a DistributedDataParallel module, not {type(ddp).__name__}")
    request = CompileRequest.of(fullgraph, dynamic, backend, mode, options)
    if compilation_is_off():
        if ddp_options is not None and ddp_options.step_in_backward is not None:
            raise ValueError(_no_step("compilation is switched off in this process"))
        return ddp
    runner = CompiledDDP(ddp, request, ddp_options or DDPOptions())
    remember_call(ddp, request, runner)
    return wrap_module(ddp, runner)


def inspect_ddp(compiled: Any) -> CompiledDDP:
    """What runs a compiled DDP module: its plan, its buckets, its graphs.

    Args:
        compiled: what ``gradsplit.compile`` made of a ``DistributedDataParallel`` module; or the module itself, if
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
