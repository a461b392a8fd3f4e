# SPDX-License-Identifier: Apache-2.0
"""Where weights come from and go to: bases, from_base, saving and loading, light checkpoints, remote code."""
