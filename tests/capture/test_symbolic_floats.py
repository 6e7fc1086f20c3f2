"""Floats that differ between calls, wherever they lie, stay open, and equal plain Python to the last bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn, optim

import gradsplit
from gradsplit.compile_core.backends.registry import DEFAULT_BACKEND
from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction

untyped: Any = torch
VALUES = [0.5, 2.5, 0.0, -0.0, math.nan, math.inf, 1.0, -1.0, 1e-300, 3.7]


def compile_eager(function, **options) -> Any:
    return CompiledFunction(function, lambda graph, inputs: graph.module, **options)


def same(one, other) -> bool:
    """Equal in type and to the last bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one.nan_to_num(nan=7.25).signbit(), other.nan_to_num(nan=7.25).signbit()) and (
            torch.equal(one.nan_to_num(nan=7.25), other.nan_to_num(nan=7.25))
        )
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


def check_values(function, values=VALUES, *, captures=2, fullgraph=True, make_arguments=None):
    compiled = compile_eager(function, fullgraph=fullgraph)
    for value in values:
        x = torch.tensor([1.5, -2.0, 0.0])
        extra = () if make_arguments is None else make_arguments()
        expected, found = function(x.clone(), value, *extra), compiled(x.clone(), value, *extra)
        assert same(expected, found), (value, expected, found)
    assert len(compiled.entries) == captures
    return compiled


def arithmetic(x, a):
    return x * (a * 0.1 - 3) + a, a + 1, -a, a - a, abs(a), 2 * a


def operations(x, a):
    y = torch.add(x, x, alpha=-a).mul_(a).lerp(x, a)
    y = y.addcdiv(x, x + 1, value=a * 2).clamp(min=a)
    grown = untyped._foreach_mul([y, x], 1 - a)
    return y, x**a, a / (x + 3), torch.full((2,), a), torch.where(x > a, x, a), *grown


@pytest.mark.parametrize("function", [arithmetic, operations])
def test_one_recapture_and_then_none(function):
    check_values(function)


def test_it_is_a_number_of_the_graph():
    compiled = check_values(arithmetic)
    graph = compiled.entries[0].captured.graph
    assert any(isinstance(entry.example, float) for entry in graph.inputs)


def test_integers_and_bools_never_become_floats():
    def scaled(x, a):
        return x * a, a + 1, type(a).__name__

    compiled = compile_eager(scaled, fullgraph=True)
    x = torch.tensor([1, 2])
    for value in (0.5, 2.5, 1.0, 1, True, 0, 0.0, False, 3.5, 7, 8, 1.0):
        expected, found = scaled(x, value), compiled(x, value)
        assert expected[0].dtype is found[0].dtype
        assert same(expected, found), value


def test_comparisons_are_guarded_not_the_value():
    def branches(x, a):
        if a < 0:
            raise ValueError("negative")
        if a != 0 and a <= 1:
            return x * a
        return x - a if a else x.clone()

    compiled = compile_eager(branches, fullgraph=True)
    x = torch.ones(2)
    for value in (0.5, 0.25, 0.125, 1.0, 2.0, 3.0, 0.0, -0.0, 0.75, 5.0, math.inf, math.nan):
        assert same(branches(x, value), compiled(x, value)), value
    with pytest.raises(ValueError, match="negative"):
        compiled(x, -1.0)
    # By value first, up to one, above, zero, and nan, which is on no side.
    assert len(compiled.entries) <= 5


def test_questions_about_nan_and_infinity():
    def asked(x, a):
        if math.isnan(a):
            return x - 1
        return (x * a, math.isfinite(a), math.isinf(a)), a in [a]

    check_values(asked, captures=4)  # by value, finite, nan, infinite


def test_containers_compare_by_identity_first():
    def asked(x, a):
        return x * 2, a in [1.0, a], a in (0.5, math.inf), [a].count(a), a == a

    compiled = compile_eager(asked, fullgraph=True)
    for value in VALUES:
        assert same(asked(torch.ones(2), value), compiled(torch.ones(2), value)), value


def test_division_by_zero_raises_as_in_plain_python():
    def divided(x, a):
        return x * (1 / a)

    compiled = compile_eager(divided)
    for value in (0.5, 0.25, 4.0):
        assert same(divided(torch.ones(2), value), compiled(torch.ones(2), value))
    with pytest.raises(ZeroDivisionError):
        compiled(torch.ones(2), 0.0)
    assert same(divided(torch.ones(2), 8.0), compiled(torch.ones(2), 8.0))
    assert len(compiled.entries) == 2


@pytest.mark.parametrize(
    "use",
    [
        lambda x, a: x * {0.5: 2, 1.5: 3}.get(a, 5),
        lambda x, a: (x, f"{a:.3f}", str(a)),
        lambda x, a: x + int(a * 2),
        lambda x, a: x + round(a, 1),
        lambda x, a: x + hash(a) % 7,
        lambda x, a: torch.arange(0, a),
        lambda x, a: nn.functional.dropout(x, a * 0),
        lambda x, a: x + a % 0.75 + a // 0.5 + a**2,
    ],
)
def test_other_uses_take_the_value(use):
    compiled = compile_eager(use)
    x = torch.ones(3)
    for value in (0.5, 1.5, 2.5, 1.5, 0.5, 4.0):
        assert same(use(x, value), compiled(x, value)), value


def test_numbers_behind_a_graph_break():
    """What a tensor gave differs at every call; uses of the value itself are left to plain Python."""

    def step(x, best):
        loss = x.sum().item()
        scaled = x * loss + loss * 2
        best = min(best, loss)
        return scaled, best, f"{loss:.2f}", scaled * best

    compiled = compile_eager(step)
    best = expected_best = 100.0
    for size in range(12):
        x = torch.full((2,), 7.3 - size)
        expected, found = step(x, expected_best), compiled(x, best)
        assert same(expected, found)
        expected_best, best = expected[1], found[1]
    assert all_entries(compiled) <= 12


def test_stores():
    class Holder:
        rate = 0.0

    def store(x, a, holder, items):
        holder.rate = a
        items.append(a * 0.5)
        items[0] = -a
        return x * holder.rate

    def run(function):
        holder, items, results = Holder(), [0.0], []
        for value in VALUES:
            del items[1:]
            results.append((function(torch.ones(2), value, holder, items), holder.rate, list(items)))
        return results

    compiled = compile_eager(store, fullgraph=True)
    assert same(run(store), run(compiled))
    assert len(compiled.entries) <= 3


def test_a_float_that_the_function_itself_changes():
    def decay(x, group):
        group["lr"] *= 0.9
        return x * group["lr"]

    compiled, plain, ours = compile_eager(decay, fullgraph=True), {"lr": 1.0}, {"lr": 1.0}
    for _ in range(10):
        assert same(decay(torch.ones(2), plain), compiled(torch.ones(2), ours))
        assert plain == ours
    assert len(compiled.entries) == 2


def test_powers():
    def powers(x, a, count):
        return x * a**2, a**0.5, 0.9**count, 2.0 ** (count - 40), (a + 1.0) ** 50.0, (-a) ** 3

    compiled = compile_eager(powers)
    for count, value in enumerate((0.5, 0.25, 1.0, 0.0, 0.125, 0.75), start=5):
        assert same(powers(torch.ones(2), value, count), compiled(torch.ones(2), value, count)), value
    for value in (-0.5, 4.0, math.nan, -0.0):
        assert same(powers(torch.ones(2), value, 3), compiled(torch.ones(2), value, 3)), value
    for function in (powers, compiled):
        with pytest.raises(OverflowError):
            function(torch.ones(2), 1e300, 3)


def test_powers_of_shares_stay_open():
    def shares(x, a, count):
        return x * a**2, a**0.5 + 0.9**count

    compiled = compile_eager(shares, fullgraph=True)
    for count, value in enumerate((0.5, 0.25, 1.0, 0.0, 0.125, 0.75), start=5):
        assert same(shares(torch.ones(2), value, count), compiled(torch.ones(2), value, count)), value
    assert len(compiled.entries) == 2


def test_long_computations_end():
    def powers(x, a):
        for _ in range(40):
            a = a * a
        return x * a

    compiled = compile_eager(powers)
    for value in (0.5, 0.25, 1.0):
        assert same(powers(torch.ones(2), value), compiled(torch.ones(2), value))


def test_mixed_with_sizes():
    def mixed(x, a, count):
        return x.sum() * (a * x.shape[0]) + count / a, int(a * count), math.cos(a) + math.cos(count)

    compiled = compile_eager(mixed)
    for size, value in ((3, 0.5), (4, 1.5), (5, 2.5), (6, 0.3), (7, 1e-3)):
        x = torch.arange(float(size))
        assert same(mixed(x, value, size + 3), compiled(x, value, size + 3))


def test_gradients():
    def scaled(x, a):
        return (x * a).sin().sum()

    compiled = compile_eager(scaled, fullgraph=True)
    for value in (0.5, 1.5, 2.5):
        gradients = []
        for function in (scaled, compiled):
            x = torch.tensor([1.0, 2.0], requires_grad=True)
            function(x, value).backward()
            gradients.append(x.grad)
        assert same(*gradients)
    assert len(compiled.entries) == 2


def test_static_where_the_user_says_so():
    compiled = compile_eager(arithmetic, dynamic=False)
    for value in (0.5, 1.5, 2.5):
        assert same(arithmetic(torch.ones(2), value), compiled(torch.ones(2), value))
    assert len(compiled.entries) == 3


def test_control_flow_bodies_take_the_value():
    def chosen(x, a):
        return torch.cond(x.sum() > 0, lambda y: y * a, lambda y: y - a, (x,))

    compiled = compile_eager(chosen)
    for value in (0.5, 1.5, 2.5):
        assert same(chosen(torch.ones(2), value), compiled(torch.ones(2), value))


@pytest.mark.parametrize("backend", ["aot_eager", DEFAULT_BACKEND])
def test_compiled_programs_take_all_values(backend, caplog):
    def scaled(x, a):
        return (x * a + a * 2).relu()

    compiled = gradsplit.compile(scaled, backend=backend)
    for value in VALUES:
        x = torch.tensor([1.5, -2.0, 0.25])
        torch.testing.assert_close(compiled(x, value), scaled(x, value), equal_nan=True)
    assert len(compiled.entries) == 2
    assert "torch's own kernels" not in caplog.text


def all_entries(compiled) -> int:
    functions = [compiled]
    for function in functions:
        found = (*function.continuations, *function.callees)
        functions += [other for other in found if other not in functions]
    return sum(len(function.entries) for function in functions)


OPTIMIZERS = {
    "sgd": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: optim.AdamW(parameters, lr=0.01),
    "adamw foreach": lambda parameters: optim.AdamW(parameters, lr=0.01, foreach=True),
}
SCHEDULES = {
    "exponential": lambda optimizer: optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    "powers": lambda optimizer: optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.95**epoch),
    "cosine": lambda optimizer: optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
}


def train(make_optimizer, make_schedule, *, compiled: bool, inside: bool = False):
    """Eight steps; the parameters, and the number of entries after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = make_optimizer(model.parameters())
    schedule = None if make_schedule is None else make_schedule(optimizer)

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if schedule is not None and inside:
            schedule.step()

    call: Any = gradsplit.compile(step, backend="eager") if compiled else step
    counts = []
    for index in range(8):
        call(torch.full((3, 4), float(index)))
        counts.append(all_entries(call) if compiled else 0)
        if schedule is not None and not inside:
            schedule.step()
    results = [parameter.detach() for parameter in model.parameters()]
    return [*results, optimizer.param_groups[0]["lr"]], counts


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_train_steps_under_a_schedule(make_optimizer):
    make_schedule = SCHEDULES["exponential"]
    expected, _ = train(make_optimizer, make_schedule, compiled=False)
    found, counts = train(make_optimizer, make_schedule, compiled=True)
    assert same(expected, found)
    _, without = train(make_optimizer, None, compiled=True)
    assert counts[-1] <= without[-1] + 1


def test_a_schedule_that_changes_the_decay_rates_of_moments():
    def make_schedule(optimizer):
        return optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)

    expected, _ = train(OPTIMIZERS["adamw"], make_schedule, compiled=False)
    found, counts = train(OPTIMIZERS["adamw"], make_schedule, compiled=True)
    assert same(expected, found)
    assert counts[3:] == counts[3:4] * 5, counts


@pytest.mark.parametrize("make_schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_the_schedule_itself_inside_of_the_step(make_schedule):
    expected, _ = train(OPTIMIZERS["sgd"], make_schedule, compiled=False)
    found, counts = train(OPTIMIZERS["sgd"], make_schedule, compiled=True, inside=True)
    assert same(expected, found)
    assert counts[3:] == counts[3:4] * 5, counts


def ramps(x, a):
    """As moving averages and consistency losses are weighted."""
    rise, fall = 1 - math.exp(-a / 2000), math.exp(-5 * (1 - a) ** 2)
    return x * rise, x * fall, x / math.log(a + 1), math.tanh(a) * x, x * math.pow(a, 0.9) + a**3, a**-0.5


def test_functions_of_floats_are_captured_once():
    check_values(ramps, [0.5, 2.5, 1.0, 3.7, 1e-3, 12.0])


@pytest.mark.parametrize(
    "function",
    [
        lambda x, a: x * math.exp(a),
        lambda x, a: x * math.log(a),
        lambda x, a: (x * a**2, a**3.0),
        lambda x, a: (x * a**-2, a**0.5, a**-1.5),
        lambda x, a: x * math.pow(a, 1.5) + math.pow(0.5, a),
        lambda x, a: x * 2 if math.exp(a) * a**2 > 3 else x,
    ],
)
def test_functions_of_floats_that_they_do_not_take(function):
    compiled, x = compile_eager(function), torch.tensor([1.5, -2.0, 0.0])
    for value in [0.5, 1.5, *VALUES, 800.0, 709.5, 1e154, 1.4e154, -1e200, 1e103, 5e-324, -math.inf, 2.0]:
        outcomes = []
        for run in (function, compiled):
            try:
                outcomes.append(run(x, value))
            except (ArithmeticError, ValueError) as error:
                outcomes.append((type(error).__name__, str(error)))
        assert same(*outcomes), value


def test_functions_bound_by_hand():
    def scale(owner, x):
        return x * owner.factor

    class Owner:
        factor = 3.0

    def call(x, owner):
        return scale.__get__(owner, Owner)(x), scale.__get__(None, Owner)(owner, x)

    compiled = compile_eager(call, fullgraph=True)
    assert same(call(torch.ones(2), Owner()), compiled(torch.ones(2), Owner()))

    def wrong(x):
        try:
            scale.__get__(None)
        except TypeError as error:
            return x, str(error)

    assert same(wrong(torch.ones(2)), compile_eager(wrong)(torch.ones(2)))


def test_probabilities(caplog):
    """They stay open between 0 and 1, with torch's numbers where torch draws them, and the right share in kernels."""

    def draws(x, p):
        mask = torch.empty_like(x).bernoulli_(1 - p)
        return mask, nn.functional.dropout(x, p), nn.functional.dropout(x * 1, p, inplace=True)

    shares = [0.1, 0.25, 0.5, 0.0, 1.0]
    x = torch.ones(4000, requires_grad=True)
    compiled = compile_eager(draws, fullgraph=True)
    for p in shares:
        torch.manual_seed(0)
        expected = draws(x, p)
        torch.manual_seed(0)
        assert same(expected, compiled(x, p))
    assert len(compiled.entries) == 4  # 0.1, any, 0.0 and 1.0
    in_kernels = gradsplit.compile(draws, fullgraph=True)
    for p in shares:
        mask, dropped, in_place = in_kernels(x, p)
        assert abs(mask.mean().item() - 1 + p) < 0.05 and set(mask.unique().tolist()) <= {0.0, 1.0}
        for result in (dropped, in_place):
            (gradient,) = torch.autograd.grad(result.sum(), x, retain_graph=True)
            assert torch.equal(gradient, result) and torch.equal(result != 0, result > 0.5)
            assert p == 1 or abs(result.mean().item() - 1) < 0.1
    assert "torch's own kernels" not in caplog.text
