"""The models of the benchmarks, as small as they have all their kinds of kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from tests.bench.training_models import graph_network

# What is compiled, and the arguments of its call, which returns a loss or nothing.
Training = tuple[Callable[..., Tensor | None], dict[str, Tensor]]
_VOCABULARY = 97


class _Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **arguments: Tensor) -> Tensor:
        return self.model(**arguments).loss


class _Images(nn.Module):
    """Layers on images, and a classifier."""

    def __init__(self, layers: nn.Module, channels: int) -> None:
        super().__init__()
        self.layers = layers
        self.classifier = nn.Linear(channels, 5)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        pooled = F.adaptive_avg_pool2d(self.layers(images), 1)
        return F.cross_entropy(self.classifier(pooled.flatten(1)), labels)


class _Bottleneck(nn.Module):
    """A block of ResNet-50: 1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        self.narrow = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(True)
        )
        self.middle = nn.Sequential(
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(True)
        )
        self.widen = nn.Sequential(nn.Conv2d(inner, 2 * inner, 1, bias=False), nn.BatchNorm2d(2 * inner))
        self.shortcut = nn.Sequential(
            nn.Conv2d(channels, 2 * inner, 1, stride, bias=False), nn.BatchNorm2d(2 * inner)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.widen(self.middle(self.narrow(x))) + self.shortcut(x), inplace=True)


class _Dense(nn.Module):
    """A layer of densenet121: it reads all that came before and adds to it."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(True), nn.Conv2d(channels, 16, 1, bias=False)
        )
        self.second = nn.Sequential(
            nn.BatchNorm2d(16), nn.ReLU(True), nn.Conv2d(16, growth, 3, 1, 1, bias=False)
        )

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.second(self.first(torch.cat(features, 1)))


class _DenseBlock(nn.Module):
    def __init__(self, channels: int, growth: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Dense(channels + number * growth, growth) for number in range(count))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


def gpt2() -> Training:
    config = transformers.GPT2Config(
        vocab_size=_VOCABULARY, n_positions=24, n_embd=32, n_layer=2, n_head=2, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else transformers logs a warning from inside the forward
    return _Loss(model), _tokens()


def bert() -> Training:
    config = transformers.BertConfig(
        vocab_size=_VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=24, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return _Loss(transformers.BertForMaskedLM(config)), _tokens()


def resnet() -> Training:
    layers = nn.Sequential(
        nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(True), nn.MaxPool2d(3, 2, 1),
        _Bottleneck(16, 8, 1), _Bottleneck(16, 16, 2),
    )  # fmt: skip
    return _on_images(layers, 32)


def densenet() -> Training:
    layers = nn.Sequential(
        nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(True), nn.MaxPool2d(3, 2, 1),
        _DenseBlock(16, 8, 2),
        nn.BatchNorm2d(32), nn.ReLU(True), nn.Conv2d(32, 16, 1, bias=False), nn.AvgPool2d(2, 2),
        _DenseBlock(16, 8, 1), nn.BatchNorm2d(24), nn.ReLU(True),
    )  # fmt: skip
    return _on_images(layers, 24)


def mlp() -> Training:
    class Perceptron(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            blocks = [layer for _ in range(2) for layer in (nn.Linear(48, 48), nn.LayerNorm(48), nn.GELU())]
            self.layers = nn.Sequential(*blocks, nn.Linear(48, 5))

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.layers(x), labels)

    return Perceptron(), {"x": torch.randn(20, 48), "labels": torch.randint(5, (20,))}


def optimizer_step() -> Training:
    parameters = [nn.Parameter(torch.randn(shape)) for shape in [(8, 8), (8,), (8, 32), (32,), (300,), (1,)]]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1).step, {}


MODELS: dict[str, Callable[[], Training]] = {
    "gpt2": gpt2,
    "bert": bert,
    "resnet": resnet,
    "densenet": densenet,
    "mlp": mlp,
    "graph": lambda: graph_network(60, 700, 32),
    "optimizer_step": optimizer_step,
}


def _tokens() -> dict[str, Tensor]:
    tokens = torch.randint(_VOCABULARY, (2, 24))
    return {"input_ids": tokens, "labels": tokens}


def _on_images(layers: nn.Module, channels: int) -> Training:
    """As a GPU would have them: convolutions of 16-bit images are channels-last there."""
    images = torch.randn(2, 3, 20, 20).contiguous(memory_format=torch.channels_last)
    model = _Images(layers, channels).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, {"images": images, "labels": torch.randint(5, (2,))}
