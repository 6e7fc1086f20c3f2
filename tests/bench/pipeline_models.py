"""A GPT and a Llama for benchmarks of pipelines, and torch's own stages of them.

Both return logits. Of a model that torch's ``pipeline()`` cannot capture, stages are written by hand, which is torch's
own way then; here of the Llama.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline

from examples.gpt import GPT, GPTConfig


@dataclass(frozen=True)
class Sizes:
    """Of a model and of one microbatch."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    batch: int


class Llama(nn.Module):
    """Transformers' Llama with a key and value for every four heads, by its logits."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=sizes.vocabulary, hidden_size=sizes.width, num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads, num_key_value_heads=max(1, sizes.heads // 4),
            intermediate_size=sizes.width * 11 // 4, max_position_embeddings=sizes.length, use_cache=False,
        )  # fmt: skip
        self.whole = transformers.LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.whole(input_ids=tokens, use_cache=False).logits


class LlamaPart(nn.Module):
    """Layers of a Llama from ``first`` to ``end``, with the embedding before the first and the head after the last."""

    def __init__(self, model: Llama, first: int, end: int) -> None:
        super().__init__()
        whole = model.whole
        self.embedding = whole.model.embed_tokens if first == 0 else None
        self.rotary = whole.model.rotary_emb
        self.layers = nn.ModuleList(whole.model.layers[first:end])
        is_last = end == len(whole.model.layers)
        self.norm, self.head = (whole.model.norm, whole.lm_head) if is_last else (None, None)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        rotated = self.rotary(hidden, positions)
        for layer in self.layers:
            made = layer(
                hidden,
                attention_mask=None,
                position_ids=positions,
                position_embeddings=rotated,
                use_cache=False,
            )
            hidden = made[0] if isinstance(made, tuple) else made
        return hidden if self.norm is None else self.head(self.norm(hidden))


def _gpt2(sizes: Sizes) -> nn.Module:
    return GPT(
        GPTConfig(
            vocabulary=sizes.vocabulary,
            context=sizes.length,
            layers=sizes.layers,
            heads=sizes.heads,
            width=sizes.width,
        )
    )


MODELS: Mapping[str, Callable[[Sizes], nn.Module]] = {"gpt2": _gpt2, "llama": Llama}
# GPT-2's own sizes, with a head of its own; those of a Llama of 0.9 billion parameters,
# whose kernels take longer than it takes to launch them.
SIZES: Mapping[tuple[str, str], Sizes] = {
    # Words in whole tiles: a torch.compile'd stage pads odd ones, whose strides torch's pipelines then refuse.
    ("gpt2", "cuda"): Sizes(12, 768, 12, 50304, 1024, 4),
    ("llama", "cuda"): Sizes(16, 2048, 32, 32000, 1024, 4),
    ("gpt2", "cpu"): Sizes(4, 256, 4, 256, 128, 4),
    ("llama", "cpu"): Sizes(4, 256, 4, 256, 128, 4),
}
_LAYERS = {"gpt2": "blocks", "llama": "whole.model.layers"}


def nearest_layers(name: str, parameters: list[list[str]], layers: int) -> list[int]:
    """By stage but for the last, the layer before which a cut is nearest to its end.

    Args:
        parameters: by stage, their names.
        layers: of the model.
    """
    prefix = _LAYERS[name] + "."

    def held(names: list[str]) -> float:
        return sum(one.startswith(prefix) for one in names)

    each = sum(map(held, parameters)) / layers
    ends = itertools.accumulate(held(names) / each for names in parameters[:-1])
    return [min(max(1, round(end)), layers - 1) for end in ends]


def torch_stage(
    name: str,
    make: Callable[[], nn.Module],
    sizes: Sizes,
    cuts: list[int],
    tokens: Tensor,
    rank: int,
    group: dist.ProcessGroup,
) -> tuple[Any, str]:
    """Torch's own stage of a rank, cut before these layers, and how it was made.

    Args:
        make: a new model at each call, which are all alike.
        tokens: of one microbatch.
        rank: within the group, the pipeline's.
    """
    points = {f"{_LAYERS[name]}.{cut}": SplitPoint.BEGINNING for cut in cuts}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipe = pipeline(make(), mb_args=(tokens,), split_spec=points)
            # What was captured of a Llama only fails when it runs.
            with torch.no_grad():
                pipe(tokens)
            return pipe.build_stage(rank, tokens.device, group), "pipeline()"
    except Exception as error:
        model = make()
        if not isinstance(model, Llama):
            raise
        problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
    bounds = [0, *cuts, sizes.layers]
    part = LlamaPart(model, bounds[rank], bounds[rank + 1])
    example = tokens
    if rank > 0:
        dtype = next(part.parameters()).dtype
        example = torch.zeros(*tokens.shape, sizes.width, dtype=dtype, device=tokens.device)
        example.requires_grad_()
    # As many gradients are sent as these need.
    output = part(example).detach().requires_grad_()
    stage = PipelineStage(
        part, rank, len(bounds) - 1, tokens.device, input_args=(example,), output_args=(output,), group=group
    )
    return stage, f"by hand, since pipeline() failed: {problem}"
