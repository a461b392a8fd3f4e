# SPDX-License-Identifier: Apache-2.0
"""What methods are built of: pooling, transport, alignment, layouts, adapters, packing, prompts."""
