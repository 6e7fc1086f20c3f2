"""How ``compile_core`` finds us: the plug-in that claims ``DistributedDataParallel`` modules, and splits graphs that
run inside of one."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from gradsplit.compile_core.interface.module_compilers import ModuleCompiler
from gradsplit.distributed.compile_ddp import CompiledDDP
from gradsplit.distributed.explaining.explain_ddp import explain_ddp
from gradsplit.distributed.reducer.graph_in_ddp import compile_in_ddp

PLUGIN = ModuleCompiler(DistributedDataParallel, CompiledDDP, compile_in_ddp, explain_ddp)
