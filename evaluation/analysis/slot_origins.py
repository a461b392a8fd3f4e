# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a document went into which slot, and how well its tokens can be had back from the slots."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...data.prompts import default_prompts, format_prompt
from ...modeling.memory.compressed_context import CompressedContext
from ...modeling.parts.chat_template import prompt_ids
from ...modeling.parts.pooling import num_slots
from ...modeling.parts.prompting import restored_ids, start_ids
from ...modeling.parts.text_ids import start_token_id
from .attention import has_memory_tokens, memory_token_shares
from .information_flow import has_information_flow, information_flow
from .one_chunk import one_chunk

PLAN, ATTENTION, WINDOWS, KEPT = "plan", "attention", "windows", "kept"
# Tokens whose logits are computed at once.
_LOGITS_AT_ONCE = 256


@dataclass(frozen=True)
class SlotOrigins:
    """What the slots of a document are made of.

    Args:
        kind: what tells it: "plan", the weights that tokens are transported with; "attention" of memory tokens, in the
            last layer; "windows" of neighbouring tokens whose mean, or embedding, a slot is; or "kept", tokens
            whose own keys and values a slot holds, as shares of the heads of all layers.
        chunks: for each chunk of the document `(num_slots, num_tokens)`; what a slot is made of sums up to 1.
    """

    kind: str
    chunks: tuple[Tensor, ...]

    def strongest(self, most: int) -> list[list[tuple[int, float]]]:
        """For each slot the places of its tokens in the document and their weights, in the order of the text.

        Args:
            most: tokens of a slot at most; those below a hundredth of its strongest one are left out.
        """
        found, first = [], 0
        for weights in self.chunks:
            for slot in weights:
                values, places = slot.topk(min(most, len(slot)))
                pairs = zip((places + first).tolist(), values.tolist(), strict=True)
                found.append(sorted(pair for pair in pairs if pair[1] >= 0.01 * float(values[0])))
            first += weights.shape[1]
        return found


@torch.inference_mode()
def slot_origins(model: PreTrainedModel, ids: Sequence[int], ratio: int | None = None) -> SlotOrigins | None:
    """Which tokens of a document went into which slot.

    Args:
        model: a compressor.
        ids: the document's token ids, as `compress` reads them.
        ratio: context tokens per slot; the checkpoint's default when `None`.

    Returns:
        What the model's own parts tell; `None` where a slot has no such weights.

    Raises:
        ValueError: a document without tokens, or a ratio that the checkpoint lacks.
    """
    backbone = model.base_model
    kind = _kind(backbone)
    if kind is None:
        return None
    size = model.config.chunk_size or max(1, len(ids))
    parts = [ids[start : start + size] for start in range(0, max(1, len(ids)), size)]
    rows = (torch.tensor([list(part)], device=model.device) for part in parts)
    return SlotOrigins(kind, tuple(_weights(backbone, kind, row, ratio).float().cpu() for row in rows))


def _kind(backbone: Any) -> str | None:
    if has_information_flow(backbone):
        return PLAN
    if has_memory_tokens(backbone):
        return ATTENTION
    if getattr(backbone, "pools_windows", False):
        return WINDOWS
    return KEPT if hasattr(backbone, "kept_tokens") else None


def _weights(backbone: Any, kind: str, input_ids: Tensor, ratio: int | None) -> Tensor:
    """Of one chunk, `(num_slots, num_tokens)`."""
    if kind == PLAN:
        return information_flow(backbone, input_ids, ratio=ratio).allocation[0]
    if kind == ATTENTION:
        return memory_token_shares(backbone, input_ids, ratio)
    chunks, chunk_ratio = one_chunk(backbone, input_ids, None, ratio, "the origin of slots is shown")
    num_tokens = input_ids.shape[1]
    if kind == KEPT:
        heads = torch.cat([places.flatten(0, 1) for places in backbone.kept_tokens(chunks, chunk_ratio)])
        return functional.one_hot(heads, num_tokens).float().mean(dim=0)
    window = torch.arange(num_tokens) // int(chunk_ratio)
    shares = functional.one_hot(window, int(num_slots(num_tokens, int(chunk_ratio)))).T.float()
    return shares / shares.sum(dim=1, keepdim=True)


def can_reconstruct(config: Any) -> bool:
    """Whether a checkpoint may have learned to write a document back from its slots: one that nothing trained cannot.

    Args:
        config: a compressor's configuration.
    """
    return config.is_trained and not config.opens_context and not config.is_encoder_decoder


@dataclass(frozen=True)
class Reconstruction:
    """How likely the tokens of a text are to a decoder that is to repeat it.

    Args:
        errors: `(num_tokens,)`, negative log-likelihood of each, in nats.
        is_likeliest: `(num_tokens,)` bool, whether no other token was likelier there.
    """

    errors: Tensor
    is_likeliest: Tensor

    @property
    def accuracy(self) -> float:
        """Share of the tokens that are the likeliest in their place, 0 to 100."""
        return 100 * float(self.is_likeliest.float().mean())


@torch.inference_mode()
def reconstruction(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], memory: CompressedContext | None
) -> Reconstruction:
    """Give the decoder a text token by token behind the request to repeat it, as evaluation does.

    Args:
        model: a compressor that reconstructs, see `can_reconstruct`.
        tokenizer: the tokenizer saved with it.
        ids: token ids of the text alone, of the decoder's tokenizer.
        memory: what the text was compressed to, one row; `None` for what the tokens before tell alone.

    Raises:
        ValueError: a text without tokens, or a checkpoint that cannot reconstruct.
    """
    config = model.config
    if not ids or not can_reconstruct(config):
        raise ValueError(f"{type(model).__name__} cannot reconstruct a text of {len(ids)} tokens")
    request = format_prompt("reconstruction", path=default_prompts(config))
    prompt = prompt_ids(tokenizer, [request], config.prompt_format)
    start = [*start_ids(config, tokenizer, prompt.head, "reconstruction"), *prompt.turns[0]]
    start = [*start, *restored_ids(config, tokenizer)] or [start_token_id(tokenizer)]
    input_ids = torch.tensor([[*start, *ids[:-1]]], device=model.device)
    states = model.base_model(input_ids=input_ids, memory=memory, use_cache=False).last_hidden_state
    states, targets = states[0, len(start) - 1 :], torch.tensor(list(ids), device=model.device)
    errors, hits = [], []
    # The logits of all tokens together would be the largest tensor by far.
    for piece, wanted in zip(states.split(_LOGITS_AT_ONCE), targets.split(_LOGITS_AT_ONCE), strict=True):
        logits = model.text_logits(piece[None])[0].float()
        errors.append(functional.cross_entropy(logits, wanted, reduction="none").cpu())
        hits.append((logits.argmax(dim=-1) == wanted).cpu())
    return Reconstruction(torch.cat(errors), torch.cat(hits))
