"""One model of a sweep: plain, compiled here and compiled by torch, all from the same weights and random state."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import gradsplit
from gradsplit.compile_core.backends.registry import DEFAULT_BACKEND, resolve_backend
from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from gradsplit.compile_core.ir.captured import CapturedFrame, CapturedGraph
from gradsplit.compile_core.observe.observer import Observer
from gradsplit.compile_core.options import CompileOptions
from gradsplit.compile_core.pipeline import compile_graph
from tests.sweeps.cases import Case


@dataclass(frozen=True)
class Setting:
    """How models are called.

    Attributes:
        backend: of both compilers; None is the default of each.
    """

    training: bool
    autocast: bool
    device: str
    backend: str | None
    with_torch: bool


@dataclass
class Side:
    """What one compiler made of a model.

    Attributes:
        graphs: those that were compiled in two calls.
        breaks: the reasons, with how often each occurred.
        seconds: of processor time for the first call, less a second one.
        error: what it raised; empty for nothing.
        difference: the largest of an output or gradient from the plain program's, over the spread of these.
    """

    graphs: int = 0
    breaks: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""
    difference: float = 0.0


@dataclass
class Result:
    """What a model gave; ``skipped`` is the reason why it could not be made or run."""

    name: str
    skipped: str = ""
    ours: Side = field(default_factory=Side)
    torchs: Side | None = None


def measure(case: Case, setting: Setting) -> Result:
    """Run a case. Whatever it raises is part of the result."""
    torch.manual_seed(0)
    try:
        model, inputs = case.make()
        model, inputs = model.to(setting.device), _moved(inputs, setting.device)
        model.train(setting.training)
        plain = _run(copy.deepcopy(model), inputs, setting)
    except Exception as error:
        return Result(case.name, skipped=f"{type(error).__name__}: {str(error)[:200]}")
    result = Result(case.name, ours=_measured(_compiled_here, model, inputs, setting, plain))
    if setting.with_torch:
        result.torchs = _measured(_compiled_by_torch, model, inputs, setting, plain)
    return result


Compile = Callable[[nn.Module, Setting, Side], Any]


def _measured(compile: Compile, model: nn.Module, inputs: Any, setting: Setting, plain: list[Tensor]) -> Side:
    side = Side()
    model = copy.deepcopy(model)
    try:
        with _reported(compile, side):
            compiled = compile(model, setting, side)
            seconds = []
            for _ in range(2):
                start = time.process_time()
                found = _run(compiled, inputs, setting, model)
                seconds.append(time.process_time() - start)
                side.difference = max(side.difference, _difference(plain, found))
            side.seconds = seconds[0] - seconds[1]
    except Exception as error:
        side.error = f"{type(error).__name__}: {str(error)[:300]}"
    return side


def _run(
    run: Callable[..., Any], inputs: Any, setting: Setting, model: nn.Module | None = None
) -> list[Tensor]:
    """Outputs and gradients of a call."""
    module = run if model is None else model
    assert isinstance(module, nn.Module)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    module.zero_grad()
    torch.manual_seed(0)
    casting = torch.autocast(setting.device, torch.bfloat16) if setting.autocast else contextlib.nullcontext()
    recording = contextlib.nullcontext() if setting.training else torch.no_grad()
    with casting, recording:
        outputs = run(**copy.deepcopy(inputs))
    found = [leaf for leaf in tree_leaves(_plain(outputs)) if isinstance(leaf, Tensor)]
    if setting.training:
        loss = sum(leaf.float().pow(2).mean() for leaf in found if leaf.requires_grad and leaf.numel())
        if isinstance(loss, Tensor):
            loss.backward()
        found += [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    results = [leaf.detach().clone() for leaf in found]
    module.load_state_dict(state, strict=False)
    return results


def _plain(outputs: Any) -> Any:
    """Records of libraries as dictionaries; caches, which are no results, are left out."""
    if hasattr(outputs, "items"):
        return {name: _plain(item) for name, item in outputs.items() if "past_key_values" not in str(name)}
    return outputs


def _difference(expected: list[Tensor], found: list[Tensor]) -> float:
    if [tensor.shape for tensor in expected] != [tensor.shape for tensor in found]:
        return math.inf
    differences = [0.0]
    for one, other in zip(expected, found, strict=True):
        one, other = one.double().nan_to_num(), other.double().nan_to_num()
        if one.numel():
            spread = max(one.abs().max().item(), 1e-6)
            differences.append(((one - other).abs().max() / spread).item())
    return max(differences)


def _moved(inputs: Any, device: str) -> Any:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}


@contextlib.contextmanager
def _reported(compile: Compile, side: Side) -> Iterator[None]:
    """Notes graphs that run with torch's own kernels, and calls that are made again, as breaks of ours."""

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            for known in ("torch's own kernels", "plain Python", "is a bug of it", "the graph raised"):
                if known in text and "is not captured in full" not in text:
                    side.breaks[f"log: {text[:200]}"] = side.breaks.get(f"log: {text[:200]}", 0) + 1

    handler, logger = Notes(), logging.getLogger("gradsplit")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Seen(Observer):
    """Notes graphs and breaks."""

    def __init__(self, side: Side) -> None:
        self._side = side

    def frame_captured(self, name: str, code: types.CodeType, frame: CapturedFrame) -> None:
        self._side.graphs += frame.graph is not None
        reason = frame.break_reason
        if reason is not None:
            line = "" if reason.location is None else f" | {reason.location.text[:80]}"
            shown = f"[{reason.reason_id}] {reason.explanation[:160]}{line}"
            self._side.breaks[shown] = self._side.breaks.get(shown, 0) + 1


def _compiled_here(model: nn.Module, setting: Setting, side: Side) -> Any:
    gradsplit.reset()
    backend = resolve_backend(setting.backend or DEFAULT_BACKEND)

    def compile_captured(captured: CapturedGraph, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_graph(captured, inputs, backend=backend, options=CompileOptions())

    return CompiledFunction(model, compile_captured, observer=_Seen(side))


def _compiled_by_torch(model: nn.Module, setting: Setting, side: Side) -> Any:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    backend = torch._dynamo.lookup_backend(setting.backend or "inductor")

    def counting(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        side.graphs += 1
        side.breaks.update({reason[:240]: count for reason, count in counters["graph_break"].items()})
        return backend(module, inputs)

    return torch.compile(model, backend=counting)
