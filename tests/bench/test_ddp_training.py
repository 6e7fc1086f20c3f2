"""The bench of data-parallel training runs on two CPU ranks, and completes what an earlier call measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.ddp_results import Figures, append_figures, read_figures, summary
from tests.bench.ddp_sides import in_groups
from tests.start_ranks import start_ranks

BENCH = Path(__file__).with_name("ddp_training.py")


@pytest.mark.multi_process
@pytest.mark.timeout(300)
def test_a_call_completes_the_table_of_an_earlier_one(tmp_path: Path) -> None:
    results = tmp_path / "figures.jsonl"
    append_figures(results, Figures("gloo", "two_types", "inductor", step_ms=123.45, loss=1.0))
    program = [
        *(str(BENCH), "--models", "two_types"),
        *("--sides", "inductor,eager-ddp,ours-ddp,ours-joined", "--results", str(results)),
        *("--rows", "2", "--warm-up-s", "0", "--caches", str(tmp_path / "caches")),
    ]
    done = start_ranks(program, timeout_s=280, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    _, eager, ours, alone, *variants = read_figures(results)
    assert [eager.side, ours.side, alone.side] == ["eager-ddp", "ours-ddp", "ours"]
    assert [figures.side for figures in variants] == ["ours-joined"]
    assert all(figures.ratio is not None and figures.loss == alone.loss for figures in variants)
    assert all(figures.ratio_spread is not None and figures.ratio_spread >= 0 for figures in variants)
    assert not ours.failed and ours.cold and ours.buckets >= 2 and ours.exposed_ms is not None
    assert alone.ratio is None and eager.ratio is None and ours.ratio is not None and ours.ratio > 0
    assert abs(ours.loss - eager.loss) < 1e-2 * eager.loss
    for text in ("123.45", "eager-ddp", "exposed ms", "joined at the end"):
        assert text in done.stdout, done.stdout


def test_the_summary_compares_with_the_best_peer_and_the_floors() -> None:
    times_ms = {"ours": 20, "ddp-optimizer": 24, "python-reducer": 28, "ours-forward": 10, "all-reduce": 20}
    found = [Figures("sockets", "gpt2", side, step_ms=ms) for side, ms in times_ms.items()]
    found.append(Figures("sockets", "gpt2", "ours-ddp", failed=True, note="of an earlier call"))
    found.append(Figures("sockets", "gpt2", "ours-ddp", step_ms=21, ratio=1.049, predicted_ms=0.5))
    found.append(Figures("sockets", "gpt2", "ours-joined", step_ms=20.2, ratio=1.01))
    found.append(Figures("sockets", "gpt2", "no-optimization", failed=True, note="no"))
    (line,) = summary(found)
    assert line.startswith(
        "sockets gpt2: ours-ddp: 1.049 of ours (1.010 joined at the end); +12.5% faster than"
    )
    assert "than ddp-optimizer; 0.700 of max(compute, forward + all-reduce) = 30.00 ms" in line
    assert line.endswith("predicted 20.50 ms, off by 2.4%")


def test_what_is_compared_is_measured_together() -> None:
    groups = in_groups(["eager-ddp", "ours-ddp", "ours-forward", "bridge-ddp", "all-reduce", "bridge"])
    assert groups == [
        ("eager-ddp",),
        ("ours-ddp", "ours", "ours-forward", "all-reduce"),
        ("bridge-ddp", "bridge"),
    ]
