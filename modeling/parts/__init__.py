# SPDX-License-Identifier: Apache-2.0
"""Parts of methods: pooling, transport, layouts, adapters, packing, prompts."""
