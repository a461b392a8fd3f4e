# SPDX-License-Identifier: Apache-2.0
"""Weights of bases and checkpoints: starting from a base, saving, loading, light checkpoints, remote code."""
