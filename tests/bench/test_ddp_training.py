"""The bench of data-parallel training runs on two CPU ranks, and completes what an earlier call measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.ddp_results import Figures, append_figures, read_figures, summary
from tests.start_ranks import start_ranks

BENCH = Path(__file__).with_name("ddp_training.py")


@pytest.mark.multi_process
@pytest.mark.timeout(300)
def test_a_call_completes_the_table_of_an_earlier_one(tmp_path: Path) -> None:
    results = tmp_path / "figures.jsonl"
    append_figures(results, Figures("gloo", "mlp", "inductor", 0, step_ms=123.45, loss=1.0))
    program = [
        *(str(BENCH), "--models", "mlp"),
        *("--sides", "inductor,all-reduce-25mb,eager-ddp,ours-ddp", "--results", str(results)),
        *("--steps", "2", "--warm-up", "1", "--rounds", "1", "--caches", str(tmp_path / "caches")),
    ]
    done = start_ranks(program, timeout_s=280)
    assert done.returncode == 0, done.stdout + done.stderr
    _, wire, eager, ours = read_figures(results)
    assert [wire.side, eager.side, ours.side] == ["all-reduce-25mb", "eager-ddp", "ours-ddp"]
    assert not ours.failed and ours.cold and ours.buckets >= 2 and ours.exposed_ms is not None
    assert abs(ours.loss - eager.loss) < 1e-2 * eager.loss
    assert "GB/s" in wire.note
    for text in ("123.45", "all-reduce-25mb", "eager-ddp", "exposed ms"):
        assert text in done.stdout, done.stdout


def test_the_summary_compares_with_the_best_peer_and_the_floors() -> None:
    times_ms = {"ours": 20, "ours-ddp": 21, "ddp-optimizer": 24, "python-reducer": 28, "ours-forward": 10}
    found = [Figures("sockets", "gpt2", side, 0, step_ms=ms, gradient_gib=1) for side, ms in times_ms.items()]
    found.append(Figures("sockets", "gpt2", "all-reduce", 0, step_ms=20))
    found.append(Figures("sockets", "gpt2", "no-optimization", 0, failed=True, note="no"))
    (line,) = summary(found)
    assert line.startswith("sockets gpt2: ours-ddp: 1.050 of ours; +12.5% faster than ddp-optimizer")
    assert line.endswith("0.700 of max(compute, forward + all-reduce) = 30.00 ms")
