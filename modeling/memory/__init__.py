# SPDX-License-Identifier: Apache-2.0
"""Compressed contexts: what `compress` returns, its file, concatenation, validation and key/values."""
