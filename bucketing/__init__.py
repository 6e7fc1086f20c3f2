"""Plans for gradient buckets and timelines of them: pure computation, no process group, no GPU."""

from bucketing.bucket import ALIGNMENT_BYTES, Bucket, BucketPlan, Parameter, format_bytes, pack_bucket
from bucketing.plot_timeline import plot_timeline
from bucketing.reducer_plan import reducer_plan
from bucketing.timeline import Interval, Timeline

__all__ = [
    "ALIGNMENT_BYTES",
    "Bucket",
    "BucketPlan",
    "Interval",
    "Parameter",
    "Timeline",
    "format_bytes",
    "pack_bucket",
    "plot_timeline",
    "reducer_plan",
]
