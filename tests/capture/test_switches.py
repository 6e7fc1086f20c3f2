"""Modes and switches of torch that captured code turns: as contexts, decorators and calls."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradsplit
from gradsplit.compile_core.torch_facts.torch_switches import read_switches
from tests.capture.same_as_plain import check_same


def decorated_in_place(x):
    return torch.no_grad()(lambda t: t * 2)(x) + torch.enable_grad()(torch.sin)(x)


def decorator_with_function(x):
    @torch.no_grad
    def double(t):
        return t * 2

    return double(x) + x


def grad_mode_survives_an_exception(x):
    try:
        with torch.no_grad():
            raise ValueError
    except ValueError:
        return x * 2


def default_dtype(x):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        y = torch.ones(3) * 2
    finally:
        torch.set_default_dtype(before)
    return x.sum() + y, torch.zeros(1)


def anomaly(x):
    with torch.autograd.set_detect_anomaly(True):
        y = x * 2
    return y, torch.is_anomaly_enabled()


def cudnn_flags(x):
    with torch.backends.cudnn.flags(enabled=False, deterministic=True):
        inside = torch.backends.cudnn.enabled
    return x * 2, inside, torch.backends.cudnn.deterministic


def attention(x):
    queries = x.reshape(1, 1, 3, 4)
    with sdpa_kernel(SDPBackend.MATH):
        one = F.scaled_dot_product_attention(queries, queries, queries)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        two = F.scaled_dot_product_attention(queries, queries, queries, is_causal=True)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        return one + two + F.scaled_dot_product_attention(queries, queries, queries)


def decorated_in_the_frame(x):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def halved(t):
        return t @ t.T

    @torch.no_grad
    def rows(t):
        yield t[0] * 2
        yield t[1] * 3

    mode = torch.no_grad()
    with mode:
        inside = torch.is_grad_enabled()
    return halved(x) @ halved(x), [*rows(x)], inside, mode.prev


def inference_inside_of_itself(x):
    @torch.inference_mode()
    def deeper(t, depth):
        return deeper(t * 2, depth - 1) if depth else t

    return deeper(x, 2), torch.is_inference_mode_enabled(), x * 2


def nested_autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.T
        with torch.autocast("cpu", enabled=False):
            z = y.float() @ x
        return y, z, z @ x.T


def inference_inside(x):
    with torch.inference_mode():
        y = x * 2
        inside = torch.is_inference_mode_enabled()
    return y, inside, x * 3


@torch.inference_mode()
def decorated_for_inference(x):
    return x * 2


def calls_decorated(x):
    return decorated_for_inference(x), x * 2


AUTOCAST = torch.autocast("cpu", dtype=torch.bfloat16)


@AUTOCAST
def decorated_with_autocast(x):
    return x @ x.T


def autocast_made_before(x):
    with AUTOCAST:
        y = x @ x.T
    return y, decorated_with_autocast(x), torch.is_autocast_enabled("cpu")


PROGRAMS = [
    autocast_made_before, decorated_in_place, decorator_with_function, grad_mode_survives_an_exception,
    default_dtype, anomaly, cudnn_flags, attention, nested_autocast, inference_inside, calls_decorated,
    decorated_in_the_frame, inference_inside_of_itself,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_same_as_plain(program, backend):
    before = read_switches(), torch.is_grad_enabled()
    check_same(program, lambda: (torch.randn(3, 4, requires_grad=True),), backend=backend)
    assert (read_switches(), torch.is_grad_enabled()) == before


def breaks_in_autocast(x):
    with AUTOCAST:
        y = x @ x.T
        gradsplit.graph_break()
        z = x @ x.T
    return y, z, torch.is_autocast_enabled("cpu")


def test_a_graph_that_ends_in_an_autocast_made_before():
    check_same(breaks_in_autocast, lambda: (torch.randn(3, 4),), fullgraph=False)
    assert not torch.is_autocast_enabled("cpu")


def test_results_of_inference_mode_are_inference_tensors():
    compiled = gradsplit.compile(inference_inside, backend="eager", fullgraph=True)
    made, inside, other = compiled(torch.ones(2))
    assert made.is_inference()
    assert inside
    assert not other.is_inference()


def test_a_switch_left_turned_runs_as_plain_python():
    compiled = gradsplit.compile(lambda x: (torch._C._set_cudnn_benchmark(True), x * 2)[1], backend="eager")
    try:
        compiled(torch.ones(2))
        assert torch.backends.cudnn.benchmark
    finally:
        torch.backends.cudnn.benchmark = False


def test_what_was_read_is_guarded():
    compiled = gradsplit.compile(
        lambda x: x + (1 if torch.backends.cudnn.benchmark else 0), backend="eager", fullgraph=True
    )
    x = torch.zeros(2)
    assert torch.equal(compiled(x), x)
    torch.backends.cudnn.benchmark = True
    try:
        assert torch.equal(compiled(x), x + 1)
    finally:
        torch.backends.cudnn.benchmark = False


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("mode", [torch.no_grad, lambda: torch.autocast("cpu", dtype=torch.bfloat16)])
def test_modes_are_as_before_when_the_graph_raises(mode, backend):
    def program(x, index):
        with mode():
            return x[index] * 2

    compiled = gradsplit.compile(program, backend=backend, fullgraph=True)
    x = torch.randn(3)
    compiled(x, torch.tensor([0, 1]))
    with pytest.raises(IndexError):
        compiled(x, torch.tensor([0, 7]))
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_inference_mode_of_the_caller_is_seen():
    compiled = gradsplit.compile(
        lambda x: x + (1 if torch.is_inference_mode_enabled() else 0), backend="eager", fullgraph=True
    )
    x = torch.zeros(2)
    with torch.inference_mode():
        assert torch.equal(compiled(x), x + 1)
    assert torch.equal(compiled(x), x)
