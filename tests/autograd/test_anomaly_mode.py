"""Anomaly mode around compiled calls: it watches the real backward, not the trace, and points to the user's call."""

from __future__ import annotations

import pytest
import torch

import gradsplit
from tests.autograd.scenarios import BACKENDS, check_scenario, for_each, layer, leaf

pytestmark = pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")


def nothing_wrong(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    with torch.autograd.detect_anomaly():
        f(x, w).sum().backward()
    return x.grad, w.grad


def compiled_before(compile):
    f, x, w = compile(layer), leaf(3, 3), leaf(3, 3)
    f(x, w)
    return nothing_wrong(lambda _: f)


def not_a_number(compile):
    f = compile(lambda x: x.sqrt() * 0)
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    with torch.autograd.detect_anomaly():
        try:
            f(x).sum().backward()
        except RuntimeError as error:
            return "returned nan values in its 0th output" in str(error)
    return None


def not_a_number_unwatched(compile):
    f = compile(lambda x: x.sqrt() * 0)
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=False):
        f(x).sum().backward()
    return x.grad


def read_inside(compile):
    def program(x):
        return x + torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()

    f, x = compile(program), torch.zeros(2)
    first = f(x)
    with torch.autograd.detect_anomaly(check_nan=False):
        second = f(x)
    return first, second, torch.is_anomaly_enabled()


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (nothing_wrong, compiled_before, not_a_number, not_a_number_unwatched, read_inside)
}


@pytest.mark.parametrize("backend", BACKENDS)
@for_each(SCENARIOS)
def test_anomaly_mode(scenario, backend):
    check_scenario(scenario, backend)


def test_the_forward_call_is_shown():
    compiled = gradsplit.compile(lambda x: x.sqrt() * 0, backend="aot_eager", fullgraph=True)
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    with (
        torch.autograd.detect_anomaly(),
        pytest.warns(UserWarning, match=r"y = compiled\(x\)") as warned,
        pytest.raises(RuntimeError, match="returned nan values"),
    ):
        y = compiled(x)
        y.sum().backward()
    assert any("Traceback of forward call" in str(warning.message) for warning in warned)
