# SPDX-License-Identifier: Apache-2.0
"""Memories: `compressed_context` is what `compress` returns, and the files beside it are what it can do.

`carriers` and `memory_quantization` are about its embeddings or key/values, `memory_validation` about its fields;
`memory_concatenation` joins, `memory_file` saves.
`headwise_pairs` says which key/values stay of all heads together, and which of them at coarser ratios;
`key_value_memory` has the caches.
"""
