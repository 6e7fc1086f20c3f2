"""A small GPT in plain PyTorch: pre-norm blocks, causal attention, a learned position for each place.

The shape follows GPT-2 (Radford et al. 2019); the default configuration has 3.3 million parameters and
reads bytes. Nothing here knows about compilers or processes.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes; ``width`` is a multiple of ``heads``. With ``tied`` the head is the token embedding."""

    vocabulary: int = 256
    context: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 256
    dropout: float = 0.0
    tied: bool = False


class Attention(nn.Module):
    """Causal self-attention: [batch, time, width] → [batch, time, width]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        query, key, value = self.query_key_value(x).split(width, dim=2)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            self.split_heads(query),
            self.split_heads(key),
            self.split_heads(value),
            dropout_p=dropout,
            is_causal=True,
        )
        return self.projection(y.transpose(1, 2).reshape(batch, time, width))

    def split_heads(self, x: Tensor) -> Tensor:
        """[batch, time, width] → [batch, heads, time, width / heads]"""
        batch, time, width = x.shape
        return x.view(batch, time, self.heads, width // self.heads).transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear layers with GELU between them, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.projection = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(F.gelu(self.expand(x)))


class Block(nn.Module):
    """One layer: attention, then feed-forward, each on a normalised input and added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class GPT(nn.Module):
    """A language model over ``config.vocabulary`` tokens."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(initialise)
        # Each block adds twice to the stream; scaled down, the stream's variance does not grow with depth
        # (GPT-2).
        for name, parameter in self.named_parameters():
            if name.endswith("projection.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers))
        if config.tied:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean cross-entropy in nats a token, a scalar; without ``targets`` the logits instead.

        ``tokens`` and ``targets`` are int64 [batch, time], time at most ``config.context``; the logits are
        [batch, time, vocabulary].
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def initialise(module: nn.Module) -> None:
    """GPT-2's initial values: normal with deviation 0.02, biases zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
