"""Plans for gradient buckets and timelines of them: pure computation, no process group, no GPU."""

from bucketing.bucket import ALIGNMENT_BYTES, Bucket, BucketPlan, Parameter, format_bytes, pack_bucket
from bucketing.cost_model import CostModel
from bucketing.host_model import HostModel
from bucketing.link_model import LinkModel, fit_link_model
from bucketing.merge_plan import MergePlan, merge_plan
from bucketing.plot_timeline import plot_timeline
from bucketing.reducer_plan import reducer_plan
from bucketing.simulate import simulate
from bucketing.timeline import Interval, Timeline

__all__ = [
    "ALIGNMENT_BYTES",
    "Bucket",
    "BucketPlan",
    "CostModel",
    "HostModel",
    "Interval",
    "LinkModel",
    "MergePlan",
    "Parameter",
    "Timeline",
    "fit_link_model",
    "format_bytes",
    "merge_plan",
    "pack_bucket",
    "plot_timeline",
    "reducer_plan",
    "simulate",
]
