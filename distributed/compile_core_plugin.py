"""How ``compile_core`` finds us: the plug-in that claims ``DistributedDataParallel`` modules, and splits graphs that
run inside of one."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from gradsplit.compile_core.interface.module_compilers import ModuleCompiler
from gradsplit.distributed.explaining.explain_ddp import explain_ddp
from gradsplit.distributed.explaining.record_run import compile_recorded
from gradsplit.distributed.reducer.graph_in_ddp import compile_in_ddp

PLUGIN = ModuleCompiler(DistributedDataParallel, compile_recorded, compile_in_ddp, explain_ddp)
