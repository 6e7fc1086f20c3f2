"""Data parallelism for compiled programs: gradient buckets that are reduced under the backward that fills them."""

if __name__ == "distributed":
    from gradsplit.give_way import give_way

    give_way(__name__)
else:
    from gradsplit.distributed.compile_ddp import CompiledDDP, compile_ddp, inspect_ddp
    from gradsplit.distributed.ddp_options import DDPOptions
    from gradsplit.distributed.explaining.ddp_explanation import DDPExplanation
    from gradsplit.distributed.explaining.explain_ddp import explain_ddp
    from gradsplit.distributed.explaining.record_timeline import record_timeline
    from gradsplit.distributed.pipeline.checkpoints import merge_checkpoints
    from gradsplit.distributed.pipeline.export_pipeline import export_pipeline
    from gradsplit.distributed.pipeline.load_stage import load_stage

    __all__ = [
        "CompiledDDP",
        "DDPExplanation",
        "DDPOptions",
        "compile_ddp",
        "explain_ddp",
        "export_pipeline",
        "inspect_ddp",
        "load_stage",
        "merge_checkpoints",
        "record_timeline",
    ]
