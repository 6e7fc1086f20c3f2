"""Models of transformers: one graph each in training mode, equal to eager in values, gradients and state."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from gradsplit.compile_core.compiled_calls.compiled_function import CompiledFunction
from gradsplit.compile_core.interface import api
from tests.capture.transformers_models import MODELS, Inputs, padded_text


def compile_module(module: nn.Module) -> tuple[Any, CompiledFunction]:
    compiled = api.compile(module, backend="eager", fullgraph=True)
    return compiled, compiled._run


def leaves(value: Any) -> list[Any]:
    """Types, keys and tensors of a result, all the way down."""
    if isinstance(value, dict):
        return [type(value), *itertools.chain(*([key, *leaves(item)] for key, item in value.items()))]
    if isinstance(value, (list, tuple)):
        return [type(value), *itertools.chain(*map(leaves, value))]
    if isinstance(value, torch.Tensor) or not hasattr(value, "__dict__"):
        return [value]
    return [
        type(value),
        *itertools.chain(*([key, *leaves(item)] for key, item in sorted(vars(value).items()))),
    ]


def train_once(module: nn.Module, inputs: Inputs, seed: int) -> list[Any]:
    """A forward and backward; everything that they give."""
    module.zero_grad()
    torch.manual_seed(seed)
    output = module(**inputs)
    loss = output["loss"] if isinstance(output, dict) else output[0]
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return leaves([output, gradients, dict(module.named_buffers()), torch.get_rng_state()])


def assert_same(got: list[Any], want: list[Any]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype and one.requires_grad == other.requires_grad
            assert torch.equal(one, other)
        else:
            assert one is other or one == other


def same_as_eager(module: nn.Module, batches: list[Inputs]) -> CompiledFunction:
    compiled, function = compile_module(copy.deepcopy(module))
    for seed, inputs in enumerate(batches):
        want = train_once(module, copy.deepcopy(inputs), seed)
        assert_same(train_once(compiled, copy.deepcopy(inputs), seed), want)
    return function


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name].make().train()


@pytest.mark.parametrize("name", MODELS)
def test_training_is_one_graph(name):
    function = same_as_eager(make(name), [MODELS[name].inputs(batch) for batch in (2, 2, 3, 5)])
    assert len(function.entries) == 2  # the first batch size, and all others
    assert all(entry.captured.graph is not None for entry in function.entries)


def test_a_padding_mask_is_data():
    module = make("gpt2")
    inputs = padded_text(2)
    other = {**inputs, "attention_mask": torch.ones_like(inputs["attention_mask"])}
    assert len(same_as_eager(module, [inputs, other]).entries) == 1


@pytest.mark.parametrize(
    "arguments", [{"output_hidden_states": True}, {"return_dict": False}, {"use_cache": False}]
)
def test_arguments_that_change_the_result(arguments):
    module = make("mistral")
    module(**MODELS["mistral"].inputs(2), **arguments)  # transformers installs hooks at the first request
    batch = MODELS["mistral"].inputs(2) | arguments
    assert len(same_as_eager(module, [batch, batch]).entries) == 1


def test_attention_weights():
    module = make("vit")
    module.set_attn_implementation("eager")
    module(**MODELS["vit"].inputs(2), output_attentions=True)
    same_as_eager(module, [MODELS["vit"].inputs(2) | {"output_attentions": True}] * 2)


def test_gradient_checkpointing():
    module = make("gpt2")
    # Before transformers 5.2x it had the other name.
    enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
    enable()
    same_as_eager(module, [MODELS["gpt2"].inputs(2)] * 2)


def test_inference_under_autocast():
    module = make("llama").eval()
    compiled, function = compile_module(copy.deepcopy(module))
    inputs = MODELS["llama"].inputs(2)
    for _ in range(2):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert_same(leaves(compiled(**inputs)), leaves(module(**inputs)))
    assert len(function.entries) == 1


def test_a_cache_that_is_passed_in_grows():
    module = make("llama").eval()
    compiled, _ = compile_module(copy.deepcopy(module))
    tokens = MODELS["llama"].inputs(2)["input_ids"]
    results = []
    for model in (module, compiled):
        with torch.no_grad():
            cache = model(input_ids=tokens[:, :4]).past_key_values
            results.append(leaves([model(input_ids=tokens[:, 4:5], past_key_values=cache), cache]))
    assert_same(results[1], results[0])


def test_audio_of_which_the_model_wants_gradients():
    """HuBERT stores in what it is given that it requires them, for checkpoints."""
    torch.manual_seed(0)
    config = hf.HubertConfig(
        conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2
    )
    plain = hf.HubertModel(config).feature_extractor.train()
    compiled, function = compile_module(copy.deepcopy(plain))
    audio = torch.randn(2, 400)
    found = []
    for module in (plain, compiled):
        result = module(audio)
        result.sin().sum().backward()
        found.append([result.detach(), *(parameter.grad for parameter in module.parameters())])
    torch.testing.assert_close(found[1], found[0])
    assert not audio.requires_grad and len(function.entries) == 1
