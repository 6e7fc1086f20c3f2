"""Linear layers of one input are one product, and what reads their results notices nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import gradsplit
from gradsplit.compile_core.autograd.captured_graphs import joined_linears
from tests.autograd.compare_with_eager import check_call

BATCH, LENGTH, SIZE, HEADS = 2, 5, 16, 2


def in_heads(tensor: Tensor) -> Tensor:
    return tensor.view(BATCH, LENGTH, HEADS, -1).transpose(1, 2)


def attention(x: Tensor, first: Tensor, second: Tensor, third: Tensor, bias: Tensor) -> Tensor:
    query, key, value = in_heads(F.linear(x, first, bias)), in_heads(F.linear(x, second)), F.linear(x, third)
    result = F.scaled_dot_product_attention(query, key, in_heads(value))
    return result.transpose(1, 2).reshape(BATCH, LENGTH, SIZE) @ value.sum((0, 1)).diag()


def of_other_widths(x: Tensor, first: Tensor, second: Tensor, third: Tensor, bias: Tensor) -> Tensor:
    gate, up = F.linear(x, first[:8].detach()), F.linear(x, first, bias)
    narrow = F.linear(x, second)
    return F.silu(gate).repeat(1, 1, 2) * up * narrow.mT.sum(1, keepdim=True).mT


def of_two_inputs(x: Tensor, first: Tensor, second: Tensor, third: Tensor, bias: Tensor) -> Tensor:
    y = x.sin()
    keys = F.linear(y, first) * F.linear(y, second, bias)
    return F.linear(x, third).chunk(2, -1)[0].sum(-1, keepdim=True) + F.linear(x, first) + keys


def of_two_layers(x: Tensor, first: Tensor, second: Tensor, third: Tensor, bias: Tensor) -> Tensor:
    """As keys and values of each layer of a decoder."""
    y = F.linear(x, first, bias) * F.linear(x, second)
    for _ in range(30):
        y = y.sin()
    return y * F.linear(x, third)


def under_checkpoint(x: Tensor, *weights: Tensor) -> Tensor:
    return checkpoint(attention, x, *weights, use_reentrant=False)


def with_flat_views(x: Tensor, first: Tensor, second: Tensor, third: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, first).view(BATCH, -1) + F.linear(x, second).view(BATCH, -1)


def returned(x: Tensor, first: Tensor, second: Tensor, third: Tensor, bias: Tensor) -> Tensor:
    F.linear(x, second).sin()
    return F.linear(x, first).mT


def changed_in_place(x: Tensor, first: Tensor, second: Tensor, third: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, first).mul_(2) + in_heads(F.linear(x, second)).mul_(3).sum()


def with_strides(x: Tensor, first: Tensor, second: Tensor, third: Tensor, bias: Tensor) -> Tensor:
    window = F.linear(x, first).as_strided((BATCH, LENGTH, 2), (LENGTH * SIZE, SIZE, 3))
    return window.sum() + F.linear(x, second)


def of_computed_weights(x: Tensor, first: Tensor, second: Tensor, third: Tensor, bias: Tensor) -> Tensor:
    return (F.linear(x, first.sin()) + F.linear(x, second.cos())).exp()


def partly_without_gradients(x: Tensor, first: Tensor, second: Tensor, third: Tensor, bias: Tensor) -> Tensor:
    with torch.no_grad():
        scale = F.linear(x, first)
    return scale * F.linear(x, second)


def with_one_weight(x: Tensor, first: Tensor, second: Tensor, third: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, first).sin() * F.linear(x, first, bias)


def through_data(x: Tensor, first: Tensor, second: Tensor, third: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, first).data.sum() * F.linear(x, second)


JOINED = {attention: 1, of_other_widths: 1, of_two_inputs: 2, of_two_layers: 1, under_checkpoint: 1}
LEFT = dict.fromkeys(
    [
        with_flat_views, returned, changed_in_place, with_strides, of_computed_weights,
        partly_without_gradients, with_one_weight, through_data,
    ],
    0,
)  # fmt: skip


def some_inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((BATCH, LENGTH, SIZE), (SIZE, SIZE), (SIZE, SIZE), (SIZE, SIZE), (SIZE,))
    return [torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True) for size in sizes]


@pytest.fixture(autouse=True)
def small_products_gain(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """As larger ones do on a GPU."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(joined_linears, "gain", lambda *given: True)


def joined_calls(module: GraphModule) -> list[Any]:
    """The widths of the parts of each joined layer."""
    inner = [part for part in module.modules() if isinstance(part, GraphModule)]
    nodes = [node for part in inner for node in part.graph.find_nodes(op="call_function", target=torch.split)]
    return [node.args[1] for node in nodes if node.args[0].target is F.linear]


@pytest.mark.parametrize(("function", "count"), {**JOINED, **LEFT}.items())
def test_which_are_joined(function: Callable[..., Tensor], count: int) -> None:
    found = []

    def note(module: GraphModule, examples: Any) -> Any:
        changed = joined_linears.join_linears(module)
        assert (changed is module) == (count == 0)
        found.extend(joined_calls(changed))
        return module.forward

    gradsplit.compile(function, backend=note, fullgraph=True)(*some_inputs())
    assert len(found) == count


@pytest.mark.parametrize("function", [*JOINED, *LEFT])
def test_results_and_gradients_are_those_of_the_plain_call(function: Callable[..., Tensor]) -> None:
    check_call(function, *some_inputs())


def test_what_an_operator_of_others_reads_stays() -> None:
    with torch.library._scoped_library("joined", "FRAGMENT") as library:
        library.define("rows(Tensor x) -> Tensor")
        library.impl("rows", lambda x: x.clone(), "CompositeExplicitAutograd")

        def function(x: Tensor, first: Tensor, second: Tensor, *_: Tensor) -> Tensor:
            return torch.ops.joined.rows(F.linear(x, first)) + F.linear(x, second)

        def note(module: GraphModule, examples: Any) -> Any:
            assert joined_linears.join_linears(module) is module
            return module.forward

        gradsplit.compile(function, backend=note, fullgraph=True)(*some_inputs())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(256, 256, bias=k > 0) for k in range(3))

    def forward(self, x: Tensor) -> Tensor:
        heads = [layer(x).view(4, 128, 4, 64).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(4, 128, 256)


@pytest.mark.gpu
def test_gradients_on_a_gpu_are_as_near_to_float64_as_eagers() -> None:
    model = Attention().cuda()
    x = torch.randn(4, 128, 256, device="cuda")
    parameters = list(model.parameters())

    def run(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            result = call(x)
        return [result, *torch.autograd.grad(result.float().square().sum(), parameters)]

    plain, found = run(model), run(gradsplit.compile(model))
    exact_model = Attention().cuda().double()
    exact_model.load_state_dict(model.state_dict())
    result = exact_model(x.double())
    exact = [result, *torch.autograd.grad(result.square().sum(), list(exact_model.parameters()))]
    for ours, eager, true in zip(found, plain, exact, strict=True):
        error, allowed = ((each.double() - true).norm() / true.norm() for each in (ours, eager))
        assert error < 1.5 * allowed + 1e-3
