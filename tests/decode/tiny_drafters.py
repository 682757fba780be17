"""Tiny real targets, and drafters for them: one that knows the target's next tokens, one trained for a few seconds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from dflash_mp.bench.tiny import write_tiny_target
from dflash_mp.decode.speculative import ModelDrafter, Propose
from dflash_mp.decode.verifier import Verifier
from dflash_mp.drafter.model import DraftModel, embed
from dflash_mp.drafter.shape import DrafterShape

MASK, EOS = 259, 258
VOCABULARY = 288


@cache
def tiny_model(family: str, seed: int = 0, *, predictable: bool = False) -> Any:
    """A random target in float32, built once per process. `predictable`: it counts 0, 1, … 31, 0, whatever came before."""
    directory = Path(mkdtemp(prefix="tiny-target-"))
    write_tiny_target(directory, family=family, seed=seed)  # type: ignore[arg-type]
    attention = "eager" if family == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=attention)
    model = model.eval().requires_grad_(False)
    if predictable:
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "post_feedforward_layernorm.weight")):
                parameter.mul_(0.02)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        for token in range(32):
            head[(token + 1) % 32] = embedding[token]
    return model


def verifier_for(model: Any, layer_ids: Sequence[int]) -> Verifier:
    return Verifier(model, list(model.model.layers), layer_ids)


def drafter_shape(
    model: Any, *, block_size: int = 8, layer_ids: tuple[int, ...] = (0, 2), layers: int = 2
) -> DrafterShape:
    config = model.config
    return DrafterShape(
        layers=layers,
        hidden_size=config.hidden_size,
        intermediate_size=128,
        heads=3,
        kv_heads=1,
        head_dim=32,
        block_size=block_size,
        layer_ids=layer_ids,
        mask_token_id=MASK,
        vocab_size=config.vocab_size,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_positions=config.max_position_embeddings,
        num_target_layers=config.num_hidden_layers,
        embedding_scale=config.hidden_size**0.5 if config.model_type == "gemma2" else 1.0,
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        eos_token_ids=(EOS,),
        pad_token_id=256,
    )


def model_drafter(draft_model: DraftModel, model: Any) -> ModelDrafter:
    return ModelDrafter(draft_model, model.get_input_embeddings().weight, model.get_output_embeddings().weight)


@torch.no_grad()
def greedy(model: Any, prompts: torch.Tensor, count: int) -> torch.Tensor:
    """`prompts` [b, n] and the `count` tokens that the target adds, without a cache: the plainest reference there is."""
    for _ in range(count):
        following = model(input_ids=prompts, use_cache=False, logits_to_keep=1).logits[:, -1].argmax(-1)
        prompts = torch.cat((prompts, following[:, None]), 1)
    return prompts


@cache
def briefly_trained(family: str) -> DraftModel:
    """A drafter of the predictable target, fitted to its greedy texts so far that blocks of all lengths are accepted."""
    model = tiny_model(family, predictable=True)
    drafter = DraftModel(drafter_shape(model))
    drafter.init_weights(0)
    prompts = torch.randint(0, 32, (32, 6), generator=torch.Generator().manual_seed(0))
    learn(drafter, model, greedy(model, prompts, 30), first=6, steps=50)
    return drafter


def learn(drafter: DraftModel, model: Any, texts: torch.Tensor, *, first: int, steps: int, rate: float = 3e-3) -> None:
    """Fit `drafter` to `texts` [b, n], in each step to the blocks at one anchor, which starts at `first` and moves on.

    Of a large vocabulary it learns to tell the texts' own tokens from some 1,000 others: enough for greedy decoding, and cheap.
    """
    shape = drafter.shape
    with torch.no_grad():
        states = model(input_ids=texts, output_hidden_states=True, use_cache=False).hidden_states
        features = torch.cat([states[i + 1] for i in shape.layer_ids], -1)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    others = torch.randperm(head.shape[0], generator=torch.Generator().manual_seed(0))[:1000]
    known = torch.cat((texts.flatten(), others)).unique()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=rate)
    size, rows = shape.block_size, texts.shape[0]
    for step in range(steps):
        anchor = first + step % (texts.shape[1] - size + 1 - first)
        ids = torch.full((rows, size), shape.mask_token_id)
        ids[:, 0] = texts[:, anchor]
        context, block = torch.arange(anchor), torch.arange(anchor, anchor + size)
        hidden = drafter(
            features[:, :anchor],
            embed(ids, embedding, shape.embedding_scale),
            context.expand(rows, -1),
            block.expand(rows, -1),
            None,  # all context precedes the one block of a row: nothing is hidden from it
        )
        logits = drafter.compute_logits(hidden[:, 1:], head[known]).flatten(0, 1)
        labels = torch.searchsorted(known, texts[:, anchor + 1 : anchor + size].flatten())
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@dataclass
class Oracle:
    """A drafter that proposes `text` itself, except at the positions in `wrong`; past the end of `text` it proposes token 0."""

    text: Sequence[int]
    block_size: int
    wrong: frozenset[int] = frozenset()
    features: list[torch.Tensor] = field(default_factory=list)

    @staticmethod
    def erring(text: Sequence[int], block_size: int, share: float, seed: int) -> Oracle:
        chance = random.Random(seed)
        return Oracle(text, block_size, frozenset(i for i in range(len(text)) if chance.random() < share))

    def begin(self) -> Propose:
        self.features.clear()
        known = 0

        def propose(features: torch.Tensor, anchor: torch.Tensor, size: int) -> torch.Tensor:
            nonlocal known
            self.features.append(features)
            known += features.shape[1]  # the anchor's position
            tokens = []
            for place in range(known + 1, known + size):
                token = self.text[place] if place < len(self.text) else 0
                tokens.append((token + 1) % 256 if place in self.wrong else token)
            return F.one_hot(torch.tensor(tokens, dtype=torch.int64), VOCABULARY).float() * 50

        return propose
