"""Random differentiable programs: compiled equals eager, gradients too."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.autograd.compare_with_eager import check

# Each maps a square matrix (and a second one) to a square matrix of the same size.
UNARY = {
    "sin": lambda x: x.sin(),
    "exp": lambda x: x.clamp(max=2).exp(),
    "sigmoid": lambda x: x.sigmoid(),
    "relu": lambda x: x.relu(),
    "scale": lambda x: x * 0.5 + 1,
    "transpose": lambda x: x.t(),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.t().contiguous(),
    "reshape": lambda x: x.t().reshape(-1).view(4, 4),
    "roll": lambda x: torch.cat([x[1:], x[:1]]),
    "softmax": lambda x: x.softmax(-1),
    "normalised": lambda x: torch.nn.functional.layer_norm(x, (4,)),
    "sum": lambda x: x.sum(0, keepdim=True).expand(4, 4),
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "max": lambda x: x.max(1, keepdim=True).values.expand(4, 4),
    "detach": lambda x: x + x.detach(),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5),
    "in_place": lambda x: x.clone().mul_(2).add_(1),
    "row_in_place": lambda x: _row_in_place(x),
    "view_in_place": lambda x: _view_in_place(x),
    "fill_diagonal": lambda x: x.clone().fill_diagonal_(1),
    "tril": lambda x: x.tril(),
    "index": lambda x: x[[0, 2, 1, 0]],
    "where": lambda x: torch.where(x > 0, x, -0.1 * x),
}
BINARY = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "matmul": lambda x, y: x @ y,
    "div": lambda x, y: x / (y.abs() + 1),
    "maximum": lambda x, y: torch.maximum(x, y),
    "add_in_place": lambda x, y: (x * 1).add_(y),
    "copy_in_place": lambda x, y: _copy_in_place(x, y),
}


def _row_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[1].mul_(3)
    return y


def _view_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y.t().view(4, 2, 2)[:, 0].add_(1)
    return y


def _copy_in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x.clone()
    z[:, 1:3].copy_(y[:, :2])
    return z


@st.composite
def programs(draw: st.DrawFn):
    """Steps over a growing list of values, and which of the values are returned."""
    steps = []
    count = 3
    for _ in range(draw(st.integers(1, 8))):
        name = draw(st.sampled_from([*UNARY, *BINARY]))
        arity = 1 if name in UNARY else 2
        steps.append((name, tuple(draw(st.integers(0, count - 1)) for _ in range(arity))))
        count += 1
    returned = draw(st.lists(st.integers(3, count - 1), min_size=1, max_size=3, unique=True))
    return tuple(steps), tuple(returned)


def program_of(steps, returned):
    def program(a, b, c):
        values = [a, b, c]
        for name, arguments in steps:
            values.append({**UNARY, **BINARY}[name](*(values[k] for k in arguments)))
        # Views of inputs or of one another are results with rules of their own; ``test_trace_joint`` has
        # them.
        return tuple(values[k] * 1 for k in returned)

    return program


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(programs(), st.tuples(*[st.booleans()] * 3))
def test_compiled_equals_eager(described, requires_grad):
    torch.manual_seed(0)
    inputs = [torch.randn(4, 4, dtype=torch.float64, requires_grad=flag) for flag in requires_grad]
    check(program_of(*described), *inputs, rtol=1e-12, atol=1e-12)
