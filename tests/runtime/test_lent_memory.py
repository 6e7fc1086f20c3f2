"""Backwards that are recorded in the memory of what their forward kept: when they may be, and what ends it.

``LendingRecorder`` spoils what CUDA graphs would overwrite.
"""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradsplit
from gradsplit.compile_core import pipeline
from gradsplit.compile_core.runtime.cuda_graphs import graph_programs
from gradsplit.compile_core.runtime.lent_tensors import lent_tensors
from gradsplit.compile_core.runtime.recording import Recording
from tests.runtime.recorder_on_cpu import LendingRecorder
from tests.runtime.test_graphed_program import Net, batches


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> LendingRecorder:
    made = LendingRecorder()
    monkeypatch.setattr(pipeline, "with_cuda_graphs", functools.partial(graph_programs, recorder=made))
    return made


Step = Callable[[nn.Module, Any, torch.optim.Optimizer, torch.Tensor, int], None]


def run(step: Step, steps: int = 8, device: str = "cpu", backend: str = "aot_eager") -> None:
    """The same steps of a plain module and of its compiled twin, which are compared after each."""
    plain = Net().to(device, torch.float64)
    twin = copy.deepcopy(plain)
    compiled = gradsplit.compile(twin, backend=backend, mode="reduce-overhead", fullgraph=True)
    sides = [
        (module, call, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
        for module, call in ((plain, plain), (twin, compiled))
    ]
    for number, x in enumerate([x.to(device, torch.float64) for x in batches(steps)]):
        for module, call, optimizer in sides:
            step(module, call, optimizer, x, number)
        for expected, found in zip(plain.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad)
            torch.testing.assert_close(found, expected)


def drop_before(module: nn.Module, call: Any, optimizer: Any, x: torch.Tensor, number: int) -> None:
    optimizer.zero_grad()
    call(x)[0].backward()
    optimizer.step()


def drop_after(module: nn.Module, call: Any, optimizer: Any, x: torch.Tensor, number: int) -> None:
    loss = call(x)[0]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def add_up(module: nn.Module, call: Any, optimizer: Any, x: torch.Tensor, number: int) -> None:
    if number % 3 == 0:
        optimizer.zero_grad()
    call(x)[0].backward()


def add_up_in_place(module: nn.Module, call: Any, optimizer: Any, x: torch.Tensor, number: int) -> None:
    if number % 3 == 0:
        optimizer.zero_grad(set_to_none=False)
    call(x)[0].backward()


def differentiate_again(module: nn.Module, call: Any, optimizer: Any, x: torch.Tensor, number: int) -> None:
    optimizer.zero_grad()
    loss = call(x)[0]
    if number >= 4 and number % 2:
        loss.backward(retain_graph=True)
    loss.backward()


def differentiate_twice_at_once(
    module: nn.Module, call: Any, optimizer: Any, x: torch.Tensor, number: int
) -> None:
    optimizer.zero_grad()
    loss = call(x)[0]
    loss.backward(retain_graph=True)
    loss.backward()


def forward_thrice(module: nn.Module, call: Any, optimizer: Any, x: torch.Tensor, number: int) -> None:
    optimizer.zero_grad()
    losses = [call(x * k)[0] for k in range(1, 4)]
    for k in (1, 0, 2) if number % 2 else (2, 1, 0):
        losses[k].backward()


# How often a backward is recorded in the memory of its forward.
STEPS: dict[Step, int] = {
    drop_before: 1,
    drop_after: 1,
    add_up: 1,
    add_up_in_place: 1,
    differentiate_again: 1,
    differentiate_twice_at_once: 0,
    forward_thrice: 3,
}


@pytest.mark.parametrize("step", STEPS)
def test_steps_equal_plain_ones(step: Step, recorder: LendingRecorder) -> None:
    run(step, 12)
    assert recorder.within == STEPS[step]
    # With momentum gradients are read long after the step that made them, but not by the next forward.
    assert recorder.recorded <= (2 if step is drop_before else 8)
    assert recorder.replayed > 12


@pytest.mark.gpu
@pytest.mark.parametrize("step", STEPS)
def test_steps_on_a_gpu_equal_plain_ones(step: Step) -> None:
    run(step, 12, "cuda", "triton")


@pytest.mark.gpu
def test_gradients_lie_where_activations_did() -> None:
    """Eight layers of 64 MiB each, with as much saved for each."""
    module = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(4096, 4096), nn.Tanh()))).cuda()
    compiled = gradsplit.compile(module, mode="reduce-overhead")
    x = torch.randn(4096, 4096, device="cuda")

    def held_mib() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() >> 20

    before = held_mib()
    for _ in range(4):
        module.zero_grad()
        compiled(x).square().mean().backward()
    module.zero_grad()
    # What is saved, temporaries of a layer, its result and its gradient; but for what cuBLAS keeps.
    assert held_mib() - before < 512 + 4 * 64 + 64 + 48


def test_gradients_kept_for_longer(recorder: LendingRecorder) -> None:
    kept: list[list[torch.Tensor]] = []

    def step(module: nn.Module, call: Any, optimizer: Any, x: torch.Tensor, number: int) -> None:
        optimizer.zero_grad()
        call(x)[0].backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        if 3 <= number < 6:
            kept.append([gradient[:1] for gradient in gradients if gradient is not None])

    run(step, 9)
    for expected, found in zip(kept[::2], kept[1::2], strict=True):
        assert all(map(torch.equal, expected, found))
    assert recorder.within == 1 and recorder.replayed > 8


def test_results_outlast_backwards_and_forwards(recorder: LendingRecorder) -> None:
    kept: list[torch.Tensor] = []

    def step(module: nn.Module, call: Any, optimizer: Any, x: torch.Tensor, number: int) -> None:
        optimizer.zero_grad()
        loss, hidden = call(x)
        (loss + hidden.sum()).backward()
        kept.append(hidden.detach())

    run(step)
    assert all(map(torch.equal, kept[::2], kept[1::2])) and recorder.within >= 1


def test_a_backward_that_fails_to_be_recorded_runs_on_what_was_lent(
    recorder: LendingRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = LendingRecorder.record

    def fail(self: LendingRecorder, program: Any, inputs: Any, within: Any = None) -> Any:
        if within is None:
            return record(self, program, inputs)
        inputs.clear()
        raise RuntimeError("no memory")

    monkeypatch.setattr(LendingRecorder, "record", fail)

    run(drop_before, 5)
    assert recorder.recorded == 1


def test_the_witness_is_there_until_the_results_are(
    recorder: LendingRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else another thread's forward might come between."""
    found: list[bool] = []
    give = Recording.give

    def looking(self: Recording, inputs: Any, copied: Any) -> Any:
        results = give(self, inputs, copied)
        found.extend(bool(source.held()) for source in map(_alive, self._sources))
        return results

    monkeypatch.setattr(Recording, "give", looking)
    module = Net()
    compiled = gradsplit.compile(module, backend="aot_eager", mode="reduce-overhead", fullgraph=True)
    for x in batches(4):
        module.zero_grad()
        compiled(x)[0].backward()
    assert len(found) == 3 and all(found) and recorder.within == 1


def test_a_forward_waits_for_the_stream_of_its_backward(
    recorder: LendingRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, waited = "first", list[str]()

    def follow(self: LendingRecorder, stream: str | None) -> str:
        if stream not in (None, current):
            waited.append(f"{current} for {stream}")
        return current

    monkeypatch.setattr(LendingRecorder, "follow", follow)
    compiled = gradsplit.compile(Net(), backend="aot_eager", mode="reduce-overhead", fullgraph=True)
    for number, x in enumerate(batches(5)):
        compiled.zero_grad()
        current = "first"
        loss = compiled(x)[0]
        current = "second" if number == 3 else "first"
        loss.backward()
    assert waited == ["second for first", "first for second", "first for second"]


def _alive(reference: Any) -> Recording:
    source = reference()
    assert source is not None
    return source


@pytest.mark.gpu
def test_lent_tensors_hold_their_owner_and_lie_where_others_did() -> None:
    class Owner:
        pass

    memory = torch.arange(64, dtype=torch.bfloat16, device="cuda")
    tensors = [memory[3:9], memory.view(8, 8).t()[1:], torch.empty(0, device="cuda")]
    owner = Owner()
    alive = weakref.ref(owner)
    lent = lent_tensors(tensors, owner)
    for one, other in zip(tensors, lent, strict=True):
        assert torch.equal(one, other) and one.data_ptr() == other.data_ptr()
        assert (one.stride(), one.storage_offset()) == (other.stride(), other.storage_offset())
    assert lent[0].untyped_storage()._cdata == lent[1].untyped_storage()._cdata
    del owner
    gc.collect()
    assert alive() is not None
    view = lent[1].detach()[:1]
    del lent, one, other
    assert alive() is not None
    del view
    assert alive() is None
