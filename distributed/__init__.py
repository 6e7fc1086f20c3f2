"""Data parallelism for compiled programs: gradient buckets that are reduced under the backward that fills them."""

from distributed.compile_ddp import CompiledDDP, compile_ddp, inspect_ddp
from distributed.ddp_options import DDPOptions
from distributed.record_timeline import record_timeline

__all__ = ["CompiledDDP", "DDPOptions", "compile_ddp", "inspect_ddp", "record_timeline"]
