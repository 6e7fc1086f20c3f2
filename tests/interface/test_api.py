"""``gradsplit.compile`` as its users call it."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gradsplit
from gradsplit.compile_core.compiled_calls.compiled_module import CompiledModule
from gradsplit.compile_core.errors import Unsupported
from gradsplit.compile_core.interface.testing import CompileCounter


def scaled(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    """Doubles, unless told otherwise."""
    return torch.sin(x) * factor


@pytest.mark.parametrize("backend", ["aot_eager", "eager", "triton"])
def test_function_module_and_decorator(backend: str) -> None:
    x = torch.randn(3, 4)
    assert torch.allclose(gradsplit.compile(scaled, backend=backend)(x, factor=3.0), scaled(x, 3.0))
    model = torch.nn.Linear(4, 4)
    assert torch.allclose(gradsplit.compile(model, backend=backend)(x), model(x), atol=1e-6)

    @gradsplit.compile(backend=backend, fullgraph=True)
    def decorated(x: torch.Tensor) -> torch.Tensor:
        return scaled(x) + 1

    assert torch.allclose(decorated(x), scaled(x) + 1)


def doubling(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(forward)
    def double(*args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * forward(*args, **kwargs)

    return double


@pytest.mark.parametrize("decorate", [doubling, gradsplit.disable])
def test_a_decorated_forward_takes_the_module_as_one_of_its_arguments(decorate: Callable[..., Any]) -> None:
    class Decorated(torch.nn.Linear):
        @decorate
        def forward(self, input: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
            return super().forward(input) * factor

    model, x = Decorated(4, 4), torch.randn(3, 4)
    compiled = gradsplit.compile(model, backend="aot_eager")
    assert torch.equal(compiled(x, factor=3.0), model(x, factor=3.0))
    model.register_forward_hook(lambda module, args, output: output + 1)
    assert torch.equal(compiled(x), model(x))


def test_a_function_that_is_made_of_something_else_is_compiled_again() -> None:
    """As in notebooks that reload what was edited, which keep the function."""

    def scale(x: torch.Tensor, factor: float = 2.0, *, offset: float = 1.0) -> torch.Tensor:
        return x * factor + offset

    class Shift(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    x, module = torch.ones(2), Shift()
    compiled, compiled_module = gradsplit.compile(scale), gradsplit.compile(module)
    assert torch.equal(compiled(x), scale(x))
    assert torch.equal(compiled_module(x), x + 1)
    for name, value in (
        ("__defaults__", (5.0,)),
        ("__kwdefaults__", {"offset": 7.0}),
        ("__code__", (lambda x, factor, *, offset: x - factor * offset).__code__),
    ):
        setattr(scale, name, value)
        assert torch.equal(compiled(x), scale(x))
    Shift.forward.__code__ = (lambda self, x: x + 3).__code__
    assert torch.equal(compiled_module(x), x + 3)


def test_a_callable_backend_gets_graph_and_examples() -> None:
    seen = []

    def backend(module: torch.fx.GraphModule, examples: list[torch.Tensor]) -> torch.fx.GraphModule:
        seen.append((module, examples))
        return module

    gradsplit.compile(scaled, backend=backend)(torch.ones(2))
    ((module, examples),) = seen
    assert isinstance(module, torch.fx.GraphModule)
    assert [tuple(example.shape) for example in examples] == [(2,)]


def test_a_registered_backend_is_known_by_name() -> None:
    @gradsplit.register_backend(name="identity_for_test")
    def identity(module: torch.fx.GraphModule, examples: list[torch.Tensor]) -> torch.fx.GraphModule:
        return module

    assert "identity_for_test" in gradsplit.list_backends()
    assert torch.equal(
        gradsplit.compile(scaled, backend="identity_for_test")(torch.ones(2)), scaled(torch.ones(2))
    )
    with pytest.raises(ValueError, match="exists already"):
        gradsplit.register_backend(lambda module, examples: module, name="identity_for_test")


def test_disable_returns_what_it_was_given() -> None:
    assert gradsplit.compile(scaled, disable=True) is scaled


def test_a_compiled_module_is_the_module_in_all_but_its_call() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
    compiled = gradsplit.compile(model)
    assert isinstance(compiled, CompiledModule) and isinstance(compiled, torch.nn.Sequential)
    assert list(compiled.state_dict()) == ["0.weight", "0.bias"]
    assert compiled.eval() is compiled and not model.training
    compiled.extra = 3
    assert model.extra == 3
    assert gradsplit.compile(compiled)._orig_mod is model
    assert type(pickle.loads(pickle.dumps(compiled))) is torch.nn.Sequential
    assert torch.equal(copy.deepcopy(compiled)[0].weight, model[0].weight)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": 3}, TypeError, "takes a function or a torch.nn.Module, not int"),
        ({"backend": "tritn"}, ValueError, r"unknown backend 'tritn'; did you mean 'triton'\? \(allowed: "),
        ({"backend": 3}, TypeError, "backend must be a name or a callable"),
        ({"mode": "fast"}, ValueError, r"unknown mode 'fast' \(allowed: default, .*reduce-overhead\)"),
        (
            {"options": {"trace_foldr": "x"}},
            ValueError,
            "unknown option 'trace_foldr'; did you mean 'trace_folder'.* .allowed: activation_memory_budget, ",
        ),
        ({"options": {"cache_size_limit": 0}}, TypeError, "takes a positive number"),
        ({"dynamic": 2}, TypeError, "dynamic must be None, True or False, not 2"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        gradsplit.compile(**{"model": scaled, **arguments})
    assert "\n" not in str(raised.value)


def test_fullgraph_names_the_users_line() -> None:
    def prints(x: torch.Tensor) -> torch.Tensor:
        print("here")
        return x + 1

    with pytest.raises(gradsplit.Unsupported) as raised:
        gradsplit.compile(prints, fullgraph=True)(torch.ones(2))
    assert "test_api.py" in str(raised.value) and 'print("here")' in str(raised.value)


def test_stages_are_written_to_the_trace_folder(tmp_path) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    gradsplit.compile(scaled, options={"trace_folder": tmp_path})(x).sum().backward()
    stages = {path.name.split(".", 1)[1] for path in tmp_path.iterdir()}
    assert {
        "captured.txt",
        "joint.txt",
        "forward.loops.txt",
        "forward.kernels.txt",
        "backward.program.txt",
    } <= stages


def test_what_a_stage_has_no_rule_for_runs_with_torchs_kernels(caplog: pytest.LogCaptureFixture) -> None:
    def shares(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return y, y.detach().view(torch.int32)

    x = torch.randn(2, 3, requires_grad=True)
    first, second = gradsplit.compile(shares)(x)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    first.sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 2.0))
    assert "reinterpreting-view" in caplog.text


def test_a_torchscript_module_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch 2.14: it is deprecated
        module = torch.jit.script(torch.nn.Linear(3, 2))
    assert gradsplit.compile(module)(torch.ones(3)).shape == (2,)
    assert "TorchScript" in caplog.text
    with pytest.raises(Unsupported, match="TorchScript"):
        gradsplit.compile(module, fullgraph=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gradsplit.compile(len, fullgraph="yes"), "fullgraph must be True or False, not 'yes'"),
        (lambda: gradsplit.compile(torch.sin, recompile_limit=0), "takes a positive number, not 0"),
        (lambda: gradsplit.mark_dynamic(3, 0), "sizes of tensors are marked, not of 3"),
        (lambda: gradsplit.mark_static(None), "sizes of tensors are marked, not of None"),
        (lambda: gradsplit.explain(3), "explain takes a function or a torch.nn.Module, not int"),
        (
            lambda: gradsplit.compile(lambda x: x + 1, backend=lambda module, inputs: None)(torch.ones(2)),
            "a backend returns what runs the graph, not None",
        ),
    ],
)
def test_a_wrong_argument_is_named(call, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_arguments_that_only_torch_has_by_these_names() -> None:
    counter, x = CompileCounter(), torch.ones(4, 3)
    gradsplit.mark_dynamic(x, index=0)
    gradsplit.maybe_mark_dynamic(x, index=0)
    gradsplit.mark_static(x, index=1)
    f = gradsplit.compile(lambda x: x + 1, backend=counter, name="mine", recompile_limit=1, dynamic=False)
    for size in (2, 3, 4):
        f(torch.ones(size))
    assert counter.frame_count == 1
    assert gradsplit.compile(lambda x: x + 1, backend=None)(x).sum() == 24


def test_torchinductor_gets_its_own_options() -> None:
    import torch._inductor.config as inductor_config  # its import takes a second

    seen = []
    x = torch.ones(4)

    def note(graph) -> None:
        seen.append(inductor_config.max_autotune_gemm_backends)

    options = {"max_autotune_gemm_backends": "ATEN", "joint_custom_post_pass": note, "fallback_random": True}
    assert gradsplit.compile(torch.sin, backend="inductor", options=options)(x).shape == (4,)
    assert seen == ["ATEN"]
    with pytest.raises(ValueError, match="unknown option 'max_autotune_gemm_backend'"):
        gradsplit.compile(torch.sin, backend="inductor", options={"max_autotune_gemm_backend": "ATEN"})


def test_names_of_torchs_have_a_counterpart() -> None:
    """The page of graph breaks says of each what it is here."""
    page = Path(__file__).parents[2].joinpath("docs", "graph_breaks.md").read_text()
    prefixes = ("skip_guard_on_", "keep_")
    for name in torch.compiler.__all__:
        assert any(f"`{known}" in page for known in (name, *filter(name.startswith, prefixes))), name


def test_guards_stay_whatever_a_filter_says() -> None:
    graphs = []

    def backend(graph, inputs, **kwargs):
        graphs.append(kwargs)
        return graph.forward

    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    compiled = gradsplit.compile(lambda x, k: x * k, backend=backend, options=options, dynamic=False)
    assert [compiled(torch.ones(1), k).item() for k in (2, 3)] == [2, 3]
    assert graphs == [{}, {}]
    with pytest.raises(TypeError, match="takes a function"):
        gradsplit.compile(torch.sin, options={"guard_filter_fn": 1})
