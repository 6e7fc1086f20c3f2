"""What a program that computes with wrappers does to the tensors that hold their data.

Wrappers lie between autograd and the operators of their inner tensors, where functionalization would lie. So such a
program is recorded twice: first as it is, with its writes in place, where a wrapper's class says what an operator is;
then that record, which has plain tensors alone, is recorded as any other program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from gradsplit.compile_core.autograd.tracing.captured_nodes import CAPTURED, CapturedNodes
from gradsplit.compile_core.autograd.tracing.number_recorder import NumberOperations
from gradsplit.compile_core.autograd.tracing.record_operators import OperatorRecorder
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.torch_facts.wrapper_tensors import is_wrapper, is_wrapper_class


class _RecorderBelowWrappers(OperatorRecorder):
    """Leaves operators of wrappers to their classes, and sees what these make of them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_wrapper_class, types)):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def record_below_wrappers(
    function: Callable[..., Sequence[Any]],
    inputs: Sequence[Any],
    seeds: Sequence[torch.Tensor],
    fake_mode: FakeTensorMode,
    operations: NumberOperations,
    captured: CapturedNodes,
) -> fx.GraphModule:
    """As ``record``, of a program with wrappers: its operators, those that write in place among them."""
    recorder = _RecorderBelowWrappers({}, fake_mode, operations, captured)
    for given in inputs:
        recorder.placeholder(given)
    for seed in seeds:
        recorder.placeholder(seed, is_seed=True)
    with recorder:
        results = function(recorder, *inputs, *seeds)
    if any(map(is_wrapper, results)):
        raise Unsupported("wrapper-gradient", "the gradient of a plain tensor is one that wraps others")
    record = recorder.finish(results)
    for node in record.graph.nodes:
        node.meta["example_value"] = node.meta.get("val")
    return operations.keep(record)


class RecordedNodes(CapturedNodes):
    """Runs such a record, and knows while it is recorded anew which captured node each of its operators is of."""

    def __init__(self) -> None:
        super().__init__()
        self._running: fx.Node | None = None

    def program(
        self, record: fx.GraphModule, inputs: int, outputs: int
    ) -> Callable[..., tuple[list[Any], list[Any], Sequence[Any]]]:
        """The record as a function of a recorder, the inputs and the seeds, which gives the inputs as it leaves them,
        the outputs, and the gradients."""

        def run(_: OperatorRecorder, *given: Any) -> tuple[list[Any], list[Any], Sequence[Any]]:
            with torch.no_grad():
                found = _Noting(record, self).run(*given, enable_io_processing=False)
            return [*given[:inputs]], [*found[:outputs]], found[outputs:]

        return run

    def mark(self, node: fx.Node) -> None:
        told = {} if self._running is None else self._running.meta
        node.meta.update({key: told[key] for key in (CAPTURED, "stack_trace", "custom") if key in told})


class _Noting(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, nodes: RecordedNodes) -> None:
        super().__init__(module)
        self._nodes = nodes

    def run_node(self, n: fx.Node) -> Any:
        self._nodes._running = n
        return super().run_node(n)
