"""Data parallelism for compiled programs: gradient buckets that are reduced under the backward that fills them."""

import importlib
from typing import TYPE_CHECKING

if __name__ == "distributed":
    from gradsplit.give_way import give_way

    give_way(__name__)
else:
    from gradsplit.distributed.compile_ddp import CompiledDDP, compile_ddp, inspect_ddp
    from gradsplit.distributed.ddp_options import DDPOptions
    from gradsplit.distributed.explaining.ddp_explanation import DDPExplanation
    from gradsplit.distributed.explaining.explain_ddp import explain_ddp
    from gradsplit.distributed.explaining.record_timeline import record_timeline

    # Torch's pipelines load TorchDynamo: seconds of the start of every process, so only who asks for ours loads them.
    _PIPELINES = {
        "export_pipeline": "export_pipeline",
        "load_stage": "load_stage",
        "merge_checkpoints": "checkpoints",
    }

    if TYPE_CHECKING:
        from gradsplit.distributed.pipeline.checkpoints import merge_checkpoints
        from gradsplit.distributed.pipeline.export_pipeline import export_pipeline
        from gradsplit.distributed.pipeline.load_stage import load_stage
    else:

        def __getattr__(name):
            if name not in _PIPELINES:
                raise AttributeError(f"module 'gradsplit.distributed' has no attribute {name!r}")
            module = importlib.import_module(f"gradsplit.distributed.pipeline.{_PIPELINES[name]}")
            found = globals()[name] = getattr(module, name)
            return found

        def __dir__():
            return sorted({*globals(), *_PIPELINES})

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
