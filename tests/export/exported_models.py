"""Small models of the kinds that people export, each with a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class UNet(nn.Module):
    """Two levels with a skip connection, batch normalisation and operators in place."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.inner = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout2d(0.2))
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.head = nn.Conv2d(16, 2, 1)

    def forward(self, images: Tensor, target: Tensor) -> dict[str, Tensor]:
        wide = self.down(images)
        narrow = self.inner(F.max_pool2d(wide, 2))
        narrow += 1
        logits = self.head(torch.cat([wide, self.up(narrow)], 1))
        return {"loss": F.cross_entropy(logits, target), "logits": logits}


def ids() -> Tensor:
    return torch.arange(16).reshape(2, 8) * 3 % 64


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False, **ENDS
    )
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids(), "labels": ids()}


def bert() -> tuple[nn.Module, dict[str, Any]]:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))
    return model, {"input_ids": ids(), "attention_mask": mask, "labels": ids()}


def llama() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, use_cache=False)
    return transformers.LlamaForCausalLM(config), {"input_ids": ids(), "labels": ids()}


def t5() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids(), "labels": ids()}


def vit() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4,
        num_labels=3, problem_type="single_label_classification",
    )  # fmt: skip
    images = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
    return transformers.ViTForImageClassification(config), {
        "pixel_values": images,
        "labels": torch.tensor([0, 2]),
    }


def unet() -> tuple[nn.Module, dict[str, Any]]:
    images = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
    return UNet(), {"images": images, "target": torch.arange(128).reshape(2, 8, 8) % 2}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "gpt2": gpt2, "bert": bert, "llama": llama, "t5": t5, "vit": vit, "unet": unet,
}  # fmt: skip
