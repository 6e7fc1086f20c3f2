"""Plans for gradient buckets and timelines of them: pure computation, no process group, no GPU."""

if __name__ == "bucketing":
    from gradsplit.give_way import give_way

    give_way(__name__)
else:
    from gradsplit.bucketing.bucket import (
        ALIGNMENT_BYTES,
        Bucket,
        BucketPlan,
        Parameter,
        format_bytes,
        pack_bucket,
    )
    from gradsplit.bucketing.check_schedule import check_schedule
    from gradsplit.bucketing.cost_model import CostModel, HostModel
    from gradsplit.bucketing.link_model import LinkModel, fit_link_model
    from gradsplit.bucketing.merge_plan import MergePlan, merge_plan
    from gradsplit.bucketing.pipeline_schedule import Action, PipelineSchedule
    from gradsplit.bucketing.plot_timeline import plot_pipeline, plot_timeline
    from gradsplit.bucketing.reducer_plan import reducer_plan
    from gradsplit.bucketing.simulate import simulate
    from gradsplit.bucketing.simulate_pipeline import PipelineTimeline, StageCost, simulate_pipeline
    from gradsplit.bucketing.timeline import Interval, Timeline

    __all__ = [
        "ALIGNMENT_BYTES",
        "Action",
        "Bucket",
        "BucketPlan",
        "CostModel",
        "HostModel",
        "Interval",
        "LinkModel",
        "MergePlan",
        "Parameter",
        "PipelineSchedule",
        "PipelineTimeline",
        "StageCost",
        "Timeline",
        "check_schedule",
        "fit_link_model",
        "format_bytes",
        "merge_plan",
        "pack_bucket",
        "plot_pipeline",
        "plot_timeline",
        "reducer_plan",
        "simulate",
        "simulate_pipeline",
    ]
