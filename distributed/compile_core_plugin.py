"""How ``compile_core`` finds us: the plug-in that claims ``DistributedDataParallel`` modules."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from compile_core.planners import ModuleCompiler
from distributed.compile_ddp import CompiledDDP

PLUGIN = ModuleCompiler(DistributedDataParallel, CompiledDDP)
