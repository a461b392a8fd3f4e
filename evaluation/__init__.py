# SPDX-License-Identifier: Apache-2.0
"""Evaluation: metrics, reports, plots and the evaluate command."""
