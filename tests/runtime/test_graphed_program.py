"""Which recording a call replays, and what a replay must not overwrite.

A recorder for the CPU stands in for CUDA's; see ``recorder_on_cpu``.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import gradsplit
from gradsplit.compile_core import pipeline
from gradsplit.compile_core.ir.kept_calls import KeptCall
from gradsplit.compile_core.runtime import cuda_graphs, graphed_program, recording
from gradsplit.compile_core.runtime.cuda_graphs import graph_programs
from gradsplit.compile_core.runtime.graphed_program import GraphedProgram
from tests.runtime.recorder_on_cpu import LendingRecorder, RecorderOnCpu


@pytest.fixture(params=[RecorderOnCpu, LendingRecorder])
def recorder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecorderOnCpu]:
    """Makes ``mode="reduce-overhead"`` record on the CPU."""
    made = request.param()
    monkeypatch.setattr(pipeline, "with_cuda_graphs", functools.partial(graph_programs, recorder=made))
    yield made


class Net(nn.Module):
    """A convolution's batch norm changes buffers; two results, one of them large enough to be given out in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 256)
        self.norm = nn.BatchNorm1d(256)
        self.second = nn.Linear(256, 128)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.second(torch.relu(self.norm(self.first(x)))))
        return hidden.square().mean(), hidden * 2


def nets() -> tuple[Net, Net, Any]:
    """A plain module, its twin, and the twin compiled."""
    plain = Net()
    twin = copy.deepcopy(plain)
    return (
        plain,
        twin,
        gradsplit.compile(twin, backend="aot_eager", mode="reduce-overhead", fullgraph=True),
    )


def batches(count: int) -> list[torch.Tensor]:
    return [torch.randn(256, 16) for _ in range(count)]


def check_equal(plain: nn.Module, twin: nn.Module) -> None:
    for expected, found in zip(plain.parameters(), twin.parameters(), strict=True):
        assert (expected.grad is None) == (found.grad is None)
        if expected.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=0)
    for expected, found in zip(plain.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_statistics_that_moved_are_changed_where_they_are(recorder: RecorderOnCpu) -> None:
    plain, twin, compiled = nets()
    for k, x in enumerate(batches(6)):
        if k == 3:
            for module in (plain, twin):
                module.norm.running_mean = module.norm.running_mean.clone()
        before = [[buffer._version for buffer in module.buffers()] for module in (plain, twin)]
        plain(x)[0].backward()
        compiled(x)[0].backward()
        check_equal(plain, twin)
        # Only the number of batches counts its changes.
        changed = [
            [buffer._version > version for buffer, version in zip(module.buffers(), versions, strict=True)]
            for module, versions in zip((plain, twin), before, strict=True)
        ]
        assert changed[0] == changed[1] and any(changed[0])
    assert recorder.replayed > 2


def test_training_steps(recorder: RecorderOnCpu) -> None:
    plain, twin, compiled = nets()
    outcomes: list[list[Any]] = [[], []]
    xs = batches(8)
    for side, (module, call) in enumerate(((plain, plain), (twin, compiled))):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for x in xs:
            optimizer.zero_grad()
            loss, _ = call(x)
            loss.backward()
            optimizer.step()
            outcomes[side].append(loss.detach())  # as programs keep their losses
    check_equal(plain, twin)
    assert torch.equal(torch.stack(outcomes[0]), torch.stack(outcomes[1]))
    assert recorder.replayed >= 12, (
        "seven forwards and seven backwards, but for those that led to a new recording"
    )
    assert recorder.recorded <= 6


def test_results_that_are_kept_are_not_overwritten(recorder: RecorderOnCpu) -> None:
    plain, _, compiled = nets()
    xs = batches(6)
    with torch.no_grad():
        expected = [plain(x)[1] for x in xs]
        found = [compiled(x)[1] for x in xs]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert recorder.replayed == 5
    views = [value[3:5].t() for value in found]
    del found
    with torch.no_grad():
        compiled(xs[0])
    assert torch.equal(views[-1], expected[-1][3:5].t())


def test_gradients_accumulate(recorder: RecorderOnCpu) -> None:
    plain, twin, compiled = nets()
    xs = batches(12)
    for module, call in ((plain, plain), (twin, compiled)):
        for step, x in enumerate(xs):
            if step % 4 == 0:
                module.zero_grad()
            call(x)[0].backward()
    check_equal(plain, twin)
    assert recorder.replayed >= 20


def test_gradients_kept_in_place_by_zero_grad(recorder: RecorderOnCpu) -> None:
    plain, twin, compiled = nets()
    xs = batches(6)
    for module, call in ((plain, plain), (twin, compiled)):
        optimizer = torch.optim.Adam(module.parameters())
        for x in xs:
            optimizer.zero_grad(set_to_none=False)
            call(x)[0].backward()
            optimizer.step()
    check_equal(plain, twin)


def test_two_forwards_before_their_backwards(recorder: RecorderOnCpu) -> None:
    plain, twin, compiled = nets()
    xs = batches(10)
    for module, call in ((plain, plain), (twin, compiled)):
        for one, other in zip(xs[::2], xs[1::2], strict=True):
            module.zero_grad()
            first, second = call(one)[0], call(other)[0]
            second.backward()
            first.backward()
        check_equal(plain, module)
    assert recorder.replayed >= 14


def test_next_forward_before_the_backward(recorder: RecorderOnCpu) -> None:
    plain, twin, compiled = nets()
    xs = batches(8)
    for module, call in ((plain, plain), (twin, compiled)):
        pending = call(xs[0])[0]
        for x in xs[1:]:
            module.zero_grad()
            following = call(x)[0]
            pending.backward()
            pending = following
    check_equal(plain, twin)


def test_graphs_that_are_never_differentiated_are_kept(recorder: RecorderOnCpu, caplog: Any) -> None:
    plain, twin, compiled = nets()
    xs = batches(9)
    losses = [[call(x)[0] for x in xs] for call in (plain, compiled)]
    assert any("still in use" in record.message for record in caplog.records)
    for expected, found in zip(*losses, strict=True):
        plain.zero_grad()
        twin.zero_grad()
        expected.backward()
        found.backward()
        check_equal(plain, twin)


def test_a_graph_differentiated_twice(recorder: RecorderOnCpu) -> None:
    plain, twin, compiled = nets()
    for x in batches(4):
        plain.zero_grad()
        twin.zero_grad()
        for call in (plain, compiled):
            loss = call(x)[0]
            loss.backward(retain_graph=True)
            loss.backward()
        check_equal(plain, twin)


def test_a_backward_after_its_recording_was_given_up(recorder: RecorderOnCpu) -> None:
    plain, twin, compiled = nets()
    for x in batches(3):
        plain(x)[0].backward()
        compiled(x)[0].backward()
    x, y = batches(2)
    losses = [call(x)[0] for call in (plain, compiled)]
    for module in (plain, twin):
        module.second.bias.data = module.second.bias.data.clone()
    for call in (plain, compiled):
        call(y)[0].backward()  # finds a parameter moved, and records anew
    for loss in losses:
        loss.backward()
    check_equal(plain, twin)


def test_a_backward_without_recordings_gets_what_it_needs(
    recorder: RecorderOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is where something in the backward cannot be recorded."""

    def forward_only(graph: Any, forward: Any, backward: Any, changed: Any, at_once: int, **_: Any) -> Any:
        return graph_programs(graph, forward, None, changed, recorder, at_once)[0], backward

    monkeypatch.setattr(pipeline, "with_cuda_graphs", forward_only)
    plain, twin, compiled = nets()
    for x in batches(6):
        plain(x)[0].backward()
        compiled(x)[0].backward()
    check_equal(plain, twin)
    assert recorder.replayed > 2


def test_a_recording_is_not_taken_for_another_that_lay_at_its_address(
    recorder: RecorderOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = ctypes.create_string_buffer(1)
    monkeypatch.setattr(recording, "_witness", lambda kept: torch.frombuffer(memory, dtype=torch.uint8))
    plain, twin, compiled = nets()
    for k, x in enumerate(batches(6)):
        if k == 3:
            for module in (plain, twin):
                module.norm.running_mean = module.norm.running_mean.clone()
        plain(x)[0].backward()
        compiled(x)[0].backward()
        check_equal(plain, twin)
    assert recorder.recorded == 4, "forward and backward, and both again"


def test_hooks_see_what_is_saved(recorder: RecorderOnCpu) -> None:
    plain, twin, compiled = nets()
    packed: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    for k, x in enumerate(batches(5)):
        plain(x)[0].backward()
        if k == 3:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = compiled(x)[0]
            loss.backward()
        else:
            compiled(x)[0].backward()
    check_equal(plain, twin)
    assert (256, 256) in packed  # an activation


def test_many_gradients_at_once(recorder: RecorderOnCpu) -> None:
    plain, twin, compiled = nets()
    for x in batches(3):
        compiled(x)[0].backward()
    (x,) = batches(1)
    arriving = torch.randn(3, 256, 128)
    expected, found = (
        torch.autograd.grad(call(x)[1], list(module.parameters()), arriving, is_grads_batched=True)
        for module, call in ((plain, plain), (twin, compiled))
    )
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a)


def test_gradients_are_not_differentiated_silently(recorder: RecorderOnCpu) -> None:
    _, twin, compiled = nets()
    for x in batches(3):
        compiled(x)[0].backward()
    (x,) = batches(1)
    first = torch.autograd.grad(compiled(x)[0], list(twin.parameters()), create_graph=True)
    with pytest.raises(gradsplit.Unsupported, match="double_backward"):
        first[0].sum().backward()


def test_gradients_of_inputs_that_alternate(recorder: RecorderOnCpu) -> None:
    plain, _, compiled = nets()
    leaves = [x.requires_grad_() for x in batches(2)]
    for step in range(6):
        x = leaves[step % 2]
        gradients = [torch.autograd.grad(call(x)[1].sum(), x)[0] for call in (plain, compiled)]
        assert torch.equal(*gradients)


def test_parameters_that_move(recorder: RecorderOnCpu) -> None:
    plain, twin, compiled = nets()
    for step, x in enumerate(batches(6)):
        if step == 3:
            for parameter in twin.parameters():
                parameter.data = parameter.data.clone() * 2
            for parameter in plain.parameters():
                parameter.data = parameter.data * 2
        plain.zero_grad()
        twin.zero_grad()
        plain(x)[0].backward()
        compiled(x)[0].backward()
        check_equal(plain, twin)


def test_inputs_that_move_one_after_the_other(recorder: RecorderOnCpu, caplog: Any) -> None:
    """As what another program computes: new tensors in each call, most of them where the ones before lay."""
    program = GraphedProgram("a program", lambda inputs: [sum(inputs)], recorder, 1)
    parameter, values = torch.tensor([0.5]), [torch.ones(1) for _ in range(30)]
    for step in range(30):
        values[step] = torch.full((1,), float(step))
        given = [parameter, *(value[:] for value in values)]
        assert torch.equal(program([*given])[0], sum(given))
    assert recorder.recorded == 2 and recorder.replayed == 29 and not caplog.records
    assert 0 not in program._copied_in


def test_inference_mode_gives_its_tensors(recorder: RecorderOnCpu) -> None:
    plain, _, compiled = nets()
    for x in batches(4):
        with torch.inference_mode():
            found = compiled(x)[1]
            assert found.is_inference() and torch.equal(found, plain(x)[1])
        del found
    loss = compiled(batches(1)[0])[0]
    loss.backward()
    assert recorder.replayed


def run_three_times(program: GraphedProgram, *inputs: torch.Tensor) -> Any:
    for _ in range(2):
        program([*inputs])
    return program([*inputs])


def test_results_in_the_memory_of_inputs(recorder: RecorderOnCpu) -> None:
    def program(inputs: list[torch.Tensor]) -> list[Any]:
        x, y = inputs
        return [x, y[1:].t(), None, x + 1]

    x, y = torch.randn(3), torch.randn(4, 5)[:, 1:]
    graphed = GraphedProgram("a program", program, recorder, 4, copied_in=[1])
    same, view, nothing, total = run_three_times(graphed, x, y)
    assert same.data_ptr() == x.data_ptr() and view.data_ptr() == y[1:].data_ptr()
    assert torch.equal(view, y[1:].t()) and nothing is None and torch.equal(total, x + 1)


@pytest.mark.parametrize(
    "make", [lambda: torch.randn(3, 1).expand(3, 4), lambda: torch.randn(6, 6)[::2, ::3]]
)
def test_layouts_with_gaps_and_shared_elements(recorder: RecorderOnCpu, make: Any) -> None:
    graphed = GraphedProgram(
        "a program",
        lambda inputs: [torch.empty_like(inputs[0]).copy_(inputs[0]), inputs[0] + 1],
        recorder,
        2,
        copied_in=[0],
        copied_out=[0],
    )
    for _ in range(4):
        x = make()
        copied, total = graphed([x])
        assert torch.equal(copied, x) and torch.equal(total, x + 1)
        del copied, total
    assert recorder.replayed == 3


def test_two_results_that_are_one_stay_one(recorder: RecorderOnCpu) -> None:
    def program(inputs: list[torch.Tensor]) -> list[Any]:
        result = inputs[0] * 2
        return [result, result]

    one, other = run_three_times(GraphedProgram("a program", program, recorder, 1), torch.randn(3))
    assert one is other


def test_a_failed_recording_is_not_tried_again(recorder: RecorderOnCpu, caplog: Any) -> None:
    recorder.failure = RuntimeError("operation not permitted")
    graphed = GraphedProgram("a program", lambda inputs: [inputs[0] + 1], recorder, 1)
    assert torch.equal(run_three_times(graphed, torch.zeros(2))[0], torch.ones(2))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "a program runs without a recording: recording failed: operation not permitted" in caplog.text


def test_reasons_of_the_moment(recorder: RecorderOnCpu, caplog: Any) -> None:
    graphed = GraphedProgram("a program", lambda inputs: [inputs[0] + 1], recorder, 1)
    recorder.against = "something else is captured"
    run_three_times(graphed, torch.zeros(2))
    assert caplog.text.count("something else is captured") == 1 and not recorder.recorded
    recorder.against = ""
    run_three_times(graphed, torch.zeros(2))
    assert recorder.recorded == 1


def test_recordings_of_the_process_are_limited(
    recorder: RecorderOnCpu, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphed_program, "_MOST_IN_PROCESS", 0)
    run_three_times(GraphedProgram("a program", lambda inputs: [inputs[0] + 1], recorder, 1), torch.zeros(2))
    assert "there are 0 recordings already" in caplog.text


def _graph(device: str, target: Any) -> torch.fx.GraphModule:
    """A graph of one node whose tensors are said to be on a device."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(target, (x,))
    graph.output((node,))
    with FakeTensorMode():
        x.meta["val"] = node.meta["val"] = torch.empty(2, device=device)
    return torch.fx.GraphModule({}, graph)


def _with_constant(numbers: int, is_returned: bool = False) -> torch.fx.GraphModule:
    module = _graph("cuda", torch.ops.aten.sin.default)
    (output,) = module.graph.find_nodes(op="output")
    with module.graph.inserting_before(output):
        constant = module.graph.create_node("get_attr", "constant")
    with FakeTensorMode():
        constant.meta["val"] = torch.empty(numbers)
    if is_returned:
        output.args = ((*output.args[0], constant),)  # type: ignore[misc]
    return module


sin = torch.ops.aten.sin.default
library = torch.library.Library("gradsplit_test", "FRAGMENT")
library.define("unsafe(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (_graph("cuda", sin), ""),
        (_graph("cpu", sin), "it has tensors on: cpu"),
        (_with_constant(1), ""),
        (_with_constant(2), "it has tensors on: cpu, cuda"),
        (_with_constant(1, is_returned=True), "it has tensors on: cpu, cuda"),
        (_graph("cuda", KeptCall("cond", lambda x: [x], ())), "what cond runs depends on data"),
        (_graph("cuda", torch.ops.gradsplit_test.unsafe.default), "marked as unsafe in CUDA graphs"),
    ],
)
def test_reasons_in_a_graph(module: torch.fx.GraphModule, reason: str) -> None:
    found = cuda_graphs.reason_against(module)
    assert reason in found and bool(reason) == bool(found)


@pytest.mark.parametrize(
    ("program", "launches"),
    [
        (lambda x: x.t().reshape(2, 3).unbind()[0], False),
        (lambda x: x, False),
        (lambda x: x + 1, True),
        (lambda x: x.max(0)[0].view(-1), True),
    ],
)
def test_which_graphs_launch_kernels(program: Any, launches: bool) -> None:
    traced = make_fx(program, tracing_mode="fake")(torch.ones(3, 2).t())
    assert cuda_graphs.launches_kernels(traced) is launches


def test_a_graph_without_kernels_is_not_recorded(
    recorder: RecorderOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "with_cuda_graphs", cuda_graphs.with_cuda_graphs)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda_graphs, "CudaRecorder", lambda device, **_: recorder)
    monkeypatch.setattr(cuda_graphs, "reason_against", lambda module: "")
    for program, replayed in ((lambda x: x.view(-1), 0), (lambda x: x + 1, 2)):
        compiled = gradsplit.compile(program, backend="aot_eager", mode="reduce-overhead")
        for x in (torch.randn(2, 2) for _ in range(3)):
            assert torch.equal(compiled(x), program(x))
        assert recorder.replayed == replayed


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_without_cuda_the_mode_is_the_default(caplog: Any) -> None:
    cuda_graphs._report_no_cuda.cache_clear()
    for _ in range(2):
        compiled = gradsplit.compile(lambda x: x + 1, backend="aot_eager", mode="reduce-overhead")
        assert torch.equal(compiled(torch.zeros(2)), torch.ones(2))
    assert caplog.text.count("CUDA graphs need a CUDA device") == 1
