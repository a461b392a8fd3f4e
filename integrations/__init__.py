# SPDX-License-Identifier: Apache-2.0
"""Compressors as components of other frameworks, a module each (extras `langchain`, `llama-index`, `haystack`)."""
