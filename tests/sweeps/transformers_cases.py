"""Every model class of transformers that an Auto class names, at a small size.

A configuration is made small by the names of its settings. Where that gives no model that runs, the class is left out,
with the reason in the report.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto import configuration_auto, modeling_auto

from tests.sweeps.cases import Case

_VOCABULARY, _LENGTH, _SIDE = 120, 12, 32

# Settings by the end of their names; the first that fits counts.
_SMALL: Mapping[str, int] = {
    "vocab_size": _VOCABULARY,
    "num_key_value_heads": 2,
    "num_attention_heads": 4,
    "attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_decoder_layers": 2,
    "num_encoder_layers": 2,
    "max_position_embeddings": 64,
    "max_source_positions": 64,
    "max_target_positions": 64,
    "n_positions": 64,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "d_ff": 64,
    "n_inner": 64,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "embed_dim": 32,
    "embedding_size": 32,
    "projection_dim": 32,
    "head_dim": 8,
    "d_kv": 8,
    "image_size": _SIDE,
    "patch_size": 8,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "dim": 32,
    "hidden_dim": 64,
}
# What is tried where these do not fit together.
_OTHER_SIZES: Sequence[Mapping[str, int]] = (
    {},
    {"num_key_value_heads": 4},
    {"num_hidden_layers": 8, "num_key_value_heads": 4},
)
_EXACT = {"dim", "hidden_dim", "n_inner"}


def cases() -> list[Case]:
    """A case for each model class."""
    found: dict[str, Case] = {}
    for mapping, inputs in _KINDS.items():
        for model_type, names in getattr(modeling_auto, mapping, {}).items():
            for name in (names,) if isinstance(names, str) else names:
                made = Case(
                    f"transformers/{name}",
                    model_type,
                    lambda name=name, model_type=model_type, inputs=inputs: _make(name, model_type, inputs),
                )
                found.setdefault(made.name, made)
    return list(found.values())


def _make(
    name: str, model_type: str, inputs: Callable[[Any], dict[str, Any]]
) -> tuple[nn.Module, dict[str, Any]]:
    config_class = getattr(transformers, configuration_auto.CONFIG_MAPPING_NAMES[model_type])
    model_class = getattr(transformers, name)
    errors = []
    for shrink, other in itertools.product((_made_anew, _changed), _OTHER_SIZES):
        try:
            config = shrink(config_class(), {**_SMALL, **other})
            if hasattr(config, "num_labels"):
                config.num_labels = 3
            given = inputs(config)
            model = model_class(config)
            model.eval()(**given)
            return model, given
        except Exception as error:
            errors.append(error)
    raise errors[0]


def _made_anew(config: PretrainedConfig, sizes: Mapping[str, int]) -> PretrainedConfig:
    """A configuration of small settings, from which it derives the others."""
    taken = inspect.signature(type(config).__init__).parameters
    settings: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            settings[name] = _made_anew(value, sizes)
        elif name in taken and (small := _small(name, value, sizes)) != value:
            settings[name] = small
    return type(config)(**settings)


def _changed(config: PretrainedConfig, sizes: Mapping[str, int]) -> PretrainedConfig:
    """The configuration itself, with small settings."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _changed(value, sizes)
        elif (small := _small(name, value, sizes)) != value:
            setattr(config, name, small)
    for name in ("layer_types", "mlp_layer_types"):
        kinds, layers = getattr(config, name, None), getattr(config, "num_hidden_layers", None)
        if isinstance(kinds, list) and layers is not None and len(kinds) > layers:
            chosen = (list(dict.fromkeys(kinds)) * layers)[:layers]  # of each kind there is a layer
            setattr(config, name, chosen)
    return config


def _small(name: str, value: Any, sizes: Mapping[str, int]) -> Any:
    if type(value) is int and value > 0:
        if name.endswith("_token_id"):
            return value if value < _VOCABULARY else 3
        ends = [end for end in sizes if name == end or (end not in _EXACT and name.endswith(f"_{end}"))]
        return min(value, sizes[max(ends, key=len)]) if ends else value
    if name == "depths" and isinstance(value, (list, tuple)):
        return type(value)(min(depth, 2) for depth in value)
    if name == "hidden_sizes" and isinstance(value, (list, tuple)):
        return type(value)(max(size // 8, 8) for size in value)
    return value


def _tokens(length: int = _LENGTH) -> torch.Tensor:
    return torch.randint(5, _VOCABULARY, (2, length))


def _text(config: Any) -> dict[str, Any]:
    tokens = _tokens()
    return {"input_ids": tokens, "labels": tokens.clone()}


def _plain_text(config: Any) -> dict[str, Any]:
    return {"input_ids": _tokens()}


def _text_class(config: Any) -> dict[str, Any]:
    config.problem_type = "single_label_classification"
    config.pad_token_id = config.pad_token_id if isinstance(config.pad_token_id, int) else 0
    return {"input_ids": _tokens(), "labels": torch.tensor([0, 1])}


def _pairs(config: Any) -> dict[str, Any]:
    return {"input_ids": _tokens(), "labels": _tokens(6)}


def _pixels(config: Any) -> torch.Tensor:
    side = getattr(config, "image_size", _SIDE)
    height, width = side if isinstance(side, (list, tuple)) else (side, side)
    return torch.randn(2, getattr(config, "num_channels", 3), max(height, _SIDE), max(width, _SIDE))


def _image(config: Any) -> dict[str, Any]:
    return {"pixel_values": _pixels(config)}


def _image_class(config: Any) -> dict[str, Any]:
    return {"pixel_values": _pixels(config), "labels": torch.tensor([0, 1])}


def _sound(config: Any) -> dict[str, Any]:
    return {"input_values": torch.randn(2, 2000)}


def _image_text(config: Any) -> dict[str, Any]:
    vision = getattr(config, "vision_config", config)
    return {"input_ids": _tokens(), "pixel_values": _pixels(vision)}


_KINDS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": _text,
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": _text,
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": _pairs,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": _text_class,
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": _image_class,
    "MODEL_FOR_CTC_MAPPING_NAMES": _sound,
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES": _sound,
    "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES": _image_text,
    "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES": _image,
    "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES": _image,
    "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES": _image,
    "MODEL_FOR_BACKBONE_MAPPING_NAMES": _image,
    "MODEL_MAPPING_NAMES": _plain_text,
}
