# SPDX-License-Identifier: Apache-2.0
"""What a run counts from its first step to its last, over all its parts: tokens and time."""

from __future__ import annotations

import time
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

COUNTS = ("num_tokens", "num_context_tokens", "num_cut_tokens", "num_cut_examples")


class RunCounts(TrainerCallback, ExportableState):
    """Counts of a training run that its checkpoints hold, so that a resumed run goes on from them.

    Attributes:
        counts: `COUNTS` of this process, and in process 0 what all of them had when they were last put together.
        is_whole: whether they go back to the first step; not after a resume from a checkpoint without them.
        earlier_seconds: wall-clock time of the parts before a resume, up to the checkpoints that they left.
    """

    def __init__(self) -> None:
        self.counts = dict.fromkeys(COUNTS, 0)
        self.is_whole = True
        self.earlier_seconds = 0.0
        self._began: float | None = None

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of training so far."""
        return self.earlier_seconds + (0.0 if self._began is None else time.perf_counter() - self._began)

    def add(self, **counts: int) -> None:
        """Count what a batch has."""
        for name, number in counts.items():
            self.counts[name] += number

    def put_together(self, accelerator: Accelerator) -> dict[str, int]:
        """The counts of all processes, which process 0 keeps from now on; every process has to call this."""
        own = torch.tensor([self.counts[name] for name in COUNTS], device=accelerator.device)
        total = dict(zip(COUNTS, accelerator.reduce(own, reduction="sum").tolist(), strict=True))
        self.counts = dict(total) if accelerator.is_main_process else dict.fromkeys(COUNTS, 0)
        return total

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, as `ExportableState` has it."""
        attributes = {"counts": dict(self.counts), "earlier_seconds": self.seconds, "is_whole": self.is_whole}
        return {"args": {}, "attributes": attributes}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__)
        if saved is None:
            # A checkpoint from before these counts; the Trainer looks for them when it saves the next one.
            self.is_whole = state.global_step == 0
        elif state.global_step:
            attributes = saved["attributes"]
            # They are those of all processes.
            self.counts = dict(attributes["counts"] if state.is_world_process_zero else dict.fromkeys(COUNTS, 0))
            self.is_whole, self.earlier_seconds = attributes["is_whole"], attributes["earlier_seconds"]
        state.stateful_callbacks[type(self).__name__] = self.state()
        self._began = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.earlier_seconds, self._began = self.seconds, None
