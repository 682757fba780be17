"""Taking a causal LM apart: the decoder, its layers, embedding and head, and the numbers that scale them.

Found by structure (the module that owns both the input embedding and a list of as many layers as the config says), so Llama, Qwen,
Gemma, SmolLM, Mistral, their mixtures of experts and the text part of multimodal models need no case of their own. Scales and caps are
read under the names that families use; `Capture.self_check` then compares all of this with the model's own forward pass, so a family
with a rule of its own is refused, not mistrained. What can't be found or used is a `TargetError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dflash_mp.errors import TargetError


@dataclass(frozen=True)
class Anatomy:
    """Parts of a causal LM with hidden size H and V embedding rows."""

    config: Any  # of the text model
    decoder: nn.Module  # embedding, layers, final norm: token ids in, last hidden state out
    layers_name: str  # decoder's attribute that holds the layers
    embedding: torch.Tensor  # [V, H]
    head: torch.Tensor  # [V, H]; the same tensor as the embedding if tied
    embedding_scale: float  # the model multiplies embeddings by this
    logit_softcap: float | None  # logits = cap · tanh(logits / cap)
    logit_scale: float  # logits are multiplied by this, before the cap

    @property
    def layers(self) -> nn.ModuleList:
        layers: nn.ModuleList = getattr(self.decoder, self.layers_name)
        return layers

    @property
    def tied(self) -> bool:
        return self.head.data_ptr() == self.embedding.data_ptr()


def dissect(model: Any, name: str) -> Anatomy:
    """Find the parts of `model`, a transformers causal LM or multimodal model, called `name` in errors."""
    config = model.config.get_text_config(decoder=True)
    embedding = model.get_input_embeddings()
    decoder, layers_name = _find_decoder(model, embedding, config.num_hidden_layers, name)
    weight = _plain_matrix(embedding, "embedding", name)
    head = _find_head(model, weight, name)
    return Anatomy(
        config=config,
        decoder=decoder,
        layers_name=layers_name,
        embedding=weight,
        head=head,
        embedding_scale=_embedding_scale(config, embedding, weight.dtype),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        logit_scale=_logit_scale(config),
    )


def _find_decoder(model: nn.Module, embedding: nn.Module, num_layers: int, name: str) -> tuple[nn.Module, str]:
    for module in model.modules():
        children = dict(module.named_children())
        if any(child is embedding for child in children.values()):
            for child_name, child in children.items():
                if isinstance(child, nn.ModuleList) and len(child) == num_layers:
                    return module, child_name
    raise TargetError(
        f"{name} ({type(model).__name__}): found no module that holds the embedding and its {num_layers} decoder layers",
        "use a decoder-only model of a family that transformers implements in the usual way",
    )


def _find_head(model: Any, embedding: torch.Tensor, name: str) -> torch.Tensor:
    head = model.get_output_embeddings()
    if head is None:
        raise TargetError(f"{name} has no language-model head", "use a causal LM, not a bare decoder or an embedder")
    if getattr(head, "bias", None) is not None:
        raise TargetError(f"{name}: its head has a bias, which a drafter can't carry", "use another target")
    weight = _plain_matrix(head, "head", name)
    if weight.shape != embedding.shape or weight.dtype != embedding.dtype:
        raise TargetError(
            f"{name}: its head is {tuple(weight.shape)} {weight.dtype}, its embedding {tuple(embedding.shape)} {embedding.dtype}",
            "use a checkpoint where they agree (if only the dtype differs, set target.dtype)",
        )
    return weight


def _plain_matrix(module: Any, what: str, name: str) -> torch.Tensor:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or weight.dtype not in _PLAIN:
        kind = type(module).__name__ if weight is None else f"{type(module).__name__}, {getattr(weight, 'dtype', '?')}"
        raise TargetError(
            f"{name}: its {what} is quantised ({kind}), but drafters need it as plain numbers",
            "use a checkpoint that leaves embedding and head unquantised, or the unquantised one",
        )
    return weight


_PLAIN = (torch.float32, torch.bfloat16, torch.float16)


def _embedding_scale(config: Any, embedding: nn.Module, dtype: torch.dtype) -> float:
    """As the model applies it: rounded to its dtype (√3072 is 55.5 in bfloat16)."""
    scale = getattr(embedding, "embed_scale", None)
    if scale is None:
        if str(config.model_type).startswith("gemma"):
            scale = config.hidden_size**0.5
        else:
            scale = _first(config, "embedding_multiplier", "scale_emb", default=1.0)
    return float(torch.as_tensor(scale, dtype=torch.float32).to(dtype))


def _logit_scale(config: Any) -> float:
    divisor = _first(config, "logits_scaling", default=None)  # Granite
    if divisor is not None:
        return 1.0 / float(divisor)
    base = _first(config, "dim_model_base", default=None)  # MiniCPM
    if base is not None:
        return float(base) / float(config.hidden_size)
    return float(_first(config, "logit_scale", "lm_head_multiplier", default=1.0))  # Cohere, Falcon-H1


def rope_theta(config: Any) -> float:
    """Base of the rotary embedding; of the full-attention layers where kinds of layers differ; 10,000 if none is given.

    Read from transformers 5's `rope_parameters`, flat or by kind of layer, or from the flat key of older configs.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    if "full_attention" in parameters:
        parameters = parameters["full_attention"] or {}
    theta = parameters.get("rope_theta")
    if theta is None:
        theta = _first(config, "rope_theta", "rotary_emb_base", default=10_000.0)
    return float(theta)


def norm_eps(config: Any) -> float:
    """Epsilon of the norms. Rounded to 7 digits, since a GGUF file holds it as float32."""
    eps = _first(
        config, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", default=1e-6
    )
    return float(f"{float(eps):.7g}")


def attention_shape(config: Any) -> tuple[int, int, int]:
    """(heads, KV heads, size of a head). Raises `TargetError` for a model without attention."""
    if getattr(config, "num_attention_heads", None) is None:
        raise TargetError(f"the target ({config.model_type}) has no attention layers", "use a target with attention")
    heads = int(config.num_attention_heads)
    kv_heads = int(_first(config, "num_key_value_heads", default=heads))
    return heads, kv_heads, int(_first(config, "head_dim", default=config.hidden_size // heads))


def mlp_width(config: Any) -> int:
    """Width of a dense MLP; the experts' if there is no dense one; 4·H if none is given. The first layer's where layers differ."""
    width = _first(
        config, "intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size", default=4 * config.hidden_size
    )
    return int(width[0] if isinstance(width, (list, tuple)) else width)


def keeps_state(config: Any) -> bool:
    """Whether some layer carries state from token to token outside attention (linear attention, convolution, Mamba)."""
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    return any(kind in ("conv", "mamba") or kind.startswith(("linear", "hybrid")) for kind in kinds)


def _first(config: Any, *names: str, default: Any) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return default
