"""Faults that are planted in the compiler, or in a backend: ``PLANTED_FAULT`` names the one of this process.

Each is one of a kind: a guard that lets too much through, a wrong kernel, one of no numbers, a wrong or failing pass, a
wrong decomposition, a crash, an error or a hang of a backend while it compiles, and of what it compiled, forward and
backward, on one rank or on two that do not do the same.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from gradsplit.compile_core import passes, pipeline
from gradsplit.compile_core.backends import generated_kernels, registry
from gradsplit.compile_core.capture.guards.guards import GuardSet
from gradsplit.compile_core.ir.loops import LoopProgram
from gradsplit.compile_core.lowering.cpp_kernels import scalar_cpp

VARIABLE = "PLANTED_FAULT"


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        plant: puts it in place in this process.
        needs: what must be in a program for it to fail: takes and returns a tensor of the program's one shape.
        level: 4 where results are wrong and nothing is raised.
        backend: which must be used.
        ranks: on which the program runs.
        again: makes the input of a second call of that of the first, which the fault lets through to what was compiled.
    """

    plant: Callable[[], None]
    needs: Callable[[Tensor], Tensor]
    level: int = 2
    backend: str = "triton"
    ranks: int = 1
    again: Callable[[Tensor], Tensor] | None = None


FAULTS: dict[str, Fault] = {}


def _kernel(name: str, expression: str, needs: Callable[[Tensor], Tensor], table: str = "_FLOAT") -> None:
    """The C++ of a scalar operation is another expression."""

    def plant() -> None:
        scalar_cpp._FLOAT32.pop(name, None)  # type: ignore[attr-defined]
        getattr(scalar_cpp, table)[name] = expression

    FAULTS[f"kernel of {name}"] = Fault(plant, needs, 4)


_kernel("sin", "__builtin_cos{B}({0})", torch.sin)
_kernel("atan", "{0}", torch.atan)
_kernel("sigmoid", "{T}(1) / ({T}(1) + __builtin_exp{B}({0}))", torch.sigmoid)
_kernel("expm1", "__builtin_exp{B}({0})", lambda x: torch.expm1(x.clamp(-3.0, 0.5)))
_kernel("rsqrt", "__builtin_sqrt{B}({0})", lambda x: torch.rsqrt(x.square() + 1.0))
_kernel("erf", "__builtin_tanh{B}({0})", torch.erf)
_kernel("log1p", "__builtin_log{B}({0})", lambda x: torch.log1p(x.square()))
_kernel(
    "sqrt",
    '({0} > {T}(1) ? {T}(__builtin_nan("")) : __builtin_sqrt{B}({0}))',
    lambda x: torch.sqrt(x.square()),
)
_kernel("maximum", "({0} < {1} ? {0} : {1})", lambda x: torch.maximum(x, x.flip(0)), "_EVERY")
_kernel("abs", "{0}", torch.abs, "_EVERY")
_kernel("remainder", "{0}", lambda x: torch.remainder(x, 0.75))


def _backend(
    name: str,
    meets: Callable[[fx.Graph], bool],
    act: Callable[[], Any],
    needs: Callable[[Tensor], Tensor],
    ranks: int = 1,
) -> None:
    """A backend that does something while it compiles certain graphs."""

    def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if meets(module.graph):
            act()
        return module

    COMPILERS[name] = compile_graph
    FAULTS[name] = Fault(lambda: None, needs, backend=f"{__name__}:{name.replace(' ', '_')}", ranks=ranks)


COMPILERS: dict[str, Callable[..., Any]] = {}


def __getattr__(name: str) -> Any:
    """``planted_faults:<name of a backend>``."""
    found = COMPILERS.get(name.replace("_", " "))
    if found is None:
        raise AttributeError(name)
    return found


def _has(*words: str) -> Callable[[fx.Graph], bool]:
    return lambda graph: all(
        any(word in str(node.target) or word in node.name for node in graph.nodes) for word in words
    )


def _reads(user: str, source: str) -> Callable[[fx.Graph], bool]:
    return lambda graph: any(
        user in node.name and any(source in other.name for other in node.all_input_nodes)
        for node in graph.nodes
    )


def _raise(error: Exception) -> Callable[[], Any]:
    def act() -> Any:
        raise error

    return act


def _die(number: int) -> Callable[[], Any]:
    return lambda: os.kill(os.getpid(), number)


_backend("no rule for logaddexp", _has("logaddexp"), _raise(ValueError("no rule for logaddexp of 17 elements")),
         lambda x: torch.logaddexp(x, x.flip(0)))  # fmt: skip
_backend("sin after cos", _reads("sin", "cos"), _raise(RuntimeError("cannot fuse sin_3 with cos_4")),
         lambda x: torch.sin(torch.cos(x)))  # fmt: skip
_backend("tanh and erfc", _has("erfc", "hardtanh"), _raise(IndexError("list index out of range")),
         lambda x: torch.special.erfc(x) + torch.nn.functional.hardtanh(x))  # fmt: skip
_backend("a segmentation fault of sort", _has("sort"), _die(signal.SIGSEGV), lambda x: x.sort(0).values)
_backend("aborted at flip", _has("flip"), _die(signal.SIGABRT), lambda x: x.flip(1))
_backend("exit at median", _has("median"), lambda: os._exit(3), lambda x: x - x.median(0).values)
_backend("killed at var", _has("var"), _die(signal.SIGKILL), lambda x: x / (1.0 + x.var(0)))
_backend("no rule for lerp and addcmul", _has("lerp", "addcmul"), _raise(NotImplementedError("lerp of addcmul")),
         lambda x: torch.lerp(x, torch.addcmul(x, x, x, value=0.1), 0.25))  # fmt: skip
_backend("a hang at trunc", _has("trunc"), lambda: time.sleep(3600), torch.trunc)


def _at_run(
    name: str,
    word: str,
    change: Callable[..., Any],
    needs: Callable[[Tensor], Tensor],
    level: int = 2,
    ranks: int = 1,
) -> None:
    """A backend whose compiled graphs do something with their results."""

    def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return (lambda *given: change(module(*given))) if _has(word)(module.graph) else module

    COMPILERS[name] = compile_graph
    FAULTS[name] = Fault(lambda: None, needs, level, f"{__name__}:{name.replace(' ', '_')}", ranks)


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise RuntimeError("the backward has no kernel for 12 rows")


def _raise_at_run(results: Any) -> Any:
    raise TypeError("run takes 3 arguments, not 4")


def _crash_at_run(results: Any) -> Any:
    os.kill(os.getpid(), signal.SIGSEGV)


functional = torch.nn.functional
_at_run("the run of hypot raises", "hypot", _raise_at_run, lambda x: torch.hypot(x, x + 1.0))
_at_run("the run of atan2 crashes", "atan2", _crash_at_run, lambda x: torch.atan2(x, x + 3.0))
_at_run("softplus is halved", "softplus", lambda found: tuple(r * 0.5 for r in found), functional.softplus, 4)
_at_run("elu is no number", "elu", lambda found: tuple(r * float("nan") for r in found), functional.elu, 4)
_at_run(
    "the backward of logit raises",
    "logit",
    lambda found: tuple(map(_FailsBackward.apply, found)),
    lambda x: torch.logit(x.sigmoid(), 1e-3),
)
_at_run(
    "the gradient of mish is doubled",
    "mish",
    lambda found: tuple(r + (r - r.detach()) for r in found),
    functional.mish,
    4,
)


def _pass(name: str, wrong: Callable[[Any], Any], needs: Callable[[Tensor], Tensor], level: int) -> None:
    """A pass (the first word of the name) makes something else."""

    def changed(row: passes.NestPass[Any, Any]) -> passes.NestPass[Any, Any]:
        return replace(row, run=lambda graph, choices: wrong(row.run(graph, choices)))

    def plant() -> None:
        for module in (passes, pipeline, generated_kernels):
            for table in ("CAPTURED_PASSES", "JOINT_PASSES", "LOOP_PASSES"):
                rows = getattr(module, table, ())
                rows = [changed(row) if row.name == name.partition(" ")[0] else row for row in rows]
                if rows:
                    setattr(module, table, rows)

    FAULTS[f"pass {name}"] = Fault(plant, needs, level)


def _swapped(found: Any, replaced: Any) -> Callable[[Any], Any]:
    """Calls of a function become calls of another."""

    def wrong(graph: Any) -> Any:
        module = getattr(graph, "module", graph)
        for node in module.graph.nodes:
            if node.target == found:
                node.target = replaced
        return graph

    return wrong


def _raises_at(word: str, error: Exception) -> Callable[[Any], Any]:
    def wrong(graph: Any) -> Any:
        if word in (
            str(graph) if isinstance(graph, LoopProgram) else str(getattr(graph, "module", graph).graph)
        ):
            raise error
        return graph

    return wrong


aten = torch.ops.aten
_pass("absent_gradients makes sinh of cosh", _swapped(aten.cosh.default, aten.sinh.default), torch.cosh, 4)
_pass(
    "absent_gradients makes a product a sum",
    _swapped(aten.mm.default, aten.add.Tensor),
    lambda x: x @ x * 0.01,
    4,
)
_pass("random_to_counters loses erfc", _swapped(aten.erfc.default, aten.erf.default), torch.special.erfc, 4)
_pass("pad_products takes ceil for floor", _swapped(aten.ceil.default, aten.floor.default), torch.ceil, 4)
_pass("absent_gradients raises", _raises_at("asinh", KeyError("asinh_7")), torch.asinh, 2)
_pass(
    "fuse raises", _raises_at("acosh", IndexError("loop 5 of 4")), lambda x: torch.acosh(x.square() + 1.5), 2
)
_pass(
    "overwrite_inputs raises",
    _raises_at("lgamma", ValueError("buffer 12")),
    lambda x: torch.lgamma(x.abs() + 1),
    2,
)
_pass(
    "batch_nests raises",
    _raises_at("atanh", AssertionError("nest 3")),
    lambda x: torch.atanh(x.tanh() * 0.9),
    2,
)
_pass("known_masks raises", _raises_at("celu", RuntimeError("mask")), functional.celu, 2)


def _wrong_decomposition() -> None:
    def decompositions(*arguments: Any, **named: Any) -> Any:
        return {
            **generated_kernels.decompositions(*arguments, **named),
            aten.trace.default: lambda x: x.sum() * 0.5,
        }

    backend = registry.resolve_backend("triton")
    registry._backends["triton"] = replace(backend, decompositions=decompositions)


FAULTS["decomposition of trace"] = Fault(_wrong_decomposition, lambda x: x + x.trace() * 0.1, 4)


def again(name: str, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The inputs of the second call."""
    change = FAULTS[name].again
    assert change is not None
    return [change(x.detach()).requires_grad_(x.requires_grad) for x in inputs]


def _is_second_rank() -> bool:
    return dist.get_rank() == 1


def _gather_on_one_rank() -> None:
    """As a plan that is agreed on by the ranks that find it worth while."""
    if not _is_second_rank():
        dist.all_gather_object([None] * dist.get_world_size(), "plan")


_backend("only one rank gathers at deg2rad", _has("deg2rad"), _gather_on_one_rank, torch.deg2rad, 2)
_at_run(
    "the second rank adds to hardswish",
    "hardswish",
    lambda found: tuple(r + 1.0 for r in found) if _is_second_rank() else found,
    functional.hardswish,
    4,
    2,
)


def _guard(name: str, left_out: str, instead: str, again: Callable[[Tensor], Tensor]) -> None:
    """A condition on tensors is laxer than what the graph takes for granted."""

    def plant(put: Callable[[Any, str, Any], None] = setattr) -> None:
        add = GuardSet.add

        def add_lax(
            guards: GuardSet,
            sources: Any,
            condition: str,
            constants: Any,
            text: str,
            kind: Any = "expression",
        ) -> None:
            if kind == "tensor":
                condition, kind = re.sub(left_out, instead, condition), "expression"
            add(guards, sources, condition, constants, text, kind)

        put(GuardSet, "add", add_lax)

    FAULTS[name] = Fault(plant, torch.sin, 4, again=again)


_guard("strides are not guarded", r" and \{0\}.stride\(\) == \(.*?\)", "", lambda x: x.t())
_guard("more rows pass a guard", r"\{0\}.shape == .*? and \{0\}.stride\(\)", "{0}.stride()",
       lambda x: torch.cat([x, x]))  # fmt: skip

if VARIABLE in os.environ:
    FAULTS[os.environ[VARIABLE]].plant()
