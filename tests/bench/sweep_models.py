"""Models that people train, at sizes at which they train them, with random weights: what ``sweep_steps.py`` times.

Names, configurations and defaults are those of transformers, timm and torchvision; where a model has many layers alike,
some of them. Every model is a module that returns its loss.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.bench.training_models import Classified, Loss, graph_network

Inputs = dict[str, Tensor]
Made = tuple[nn.Module, Inputs]
_LAYERS = 6
_CLASSES = 1000


class Summed(nn.Module):
    """A model without a loss of its own: the mean square of one of its results."""

    def __init__(self, model: nn.Module, result: str) -> None:
        super().__init__()
        self.model, self.result = model, result

    def forward(self, **inputs: Tensor) -> Tensor:
        return getattr(self.model(**inputs), self.result).float().square().mean()


class SquaredResults(nn.Module):
    """A model without a loss of its own: the sum of the mean squares of all its results that gradients lead to."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Tensor:
        results = tree_leaves(self.model(**inputs))
        squares = [each.float().square().mean() for each in results if _is_trained(each)]
        return torch.stack(squares).sum()


def _is_trained(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad


class Recurrent(nn.Module):
    """A language model of LSTM layers."""

    def __init__(self, vocabulary: int = 10_000, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.LSTM(width, width, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.layers(F.dropout(self.embedding(tokens), 0.2, self.training))
        logits = self.head(hidden[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Recommendation(nn.Module):
    """Embeddings of categories, their products with one another and with dense features (as DLRM)."""

    def __init__(self, tables: int = 26, rows: int = 20_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = _perceptron(13, 512, 256, width)
        self.top = _perceptron(width + (tables + 1) * tables // 2, 1024, 512, 1)
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense: Tensor, categories: Tensor, clicks: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        rows = [table(categories[:, index]).to(bottom.dtype) for index, table in enumerate(self.tables)]
        features = torch.stack([bottom, *rows], 1)
        products = features @ features.transpose(1, 2)
        pairs = products[:, self.pairs[0], self.pairs[1]]
        score = self.top(torch.cat([bottom, pairs], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(score.float(), clicks)


class Block(nn.Module):
    """Two convolutions with norms, as a U-Net has them."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, padding=1),
            nn.GroupNorm(8, channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(8, channels),
            nn.SiLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class UNet(nn.Module):
    """Three levels down and up."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            Block(before, after) for before, after in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(Block(before + after, after) for before, after in ((256, 128), (128, 64)))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        x, kept = pixels, []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2) if len(kept) < 3 else x
        for block, skipped in zip(self.up, reversed(kept[:-1]), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skipped], 1))
        return F.mse_loss(self.head(x).float(), pixels)


def _perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _transformers(name: str, config: str, **settings: Any) -> nn.Module:
    package = importlib.import_module("transformers")
    made = getattr(package, config)(**settings)
    return getattr(package, name)(made)


def _text(
    name: str,
    config: str,
    batch: int = 8,
    length: int = 512,
    layers: str = "num_hidden_layers",
    **settings: Any,
) -> Callable[[], Made]:
    """A model of tokens, which are its labels, too. ``layers`` is how the configuration calls their number."""

    def make() -> Made:
        model = _transformers(name, config, **{layers: _LAYERS, **settings})
        tokens = torch.randint(5, model.config.vocab_size, (batch, length))
        return Loss(model), {"input_ids": tokens, "labels": tokens.clone()}

    return make


def _causal(name: str, config: str, **settings: Any) -> Callable[[], Made]:
    """A decoder of about the width of GPT-2."""
    sizes = {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 32_000,
        "use_cache": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return _text(name, config, **{"length": 1024, **sizes, **settings})


def _pixels(name: str, config: str, batch: int, side: int = 224, **settings: Any) -> Callable[[], Made]:
    def make() -> Made:
        model = _transformers(name, config, num_labels=_CLASSES, **settings)
        pixels, labels = torch.randn(batch, 3, side, side), torch.randint(_CLASSES, (batch,))
        return Loss(model), {"pixel_values": pixels, "labels": labels}

    return make


def _audio(
    name: str, config: str, batch: int = 8, samples: int = 80_000, **settings: Any
) -> Callable[[], Made]:
    def make() -> Made:
        model = _transformers(name, config, num_hidden_layers=_LAYERS, mask_time_prob=0.0, **settings)
        return Summed(model, "last_hidden_state"), {"input_values": torch.randn(batch, samples)}

    return make


def _whisper() -> Made:
    model = _transformers(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        encoder_layers=4,
        decoder_layers=4,
        d_model=384,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
        use_cache=False,
    )
    return Loss(model), {
        "input_features": torch.randn(8, 80, 3000),
        "labels": torch.randint(5, 50_000, (8, 128)),
    }


def _spectrogram() -> Made:
    model = _transformers("ASTModel", "ASTConfig", num_hidden_layers=_LAYERS)
    return Summed(model, "last_hidden_state"), {"input_values": torch.randn(8, 1024, 128)}


def _pairs(name: str, config: str) -> Callable[[], Made]:
    """Images and texts that are told apart (CLIP and its kin)."""

    def make() -> Made:
        package = importlib.import_module("transformers")
        settings = getattr(package, config)()
        settings.text_config.num_hidden_layers = settings.vision_config.num_hidden_layers = _LAYERS
        model = getattr(package, name)(settings)
        length = settings.text_config.max_position_embeddings
        tokens = torch.randint(5, settings.text_config.vocab_size, (32, length))
        size = settings.vision_config.image_size
        inputs = {"input_ids": tokens, "pixel_values": torch.randn(32, 3, size, size)}
        return Summed(model, "logits_per_image"), inputs

    return make


def _torchvision(name: str, batch: int, side: int = 224) -> Callable[[], Made]:
    def make() -> Made:
        models = importlib.import_module("torchvision").models
        known = {"weights": None, "weights_backbone": None} if "_resnet50" in name else {"weights": None}
        model = Classified(models.get_model(name, **known))
        is_dense = "_resnet50" in name
        labels = torch.randint(21, (batch, side, side)) if is_dense else torch.randint(_CLASSES, (batch,))
        return model, {"pixels": torch.randn(batch, 3, side, side), "labels": labels}

    return make


def _video() -> Made:
    models = importlib.import_module("torchvision").models
    model = Classified(models.get_model("r3d_18", weights=None))
    return model, {"pixels": torch.randn(4, 3, 16, 112, 112), "labels": torch.randint(400, (4,))}


def _timm(name: str, batch: int, side: int = 224, **settings: Any) -> Callable[[], Made]:
    def make() -> Made:
        timm = importlib.import_module("timm")
        model = Classified(timm.create_model(name, pretrained=False, num_classes=_CLASSES, **settings))
        return model, {
            "pixels": torch.randn(batch, 3, side, side),
            "labels": torch.randint(_CLASSES, (batch,)),
        }

    return make


def _recurrent() -> Made:
    return Recurrent(), {"tokens": torch.randint(10_000, (32, 128))}


def _recommendation() -> Made:
    return Recommendation(), {
        "dense": torch.randn(2048, 13),
        "categories": torch.randint(20_000, (2048, 26)),
        "clicks": torch.randint(2, (2048,)).float(),
    }


MODELS: Mapping[str, Callable[[], Made]] = {
    # Text, both directions.
    "roberta": _text("RobertaForMaskedLM", "RobertaConfig", max_position_embeddings=514, length=500),
    "distilbert": _text("DistilBertForMaskedLM", "DistilBertConfig", layers="n_layers"),
    "albert": _text(
        "AlbertForMaskedLM", "AlbertConfig", hidden_size=768, intermediate_size=3072, num_attention_heads=12
    ),
    "electra": _text("ElectraForMaskedLM", "ElectraConfig"),
    "deberta-v2": _text(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        hidden_size=768,
        intermediate_size=3072,
        num_attention_heads=12,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        vocab_size=32_000,
        length=256,
    ),
    "mpnet": _text("MPNetForMaskedLM", "MPNetConfig", length=500),
    "modernbert": _text("ModernBertForMaskedLM", "ModernBertConfig"),
    "xlnet": _text(
        "XLNetLMHeadModel", "XLNetConfig", d_model=768, n_head=12, d_inner=3072, layers="n_layer", length=256
    ),
    "fnet": _text("FNetForMaskedLM", "FNetConfig"),
    # Text, left to right.
    "gpt-neo": _text(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        hidden_size=768,
        num_heads=12,
        layers="num_layers",
        use_cache=False,
        attention_types=[[["global", "local"], 3]],
        length=1024,
    ),
    "gpt-neox": _causal("GPTNeoXForCausalLM", "GPTNeoXConfig"),
    "gptj": _text(
        "GPTJForCausalLM", "GPTJConfig", n_embd=768, n_head=12, layers="n_layer", length=1024, use_cache=False
    ),
    "opt": _causal("OPTForCausalLM", "OPTConfig", ffn_dim=3072),
    "bloom": _text(
        "BloomForCausalLM",
        "BloomConfig",
        hidden_size=768,
        n_head=12,
        layers="n_layer",
        vocab_size=32_000,
        length=1024,
        use_cache=False,
    ),
    "llama": _causal("LlamaForCausalLM", "LlamaConfig"),
    "qwen3": _causal("Qwen3ForCausalLM", "Qwen3Config", head_dim=64),
    "gemma2": _causal("Gemma2ForCausalLM", "Gemma2Config", head_dim=64),
    "phi3": _causal("Phi3ForCausalLM", "Phi3Config"),
    "falcon": _causal("FalconForCausalLM", "FalconConfig", ffn_hidden_size=3072),
    "stablelm": _causal("StableLmForCausalLM", "StableLmConfig"),
    "olmo2": _causal("Olmo2ForCausalLM", "Olmo2Config"),
    "cohere": _causal("CohereForCausalLM", "CohereConfig"),
    "mamba": _text(
        "MambaForCausalLM",
        "MambaConfig",
        num_hidden_layers=2,
        hidden_size=512,
        state_size=8,
        batch=4,
        length=128,
        vocab_size=32_000,
        use_cache=False,
    ),
    "mixtral": _causal("MixtralForCausalLM", "MixtralConfig", num_local_experts=8, length=512),
    # Text to text.
    "t5": _text(
        "T5ForConditionalGeneration",
        "T5Config",
        layers="num_layers",
        d_model=512,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    ),
    "bart": _text(
        "BartForConditionalGeneration",
        "BartConfig",
        layers="encoder_layers",
        decoder_layers=_LAYERS,
        d_model=768,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        use_cache=False,
    ),
    "marian": _text(
        "MarianMTModel",
        "MarianConfig",
        layers="encoder_layers",
        decoder_layers=_LAYERS,
        d_model=512,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        vocab_size=32_000,
        pad_token_id=0,
        decoder_start_token_id=0,
        use_cache=False,
    ),
    "pegasus": _text(
        "PegasusForConditionalGeneration",
        "PegasusConfig",
        layers="encoder_layers",
        decoder_layers=_LAYERS,
        d_model=512,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        vocab_size=32_000,
        use_cache=False,
    ),
    # Images.
    "vit": _pixels("ViTForImageClassification", "ViTConfig", 32),
    "deit": _pixels("DeiTForImageClassification", "DeiTConfig", 32, num_hidden_layers=_LAYERS),
    "beit": _pixels(
        "BeitForImageClassification", "BeitConfig", 32, num_hidden_layers=_LAYERS, drop_path_rate=0.1
    ),
    "dinov2": _pixels(
        "Dinov2ForImageClassification",
        "Dinov2Config",
        32,
        num_hidden_layers=_LAYERS,
        patch_size=14,
        image_size=224,
    ),
    "segformer": _pixels("SegformerForImageClassification", "SegformerConfig", 32),
    "poolformer": _pixels("PoolFormerForImageClassification", "PoolFormerConfig", 32),
    "mobilevit": _pixels("MobileViTForImageClassification", "MobileViTConfig", 32, 256),
    "resnext50": _torchvision("resnext50_32x4d", 32),
    "vgg16": _torchvision("vgg16_bn", 32),
    "inception": _timm("inception_v4", 16, 299),
    "efficientnet": _torchvision("efficientnet_b0", 64),
    "mobilenet": _torchvision("mobilenet_v3_large", 64),
    "mnasnet": _torchvision("mnasnet1_0", 64),
    "shufflenet": _torchvision("shufflenet_v2_x1_0", 64),
    "squeezenet": _torchvision("squeezenet1_1", 64),
    "regnet": _torchvision("regnet_y_800mf", 64),
    "convnext": _torchvision("convnext_tiny", 32),
    "swin": _torchvision("swin_t", 32),
    "maxvit": _torchvision("maxvit_t", 16),
    "deeplab": _torchvision("deeplabv3_resnet50", 8),
    "fcn": _torchvision("fcn_resnet50", 8),
    "r3d": _video,
    "mixer": _timm("mixer_s16_224", 64),
    "resmlp": _timm("resmlp_12_224", 64),
    "cait": _timm("cait_xxs24_224", 32),
    "pvt": _timm("pvt_v2_b1", 32),
    "levit": _timm("levit_256", 64),
    "xcit": _timm("xcit_tiny_12_p16_224", 32),
    "gmlp": _timm("gmlp_s16_224", 32),
    "coatnet": _timm("coatnet_0_rw_224", 16),
    "nfnet": _timm("nf_resnet50", 32),
    "res2net": _timm("res2net50_26w_4s", 32),
    "hrnet": _timm("hrnet_w18", 16),
    "rexnet": _timm("rexnet_100", 64),
    "convmixer": _timm("convmixer_768_32", 8),
    "ghostnet": _timm("ghostnet_100", 64),
    "twins": _timm("twins_pcpvt_small", 32),
    # Sound, and pairs of images and texts.
    "wav2vec2": _audio("Wav2Vec2Model", "Wav2Vec2Config"),
    "hubert": _audio("HubertModel", "HubertConfig"),
    "wavlm": _audio("WavLMModel", "WavLMConfig"),
    "whisper": _whisper,
    "ast": _spectrogram,
    "clip": _pairs("CLIPModel", "CLIPConfig"),
    "siglip": _pairs("SiglipModel", "SiglipConfig"),
    # Others.
    "lstm": _recurrent,
    "unet": lambda: (UNet(), {"pixels": torch.randn(8, 3, 128, 128)}),
    "dlrm": _recommendation,
    "graph": graph_network,
}
