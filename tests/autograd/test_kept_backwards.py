"""Backwards of custom operators that look at data, in graphs that are compiled around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gradsplit
from tests.autograd.observed_call import check_call
from tests.autograd.scenarios import leaf
from tests.programs.grouped_products import Experts

BACKENDS = ["aot_eager", "triton"]
GROUPS = ([3, 7, 12], [0, 12, 12], [0, 0, 0], [4, 5, 10])  # of the last, two rows belong to no expert


def _check(model: Experts, call: Callable[..., Tensor], groups: list[int], rows: int = 12) -> None:
    x = leaf(rows, 8)
    found = []
    for run in (model, call):
        torch.manual_seed(1)
        result = run(x, torch.tensor(groups))
        wanted = [x, *model.parameters()]
        found.append((result, *torch.autograd.grad(result.square().mean(), wanted)))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_trained", [True, False])
def test_all_around_it_is_compiled(backend: str, is_trained: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = Experts().train(is_trained)
    options = {"fallback_random": True} if backend == "triton" else None
    compiled = gradsplit.compile(model, backend=backend, options=options, fullgraph=True)
    for groups in GROUPS:
        _check(model, compiled, groups)
    assert not caplog.records


def test_sizes_may_differ() -> None:
    model = Experts().eval()
    counter = gradsplit.testing.CompileCounterWithBackend("triton")
    compiled = gradsplit.compile(model, backend=counter, dynamic=True)
    for rows in (12, 15, 9):
        _check(model, compiled, [3, 7, 9], rows)
    assert counter.frame_count == 1


def test_casts_around_the_backward_do_not_reach_it() -> None:
    model = Experts().eval()
    compiled = gradsplit.compile(model)
    x = leaf(12, 8)
    gradients = []
    for run in (model, compiled):
        loss = run(x, torch.tensor(GROUPS[0])).square().mean()
        with torch.autocast("cpu", torch.bfloat16, enabled=run is compiled):
            gradients.append(torch.autograd.grad(loss, [x, *model.parameters()]))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_it_is_in_no_cuda_graph(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from gradsplit.compile_core import pipeline
    from gradsplit.compile_core.runtime import cuda_graphs

    reasons = []

    def only_asked(graph: Any, forward: Any, backward: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        monkeypatch.setattr(cuda_graphs, "_devices", lambda module: iter([torch.device("cuda")]))
        reasons.append(cuda_graphs.reason_against(graph.backward))
        return forward, backward

    monkeypatch.setattr(pipeline, "with_cuda_graphs", only_asked)
    model = Experts().eval()
    _check(model, gradsplit.compile(model, mode="reduce-overhead"), GROUPS[0])
    (reason,) = reasons
    assert "depends on data" in reason


def _operator(name: str, backward: Callable[..., Any], save: Callable[..., Any] | None = None) -> Any:
    """``x * factor`` with a backward of its own."""

    @torch.library.custom_op(f"gradsplit_tests::kept_{name}", mutates_args=())
    def operator(x: Tensor, factor: Tensor) -> Tensor:
        return x * factor

    operator.register_fake(lambda x, factor: torch.empty_like(x))
    operator.register_autograd(
        backward,
        setup_context=save or (lambda ctx, inputs, output: ctx.save_for_backward(*inputs)),
    )
    return operator


def _gives_what_it_is_given(ctx: Any, gradient: Tensor) -> Any:
    _, factor = ctx.saved_tensors
    return (gradient if factor[0].item() < 1 else gradient * factor), gradient


def _gives_none_at_times(ctx: Any, gradient: Tensor) -> Any:
    _, factor = ctx.saved_tensors
    return gradient, None if factor[0].item() > 1 else gradient


def _gives_none(ctx: Any, gradient: Tensor) -> Any:
    _, factor = ctx.saved_tensors
    return gradient * factor[0].item(), None


def _changes_what_it_is_given(ctx: Any, gradient: Tensor) -> Any:
    x, factor = ctx.saved_tensors
    gradient.mul_(factor[0].item())
    return gradient, gradient * x


def _changes_it_before_it_looks(ctx: Any, gradient: Tensor) -> Any:
    x, factor = ctx.saved_tensors
    gradient.mul_(2)
    return gradient * factor[0].item(), gradient * x


def _looks_with_numpy(ctx: Any, gradient: Tensor) -> Any:
    x, factor = ctx.saved_tensors
    return gradient * float(factor.numpy().max()), gradient * x


def _looks_through_an_array(ctx: Any, gradient: Tensor) -> Any:
    x, factor = ctx.saved_tensors
    return gradient * float(np.asarray(factor).max()), gradient * x


def _looks_at_the_address(ctx: Any, gradient: Tensor) -> Any:
    x, factor = ctx.saved_tensors
    return gradient * (factor if factor.data_ptr() else x), gradient * x


def _reads_its_context(ctx: Any, gradient: Tensor) -> Any:
    x, factor = ctx.held["both"]
    scale = ctx.options[1] if ctx.chosen.start is None else 0
    return gradient * factor.tolist()[0] * scale, gradient * x if ctx.needs_input_grad[1] else None


def _holds_much(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.held = {"both": list(inputs)}
    ctx.options = ("of the program", 2.5)
    ctx.chosen = slice(None, 3)


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


def _reads_an_object(ctx: Any, gradient: Tensor) -> Any:
    return gradient * ctx.box.value[1][0].item(), None


def _holds_an_object(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.box = Box(inputs)


def _counts_positives(ctx: Any, gradient: Tensor) -> Any:
    x, factor = ctx.saved_tensors
    gradients = torch.zeros_like(x)
    for position in (factor > 0).nonzero():
        gradients[position] = gradient[position] * factor[position]
    return gradients, gradient * x


KEPT = {
    "given": _operator("given", _gives_what_it_is_given),
    "none_at_times": _operator("none_at_times", _gives_none_at_times),
    "context": _operator("context", _reads_its_context, _holds_much),
    "positives": _operator("positives", _counts_positives),
}
LEFT = {
    "none": _operator("none", _gives_none),
    "changes": _operator("changes", _changes_what_it_is_given),
    "changes_first": _operator("changes_first", _changes_it_before_it_looks),
    "numpy": _operator("numpy", _looks_with_numpy),
    "array": _operator("array", _looks_through_an_array),
    "address": _operator("address", _looks_at_the_address),
    "object": _operator("object", _reads_an_object, _holds_an_object),
}


def _program(operator: Any) -> Callable[..., Tensor]:
    # What arrives at the operator is used beside it, too, and so is the factor: nobody may change either.
    return lambda x, factor: (operator(x.sin(), factor.cos() * 3) + x * 2).exp() * factor.sin()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", KEPT)
def test_kept(name: str, backend: str, caplog: pytest.LogCaptureFixture) -> None:
    check_call(_program(KEPT[name]), lambda: (leaf(6), leaf(6)), backend, caplog, calls=4)


@pytest.mark.parametrize("name", LEFT)
def test_left_to_torch(name: str, caplog: pytest.LogCaptureFixture) -> None:
    check_call(
        _program(LEFT[name]), lambda: (leaf(6), leaf(6)), "aot_eager", caplog, left_to_torch="trace-failed"
    )


def _keeps_a_size(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)
    ctx.rows = inputs[0].shape[0]


def _reads_a_size(ctx: Any, gradient: Tensor) -> Any:
    x, factor = ctx.saved_tensors
    of_x = gradient.new_zeros(ctx.rows)
    of_x += gradient * factor[0].item() / ctx.rows
    return of_x, gradient * x


def _branches_and_reads_a_size(ctx: Any, gradient: Tensor) -> Any:
    of_x, of_factor = _reads_a_size(ctx, gradient)
    return (of_x if ctx.saved_tensors[1][0].item() > 0 else of_x * 2), of_factor


@pytest.mark.parametrize("name, backward", [("size", _reads_a_size), ("branch", _branches_and_reads_a_size)])
def test_sizes_in_a_context_may_differ(
    name: str, backward: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    program = _program(_operator(name, backward, _keeps_a_size))
    counter = gradsplit.testing.CompileCounterWithBackend("triton")
    compiled = gradsplit.compile(program, backend=counter, dynamic=True)
    for rows, angle in ((3, 0.0), (5, 3.0), (4, 0.5), (6, 2.5)):
        x, factor = leaf(rows), torch.full((rows,), angle, requires_grad=True)
        gradients = [torch.autograd.grad(call(x, factor).sum(), (x, factor)) for call in (program, compiled)]
        torch.testing.assert_close(*gradients)
    # A logger of torch's tells its first use in a process.
    warnings = [record for record in caplog.records if not record.name.startswith("torch.")]
    assert counter.frame_count == 1 and not warnings


def _gives_another_shape(ctx: Any, gradient: Tensor) -> Any:
    _, factor = ctx.saved_tensors
    return gradient if factor[0].item() < 1 else gradient[:1], gradient


def _changes_it_at_times(ctx: Any, gradient: Tensor) -> Any:
    _, factor = ctx.saved_tensors
    if factor[0].item() > 1:
        gradient.mul_(2)
    return gradient, gradient


@pytest.mark.parametrize(
    "operator, text",
    [
        (_operator("shapes", _gives_another_shape), "a gradient of shape"),
        (_operator("changes_at_times", _changes_it_at_times), "changes what it is given"),
    ],
)
def test_what_was_not_foreseen_is_an_error(operator: Any, text: str) -> None:
    x = leaf(3)
    compiled = gradsplit.compile(lambda x, factor: operator(x, factor).sin())
    compiled(x, leaf(3) * 0).sum().backward()
    with pytest.raises(RuntimeError, match=text):
        compiled(x, torch.full((3,), 2.0, requires_grad=True)).sum().backward()
