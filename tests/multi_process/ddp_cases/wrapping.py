"""The order of wrapping and compiling does not matter."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsplit
from gradsplit.compile_core.interface import graph_compiler
from gradsplit.distributed import DDPOptions, compile_ddp, inspect_ddp
from tests.multi_process.ddp_harness import (
    DEVICE,
    Net,
    case,
    check_buffers,
    check_gradients,
    check_in_graph,
    check_reducer,
    check_steps,
    data,
    is_in_graph,
    loss_of,
    pair,
    plain_step,
    stock_ddp,
)


def compiled_net(**options: Any) -> nn.Module:
    return gradsplit.compile(Net(**options), backend="aot_eager")


@case()
def compiled_before_it_is_wrapped() -> None:
    """Stock DDP's own forward and reducer, round a compiled module that is cut on the reducer's buckets."""
    stock, other = stock_ddp(), stock_ddp(compiled_net)
    check_steps(stock, other)
    (entry,) = other.module._run.entries
    assert entry.compiled.pieces > 1
    for module in (stock, other):
        module.zero_grad()
        with module.no_sync():
            loss_of(module(data(5))).backward()
        loss_of(module(data(6))).backward()
    check_gradients(stock, other, exact=True)


@case()
def compiled_before_and_after() -> None:
    stock = stock_ddp(lambda: Net(norm=nn.BatchNorm1d(32)))
    other = gradsplit.compile(stock_ddp(lambda: compiled_net(norm=nn.BatchNorm1d(32))), backend="aot_eager")
    check_steps(stock, other, exact=False)
    check_buffers(stock, other)
    check_in_graph(other)
    assert len(inspect_ddp(other).graphs) == 1


@case()
def compiled_parts_of_a_module_that_is_wrapped() -> None:
    def make() -> nn.Module:
        net = Net()
        net.second = gradsplit.compile(net.second, backend="aot_eager")
        return net

    stock, other = stock_ddp(), stock_ddp(make)
    check_steps(stock, other)
    compiled = gradsplit.compile(other, backend="aot_eager")
    check_steps(stock, compiled)
    check_in_graph(compiled)
    assert len(inspect_ddp(compiled).graphs) == 1


@case()
def compiled_twice() -> None:
    """The second form takes over; the first one's reductions are over."""
    stock, other = stock_ddp(), stock_ddp()
    for backend in ("aot_eager", "eager", "aot_eager"):
        compiled = gradsplit.compile(other, backend=backend)
        check_steps(stock, compiled)
        again = gradsplit.compile(compiled, backend=backend)
        check_steps(stock, again)
    check_in_graph(again)


@case()
def two_forms_in_turn() -> None:
    stock, other = stock_ddp(), stock_ddp()
    forms = [gradsplit.compile(other, backend="aot_eager", dynamic=dynamic) for dynamic in (False, True)]

    def run(model: nn.Module, step: int) -> None:
        form = model if model is stock else forms[step % 2]
        loss_of(form(data(step))).backward()

    check_steps(stock, other, run, steps=6)
    for form in forms:
        check_in_graph(form)


@case()
def compiled_and_plain_calls_in_turn() -> None:
    """A plain call of the module goes through stock DDP's reducer."""
    stock, other = stock_ddp(), stock_ddp()
    compiled = gradsplit.compile(other, backend="aot_eager")

    def run(model: nn.Module, step: int) -> None:
        loss_of((model if model is stock or step % 2 else compiled)(data(step))).backward()

    check_steps(stock, other, run, steps=6)
    check_in_graph(compiled)


# Torch's front end takes longer to load than all of the other cases; what it wraps does not depend on the device.
@case("cpu")
def compiled_in_place_by_torch() -> None:
    """``module.compile()`` is torch's front end, with this project's backend behind it; either module may have it."""
    for wrapped in (False, True):
        # Torch's own split of the forward wants the first bucket, of 1 MiB, to be the smallest.
        stock, other = stock_ddp(bucket_cap_mb=25), stock_ddp(bucket_cap_mb=25)
        (other if wrapped else other.module).compile(backend=graph_compiler.gradsplit)
        check_steps(stock, other, exact=False)


@case("cpu")
def a_module_that_torch_compiles_in_place_is_compiled_here() -> None:
    stock, other = stock_ddp(), stock_ddp()
    other.module.compile(backend="eager")
    compiled = gradsplit.compile(other, backend="aot_eager")
    check_steps(stock, compiled)
    check_in_graph(compiled)
    assert len(inspect_ddp(compiled).graphs) == 1


@case("cpu")
def wrapped_by_torchs_compile() -> None:
    """What ``torch.compile`` made of a module is taken for that module."""
    stock, other = stock_ddp(), stock_ddp()
    compiled = gradsplit.compile(torch.compile(other, backend="eager"), backend="aot_eager")
    check_steps(stock, compiled)
    check_in_graph(compiled)


@case("cpu")
def called_by_what_torch_compiled() -> None:
    """A step that ``torch.compile`` made, with its backward: its front end sees nothing of the module's call."""
    for overlap in ("in_graph", "reducer"):
        seen: list[list[str]] = []

        def note(gm: torch.fx.GraphModule, examples: Any, seen: list[list[str]] = seen) -> Callable[..., Any]:
            seen.append([str(node.target) for node in gm.graph.nodes if node.op == "call_method"])
            return gm.forward

        def train(model: nn.Module, x: torch.Tensor) -> None:
            model(x.mul(2)).square().sum().backward()

        stock, other = stock_ddp(), stock_ddp()
        compiled = compile_ddp(other, DDPOptions(overlap=overlap), backend="aot_eager")
        step = torch.compile(train, backend=note, dynamic=False)
        for number in range(3):
            for module in (stock, compiled):
                module.zero_grad()
            train(stock, data(number))
            step(compiled, data(number))
            check_gradients(stock, compiled)
        assert seen == [["mul"], ["square", "sum"]], seen


class _Tripled(DistributedDataParallel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) * 3


class _Transparent(DistributedDataParallel):
    """As many programs have it, for the attributes of the module."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


@case()
def subclasses_of_ddp() -> None:
    """What they do in a call is done; those that have no part in it go the in-graph way."""
    for kind in (_Tripled, _Transparent):
        models: list[Any] = []
        for _ in range(2):
            torch.manual_seed(7)
            models.append(kind(Net().to(DEVICE)))
        stock, compiled = models[0], gradsplit.compile(models[1], backend="aot_eager")
        check_steps(stock, compiled)
        if kind is _Tripled:
            check_reducer(compiled, "_Tripled does something else in a call")
        else:
            check_in_graph(compiled)
            assert compiled.third is compiled.module.third


def _triple(module: Any) -> None:
    forward = module.forward
    module.forward = lambda *args: forward(*args) * 3


@case()
def forwards_that_are_replaced() -> None:
    """On the wrapped module, and on DDP's, between steps."""
    for options in ({}, {"find_unused_parameters": True}):
        stock, compiled = pair(backend="aot_eager", **options)
        check_steps(stock, compiled, exact=False)
        for model in (stock, compiled):
            _triple(model.module)
        check_steps(stock, compiled, exact=False)
        assert is_in_graph(compiled) is not bool(options)
        for model in (stock, compiled._orig_mod):
            _triple(model)
        check_steps(stock, compiled, exact=False)
        assert not is_in_graph(compiled)


@case()
def modules_that_are_let_go() -> None:
    """With their parameters, buckets and programs, also if they had hooks."""
    for has_hook in (False, True):
        ddp = stock_ddp()
        if has_hook:
            ddp.register_forward_hook(lambda module, args, output: output * 2)
        compiled = gradsplit.compile(ddp, backend="aot_eager")
        for step in range(2):
            plain_step(compiled, step)
        buckets = inspect_ddp(compiled).buckets
        living = [weakref.ref(whole) for whole in (ddp, ddp.module.first.weight, buckets)]
        del ddp, compiled, buckets
        gc.collect()
        assert [reference() for reference in living] == [None] * 3


@case()
def forms_that_are_let_go() -> None:
    """Of a module that stays, when it is compiled again; they have buckets as large as its parameters."""
    stock, ddp = stock_ddp(), stock_ddp()
    living = []
    for _ in range(3):
        compiled = gradsplit.compile(ddp, backend="aot_eager")
        plain_step(compiled, 0)
        living.append(weakref.ref(inspect_ddp(compiled).buckets))
    gc.collect()
    assert [reference() is None for reference in living] == [True, True, False]
    check_steps(stock, compiled)
    check_in_graph(compiled)


@case()
def plain_calls_beside_compiled_ones() -> None:
    """A backward may reach calls of both kinds, in any order, and a call of either kind may have no backward."""
    stock, other = stock_ddp(), stock_ddp()
    compiled = gradsplit.compile(other, backend="aot_eager")

    def loss(forms: tuple[Any, Any], step: int) -> torch.Tensor:
        first, second = forms if step % 2 else reversed(forms)
        return loss_of(first(data(step))) + loss_of(second(data(step + 20)))

    for step in range(6):
        for model, forms in ((stock, (stock, stock)), (other, (other, compiled))):
            model.zero_grad()
            loss(forms, step).backward()
        check_gradients(stock, other)
    for step in range(4):
        for model, form in ((stock, stock), (other, compiled)):
            (form, model)[step % 2](data(step + 40))
            model.zero_grad()
            loss_of((model, form)[step % 2](data(step))).backward()
        check_gradients(stock, other)
