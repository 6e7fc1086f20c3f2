"""What ``explain_ddp`` finds out, and how it prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import zip_longest

from gradsplit.bucketing.bucket import Bucket, BucketPlan, format_bytes
from gradsplit.bucketing.timeline import Timeline
from gradsplit.compile_core.compiled_calls.kept_random_state import kept_random_state

with kept_random_state():  # rich draws numbers when it is imported
    from rich.console import Console
    from rich.table import Table

_WIDTH = 140


@dataclass(frozen=True)
class ExplainedSegment:
    """A region of a compiled backward.

    Attributes:
        name: as in the timeline.
        gradients: the parameters whose gradients are complete when it ends.
        compute_ms: measured; 0 where it did not run.
    """

    name: str
    gradients: tuple[str, ...]
    compute_ms: float


@dataclass(frozen=True)
class DDPExplanation:
    """How this rank reduces the gradients of a compiled DDP module.

    Attributes:
        reason_for_reducer: why the module keeps stock DDP's reducer; "" where it does not. Where it does, ``pieces``
            and ``stock_plan`` are known, else all but ``pieces``.
        pieces: into how many each graph of the forward is cut on the reducer's buckets.
        plan: the buckets in use, in the order in which they are reduced.
        stock_plan: stock DDP's buckets; those that its reducer would rebuild for gradients that come in the order of
            ``plan``, where it has not.
        reasons: for every bucket why it ends where it does.
        segments: of all graphs' backwards, in the order in which they run.
        ready_ms: by parameter, when its gradient had come, since the backward began; measured.
        predicted: the backward as the planner sees it, from costs of the slowest rank.
        measured: a backward as it ran.
    """

    reason_for_reducer: str = ""
    pieces: tuple[int, ...] = ()
    plan: BucketPlan | None = None
    stock_plan: BucketPlan | None = None
    reasons: tuple[str, ...] = ()
    segments: tuple[ExplainedSegment, ...] = ()
    ready_ms: Mapping[str, float] | None = None
    predicted: Timeline | None = None
    measured: Timeline | None = None

    @property
    def summary(self) -> str:
        """The outcome in a few lines."""
        if self.reason_for_reducer:
            pieces = " and ".join(map(str, self.pieces))
            return f"The module keeps stock DDP's reducer: {self.reason_for_reducer}." + (
                f"\nIts graphs are cut on the reducer's buckets into {pieces} pieces." if pieces else ""
            )
        assert self.plan is not None and self.stock_plan is not None
        lines = [
            f"{len(self.plan.parameters)} gradients in {len(self.plan.buckets)} buckets (stock DDP: "
            f"{len(self.stock_plan.buckets)}), computed in {len(self.segments)} segments."
        ]
        for what, timeline in (("Predicted", self.predicted), ("Measured", self.measured)):
            if timeline is not None:
                lines.append(f"{what}: {_times(timeline)}.")
        return "\n".join(lines)

    def __str__(self) -> str:
        text = StringIO()
        console = Console(file=text, width=_WIDTH)
        console.print(self.summary, highlight=False)
        if self.stock_plan is None:
            return text.getvalue()
        ready_ms = self.ready_ms or {}
        if self.plan is None:
            console.print(_stock_table(self.stock_plan))
        else:
            console.print(_bucket_table(self.plan, self.stock_plan, self.reasons, ready_ms))
            console.print(_segment_table(self.segments))
            console.print(_parameter_table(self.plan, self.stock_plan, ready_ms))
        return text.getvalue()


def _times(timeline: Timeline) -> str:
    return (
        f"all-reduces take {timeline.all_reduce_ms:.2f} ms, of which {timeline.exposed_ms:.2f} ms are exposed, "
        f"in a backward of {1e3 * (timeline.end_s - timeline.start_s):.2f} ms"
    )


def _bucket_table(
    plan: BucketPlan, stock: BucketPlan, reasons: Sequence[str], ready_ms: Mapping[str, float]
) -> Table:
    table = Table(title="Buckets, beside stock DDP's", title_justify="left")
    for header in ("", "size", "gradients", "ready ms", "why it ends there", "stock: size", "gradients"):
        table.add_column(header, justify="left" if header.startswith("why") else "right")
    for index, (ours, theirs, why) in enumerate(zip_longest(plan.buckets, stock.buckets, reasons)):
        ready = [ready_ms[p.name] for p in ours.parameters if p.name in ready_ms] if ours else []
        table.add_row(
            str(index), *_size(ours), f"{max(ready):.2f}" if ready else "", why or "", *_size(theirs)
        )
    return table


def _stock_table(stock: BucketPlan) -> Table:
    table = Table("", "size", "gradients", "", title="The reducer's buckets", title_justify="left")
    for bucket in stock.buckets:
        names = [parameter.name for parameter in bucket.parameters]
        table.add_row(str(bucket.index), *_size(bucket), _shown(names))
    return table


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _size(bucket: Bucket | None) -> tuple[str, str]:
    return ("", "") if bucket is None else (format_bytes(bucket.bytes), str(len(bucket.parameters)))


def _segment_table(segments: Sequence[ExplainedSegment]) -> Table:
    table = Table("segment", "compute ms", "completes", title="Segments", title_justify="left")
    for segment in segments:
        table.add_row(segment.name, f"{segment.compute_ms:.2f}", _shown(segment.gradients))
    return table


def _parameter_table(plan: BucketPlan, stock: BucketPlan, ready_ms: Mapping[str, float]) -> Table:
    table = Table(title="Parameters, in the order in which their gradients are reduced", title_justify="left")
    for header in ("parameter", "size", "ready ms", "bucket", "stock DDP's"):
        table.add_column(header, justify="left" if header == "parameter" else "right")
    stock_bucket = {
        parameter.name: bucket.index for bucket in stock.buckets for parameter in bucket.parameters
    }
    for bucket in plan.buckets:
        for parameter in bucket.parameters:
            ready = ready_ms.get(parameter.name)
            table.add_row(
                parameter.name,
                format_bytes(parameter.bytes),
                "" if ready is None else f"{ready:.2f}",
                str(bucket.index),
                str(stock_bucket[parameter.name]),
            )
    return table
