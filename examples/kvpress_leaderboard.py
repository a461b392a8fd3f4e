# SPDX-License-Identifier: Apache-2.0
"""Run kvpress's evaluate.py with a checkpoint's scorers as the press `ranked_key_values`.

In kvpress's folder `evaluation`, in an environment that has kvpress:

    CHECKPOINT=ranked-qwen3-8b python ~/context-compressors/examples/kvpress_leaderboard.py --dataset ruler \\
        --data_dir 4096 --model Qwen/Qwen3-8B --press_name ranked_key_values --compression_ratio 0.75

`RULER` names a local copy of the data set.
"""

import os
import sys

sys.path.insert(0, os.getcwd())

from evaluate import CliEntryPoint
from evaluate_registry import DATASET_REGISTRY, PRESS_REGISTRY
from fire import Fire

from context_compressors.integrations.kvpress import RankedKeyValuesPress

if __name__ == "__main__":
    PRESS_REGISTRY["ranked_key_values"] = RankedKeyValuesPress(os.environ["CHECKPOINT"])
    DATASET_REGISTRY["ruler"] = os.environ.get("RULER", DATASET_REGISTRY["ruler"])
    Fire(CliEntryPoint)
