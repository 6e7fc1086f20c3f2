"""Small models of four kinds, with a batch and a loss each, for benchmarks that compile and train."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

# A model and the arguments of its forward, which returns the loss.
Training = tuple[Callable[..., Tensor], dict[str, Tensor]]
_VOCABULARY = 8192


class Loss(nn.Module):
    """A model of the transformers package that returns its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **arguments: Tensor) -> Tensor:
        return self.model(**arguments).loss


class Classified(nn.Module):
    """A model of images with its loss; where it gives several results, the first (or the one named ``out``) counts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        result = self.model(pixels)
        if isinstance(result, Mapping):
            result = result["out"]
        if isinstance(result, tuple):
            result = result[0]
        return F.cross_entropy(result, labels)


def gpt2() -> Training:
    config = transformers.GPT2Config(
        vocab_size=_VOCABULARY, n_embd=256, n_layer=4, n_head=4, attn_pdrop=0.0, embd_pdrop=0.0,
        resid_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else transformers logs a warning from inside the forward
    return Loss(model), _tokens()


def bert() -> Training:
    config = transformers.BertConfig(
        vocab_size=_VOCABULARY, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=1024, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return Loss(transformers.BertForMaskedLM(config)), _tokens()


def resnet18() -> Training:
    config = transformers.ResNetConfig(
        layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512]
    )
    config.num_labels = 100
    model = transformers.ResNetForImageClassification(config)
    return Loss(model), {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.randint(100, (8,))}


class Perceptron(nn.Module):
    def __init__(self, width: int = 512, depth: int = 4, classes: int = 100) -> None:
        super().__init__()
        layers = [
            layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())
        ]
        self.layers = nn.Sequential(*layers, nn.Linear(width, classes))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(x), labels)


def mlp() -> Training:
    return Perceptron(), {"x": torch.randn(256, 512), "labels": torch.randint(100, (256,))}


def two_types() -> Training:
    """A small one whose gradients lie in two buckets, whatever plan the clock makes: one bucket is of one type."""
    model = Perceptron(64, depth=2)
    model.layers[-1].to(torch.bfloat16)
    return model, {"x": torch.randn(16, 64), "labels": torch.randint(100, (16,))}


class GraphNetwork(nn.Module):
    """Layers that gather rows along edges, weigh them, and add them up at nodes."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, h: Tensor, source: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        for layer in self.layers:
            message = h[source] * weight.to(h.dtype)
            h = layer(torch.zeros_like(h).index_add_(0, target, message)).relu()
        return h.float().square().mean()


def graph_network(
    nodes: int = 100_000, edges: int = 1_000_000, width: int = 64
) -> tuple[GraphNetwork, dict[str, Tensor]]:
    return GraphNetwork(width), {
        "h": torch.randn(nodes, width),
        "source": torch.randint(nodes, (edges,)),
        "target": torch.randint(nodes, (edges,)),
        "weight": torch.rand(edges, 1),
    }


TRAININGS: dict[str, Callable[[], Training]] = {"gpt2": gpt2, "bert": bert, "resnet18": resnet18, "mlp": mlp}


def _tokens() -> dict[str, Tensor]:
    tokens = torch.randint(_VOCABULARY, (8, 128))
    return {"input_ids": tokens, "labels": tokens}
