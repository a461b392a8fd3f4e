# SPDX-License-Identifier: Apache-2.0
"""Collections: many texts compressed by many processes, kept in one store, and a few of them read for a question."""
