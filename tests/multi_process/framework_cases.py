"""Frameworks that wrap a module in DDP themselves, on each rank: what trains compiled trains as it does plainly.

Nothing of the frameworks is changed. Who compiles is this package, or torch.compile with its backend, before or after
the framework has wrapped the module.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import gradsplit

COMPILE: dict[str, Callable[[Any], Any]] = {
    "gradsplit": gradsplit.compile,
    "torch.compile": partial(torch.compile, backend="gradsplit"),
}


def accelerated(compile_before: Callable[[Any], Any], compile_after: Callable[[Any], Any]) -> list[float]:
    """The losses of a few steps with Accelerate, of other data on each rank."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = compile_before(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    model = compile_after(model)
    losses = []
    for step in range(4):
        torch.manual_seed(10 * step + accelerator.process_index)
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    if not isinstance(compile_before, partial) and not isinstance(compile_after, partial):
        # torch.compile's own wrapper has other names.
        weights = accelerator.unwrap_model(model).state_dict()
        assert list(weights) == ["0.weight", "0.bias", "2.weight", "2.bias"], list(weights)
    return losses


def trained(compile_model: Callable[[Any], Any]) -> list[float]:
    """The losses of the Trainer, which wraps a model that is compiled."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1,
        n_head=2,
        n_embd=16,
        vocab_size=32,
        n_positions=16,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
    )
    model = compile_model(GPT2LMHeadModel(config))
    rows = [
        {"input_ids": (k + torch.arange(8)) % 32, "labels": (k + torch.arange(8)) % 32} for k in range(16)
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=3,
            per_device_train_batch_size=2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def as_it_is(model: Any) -> Any:
    return model


def main() -> None:
    assert "gradsplit" in torch._dynamo.list_backends()
    expected = accelerated(as_it_is, as_it_is)
    for name, compile_it in COMPILE.items():
        for place, found in (
            ("before", accelerated(compile_it, as_it_is)),
            ("after", accelerated(as_it_is, compile_it)),
        ):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
            print(f"Accelerate, {name} {place} prepare: trains alike", flush=True)
    expected = trained(as_it_is)
    for name, compile_it in COMPILE.items():
        torch.testing.assert_close(torch.tensor(trained(compile_it)), torch.tensor(expected))
        print(f"Trainer, {name}: trains alike", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
