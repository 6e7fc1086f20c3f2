"""Data parallelism for compiled programs: gradient buckets that are reduced under the backward that fills them."""

from distributed.compile_ddp import CompiledDDP, compile_ddp, inspect_ddp
from distributed.ddp_options import DDPOptions
from distributed.explaining.ddp_explanation import DDPExplanation
from distributed.explaining.explain_ddp import explain_ddp
from distributed.explaining.record_timeline import record_timeline

__all__ = [
    "CompiledDDP",
    "DDPExplanation",
    "DDPOptions",
    "compile_ddp",
    "explain_ddp",
    "inspect_ddp",
    "record_timeline",
]
