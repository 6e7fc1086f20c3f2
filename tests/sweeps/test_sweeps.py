"""How a sweep spreads its models, ends what is stuck, and tells what is too far from what it should be."""

import math
import os
import time
from collections import Counter
from dataclasses import asdict, replace

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn

from tests.sweeps.cases import Case, in_order
from tests.sweeps.measure import OURS, TORCHS, Bounds, Result, Setting, _shaken, excess_in_float64, measure
from tests.sweeps.report import report
from tests.sweeps.workers import Resources, least_used, run_all

ON_CPU = Setting(training=True, autocast=True, device="cpu", backend=None)


def test_processes_go_to_the_card_that_has_fewest():
    used: list[str] = []
    for _ in range(10):
        used.append(least_used(used, ["0", "1", "2", "3"]))
    assert Counter(used) == {"0": 3, "1": 3, "2": 2, "3": 2}


def test_each_family_comes_before_its_second_member():
    def case(name):
        return Case(name, name[:2], lambda: (nn.Identity(), {}))

    found = in_order([[case(name) for name in ("a1", "a1x", "a2", "a3", "a4")], [case("b1"), case("b1x")]])
    assert [one.name for one in found] == ["a1", "b1", "a2", "a3", "a4", "a1x", "b1x"]


def _pretend(result, setting, tell):
    result.worst = os.environ["CUDA_VISIBLE_DEVICES"]
    result.width = len(os.sched_getaffinity(0))
    if result.name == "left out":
        result.skipped = "cannot be made"
    elif result.name == "crashes":
        result.stage = "compiled"
        tell(result)
        os._exit(3)
    elif result.name == "stuck":
        result.graphs = 1
        result.stage = "compiled" if result.compiler == OURS else "compared"
        tell(result)
        end = time.monotonic() + 100
        while time.monotonic() < end:
            pass
    tell(result)


def test_a_stuck_process_is_ended_and_others_see_cards_in_turn():
    tasks = [
        (name, compiler) for name in ("stuck", "left out", "crashes", "runs") for compiler in (OURS, TORCHS)
    ]
    resources = Resources(workers=2, cards=["5", "7"], limit_s=3, end=time.monotonic() + 200)
    found = {(one["name"], one["compiler"]): one for one in run_all(tasks, ON_CPU, resources, _pretend)}
    assert ("left out", OURS) in found and ("left out", TORCHS) not in found
    assert found["stuck", OURS]["error"] == "takes longer than 3 s (while it was compiled)"
    assert found["stuck", OURS]["graphs"] == 1
    assert found["stuck", TORCHS]["worst"] == "takes longer than 3 s" and not found["stuck", TORCHS]["error"]
    assert "ended with 3" in found["crashes", TORCHS]["error"]
    assert not found["runs", TORCHS]["error"]
    cores = len(os.sched_getaffinity(0))
    assert sorted({one["width"] for one in found.values()}) == sorted({(cores + 1) // 2, max(1, cores // 2)})
    assert found["stuck", OURS]["worst"] == "5" and "7" in {one["worst"] for one in found.values()}


def test_nothing_starts_after_the_end():
    resources = Resources(workers=2, cards=[], limit_s=3, end=time.monotonic() - 1)
    assert list(run_all([("runs", OURS)], ON_CPU, resources, _pretend)) == []


class Draws(nn.Module):
    """A model with dropout and with a batch norm, whose buffers change."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.dropout = nn.Dropout(probability)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.dropout(self.norm(self.one(x)).relu()))


@pytest.mark.parametrize("probability", [0.0, 0.5])
@pytest.mark.parametrize("compiler", [OURS, TORCHS])
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_a_model_is_measured_within_bounds(compiler, probability, monkeypatch):
    for name in ("force_disable_caches", "compile_threads", "fallback_random"):  # set by it, undone after
        monkeypatch.setattr(inductor_config, name, getattr(inductor_config, name))
    case = Case("made/draws", "draws", lambda: (Draws(probability), {"x": torch.randn(32, 8)}))
    told: list[Result] = []
    measure(case, compiler, replace(ON_CPU, backend="aot_eager"), lambda result: told.append(replace(result)))
    last = told[-1]
    assert not last.skipped and not last.error and last.graphs == last.in_a_call == 1 and not last.breaks
    assert last.draws == (probability > 0) and last.has_float64
    assert last.excess is not None and last.excess <= 1 and 0 < last.width < 0.1


class Silent(nn.Module):
    """A model that gives no tensor back, as one whose configuration names no layer to take results from."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> tuple[()]:
        self.norm(x)
        return ()


@pytest.mark.parametrize("training", [True, False])
def test_a_model_without_results_is_left_out(training):
    told: list[Result] = []
    case = Case("made/silent", "silent", lambda: (Silent(), {"x": torch.randn(4, 8)}))
    measure(case, OURS, replace(ON_CPU, training=training), lambda result: told.append(replace(result)))
    assert told[-1].skipped == "ValueError: gives no tensor, and no parameter gets a gradient"


class Told(nn.Module):
    """Computes something else while it is compiled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (3 if torch.compiler.is_compiling() else 2)


def test_a_model_that_asks_whether_it_is_compiled():
    told: list[Result] = []
    case = Case("made/told", "told", lambda: (Told(), {"x": torch.randn(4)}))
    measure(case, OURS, replace(ON_CPU, backend="eager"), lambda result: told.append(replace(result)))
    assert told[-1].excess is not None and told[-1].excess > 1 and told[-1].excess_while_compiled == 0


@pytest.mark.parametrize(("factor", "is_same"), [(1.0, True), (1 + 1e-9, True), (1 + 1e-6, False)])
def test_float64_tells_rounding_from_another_program(factor, is_same):
    def compile(module, setting, result, draws_as_plain):
        assert draws_as_plain and not setting.autocast
        return lambda input: module(input) * factor

    excess = excess_in_float64(compile, nn.Linear(4, 4), {"input": torch.randn(3, 4)}, ON_CPU)
    assert excess is not None and (excess <= 1) == is_same


def test_weights_are_rounded_otherwise_each_time():
    """Though each run begins with the same seed."""
    model, found = nn.Linear(4, 4), []
    for shaken in _shaken(model, 2.0**-9):
        torch.manual_seed(0)
        found.append(shaken.weight.detach() / model.weight.detach() - 1)
    unchanged, first, second = found
    assert unchanged.abs().max() < 1e-6 and not torch.equal(first, second)
    torch.testing.assert_close(
        torch.stack([first, second]).abs(), torch.full((2, 4, 4), 2.0**-9), rtol=1e-3, atol=0
    )


def test_what_is_too_far_is_reported():
    bounds = Bounds({"a": torch.tensor([1.0, 2.0])}, {"a": 0.01}, True)
    assert bounds.excess({"a": torch.tensor([1.0, 2.005])})[0] == pytest.approx(0.5, rel=1e-3)
    assert bounds.excess({"a": torch.tensor([1.0, 2.1])})[0] > 9
    assert bounds.excess({"a": torch.tensor([1.0, math.nan])})[0] == math.inf
    assert bounds.excess({"b": torch.tensor([1.0, 2.0])})[0] == math.inf
    ours = Result("made/one", OURS, graphs=2, excess=10.0, worst="a: 0.1 of 2", seconds=3.0)
    ours.breaks = {"log: a graph runs with torch's own kernels: why": 1}
    torchs = Result("made/one", TORCHS, graphs=1, seconds=2.0)
    as_told = Result("made/told", OURS, graphs=1, excess=2.0, excess_while_compiled=0.0)
    rounded = Result("made/rounded", OURS, graphs=1, excess=3.0, excess_in_float64=0.1)
    changed = Result("made/changed", OURS, graphs=2, in_a_call=1)
    stuck = [Result(f"made/{name}", OURS, error="takes long") for name in ("alone", "beside", "both")]
    torchs_of_stuck = [Result("made/beside", TORCHS), Result("made/both", TORCHS, error="raises")]
    text = report(
        [asdict(one) for one in (as_told, ours, torchs, rounded, changed, *stuck, *torchs_of_stuck)]
    )
    for line in (
        "in one graph: 3 of 7 (42.9 %), 1 of them in another one from the second call on",
        "more graphs than torch.compile: 1",
        "further from plain PyTorch than the bound: 1",
        "further from plain PyTorch than the bound, and the same in float64: 1",
        "values within bounds: 1 of 3 that were compared, 0 of them with float64",
        "with torch's own kernels, or calls made again: 1",
        "  made/one: 3.0 against 2.0",
        "  made/alone: takes long (torch.compile: not run)",
        "  made/beside: takes long (torch.compile: runs)",
        "  made/both: takes long (torch.compile: raises)",
    ):
        assert line in text.splitlines()
