"""Loading the target's weights through transformers: which class, which dtype, which device, which attention.

`load_model` returns a frozen model in eval mode, wholly on one device. A GGUF file is unpacked into plain tensors (15 s for 135 M
parameters: convert it once with `dflash-mp demo` or transformers' `save_pretrained`). A multimodal checkpoint is loaded with all its
parts. Everything that goes wrong on the way is a `TargetError`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from dflash_mp.config import TargetConfig
from dflash_mp.errors import TargetError
from dflash_mp.target.source import LOADING_ERRORS, TargetSource, locate, unloadable

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(config: TargetConfig) -> Any:
    """The target as a transformers causal LM: eval mode, no gradients, on `target_device(config)`."""
    source = locate(config)
    device = target_device(config.device)
    dtype = target_dtype(config.dtype, device)
    arguments = source.load_arguments(config)
    try:
        model_config = AutoConfig.from_pretrained(source.location, **arguments)
        auto_class = _auto_class(model_config, source, config)
        if source.gguf_file and hasattr(transformers, "GgufConfig"):
            arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
        attention = _attention(config, model_config)
        if attention is not None:
            arguments["attn_implementation"] = attention
        if not source.gguf_file:
            arguments["use_safetensors"] = True  # never a pickled pytorch_model.bin
        with progress_on_terminals_only():
            model, report = auto_class.from_pretrained(
                source.location, dtype=dtype, output_loading_info=True, **arguments
            )
        _refuse_missing(report, source)
        model = model.to(device)
    except torch.OutOfMemoryError as error:
        raise TargetError(
            f"{source.name} does not fit on {device}: {error}", "use a larger device, or a smaller target.dtype"
        ) from error
    except LOADING_ERRORS as error:
        raise unloadable("model", source, config, error) from error
    return model.eval().requires_grad_(False)


def target_device(name: str) -> torch.device:
    """The device that `target.device` names; auto is CUDA if there is one. Raises `TargetError` if it doesn't exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise TargetError(f"{name!r} is not a device", "target.device: auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise TargetError(
            f"there is no {name} here: PyTorch sees {torch.cuda.device_count()} CUDA devices",
            "set target.device: cpu, or install a PyTorch built for this machine's GPU",
        )
    return device


def target_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that `target.dtype` names; auto is float32 on a CPU and bfloat16 elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[name]


@contextmanager
def progress_on_terminals_only() -> Iterator[None]:
    """Progress bars are for people: keep them out of logs."""
    if sys.stderr.isatty() or not transformers.utils.logging.is_progress_bar_enabled():
        yield
        return
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.utils.logging.enable_progress_bar()


def _auto_class(model_config: Any, source: TargetSource, config: TargetConfig) -> Any:
    if getattr(model_config, "is_encoder_decoder", False):
        raise TargetError(f"{source.name} is an encoder-decoder model", "use a decoder-only causal LM as the target")
    remote = getattr(model_config, "auto_map", None) or {}
    if type(model_config) in MODEL_FOR_CAUSAL_LM_MAPPING or (
        config.trust_remote_code and "AutoModelForCausalLM" in remote
    ):
        return AutoModelForCausalLM
    if type(model_config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    raise TargetError(
        f"{source.name} ({model_config.model_type}) is not a causal language model that transformers {transformers.__version__} knows",
        "use another target, or a newer transformers",
    )


def _refuse_missing(report: dict[str, Any], source: TargetSource) -> None:
    """transformers gives random numbers to weights that the checkpoint lacks, and says so in a log only."""
    missing = sorted(str(key) for key in report.get("missing_keys") or ())
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise TargetError(
            f"the checkpoint of {source.name} lacks weights that the model needs: {', '.join(missing[:3])}{more}",
            "fetch the whole checkpoint again",
        )


def _attention(config: TargetConfig, model_config: Any) -> str | None:
    """What to ask transformers for; None leaves it its own choice (sdpa where the model supports it)."""
    capped = getattr(model_config.get_text_config(), "attn_logit_softcapping", None) is not None
    if config.attention in ("auto", "packed"):
        return "eager" if capped else None
    if config.attention == "sdpa" and capped:
        raise TargetError(
            "this target caps its attention logits, which sdpa attention leaves out", "set target.attention: eager"
        )
    return config.attention
