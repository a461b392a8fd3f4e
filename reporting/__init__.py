# SPDX-License-Identifier: Apache-2.0
"""Parts of every report: the machine that made it, result files, tables."""
