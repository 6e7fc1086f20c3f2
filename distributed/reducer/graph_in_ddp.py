"""Graphs that run while stock DDP's forward is active: each is split on the buckets of the active module.

Torch marks the module whose ``forward`` runs, so it does not matter who called the compiled function: a module that was
compiled before it was wrapped, a method deep inside it, or ``ReducerWay``. Called without an active module, the same
graph runs as a whole. All forms of a graph compute the same; they differ in when gradients arrive.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradsplit.compile_core.capture import normal_tensors
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.interface.module_compilers import CompileRequest
from gradsplit.compile_core.ir.captured import CapturedGraph
from gradsplit.compile_core.observe.stage_times import timed
from gradsplit.compile_core.pipeline import compile_graph, compile_pieces
from gradsplit.compile_core.torch_facts.process_groups import active_ddp_module, delayed_all_reduce_hook
from gradsplit.distributed.reducer.split_forward import SplitForward
from gradsplit.distributed.reducer.stock_buckets import are_final, stock_buckets
from gradsplit.distributed.reducer.unreached_parameters import look_at_unreached

logger = logging.getLogger(__name__)

CompiledForm = Callable[..., Sequence[torch.Tensor]]


def compile_in_ddp(
    captured: CapturedGraph, inputs: Sequence[Any], request: CompileRequest
) -> GraphInDDP | None:
    """What a graph becomes that may run in a DDP module's forward; ``None`` where it has no gradients to reduce."""
    if not (dist.is_available() and dist.is_initialized() and torch.is_grad_enabled()):
        return None
    if not any(isinstance(given, torch.nn.Parameter) and given.requires_grad for given in inputs):
        return None
    if captured.end_at_data is not None:
        raise Unsupported("data-in-ddp", "the pieces of a graph pass on no sizes that depend on data")
    graph = GraphInDDP(captured, request)
    graph.form_for(inputs)
    return graph


@dataclass(frozen=True)
class Form:
    """One way in which a graph was compiled.

    Attributes:
        begins: where its pieces begin beside the first.
        is_final: the buckets that it was split on stay as they are.
        arrival_order: positions of inputs that are parameters, as their gradients would arrive in plain PyTorch.
    """

    run: CompiledForm
    begins: tuple[int, ...] = ()
    is_final: bool = True
    arrival_order: tuple[int, ...] = ()

    def __call__(self, inputs: Sequence[Any]) -> Sequence[torch.Tensor]:
        """While buckets are not final, the reducer notes in which order gradients arrive, to rebuild them. It shall see
        that of plain PyTorch: views of the parameters pass them on, which autograd's engine runs after all pieces,
        those made last first."""
        if not self.is_final:
            inputs = list(inputs)
            for position in reversed(self.arrival_order):
                inputs[position] = torch.ops.aten.alias.default(inputs[position])
        return self.run(*inputs)


class GraphInDDP:
    """A captured graph; see above.

    It is split anew when the reducer has rebuilt its buckets in another way, unless it has open sizes: guards were made
    from what the first trace asked of them.
    """

    def __init__(self, captured: CapturedGraph, request: CompileRequest) -> None:
        options = replace(request.options, **captured.required_options)
        self._captured = captured
        self._backend = request.backend
        self._options = options
        self._whole: Form | None = None
        self._forms: WeakKeyDictionary[DistributedDataParallel, Form] = WeakKeyDictionary()
        self._lock = threading.RLock()

    def __call__(self, *inputs: Any) -> Sequence[torch.Tensor]:
        return self.form_for(inputs)(inputs)

    @property
    def pieces(self) -> int:
        """Into how many pieces it is cut for a DDP module; of several modules, the most."""
        return max((len(form.begins) for form in self._forms.values()), default=0) + 1

    def form_for(self, inputs: Sequence[Any]) -> Form:
        """The form that runs now."""
        ddp = active_ddp_module()
        if ddp is not None and torch.is_grad_enabled():
            look_at_unreached(ddp)
        form = self._whole if ddp is None else self._forms.get(ddp)
        if form is not None and (form.is_final or ddp is None or not are_final(ddp)):
            return form
        with self._lock, normal_tensors():
            if ddp is None:
                self._whole = self._any_form() or self._compile_whole(inputs)
                return self._whole
            form = self._forms[ddp] = self._any_form() or self._split_on(ddp, form, inputs)
            return form

    def _any_form(self) -> Form | None:
        """What must serve for all, where no other may be compiled any more."""
        if not self._captured.has_open_sizes:
            return None
        form = next(iter(self._forms.values()), self._whole)
        return None if form is None else replace(form, is_final=True)

    def _compile_whole(self, inputs: Sequence[Any]) -> Form:
        if _starts_delayed_all_reduces(inputs):
            return self._as_plain()
        run = compile_graph(self._captured, inputs, backend=self._backend, options=self._options)
        # Hooks on all modules of the program are not for a graph.
        return Form(run.forward if isinstance(run, torch.fx.GraphModule) else run)

    def _as_plain(self) -> Form:
        logger.warning(
            "a graph runs with torch's own kernels: a gradient that it computes starts DDP's delayed all-reduces"
        )
        return Form(self._captured.module.forward)

    def _split_on(self, ddp: DistributedDataParallel, before: Form | None, inputs: Sequence[Any]) -> Form:
        if _starts_delayed_all_reduces(inputs):
            return self._as_plain()
        module = self._captured.module
        examples = [entry.example for entry in self._captured.inputs]
        is_final = are_final(ddp)
        try:
            with timed("split_forward"):
                split = SplitForward(module, examples, inputs)
                begins = split.begins(stock_buckets(ddp, split.ready_order))
                if before is not None and begins == before.begins:
                    return replace(before, is_final=is_final)
                pieces, order = split.pieces(begins), split.arrival_order
        except Unsupported as reason:
            logger.warning("a graph is not split on the buckets of the DDP module: %s", reason)
            pieces, begins, is_final, order = [], (), True, ()
        if len(pieces) < 2:
            self._whole = self._whole or self._compile_whole(inputs)
            return replace(self._whole, is_final=is_final, arrival_order=order)
        logger.info("a graph is split on the buckets of the DDP module into %d pieces", len(pieces))
        run = compile_pieces(
            module,
            pieces,
            backend=self._backend,
            options=self._options,
            gives_back_draws=not split.changes_inputs,
        )
        return Form(run, begins, is_final, order)


def _starts_delayed_all_reduces(inputs: Sequence[Any]) -> bool:
    """Whether the gradient of one of these inputs makes DDP all-reduce the gradients in its buffer. It must then arrive
    after those, as in plain PyTorch; a compiled backward would give all gradients of a piece at once."""
    start = delayed_all_reduce_hook
    hooks = [given._backward_hooks for given in inputs if isinstance(given, torch.nn.Parameter)]
    return any(
        getattr(hook, "__func__", None) is start for found in hooks if found for hook in found.values()
    )
