"""Gradients in the memory of what was saved: where a kernel may, and where somebody else has that memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import gradsplit
from gradsplit.compile_core.ir.loops import Access, Apply, Load, LoopNest, Reduce, Statement, Store
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from gradsplit.compile_core.runtime import take_memory
from gradsplit.compile_core.runtime.take_memory import LEAST_BYTES, memory_to_take

ROWS, COLUMNS = 1088, LEAST_BYTES // 4096
GPU = torch.device("cuda", 0)
LARGE = TensorSpec.contiguous((ROWS, COLUMNS), torch.float32, GPU)
HERE = Access("old", (COLUMNS, 1))


def nest(*body: Statement, reduced_axes: int = 0) -> LoopNest:
    return LoopNest("nest", (ROWS, COLUMNS), reduced_axes, body)


def load(access: Access = HERE) -> Load:
    return Load(access, torch.float32)


STORE = Store(replace(HERE, buffer="new"), 1)
SUM = Store(Access("sums", (1, 0)), 3)
DOUBLED = (load(), Apply("add", (0, 0), torch.float32), STORE)


@pytest.mark.parametrize(
    ("step", "specs", "taken"),
    [
        (nest(*DOUBLED), {}, True),
        (nest(*DOUBLED), {"new": replace(LARGE, dtype=torch.bfloat16)}, False),
        (nest(*DOUBLED), dict.fromkeys(("old", "new"), replace(LARGE, shape=(ROWS // 2, COLUMNS))), False),
        (nest(*DOUBLED), dict.fromkeys(("old", "new"), replace(LARGE, device=torch.device("cpu"))), False),
        # Rows with gaps, as of a padded product, of which the program keeps a part: the gradient fills them.
        (nest(*DOUBLED), {"old": replace(LARGE, shape=(ROWS, COLUMNS - 7))}, True),
        (nest(*DOUBLED), {"old": replace(LARGE, shape=(ROWS - ROWS // 32, COLUMNS))}, False),
        (nest(*DOUBLED), {"new": replace(LARGE, shape=(ROWS, COLUMNS - 7))}, False),
        # The element of another point, which may have stored already.
        (nest(load(replace(HERE, offset=1)), *DOUBLED[1:]), {}, False),
        (nest(load(replace(HERE, strides=(0, 1))), *DOUBLED[1:]), {}, False),
        # A second look after the store.
        (nest(*DOUBLED, load()), {}, False),
        (nest(Load(replace(HERE, buffer="other"), torch.float32), *DOUBLED[1:]), {}, False),
        # Sums of what is stored, and of what must be summed before.
        (nest(*DOUBLED, Reduce("sum", 1, torch.float32), SUM, reduced_axes=1), {}, True),
        (nest(load(), Reduce("sum", 0, torch.float32), Apply("sub", (0, 1), torch.float32),
              replace(STORE, value=2), reduced_axes=1), {}, False),
        (nest(load(), Reduce("sum", 0, torch.float32), STORE, reduced_axes=1), {}, False),
    ],
)  # fmt: skip
def test_what_may_be_taken(step: LoopNest, specs: dict[str, TensorSpec], taken: bool) -> None:
    buffers = {"old": LARGE, "new": LARGE, "other": LARGE} | specs
    assert memory_to_take(step, ["new"], ["old"], buffers) == ({"new": ("old",)} if taken else {})


def test_memory_is_taken_once() -> None:
    stores = (STORE, Store(replace(HERE, buffer="newer"), 1))
    buffers = dict.fromkeys(("old", "new", "newer"), LARGE)
    assert memory_to_take(nest(*DOUBLED[:2], *stores), ["new", "newer"], ["old"], buffers) == {
        "new": ("old",)
    }


@pytest.fixture
def here_too(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory of any size is taken on the CPU, by loops that read each element once before they store it."""
    monkeypatch.setattr(take_memory, "_is_large", lambda spec: spec.numel > 0)
    gradsplit.reset()
    yield
    gradsplit.reset()


def program(x: torch.Tensor) -> torch.Tensor:
    # The product is saved and is no result; the gradient of what is added has its size.
    return (x.detach() @ x.detach() + x).sin().sum()


@pytest.mark.usefixtures("here_too")
def test_a_backward_that_runs_once_has_one_buffer_less() -> None:
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    compiled = gradsplit.compile(program)
    saved = []
    for _ in range(2):
        result = compiled(x)
        saved = [tensor.data_ptr() for tensor in result.grad_fn.saved_tensors]  # type: ignore[union-attr]
        (gradient,) = torch.autograd.grad(result, x)
        torch.testing.assert_close(gradient, torch.autograd.grad(program(x), x)[0])
    assert gradient.data_ptr() in saved


@pytest.mark.usefixtures("here_too")
def test_a_backward_that_runs_again_finds_what_was_saved() -> None:
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    result, (expected,) = gradsplit.compile(program)(x), torch.autograd.grad(program(x), x)
    first = torch.autograd.grad(result, x, retain_graph=True)[0].clone()
    second = torch.autograd.grad(result, x, retain_graph=True)[0].clone()
    third = torch.autograd.grad(result, x)[0]
    for gradient in (first, second, third):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.usefixtures("here_too")
def test_a_hook_keeps_what_it_was_given() -> None:
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = gradsplit.compile(program)(x)
    before = [tensor.clone() for tensor in kept]
    (gradient,) = torch.autograd.grad(result, x)
    torch.testing.assert_close(gradient, torch.autograd.grad(program(x), x)[0])
    assert kept
    torch.testing.assert_close(kept, before)


@pytest.mark.usefixtures("here_too")
def test_a_saved_result_is_the_callers() -> None:
    def with_result(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = x.detach() @ x.detach()
        return product, (product + x).sin().sum()

    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    product, total = gradsplit.compile(with_result)(x)
    torch.autograd.grad(total, x)
    torch.testing.assert_close(product, x.detach() @ x.detach())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_loss_needs_one_piece_of_memory_for_logits_and_gradient(mode: str) -> None:
    rows, vocabulary = 2048, 16_384
    torch.manual_seed(0)
    head = torch.nn.Linear(64, vocabulary, bias=False, device="cuda")
    x, labels = torch.randn(rows, 64, device="cuda"), torch.randint(vocabulary, (rows,), device="cuda")

    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(head(x).float(), labels)

    compiled = gradsplit.compile(loss, mode=mode)
    for _ in range(5):
        head.zero_grad()
        result = compiled(x)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result.backward()
        more = torch.cuda.max_memory_allocated() - before
    gradient = head.weight.grad
    assert gradient is not None
    expected = torch.autograd.grad(loss(x), head.weight)[0]
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    if mode == "default":
        assert more < rows * vocabulary * 4
