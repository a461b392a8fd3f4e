# SPDX-License-Identifier: Apache-2.0
"""Configuration of xRAG."""

from collections.abc import Sequence
from typing import Any

from .configuration_compressor import CompressorConfig, max_positions
from .field_checks import one_of
from .layer_shape import perceptron_flops, stack_flops

PASSAGE_READOUTS = ("last_token", "first_token", "mean")
# Families whose first position is the one behind the pad's id.
_POSITIONS_BEHIND_PAD = (
    *("camembert", "data2vec-text", "ibert", "longformer", "mpnet", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
)


class XRAGConfig(CompressorConfig):
    """A retriever's embedding of each passage as one slot ("xRAG: Extreme Context Compression for Retrieval-augmented
    Generation with One Token").

    The ratio is the length of a passage: at ratio r the context is cut into passages of r of the encoder's tokens, and
    each is one slot. The paper has 180.

    Args:
        compression_ratios: Tokens of a passage. With `passage_start_ids` and `passage_end_ids` around them they have
            to fit into the encoder's positions.
        encoder_config: Configuration of the sentence encoder or retriever; the paper's is SFR-Embedding-Mistral.
            `None`: the base's own states.
        passage_readout: The embedding of a passage, as the encoder was trained: the state of its last token
            (SFR-Embedding-Mistral), of the first one (BGE), or the `"mean"` over all (all-MiniLM).
        normalize_embeddings: Whether embeddings have length 1 in front of the perceptron. The authors' code leaves
            them as they are.
        passage_start_ids, passage_end_ids: Tokens around each passage, such as [CLS] and [SEP]; `from_base` takes them
            from the encoder's tokenizer, which then puts nothing around a text itself.
        encoder_lora: `None`: the encoder is frozen, as in the paper, where the perceptron alone trains.
        kwargs: fields of [`CompressorConfig`].
    """

    model_type = "xrag_compressor"
    # Each passage starts anew.
    encoder_limit = None
    card_fields = {
        **CompressorConfig.card_fields,
        "passage_readout": "Embedding of a passage",
        "normalize_embeddings": "Embeddings of length 1",
    }

    def __init__(
        self,
        compression_ratios: int | list[int] | tuple[int, ...] = (180,),
        passage_readout: str = "last_token",
        normalize_embeddings: bool = False,
        passage_start_ids: Sequence[int] = (),
        passage_end_ids: Sequence[int] = (),
        **kwargs: Any,
    ):
        self.passage_readout = one_of("passage_readout", passage_readout, PASSAGE_READOUTS)
        self.normalize_embeddings = normalize_embeddings
        self.passage_start_ids = list(passage_start_ids)
        self.passage_end_ids = list(passage_end_ids)
        super().__init__(compression_ratios=compression_ratios, **kwargs)
        for ratio in self.compression_ratios:
            self.check_passage(ratio)

    def check_passage(self, num_tokens: int) -> None:
        """Refuse passages that do not fit into the encoder's positions."""
        limit, places = self._positions, self.passage_places(num_tokens)
        if limit is not None and places > limit:
            raise ValueError(
                f"a passage of {num_tokens} tokens needs {places} positions, the encoder has {limit} "
                "(max_position_embeddings): take a lower ratio, which is the length of xRAG's passages"
            )

    def passage_places(self, num_tokens: int) -> int:
        """Return the encoder's places of a passage of so many tokens, those around it included."""
        return len(self.passage_start_ids) + num_tokens + len(self.passage_end_ids)

    @property
    def _positions(self) -> int | None:
        encoder = self.get_encoder_config()
        limit = max_positions(encoder)
        return limit - encoder.pad_token_id - 1 if encoder.model_type in _POSITIONS_BEHIND_PAD else limit

    def _fits(self, num_tokens: int, ratio: int) -> bool:
        limit = self._positions
        return limit is None or self.passage_places(min(num_tokens, ratio)) <= limit

    def chunk_flops(self, num_tokens: int, ratio: int) -> int:
        """Operations of the encoder, passage by passage, and of the perceptron."""
        full, rest = divmod(num_tokens, ratio)
        encoder, passages = self.get_encoder_config(), [(ratio, full), (rest, min(rest, 1))]
        total = sum(times * stack_flops(encoder, self.passage_places(length)) for length, times in passages if times)
        return total + perceptron_flops(self.chunk_slots(num_tokens, ratio), encoder.hidden_size, self.hidden_size)
