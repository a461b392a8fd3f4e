# SPDX-License-Identifier: Apache-2.0
"""Where a call's time goes: by the parts of a model, and by operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import PreTrainedModel

_PREFIX = "part: "
_WHOLE = "whole"
_NUM_OPERATORS = 10


def parts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The model's own modules, and theirs, by name; the language models in it stay in one piece."""
    found = {}
    for name, child in model.named_children():
        found[name] = child
        if not isinstance(child, PreTrainedModel):
            found.update({f"{name}.{inner}": module for inner, module in child.named_children()})
    return found


@contextmanager
def _recorded(parts: dict[str, nn.Module]) -> Iterator[None]:
    """Inside this block the profiler sees each call of a part under its name."""
    running: list[record_function] = []

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            running.append(record_function(_PREFIX + name))
            running[-1].__enter__()

        return hook

    def leave(*_: Any) -> None:
        running.pop().__exit__(None, None, None)

    handles = []
    for name, module in parts.items():
        handles += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def time_by_part(model: nn.Module, call: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Profile one call.

    Args:
        model: holds the parts that the call runs.
        call: what to profile; run it once before, so that nothing is set up inside.
        device: a GPU's own time is told on a GPU.

    Returns:
        "seconds" of the whole; "parts", each with its "seconds" and with the "own_seconds" that are not those of parts
        inside it (the model's own are under "whole"); "operators", the ten with the most time of their own, and their
        share in that of all. The profiler itself slows things down: take the proportions.
    """
    activities, kind = [ProfilerActivity.CPU], "cpu"
    if device.type == "cuda":
        activities, kind = [*activities, ProfilerActivity.CUDA], "device"
    parts = parts_of(model)
    with profile(activities=activities) as record, _recorded(parts), record_function(_PREFIX + _WHOLE):
        call()
    events = record.key_averages()
    seconds = {
        event.key.removeprefix(_PREFIX): getattr(event, f"{kind}_time_total") / 1e6
        for event in events
        if event.key.startswith(_PREFIX)
    }
    own_time = {
        event.key: getattr(event, f"self_{kind}_time_total")
        for event in events
        if not event.key.startswith(_PREFIX) and getattr(event, f"self_{kind}_time_total") > 0
    }
    longest = sorted(own_time, key=own_time.get, reverse=True)[:_NUM_OPERATORS]
    return {
        "seconds": seconds[_WHOLE],
        "parts": [
            {"part": name, "seconds": taken, "own_seconds": taken - _inside(name, seconds)}
            for name, taken in seconds.items()
        ],
        "operators": [{"operator": name, "share": own_time[name] / sum(own_time.values())} for name in longest],
    }


def _inside(name: str, seconds: dict[str, float]) -> float:
    """Time of the parts directly inside a part."""
    if name == _WHOLE:
        return sum(taken for other, taken in seconds.items() if other != _WHOLE and "." not in other)
    return sum(taken for other, taken in seconds.items() if other.rpartition(".")[0] == name)
