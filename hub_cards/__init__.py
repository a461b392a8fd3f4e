# SPDX-License-Identifier: Apache-2.0
"""Model cards: a shared template, and each method's own text."""
