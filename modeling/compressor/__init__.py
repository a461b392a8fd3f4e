# SPDX-License-Identifier: Apache-2.0
"""What every compressor does around its method, in the order in which a call goes through it.

Contexts in: `token_rows` checks them, `chunking` cuts them, a method's `encode` makes slots, `backbone` a memory.
A memory and a text: `memory_checks`, then `slot_reading` makes one sequence of both, `modeling_compressor` runs the
language model over it, and `causal_lm` has the loss and `generate`. Where the decoder looks at slots by
cross-attention, all of that is in `encoder_decoder_compressor`.

Several methods share `memory_token_compressor`, `key_value_selection` and `headwise_reading`; `opened_contexts` is for
contexts behind a chat's opening, and for those longer than a base's positions. Weights are taken and saved by
`pretrained_compressor`, and those of causal language models by `decoder_only`. `context_compression_qa` goes from
texts to answers; `serving` and `decoder_export` are for servers of the decoder alone.
"""
