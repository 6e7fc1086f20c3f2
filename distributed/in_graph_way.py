"""The in-graph way of a ``DistributedDataParallel`` module: compiled backwards store their gradients in buckets.

Calls bypass ``DDP.forward`` and go to the wrapped module, so what ``DDP.forward`` does besides is done here: buffers
are broadcast, inputs moved to the module's device, ``no_sync()`` obeyed. Where the forward cannot be captured as one
graph, several graphs and the eager code between them fill the same buckets.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from gradsplit.compile_core.interface.module_compilers import CompileRequest
from gradsplit.compile_core.ir.captured import CapturedGraph
from gradsplit.compile_core.pipeline import CompiledGraph, compile_graph
from gradsplit.compile_core.torch_facts.process_groups import to_device
from gradsplit.distributed.agreement.agreement import agreement_of
from gradsplit.distributed.agreement.failure_watch import describe_error
from gradsplit.distributed.collectives.averaging import Averaging
from gradsplit.distributed.collectives.broadcast_buffers import BufferBroadcast
from gradsplit.distributed.ddp_module import Names, process_group
from gradsplit.distributed.ddp_options import DDPOptions
from gradsplit.distributed.gradients.bucket_buffers import described
from gradsplit.distributed.gradients.buckets import Buckets
from gradsplit.distributed.gradients.ddp_communicator import DDPCommunicator
from gradsplit.distributed.gradients.static_graph import StaticGraph, changed, shown
from gradsplit.distributed.graph_forms import GraphForms
from gradsplit.distributed.optimizer_steps.partial_optimizer import PartialOptimizer
from gradsplit.distributed.optimizer_steps.step_in_backward import StepInBackward
from gradsplit.distributed.planning.ddp_planner import DDPPlanner
from gradsplit.distributed.planning.settle_plan import PlanSettler
from gradsplit.distributed.reducer.parked_reducer import park_again, park_reducer
from gradsplit.distributed.reducer.wrapped_parameters import reduced_parameters

_FIRST_CALL = "plans the gradient buckets of a module"


def is_synchronised(ddp: DistributedDataParallel) -> bool:
    """Whether the gradients of a call made now will be reduced."""
    return torch.is_grad_enabled() and ddp.require_backward_grad_sync


def what_is_reduced(ddp: DistributedDataParallel, options: DDPOptions, names: Names) -> dict[str, str]:
    """What ranks must have in common for their gradients to be averaged, by what it is about."""
    parameters = reduced_parameters(ddp, names).items()
    ignored = ddp.parameters_to_ignore
    buffers = [(name, buffer) for name, buffer in ddp.module.named_buffers() if name not in ignored]
    return {
        **{f"the parameter {name}": described(p, p.device.type) for name, p in parameters},
        **{f"the buffer {name}": described(b, b.device.type) for name, b in buffers if ddp.broadcast_buffers},
        "static_graph": str(ddp.static_graph),
        "gradient_compression": str(options.gradient_compression),
        "copy_engines": str(options.copy_engines),
        "step_in_backward": type(options.step_in_backward).__name__,
    }


class InGraphWay:
    """Runs calls of one module; the ranks have agreed to go this way before the first that is synchronised.

    Attributes:
        buckets: the module's gradients.
        communicator: has them reduced.
        settler: chooses which of them are reduced together.
        graphs: what was compiled.
    """

    def __init__(
        self, ddp: DistributedDataParallel, request: CompileRequest, options: DDPOptions, names: Names
    ) -> None:
        self._ddp = ddp
        self._request = request
        self._options = options
        group = process_group(ddp)
        self._agreement = agreement_of(group)
        averaging = Averaging(group, ddp.device, options.gradient_compression, options.copy_engines)
        parameters, stepper = reduced_parameters(ddp, names), None
        self._optimizer: PartialOptimizer | None = None
        if options.step_in_backward is not None:
            self._optimizer = PartialOptimizer(options.step_in_backward, parameters)
            stepper = StepInBackward(self._optimizer, parameters, averaging.on_streams)
        watch, park = self._agreement.watch, functools.partial(park_again, weakref.ref(ddp))
        watch.watch_over(averaging)
        self.buckets = Buckets(parameters, group, averaging, watch, stepper)
        self.communicator = DDPCommunicator(self.buckets, park)
        self.settler = PlanSettler(self.communicator)
        self._broadcast_buffers = BufferBroadcast(ddp, group, self.buckets.wait, watch.begins)
        self._planner = DDPPlanner(ddp, self.communicator, self._agreement.compiling)
        self._forms: list[GraphForms] = []
        self._make_functions()

    def _make_functions(self) -> None:
        request, self._module = self._request, self._ddp.module
        make = functools.partial(
            CompiledFunction,
            self._module,
            fullgraph=request.fullgraph,
            dynamic=request.dynamic,
            cache_limit=request.options.cache_size_limit,
        )
        self._local: CompiledFunction = make(self._compile_local)
        self._synchronised: CompiledFunction = make(self._compile)

    @property
    def graphs(self) -> list[CompiledGraph]:
        """What was compiled for calls whose gradients are reduced."""
        return [graph for forms in self._forms for graph in forms.graphs]

    def give_back_optimizer(self) -> None:
        """The program steps the optimizer itself from now on, unless a backward of this way does so again."""
        if self._optimizer is not None:
            self._optimizer.give_back()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ddp, buckets, communicator = self._ddp, self.buckets, self.communicator
        self._agreement.watch.check_failures(is_synchronised(ddp))
        communicator.begin_forward()
        if ddp.module is not self._module:
            self._make_functions()
        if not is_synchronised(ddp):
            args, kwargs = self._prepare(args, kwargs)
            ddp.require_forward_param_sync = False
            return self._local(*args, **kwargs)
        if (missing := communicator.missing) and buckets.static_graph is not None:
            named = f"{len(missing)} parameters that got one in the first: {shown(missing)}"
            raise RuntimeError(changed(f"the last backward gave no gradient to {named}"))
        if buckets.plan is not None and ddp.static_graph and buckets.static_graph is None:
            raise RuntimeError(
                "_set_static_graph() was called after a step; call it before the first, on all ranks"
            )
        self.settler.begin_forward()
        try:
            args, kwargs = self._prepare(args, kwargs)
            ddp.require_forward_param_sync = True
            self._planner.hooked = communicator.hooked()
            result = self._synchronised(*args, **kwargs)
        except BaseException as error:
            self._tell_others(error)
            raise
        if buckets.plan is None:
            park_reducer(ddp)
            buckets.static_graph = StaticGraph() if ddp.static_graph else None
            # The first rank's: another's branches, hooks or graph breaks may have gradients come in another order.
            verdict = self._agreement.settle(_FIRST_CALL, None, offer=self._planner.first_order())
            communicator.adopt(self._planner.first_plan(verdict.offer))
        communicator.expect_backward(result)
        return result

    def _tell_others(self, error: BaseException) -> None:
        """A call raised. What a compilation raised has been posted to the others already."""
        if self._agreement.watch.failure:
            return
        if not isinstance(error, Exception):  # this process ends, or the program goes on after an interrupt
            self._agreement.watch.announce_at_exit(
                f"rank {dist.get_rank()} was ended by {describe_error(error)}"
            )
        elif self.buckets.plan is None:
            self._agreement.give_up(_FIRST_CALL, describe_error(error))

    def _prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What ``DDP.forward`` does before it calls the module: buffers are broadcast, and arguments moved."""
        ddp = self._ddp
        if ddp._check_sync_bufs_pre_fwd():
            self._broadcast_buffers()
        if not ddp.device_ids:
            return args, kwargs
        device = torch.device(ddp.device_type, ddp.device_ids[0])
        moved = to_device(tuple(args), kwargs, device, ddp.use_side_stream_for_tensor_copies)
        return moved[0][0], moved[1][0]

    def _compile_local(self, captured: CapturedGraph, inputs: Sequence[Any]) -> Any:
        request, failures = self._request, self._request.failures_of(captured, inputs)
        with (
            self._agreement.watch.doing("compiles a graph whose gradients are not reduced"),
            failures.compiling(),
        ):
            compiled = compile_graph(captured, inputs, backend=request.backend, options=request.options)
        return failures.watched(compiled)

    def _compile(self, captured: CapturedGraph, inputs: Sequence[Any]) -> Any:
        forms = GraphForms(captured, self._request, self._planner, self._agreement, inputs)
        self._forms.append(forms)
        return self._request.failures_of(captured, inputs).watched(forms)
