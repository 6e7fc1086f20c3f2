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
    append_figures(results, Figures("gloo", "mlp", "inductor", step_ms=123.45, loss=1.0))
    program = [
        *(str(BENCH), "--models", "mlp"),
        *("--sides", "inductor,ours,ours-ddp,all-reduce,eager-ddp", "--results", str(results)),
        *("--rows", "2", "--warm-up-s", "0", "--caches", str(tmp_path / "caches")),
    ]
    done = start_ranks(program, timeout_s=280)
    assert done.returncode == 0, done.stdout + done.stderr
    _, alone, ours, wire, eager = read_figures(results)
    assert [alone.side, ours.side, wire.side, eager.side] == ["ours", "ours-ddp", "all-reduce", "eager-ddp"]
    assert not ours.failed and ours.cold and ours.buckets >= 2 and ours.exposed_ms is not None
    assert alone.ratio is None and eager.ratio is None and ours.ratio is not None and ours.ratio > 0
    assert abs(ours.loss - eager.loss) < 1e-2 * eager.loss
    assert "GB/s" in wire.note
    for text in ("123.45", "all-reduce", "eager-ddp", "exposed ms"):
        assert text in done.stdout, done.stdout


def test_the_summary_compares_with_the_best_peer_and_the_floors() -> None:
    times_ms = {"ours": 20, "ddp-optimizer": 24, "python-reducer": 28, "ours-forward": 10, "all-reduce": 20}
    found = [Figures("sockets", "gpt2", side, step_ms=ms) for side, ms in times_ms.items()]
    found.append(Figures("sockets", "gpt2", "ours-ddp", failed=True, note="of an earlier call"))
    found.append(Figures("sockets", "gpt2", "ours-ddp", step_ms=21, ratio=1.049))
    found.append(Figures("sockets", "gpt2", "ours-joined", step_ms=20.2, ratio=1.01))
    found.append(Figures("sockets", "gpt2", "no-optimization", failed=True, note="no"))
    (line,) = summary(found)
    assert line.startswith(
        "sockets gpt2: ours-ddp: 1.049 of ours (1.010 joined at the end); +12.5% faster than"
    )
    assert line.endswith("than ddp-optimizer; 0.700 of max(compute, forward + all-reduce) = 30.00 ms")


def test_what_is_compared_is_measured_together() -> None:
    groups = in_groups(["eager-ddp", "ours", "bridge-ddp", "all-reduce", "ours-ddp", "bridge"])
    assert groups == [("eager-ddp",), ("ours", "all-reduce", "ours-ddp"), ("bridge-ddp", "bridge")]
