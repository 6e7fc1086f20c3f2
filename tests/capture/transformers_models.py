"""Small models of transformers with random weights, and inputs that give each a loss; shared by tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import nn

VOCABULARY = 99
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_CLASSES = {"num_labels": 2, "problem_type": "single_label_classification"}

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """How to make a model, and inputs for a batch size."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]


def _tokens(batch: int, length: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(batch * length)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def text(batch: int) -> Inputs:
    tokens = _tokens(batch)
    return {"input_ids": tokens, "labels": tokens.clone()}


def padded_text(batch: int) -> Inputs:
    inputs = text(batch)
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, -2:] = 0
    return {**inputs, "attention_mask": mask}


def text_pair(batch: int) -> Inputs:
    return {"input_ids": _tokens(batch), "labels": _tokens(batch, 5)}


def image(batch: int) -> Inputs:
    pixels = torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(batch))
    return {"pixel_values": pixels, "labels": torch.arange(batch) % 2}


def _gpt2() -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    return hf.GPT2LMHeadModel(config)


def _vit() -> nn.Module:
    sizes = {
        key: _TEXT[key]
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    }
    config = hf.ViTConfig(
        **sizes,
        **_CLASSES,
        image_size=32,
        patch_size=8,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    return hf.ViTForImageClassification(config)


def _t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def _resnet() -> nn.Module:
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], **_CLASSES)
    return hf.ResNetForImageClassification(config)


def _efficientnet() -> nn.Module:
    config = hf.EfficientNetConfig(
        image_size=32, width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320, **_CLASSES
    )
    return hf.EfficientNetForImageClassification(config)


def _convnext() -> nn.Module:
    config = hf.ConvNextConfig(
        hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 2, 1], drop_path_rate=0.1, **_CLASSES
    )
    return hf.ConvNextForImageClassification(config)


MODELS: dict[str, Model] = {
    "gpt2": Model(_gpt2, text),
    "bert": Model(lambda: hf.BertForMaskedLM(hf.BertConfig(**_TEXT)), padded_text),
    "t5": Model(_t5, text_pair),
    "llama": Model(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_GROUPED)), text),
    "mistral": Model(lambda: hf.MistralForCausalLM(hf.MistralConfig(**_GROUPED, sliding_window=4)), text),
    "qwen2": Model(lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_GROUPED)), text),
    "vit": Model(_vit, image),
    "resnet": Model(_resnet, image),
    "efficientnet": Model(_efficientnet, image),
    "convnext": Model(_convnext, image),
}
