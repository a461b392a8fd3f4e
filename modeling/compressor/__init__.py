# SPDX-License-Identifier: Apache-2.0
"""The work around a method, in the order in which a call goes through it.

Contexts in: `validation` checks them, `chunking` cuts them, a method's `encode` makes slots, `backbone` makes a memory
of these. A memory and a text: `modeling_compressor` makes one sequence of both and runs the language model over it;
`causal_lm` has the loss and `generate`. `pretrained_compressor` starts from a base, loads and saves.

Several methods share `memory_token_compressor`, `key_value_selection` and `headwise_reading`. `context_compression_qa`
goes from texts to answers; `serving` is for servers of the decoder alone.
"""
