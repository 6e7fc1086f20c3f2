"""Stock DDP's reducer, with the forward compiled in pieces that are cut on its buckets."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import gradsplit
from gradsplit.distributed import DDPOptions, compile_ddp, inspect_ddp
from gradsplit.distributed.reducer.stock_buckets import stock_buckets
from tests.multi_process.ddp_harness import (
    DEVICE,
    Net,
    case,
    check_close,
    check_gradients,
    check_reducer,
    data,
    loss_of,
    stock_ddp,
    train,
)

REDUCER = DDPOptions(overlap="reducer")
BACKENDS = ("eager", "aot_eager", "triton")


def both(
    make: Callable[[], nn.Module] = Net, backend: Any = "aot_eager", **ddp_options: Any
) -> tuple[Any, Any]:
    """Stock DDP, and the same compiled to keep the reducer."""
    compiled = compile_ddp(stock_ddp(make, **ddp_options), REDUCER, backend=backend)
    return stock_ddp(make, **ddp_options), compiled


def pieces(compiled: Any) -> list[int]:
    """Into how many pieces each graph is cut."""
    return [graph.pieces for graph in inspect_ddp(compiled).reducer_way.graphs]


def check_same_buckets(stock: Any, compiled: Any) -> None:
    """Gradients arrived in the same order, so the two reducers have rebuilt the same buckets."""
    names = []
    for ddp in (stock, inspect_ddp(compiled).ddp):
        name_of = {parameter: name for name, parameter in ddp.named_parameters()}
        names.append([[name_of[parameter] for parameter in bucket] for bucket in stock_buckets(ddp, [])])
    assert names[0] == names[1], names


@case()
def every_backend_fills_the_reducers_buckets() -> None:
    for backend in (*BACKENDS, lambda module, examples: module.forward):
        stock, compiled = both(backend=backend)
        train((stock, compiled), exact=backend != "triton")
        check_reducer(compiled, "overlap")
        assert pieces(compiled) == [3], pieces(compiled)
        check_same_buckets(stock, compiled)


@case("cuda")  # on CPUs TorchInductor takes half a minute for a few pieces
def the_bridge_fills_the_reducers_buckets() -> None:
    stock, compiled = both(lambda: nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32)), backend="inductor")
    train((stock, compiled))
    assert pieces(compiled) == [2], pieces(compiled)


@case()
def early_buckets_start_before_the_backward_ends() -> None:
    """The reducer calls its hook for the first bucket before the first layer's gradient is computed."""
    seen: list[str] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append("backward ends")
            return gradient

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP takes no annotations as texts
        seen.append(f"bucket {bucket.index()}")
        return default_hooks.allreduce_hook(state, bucket)

    compiled = gradsplit.compile(stock_ddp(), backend="triton")
    compiled.register_comm_hook(None, hook)
    for step in range(3):
        seen.clear()
        compiled(Watched.apply(data(step).requires_grad_())).sum().backward()
    # The first layer's piece computes the gradient of the input, too.
    assert seen == ["bucket 0", "bucket 1", "bucket 2", "backward ends"], seen


def check_hook(
    make: Callable[[], nn.Module], hook: Callable[[], tuple[Any, Any]], count: int, **ddp_options: Any
) -> None:
    stock = stock_ddp(make, **ddp_options)
    compiled = gradsplit.compile(stock_ddp(make, **ddp_options), backend="aot_eager")
    for model in (stock, compiled):
        model.register_comm_hook(*hook())
    train((stock, compiled), steps=4, exact=True)
    check_reducer(compiled, "hook")
    assert pieces(compiled) == [count], pieces(compiled)


@case()
def communication_hooks() -> None:
    check_hook(Net, lambda: (None, default_hooks.allreduce_hook), 3)
    check_hook(Net, lambda: (None, default_hooks.fp16_compress_hook), 3)


@case()
def gradients_of_low_rank() -> None:
    """PowerSGD, which keeps what it leaves out for the next step. One bucket: several make collectives in callbacks
    that run in any order, which gloo cannot tell apart."""
    # Importing it warns on some machines, which is an error where tests are collected.
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    def hook() -> tuple[Any, Any]:
        state = PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
        )
        return state, powerSGD_hook

    check_hook(Net, hook, 1, bucket_cap_mb=25)


@case()
def reducers_made_again_rebuild_their_buckets() -> None:
    """Also where the one before had done so."""
    stock, ddp = stock_ddp(), stock_ddp()
    for model in (stock, ddp):
        for step in range(2):
            loss_of(model(data(step))).backward()
    compiled = gradsplit.compile(ddp, backend="aot_eager")
    train((stock, compiled), steps=2, exact=True)
    compiled.register_comm_hook(None, default_hooks.allreduce_hook)
    train((stock, compiled), exact=True)
    assert pieces(compiled) == [3], pieces(compiled)
    check_same_buckets(stock, compiled)


class Branching(Net):
    """Which layers are used, the call says; parameters come by keyword, in lists and nested, and one twice."""

    def forward(self, x: torch.Tensor, layers: Any = ("second", "third"), scale: float = 1.0) -> Any:
        x = torch.nn.functional.linear(input=x, weight=self.first.weight, bias=self.first.bias)
        table = {"layers": [{"weight": getattr(self, name).weight} for name in layers]}
        x = torch.tanh(x)
        for entry in table["layers"]:
            x = torch.addmm(input=x, mat1=x, mat2=entry["weight"]) * scale
        return {"out": [x @ self.first.weight], "norm": self.norm(x)}


@case()
def unused_parameters_are_found() -> None:
    stock = stock_ddp(Branching, find_unused_parameters=True)
    compiled = gradsplit.compile(stock_ddp(Branching, find_unused_parameters=True), backend="aot_eager")
    calls = itertools.product((("second",), ("third",), ("third", "second")), ("out", "norm"))
    for step, (layers, result) in enumerate(calls):
        for model in (stock, compiled):
            model.zero_grad()
            results = model(data(step), layers)
            picked = results[result]
            (picked[0] if isinstance(picked, list) else picked).square().mean().backward()
        check_gradients(stock, compiled, exact=True)
    # Which parameters are used may differ between ranks.
    for model in (stock, compiled):
        model.zero_grad()
        model(data(0), ("second",) if dist.get_rank() else ("third",))["norm"].square().mean().backward()
    check_gradients(stock, compiled, exact=True)
    check_reducer(compiled, "find_unused_parameters")
    assert max(pieces(compiled)) > 1, pieces(compiled)


class Pooled(Net):
    """What a layer computes goes over a graph break, on one rank or on none into the loss."""

    def forward(self, x: torch.Tensor, uses_pooled: bool) -> torch.Tensor:
        x = self.norm(self.first(x))
        both = {"hidden": x, "pooled": self.second(x).tanh()}
        gradsplit.graph_break()
        found = self.third(both["hidden"])
        return found + both["pooled"] if uses_pooled else found


@case()
def results_that_only_a_graph_has_are_unused() -> None:
    stock = stock_ddp(Pooled, find_unused_parameters=True)
    compiled = gradsplit.compile(stock_ddp(Pooled, find_unused_parameters=True), backend="aot_eager")
    first = dist.get_rank() == 0
    for step, (clears, uses_pooled) in enumerate(
        ((True, False), (True, first), (True, True), (False, False), (False, first), (True, False))
    ):
        for model in (stock, compiled):
            if clears:
                model.zero_grad()
            else:
                with model.no_sync():
                    loss_of(model(data(step + 10), uses_pooled)).backward()
            loss_of(model(data(step), uses_pooled)).backward()
        check_gradients(stock, compiled, exact=True)
    check_reducer(compiled, "find_unused_parameters")


@case()
def static_graph() -> None:
    class Partial(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.norm(self.first(x)))

    for make in (Net, Partial):
        stock, compiled = both(make, static_graph=True)
        train((stock, compiled), steps=4, exact=True)
        assert pieces(compiled)[0] > 1, pieces(compiled)
        check_same_buckets(stock, compiled)


@case("cpu")  # nothing waits for these all-reduces, on the host the barrier does
def delayed_all_reduces() -> None:
    """Stock DDP starts them at one parameter's gradient, when those of the others lie in its buffer."""

    def make(first: Callable[..., Any], last: Callable[..., Any], is_delayed: Callable[[str], bool]) -> Any:
        torch.manual_seed(7)
        net = Net().to(DEVICE)
        delayed = [(name, parameter) for name, parameter in net.named_parameters() if is_delayed(name)]
        wrapped = DistributedDataParallel(
            first(net), delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=net.first.weight
        )
        return last(wrapped)

    def as_it_is(module: nn.Module) -> nn.Module:
        return module

    compiled_eagerly = functools.partial(gradsplit.compile, backend="aot_eager")
    for is_delayed in (("second.weight", "norm.bias").__contains__, "first.weight".__ne__):
        for first, last in ((as_it_is, compiled_eagerly), (compiled_eagerly, as_it_is)):
            models = (make(as_it_is, as_it_is, is_delayed), make(first, last, is_delayed))
            for step in range(4):
                for model in models:
                    loss_of(model(data(step))).backward()
                    dist.barrier()
                check_gradients(*models)
                for model in models:
                    model.zero_grad(set_to_none=False)


@case("cuda")  # it needs streams
def mixed_precision_of_ddp() -> None:
    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    stock = stock_ddp(mixed_precision=precision)
    compiled = gradsplit.compile(stock_ddp(mixed_precision=precision), backend="aot_eager")
    train((stock, compiled))
    check_reducer(compiled, "mixed precision")


@case()
def uneven_inputs_in_a_join() -> None:
    stock = stock_ddp()
    for backend in ("eager", "triton"):
        compiled = gradsplit.compile(stock_ddp(), backend=backend)
        for model in (stock, compiled):
            model.load_state_dict(stock_ddp().state_dict())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            # The first time one rank has no inputs at all.
            for steps in (dist.get_rank(), 2 + dist.get_rank()):
                with model.join():
                    for step in range(steps):
                        optimizer.zero_grad()
                        model(data(step)).square().mean().backward()
                        optimizer.step()
        for expected, found in zip(stock.parameters(), compiled.parameters(), strict=True):
            check_close(found, expected, "parameter")
        # Outside of the join the module goes on its own way.
        train((stock, compiled), steps=1)


@case()
def accumulation_and_evaluation() -> None:
    stock, compiled = both()
    for model in (stock, compiled):
        with model.no_sync():
            model(data(1)).square().mean().backward()
        model(data(2)).square().mean().backward()
        with torch.no_grad():
            model(data(3))
        model(data(4)).square().mean().backward()
    check_gradients(stock, compiled, exact=True)
    assert pieces(compiled) == [3], pieces(compiled)


class Breaking(Net):
    """A graph break in the middle, statistics that are changed in place, and dropout."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu_(self.norm(self.first(x)))
        gradsplit.graph_break()
        x = torch.dropout(x, 0.2, self.training) + self.second(x)
        return self.third(x.tanh())


@case()
def graph_breaks_and_effects() -> None:
    stock, compiled = both(Breaking, backend="aot_eager")
    seeds = []
    for model in (stock, compiled):
        torch.manual_seed(dist.get_rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(3):
            optimizer.zero_grad()
            model(data(step)).square().mean().backward()
            optimizer.step()
        seeds.append(torch.rand(1))
    check_gradients(stock, compiled, exact=DEVICE == "cpu")
    for expected, found in zip(stock.buffers(), compiled.buffers(), strict=True):
        check_close(found, expected, "buffer")
    assert torch.equal(*seeds)
    assert len(pieces(compiled)) == 2, pieces(compiled)


@case()
def sizes_that_differ() -> None:
    stock, compiled = both()
    for rows in (6, 4, 9):
        for model in (stock, compiled):
            model.zero_grad()
            model(data(rows, rows)).square().mean().backward()
        check_gradients(stock, compiled, exact=True)
    assert pieces(compiled) == [3, 3], pieces(compiled)


def wrapped_in_ddp(module: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(module, bucket_cap_mb=0.004)


@case()
def modules_compiled_before_they_are_wrapped() -> None:
    """Their graphs are cut on the buckets of the module that is running, and are whole where none is."""
    compile = functools.partial(gradsplit.compile, backend="aot_eager")
    for way in ("the module", "its method", "a part"):
        stock = stock_ddp()
        torch.manual_seed(7)
        net: Any = Net().to(DEVICE)
        if way == "its method":
            net.forward = runs = compile(net.forward)
        else:
            net = compile(net)
            runs = net._run
        net(data(9))
        assert [entry.compiled.pieces for entry in runs.entries] == [1], way
        ddp = wrapped_in_ddp(nn.Sequential(net) if way == "a part" else net)
        train((stock, ddp), exact=True)
        assert [entry.compiled.pieces for entry in runs.entries] == [3], way


@case()
def a_compiled_module_inside_of_a_compiled_one() -> None:
    stock = stock_ddp()
    torch.manual_seed(7)
    inner = gradsplit.compile(Net().to(DEVICE), backend="aot_eager")
    compiled = compile_ddp(wrapped_in_ddp(inner), REDUCER, backend="aot_eager")
    train((stock, compiled), exact=True)
    assert pieces(compiled) == [3], pieces(compiled)
