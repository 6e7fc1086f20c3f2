"""What the gradient of a mean over windows takes for its sizes alone is not kept for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gradsplit.compile_core.autograd.partitioning.partition import partition
from gradsplit.compile_core.autograd.rewrites.unread_arguments import leave_unread_out
from gradsplit.compile_core.ir.tensor_spec import TensorSpec
from tests.autograd.compare_with_eager import check, joint_graph

MEANS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "windows": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "some of them": lambda x: F.avg_pool2d(x, 5, 3, 2, ceil_mode=True, count_include_pad=False),
    "cubes": lambda x: F.avg_pool3d(x.unsqueeze(2), (1, 3, 3), 2, (0, 1, 1)),
    "so many": lambda x: F.adaptive_avg_pool2d(x, (5, 7)),
    "so many cubes": lambda x: F.adaptive_avg_pool3d(x.unsqueeze(2), (1, 5, 7)),
}
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "a part": lambda x: torch.cat([x, x], 1).contiguous(memory_format=torch.channels_last)[:, 4:20],
}


def image(side: int = 256) -> torch.Tensor:
    return torch.randn(1, 16, side, side, requires_grad=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mean", MEANS)
def test_what_means_are_of_is_not_kept(mean: str, layout: str) -> None:
    def program(x):
        return MEANS[mean](LAYOUTS[layout](x.sin()))

    joint = leave_unread_out(joint_graph(program, image()))
    (memory,) = joint.module.graph.find_nodes(op="call_function", target=torch.ops.aten.empty_strided.default)
    assert TensorSpec.of(memory.meta["val"]).is_dense
    assert partition(joint).saved_bytes == 0
    check(program, image(), backend="triton", atol=1e-6, rtol=1e-6)


def seen(x):
    value = x.sin()
    return MEANS["windows"](value), value


@pytest.mark.parametrize(
    ("program", "side"),
    [
        (lambda x: MEANS["windows"](x.sin()), 128),
        (seen, 256),
        (lambda x: MEANS["windows"](x[:, 2:]), 512),
    ],
)
def test_what_is_small_or_seen_by_others_stays(program: Callable[..., Any], side: int) -> None:
    joint = joint_graph(program, image(side))
    before = joint.module.code
    assert leave_unread_out(joint).module.code == before


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mean", MEANS)
def test_no_element_is_read(mean: str, layout: str, dtype: torch.dtype, device: str) -> None:
    def gradient(fill: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = torch.randn(1, 16, 20, 20, device=device, dtype=dtype, requires_grad=True)
        value = LAYOUTS[layout](x)
        result = MEANS[mean](value)
        value.data.copy_(fill(value))
        return torch.autograd.grad(result, x, torch.ones_like(result))[0]

    nothing = gradient(lambda value: torch.full_like(value, float("nan")))
    torch.testing.assert_close(nothing, gradient(lambda value: value))
