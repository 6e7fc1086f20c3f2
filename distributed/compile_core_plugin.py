"""How ``compile_core`` finds us: the plug-in that claims ``DistributedDataParallel`` modules, and splits graphs that
run inside of one."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from compile_core.planners import ModuleCompiler
from distributed.compile_ddp import CompiledDDP
from distributed.explaining.explain_ddp import explain_ddp
from distributed.reducer.graph_in_ddp import compile_in_ddp

PLUGIN = ModuleCompiler(DistributedDataParallel, CompiledDDP, compile_in_ddp, explain_ddp)
