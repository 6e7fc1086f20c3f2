"""Whole models: one graph, the same results and gradients as plain torch, and the right guards."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from tests.capture.models import GPT, GPTConfig, ResNet


def compile_eager(fn, **options):
    return CompiledFunction(fn, lambda graph, inputs: graph.module, fullgraph=True, **options)


def assert_same_training(compiled, model, plain, *arguments):
    """One forward and backward of both; outputs, gradients and buffers are the same bit for bit."""
    model.zero_grad()
    plain.zero_grad()
    torch.manual_seed(0)
    result = compiled(*arguments)
    torch.manual_seed(0)
    expected = plain(*arguments)
    results = result if isinstance(result, tuple) else (result,)
    expectations = expected if isinstance(expected, tuple) else (expected,)
    for one, other in zip(results, expectations, strict=True):
        assert torch.equal(one, other)
    results[-1].sum().backward()
    expectations[-1].sum().backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad is None and other.grad is None) or torch.equal(one.grad, other.grad), name
    for (name, one), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other), name


@pytest.fixture
def gpt():
    torch.manual_seed(0)
    return GPT(GPTConfig())


def test_gpt_trains_as_plain(gpt):
    plain = copy.deepcopy(gpt)
    compiled = compile_eager(gpt)
    tokens = torch.randint(0, 50, (2, 16))
    assert_same_training(compiled, gpt, plain, tokens, tokens)
    other = tokens.flip(0)
    assert_same_training(compiled, gpt, plain, other, other)
    assert len(compiled.entries) == 1
    names = [entry.name for entry in compiled.entries[0].captured.graph.inputs]
    assert "p_tokens_weight" in names and "p_head_weight" not in names  # the tied weight is one input
    assert "p_blocks_1_attn_qkv_bias" in names


def test_gpt_recompiles_for_what_it_read(gpt):
    plain = copy.deepcopy(gpt)
    compiled = compile_eager(gpt)
    tokens = torch.randint(0, 50, (2, 16))
    assert_same_training(compiled, gpt, plain, tokens, tokens)
    assert_same_training(compiled, gpt, plain, tokens[:1], tokens[:1])
    assert len(compiled.entries) == 2
    gpt.eval(), plain.eval()
    assert_same_training(compiled, gpt, plain, tokens, tokens)
    assert len(compiled.entries) == 3
    assert_same_training(compiled, gpt, plain, tokens)
    assert len(compiled.entries) == 4
    gpt.train(), plain.train()
    assert_same_training(compiled, gpt, plain, tokens, tokens)
    assert len(compiled.entries) == 4


def test_replaced_parameter_is_fetched_anew(gpt):
    compiled = compile_eager(gpt)
    tokens = torch.randint(0, 50, (2, 16))
    compiled(tokens)
    gpt.norm.weight = nn.Parameter(torch.full((16,), 2.0))
    assert torch.equal(compiled(tokens), gpt(tokens))
    assert len(compiled.entries) == 1
    gpt.head.weight = nn.Parameter(gpt.head.weight.detach() * 2)  # no longer tied
    assert torch.equal(compiled(tokens), gpt(tokens))
    assert len(compiled.entries) == 2


def test_assertion_surfaces(gpt):
    compiled = compile_eager(gpt)
    with pytest.raises(AssertionError, match="sequence of 20 tokens"):
        compiled(torch.zeros(1, 20, dtype=torch.long))


def test_mlp_with_batch_norm_and_dropout():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    plain = copy.deepcopy(model)
    compiled = compile_eager(model)
    for _ in range(3):
        assert_same_training(compiled, model, plain, torch.randn(5, 6))
    assert len(compiled.entries) == 1


def test_resnet():
    torch.manual_seed(0)
    model = ResNet()
    plain = copy.deepcopy(model)
    compiled = compile_eager(model)
    for _ in range(2):
        assert_same_training(compiled, model, plain, torch.randn(2, 3, 32, 32))
    assert len(compiled.entries) == 1


def test_capture_leaves_the_random_state():
    model = nn.Dropout(0.5)
    compiled = CompiledFunction(model, lambda graph, inputs: lambda *tensors: (tensors[0],), fullgraph=True)
    before = torch.get_rng_state()
    compiled(torch.ones(4))
    assert torch.equal(before, torch.get_rng_state())


MODULES = {
    "attention": lambda: (nn.MultiheadAttention(8, 2, batch_first=True), 3),
    "encoder": lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1),
    "decoder": lambda: (nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 2),
    "lstm": lambda: (nn.LSTM(8, 5, batch_first=True), 1),
    "group_norm": lambda: (nn.GroupNorm(2, 4), 1),
    "parametrized": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)), 1),
    "bilinear": lambda: (nn.Bilinear(8, 8, 3), 2),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_torch(name):
    torch.manual_seed(0)
    model, count = MODULES[name]()
    plain = copy.deepcopy(model)
    compiled = compile_eager(model)
    arguments = [torch.randn(2, 4, 8)] * count
    for _ in range(2):
        torch.manual_seed(1)
        result = compiled(*arguments)
        torch.manual_seed(1)
        expected = plain(*arguments)
        first, other = (value[0] if isinstance(value, tuple) else value for value in (result, expected))
        assert torch.equal(first, other)
    assert len(compiled.entries) == 1
