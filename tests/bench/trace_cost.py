"""Seconds of joint trace and partition, and bytes saved for the backward: ours beside torch's AOTAutograd.

Both sides get the same graph (torch's Dynamo captures it once) of the same model in training mode with a loss, at the
same shapes, in one process, alternating. The table shows medians of CPU seconds: tracing is one thread's work, and a
busy neighbour must not count. Torch's side is ``aot_module_simplified`` with TorchInductor's decompositions, its
min-cut partitioner and compilers that return at once; ours is ``trace_joint`` and ``partition`` with the default
backend's decompositions. Bytes saved are those of activations: parameters, buffers and inputs that the backward reads
count on neither side.

    python -m tests.bench.trace_cost [--repeats 3] [--models gpt2,bert,resnet50,llama]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode

from gradsplit.compile_core.autograd.partitioning.partition import partition
from gradsplit.compile_core.autograd.rewrites.random_to_counters import random_to_counters
from gradsplit.compile_core.autograd.trace_joint import trace_joint
from gradsplit.compile_core.autograd.tracing import random_decompositions
from gradsplit.compile_core.backends.registry import RegionBackend, resolve_backend
from gradsplit.compile_core.options import CompileOptions


@dataclass
class Measured:
    """One side: seconds of each repeat, and the bytes saved."""

    trace_s: list[float] = field(default_factory=list)
    partition_s: list[float] = field(default_factory=list)
    saved_bytes: int = 0

    @property
    def total_s(self) -> float:
        return statistics.median(a + b for a, b in zip(self.trace_s, self.partition_s, strict=True))


def gpt2() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = transformers.GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else transformers logs a warning from inside the forward
    return model, _tokens(config.vocab_size)


def gpt2_with_dropout() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(attn_implementation="eager"))
    model.loss_type = "ForCausalLM"
    return model, _tokens(model.config.vocab_size)


def bert() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertForMaskedLM(config), _tokens(config.vocab_size)


def llama() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1376, num_hidden_layers=12, num_attention_heads=8, use_cache=False
    )
    return transformers.LlamaForCausalLM(config), _tokens(config.vocab_size)


def resnet50() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000))
    return model, {"pixel_values": torch.randn(4, 3, 224, 224), "labels": torch.randint(1000, (4,))}


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, dict[str, torch.Tensor]]]] = {
    "gpt2": gpt2,
    "gpt2_with_dropout": gpt2_with_dropout,
    "bert": bert,
    "resnet50": resnet50,
    "llama": llama,
}


def _tokens(vocabulary: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(vocabulary, (4, 256))
    return {"input_ids": tokens, "labels": tokens}


def measure(name: str, repeats: int) -> tuple[Measured, Measured]:
    """Ours and torch's for one model."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    ours, theirs = Measured(), Measured()

    def backend(module: torch.fx.GraphModule, examples: Sequence[torch.Tensor]) -> Callable[..., Any]:
        for _ in range(repeats + 1):  # the first of each warms imports and caches up
            _measure_theirs(module, examples, theirs)
            _measure_ours(module, examples, ours)
        return module.forward

    torch.compile(model, backend=backend, fullgraph=True)(**inputs)
    for side in (ours, theirs):
        del side.trace_s[0], side.partition_s[0]
    return ours, theirs


def _measure_ours(module: torch.fx.GraphModule, examples: Sequence[torch.Tensor], measured: Measured) -> None:
    backend = resolve_backend("triton")
    assert isinstance(backend, RegionBackend)
    mode = FakeTensorMode()
    with mode:
        fakes = [
            torch.empty_strided(one.shape, one.stride(), dtype=one.dtype).requires_grad_(one.requires_grad)
            for one in examples
        ]
    start = time.process_time()
    decompositions = {
        **backend.decompositions("cpu", CompileOptions()),
        **random_decompositions.DECOMPOSITIONS,
    }
    joint = random_to_counters(trace_joint(module, fakes, decompositions))
    traced = time.process_time()
    parts = partition(joint)
    measured.trace_s.append(traced - start)
    measured.partition_s.append(time.process_time() - traced)
    measured.saved_bytes = parts.saved_bytes


def _measure_theirs(
    module: torch.fx.GraphModule, examples: Sequence[torch.Tensor], measured: Measured
) -> None:
    partition_s = 0.0

    def cut(joint: torch.fx.GraphModule, joint_inputs: Any, **settings: Any) -> Any:
        nonlocal partition_s
        start = time.process_time()
        parts = min_cut_rematerialization_partition(joint, joint_inputs, **settings)
        partition_s = time.process_time() - start
        (output,) = parts[0].graph.find_nodes(op="output")
        saved = output.args[0][settings["num_fwd_outputs"] :]
        measured.saved_bytes = sum(
            node.meta["val"].numel() * node.meta["val"].dtype.itemsize
            for node in saved
            if node.op != "placeholder" and isinstance(node.meta["val"], torch.Tensor)
        )
        return parts

    start = time.process_time()
    aot_module_simplified(
        module,
        list(examples),
        fw_compiler=lambda graph, inputs: graph.forward,
        bw_compiler=lambda graph, inputs: graph.forward,
        partition_fn=cut,
        decompositions=select_decomp_table(),
    )
    measured.trace_s.append(time.process_time() - start - partition_s)
    measured.partition_s.append(partition_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", default=",".join(MODELS))
    arguments = parser.parse_args()
    table = Table("model", "side", "trace s", "partition s", "both s", "saved MiB")
    for name in arguments.models.split(","):
        for side, measured in zip(("gradsplit", "torch"), measure(name, arguments.repeats), strict=True):
            table.add_row(
                name,
                side,
                f"{statistics.median(measured.trace_s):.2f}",
                f"{statistics.median(measured.partition_s):.2f}",
                f"{measured.total_s:.2f}",
                f"{measured.saved_bytes / 2**20:.1f}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
