"""Calls under modes of torch: no gradients, inference, function modes."""

from __future__ import annotations

import torch
from torch import nn

from tests.multi_process.ddp_harness import (
    DEVICE,
    Net,
    case,
    check_buffers,
    check_close,
    check_in_graph,
    data,
    pair,
    train,
)


@case()
def evaluation_without_gradients() -> None:
    stock, compiled = pair()
    train((stock, compiled), steps=1)
    with torch.no_grad():
        check_close(compiled(data(5)), stock(data(5)))
    compiled.eval(), stock.eval()
    with torch.inference_mode():
        check_close(compiled(data(5)), stock(data(5)))
    compiled.train(), stock.train()
    train((stock, compiled), steps=1)


@case()
def first_call_under_a_mode() -> None:
    stock, compiled = pair(lambda: Net(norm=nn.BatchNorm1d(32)))
    with torch.overrides.BaseTorchFunctionMode():
        train((stock, compiled), steps=1)
    train((stock, compiled), steps=1)
    check_in_graph(compiled)
    check_buffers(stock, compiled)


@case()
def modes_in_later_calls() -> None:
    stock, compiled = pair(lambda: Net(norm=nn.BatchNorm1d(32)))
    train((stock, compiled), steps=1)
    for mode in (torch.overrides.BaseTorchFunctionMode(), torch.device(DEVICE)):
        with mode:
            train((stock, compiled), steps=2)
        check_in_graph(compiled)
    check_buffers(stock, compiled)
