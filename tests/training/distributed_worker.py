# SPDX-License-Identifier: Apache-2.0
"""Started by `accelerate launch`: runs the train command several times, so that a test pays for one start only.

    distributed_worker.py ddp|fsdp RUNS.json

RUNS.json holds one list of arguments for each run. "fsdp" is for processes without a GPU: accelerate looks for its
FSDP settings on accelerators only, while FSDP2 itself works over gloo, so accelerate is told that the two are GPUs.
"""

import json
import sys
from pathlib import Path

from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import Trainer

from context_compressors.training.train import main

_start_state = PartialState.__init__
_save_model = Trainer.save_model


def start_state_as_if_on_gpus(self: PartialState, *args, **kwargs) -> None:
    _start_state(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU


def save_sharded_model(self: Trainer, *args, **kwargs) -> None:
    if not any(isinstance(parameter, DTensor) for parameter in self.model.parameters()):
        raise RuntimeError("the model is not sharded: this run tests nothing")
    _save_model(self, *args, **kwargs)


if __name__ == "__main__":
    wrapper, runs = sys.argv[1:]
    if wrapper == "fsdp":
        PartialState.__init__ = start_state_as_if_on_gpus
        Trainer.save_model = save_sharded_model
    for arguments in json.loads(Path(runs).read_text()):
        main(arguments)
