# SPDX-License-Identifier: Apache-2.0
"""Training: data, prompts, collators, trainers, recipes and the train command."""
