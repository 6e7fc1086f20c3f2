"""Switches by which a process or a part of it does without compilation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradsplit
from gradsplit.compile_core.errors import CompileError
from gradsplit.compile_core.interface.testing import CompileCounter


@pytest.mark.parametrize("name", ["GRADSPLIT_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_a_process_can_do_without_compilation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)
    monkeypatch.setenv(name, "0")
    assert gradsplit.compile(model) is not model
    monkeypatch.setenv(name, "1")
    assert gradsplit.compile(model) is model
    assert gradsplit.compile(fullgraph=True)(len) is len


def test_the_stance_of_torch_is_heeded() -> None:
    counter = CompileCounter()
    f = gradsplit.compile(lambda x, y=2: x * y, backend=counter)
    module = gradsplit.compile(torch.nn.Linear(3, 3), backend=counter)
    x = torch.ones(3)

    with torch.compiler.set_stance("force_eager"):
        assert f(x).tolist() == [2.0] * 3
        assert f(x, y=3).tolist() == [3.0] * 3
        assert module(x).shape == (3,)
    with torch.compiler.set_stance("eager_on_recompile"):
        assert f(x).tolist() == [2.0] * 3
    with (
        torch.compiler.set_stance("fail_on_recompile"),
        pytest.raises(CompileError, match="fail_on_recompile"),
    ):
        f(x)
    assert counter.frame_count == 0
    f(x)
    assert counter.frame_count == 1

    for name in ("eager_on_recompile", "fail_on_recompile", "force_eager"):

        @torch.compiler.set_stance(name)
        def call() -> torch.Tensor:
            return f(x)

        assert call().tolist() == [2.0] * 3
    with torch.compiler.set_stance("eager_on_recompile"):
        assert f(x.double()).dtype == torch.float64
    assert counter.frame_count == 1
    f(x.double())
    assert counter.frame_count == 2


@pytest.fixture
def ddp() -> Iterator[DistributedDataParallel]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DistributedDataParallel(torch.nn.Linear(3, 2))
    dist.destroy_process_group()


def test_stock_ddp_runs_where_compilation_is_switched_off(
    ddp: DistributedDataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, x = gradsplit.compile(ddp), torch.randn(4, 3)
    gradients = []
    for stance in ("force_eager", "default", "force_eager"):
        with torch.compiler.set_stance(stance):
            compiled(x).square().sum().backward()
        gradients.append(compiled.module.weight.grad)
        compiled.zero_grad()
    torch.testing.assert_close(gradients, gradients[:1] * 3)
    stepping = gradsplit.distributed.DDPOptions(step_in_backward=torch.optim.SGD(ddp.parameters(), lr=0.1))
    monkeypatch.setenv("GRADSPLIT_DISABLE", "1")
    assert gradsplit.distributed.compile_ddp(ddp) is ddp
    with pytest.raises(ValueError, match="switched off"):
        gradsplit.distributed.compile_ddp(ddp, stepping)
