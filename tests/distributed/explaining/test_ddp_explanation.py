"""What ``explain_ddp`` prints, for figures that are given."""

from __future__ import annotations

from gradsplit.bucketing import Interval, Parameter, Timeline, reducer_plan
from gradsplit.distributed import DDPExplanation
from gradsplit.distributed.explaining.ddp_explanation import ExplainedSegment

PARAMETERS = [Parameter(name, 256, 4, "torch.float32", "cpu") for name in ("head", "body", "stem")]
STEP = Timeline(
    (
        Interval("compute", "backward_0", 0.0, 0.010),
        Interval("all_reduce", "bucket 0", 0.008, 0.0125, 3072),
    )
)


def test_planned_buckets_stand_beside_stock_ddps() -> None:
    explanation = DDPExplanation(
        plan=reducer_plan(PARAMETERS, [4096]),
        stock_plan=reducer_plan(PARAMETERS, [0]),
        reasons=("the last",),
        segments=(ExplainedSegment("backward_0", ("head", "body", "stem"), 10.0),),
        ready_ms={"head": 1.25, "body": 2.0, "stem": 10.0},
        predicted=Timeline(STEP.intervals[:1]),
        measured=STEP,
    )
    lines = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in str(explanation).splitlines()
        if line.startswith("│")
    ]
    assert lines == [
        ["0", "3.0 KiB", "3", "10.00", "the last", "1.0 KiB", "1"],
        ["1", "", "", "", "", "1.0 KiB", "1"],
        ["2", "", "", "", "", "1.0 KiB", "1"],
        ["backward_0", "10.00", "head, body, stem"],
        ["head", "1.0 KiB", "1.25", "0", "0"],
        ["body", "1.0 KiB", "2.00", "0", "1"],
        ["stem", "1.0 KiB", "10.00", "0", "2"],
    ]
    assert explanation.summary.splitlines() == [
        "3 gradients in 1 buckets (stock DDP: 3), computed in 1 segments.",
        "Predicted: all-reduces take 0.00 ms, of which 0.00 ms are exposed, in a backward of 10.00 ms.",
        "Measured: all-reduces take 4.50 ms, of which 2.50 ms are exposed, in a backward of 12.50 ms.",
    ]


def test_a_module_of_the_reducer_prints_reason_pieces_and_buckets() -> None:
    explanation = DDPExplanation(
        reason_for_reducer="rank 0: a communication hook is registered",
        pieces=(3, 1),
        stock_plan=reducer_plan(PARAMETERS, [2048]),
    )
    text = str(explanation)
    assert text.startswith(
        "The module keeps stock DDP's reducer: rank 0: a communication hook is registered.\n"
        "Its graphs are cut on the reducer's buckets into 3 and 1 pieces.\n"
    )
    assert "2.0 KiB" in text and "head, body" in text
