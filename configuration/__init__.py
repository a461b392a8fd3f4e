# SPDX-License-Identifier: Apache-2.0
"""Configurations, one per method."""
