"""The example that trains a GPT, short: what it writes, and that its figures are what it claims."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.start_ranks import start_ranks


@pytest.mark.multi_process
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("train_ddp")
def test_eager_and_compiled_train_alike(tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = ["examples/train_ddp.py", "--steps", "10", "--batch-size", "4", "--out", str(out)]
    run = start_ranks(
        program, timeout_s=280, CUDA_VISIBLE_DEVICES=""
    )  # how many buckets: by this link's speed
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert "median step" in run.stdout and "bucket 0" in run.stdout

    report = json.loads((out / "report.json").read_text())
    pairs = list(zip(report["eager_losses"], report["compiled_losses"], strict=True))
    assert len(pairs) == 10
    assert all(abs(compiled - eager) <= 1e-4 * eager for eager, compiled in pairs)
    assert report["max_grad_rel_diff"] <= 1e-5
    assert report["graphs"] == 1
    assert report["segments"] >= 4
    assert len(report["buckets"]) >= 2, "one would be reduced behind the backward, which hides nothing"
    names = [name for bucket in report["buckets"] for name in bucket["parameters"]]
    assert len(names) == len(set(names)) == 53
    assert report["overlap_ms"] > 0
    assert report["eager_step_ms"] > 0 and report["compiled_step_ms"] > 0

    assert (out / "overlap.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} == {"compute", "all_reduce"}
    kernels = "".join(path.read_text() for path in (out / "kernels").glob("*.kernels.txt"))
    assert "static int" in kernels
