# SPDX-License-Identifier: Apache-2.0
"""One broken argument in a good call of any method: `ValueError` or `TypeError`, with the argument's name."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from budget import fuzz
from calls import VOCAB_SIZE, Subject, assert_refused, padded, random_rows, seeds, subjects
from hypothesis import strategies as st
from tiny_models import METHOD_CASES

NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class BrokenCall:
    subject: Subject
    method: str
    fault: str
    arguments: dict[str, Any]
    names: tuple[str, ...]

    def __call__(self) -> Any:
        model = self.subject.model
        call = {"compress": model.compress, "forward": model, "generate": model.generate}[self.method]
        return call(**self.arguments)


# A fault breaks arguments in place and returns what the error may name.
Fault = Callable[[Any, Subject, dict[str, Any]], tuple[str, ...]]
OTHER_THINGS = (5, 2.5, "text", b"bytes", [[5, 6]], {"a": 1}, object(), torch.nn.Identity())


# --- token ids ---


def outside_the_vocabulary(draw: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    ids = ids.long()
    real = mask.bool().nonzero()
    row, place = real[draw(st.integers(0, len(real) - 1))]
    ids[row, place] = draw(st.sampled_from([VOCAB_SIZE + 50, 10**6, 2**31, 2**62, -1, -100, -(2**31)]))
    return ids


def other_ids(draw: Any, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    types = (torch.float32, torch.bfloat16, torch.bool, torch.int8, torch.int16, torch.uint8, torch.complex64)
    values = [*(ids.to(kind) for kind in types), ids[0], ids[None], ids.sum(), ids[:0], ids.tolist(), ids.numpy()]
    return draw(st.sampled_from([*values, *OTHER_THINGS]))


def break_ids(draw: Any, subject: Subject, arguments: dict[str, Any]) -> tuple[str, ...]:
    name = draw(st.sampled_from([name for name in ("input_ids", "context_input_ids") if name in arguments]))
    mask_name = name.replace("input_ids", "attention_mask")
    fault = draw(st.sampled_from([outside_the_vocabulary, other_ids]))
    arguments[name] = fault(draw, arguments[name], arguments[mask_name])
    return (f"`{name}`",)


# --- masks ---


def other_values(draw: Any, mask: torch.Tensor) -> torch.Tensor:
    mask = mask.to(draw(st.sampled_from([torch.float32, torch.float64, torch.float16])))
    if not bool(mask.all()) and draw(st.booleans()):
        return torch.where(mask.bool(), 0.0, -INF)  # as it is added to scores
    row, place = draw(st.integers(0, mask.shape[0] - 1)), draw(st.integers(0, mask.shape[1] - 1))
    mask[row, place] = draw(st.sampled_from([NAN, INF, -INF, 2, -1, 0.5, 1e-3, 255]))
    return mask


def other_shapes(draw: Any, mask: torch.Tensor) -> torch.Tensor:
    shapes = (
        mask[:, :-1],
        torch.cat([mask, mask]),
        mask[:, None],
        mask[0],
        torch.cat([mask, mask], dim=1),
        mask.sum(),
    )
    return draw(st.sampled_from(shapes))


def other_masks(draw: Any, mask: torch.Tensor) -> Any:
    return draw(st.sampled_from([mask.to(torch.complex64), mask.tolist(), mask.numpy(), *OTHER_THINGS]))


def break_mask(draw: Any, subject: Subject, arguments: dict[str, Any]) -> tuple[str, ...]:
    masks = [name for name in ("attention_mask", "context_attention_mask") if name in arguments]
    name = draw(st.sampled_from(masks))
    if name == "attention_mask" and len(masks) + ("memory" in arguments) > 1 and draw(st.booleans()):
        arguments[name] = arguments[name].clone()
        arguments[name][draw(st.integers(0, len(arguments[name]) - 1))] = 0
        return ("`input_ids` has no token",)
    fault = draw(st.sampled_from([other_values, other_shapes, other_masks]))
    arguments[name] = fault(draw, arguments[name])
    return (f"`{name}`",)


# --- ratios ---


def break_ratio(draw: Any, subject: Subject, arguments: dict[str, Any]) -> tuple[str, ...]:
    num_rows = len(arguments["input_ids"])
    values = [0, -1, -(2**40), True, False, 2.0, 2.5, NAN, INF, "2", b"2", {}, object(), 7, 1000]
    tensors = [
        [2.0] * num_rows,
        [0] * num_rows,
        [7] * num_rows,
        [True] * num_rows,
        [2] * (num_rows + 1),
        [[2] * num_rows],
    ]
    values += [torch.tensor(value) for value in (*tensors, 0, 7, 2.5, True, -1)]
    ratio = draw(st.sampled_from(values))
    if "memory" in arguments:
        # Of the memory's own ratio nothing is wrong, in whatever form it comes.
        arguments["ratio"] = draw(
            st.sampled_from([5, "2", torch.tensor([5] * num_rows), torch.tensor([5] * 7), object()])
        )
        return ("ratio",)
    listed = [[2]] if "context_input_ids" in arguments else [[], [ratio], [2, ratio]]
    arguments["ratio"] = draw(st.sampled_from([ratio, *listed]))
    return ("ratio",)


def break_large_ratio(draw: Any, subject: Subject, arguments: dict[str, Any]) -> tuple[str, ...]:
    arguments |= {"ratio": draw(st.sampled_from([65_537, 2**31, 2**62, 10**30])), "allow_untrained_ratio": True}
    return ("ratio",)


# --- memories ---


@functools.cache
def stranger(seed: int) -> Any:
    return METHOD_CASES[0].build(seed=seed)


def not_finite(draw: Any, memory: Any) -> Any:
    carrier = (
        [memory.embeddings] if memory.key_values is None else [part for pair in memory.key_values for part in pair]
    )
    tensors = [tensor.clone() for tensor in carrier]
    tensor = draw(st.sampled_from(tensors))
    tensor.view(-1)[draw(st.integers(0, tensor.numel() - 1))] = draw(st.sampled_from([NAN, INF, -INF]))
    if memory.key_values is None:
        return dataclasses.replace(memory, embeddings=tensors[0])
    return dataclasses.replace(memory, key_values=tuple(zip(tensors[::2], tensors[1::2], strict=True)))


def break_memory(draw: Any, subject: Subject, arguments: dict[str, Any]) -> tuple[str, ...]:
    memory = arguments["memory"]
    kind = draw(st.sampled_from(["values", "rows", "model", "stranger", "thing", "context", "mask"]))
    if kind == "values":
        arguments["memory"] = not_finite(draw, memory)
        return ("must be finite",)
    if kind == "rows":
        arguments["memory"] = memory.repeat_interleave(len(memory) + 1).rows(slice(0, len(memory) + 1))
    elif kind == "model":
        arguments["memory"] = dataclasses.replace(
            memory, model_id=draw(st.sampled_from(["other", memory.model_id + "0"]))
        )
    elif kind == "stranger":
        arguments["memory"] = stranger(1).compress(torch.full((1, 5), 9))
    elif kind == "thing":
        things = (memory.attention_mask, [memory], memory.__dict__, (memory, memory), *OTHER_THINGS)
        arguments["memory"] = draw(st.sampled_from(things))
    elif kind == "context":
        arguments["context_input_ids"] = arguments["input_ids"]
    else:
        arguments["context_attention_mask"] = arguments["attention_mask"]
        return ("`context_attention_mask`",)
    return ("`memory`",)


# --- other arguments ---


def break_keyword(draw: Any, subject: Subject, arguments: dict[str, Any]) -> tuple[str, ...]:
    name = draw(st.sampled_from(sorted(arguments)))
    place = draw(st.integers(1, len(name) - 2))
    typos = [name[:place] + name[place + 1 :], name[:place] + name[place] + name[place:], name + "s", name.upper()]
    typo = draw(st.sampled_from(typos))
    arguments[typo] = arguments.pop(name)
    # Where the broken name was needed, that is found first; pads without their mask are no token ids.
    return typo, f"`{name}`", "'input_ids'", "`input_ids`", "`context_input_ids`", "give a context"


def break_other(draw: Any, subject: Subject, arguments: dict[str, Any]) -> tuple[str, ...]:
    ids = arguments["input_ids"]
    shaped = [ids.float(), ids[:, :-1], ids[0], ids[:, None], torch.cat([ids, ids]), *OTHER_THINGS]
    values: dict[str, list[Any]] = {
        "labels": shaped,
        "cache": [*OTHER_THINGS, ids],
        "logits_to_keep": ["all", 2.5, {}, object(), torch.tensor([1.5])],
    }
    if not subject.is_encoder_decoder:
        values["position_ids"] = shaped
        values["text_position_offset"] = [*shaped, ids]
    name = draw(st.sampled_from(sorted(values)))
    arguments[name] = draw(st.sampled_from(values[name]))
    return (f"`{name}`",)


# --- calls ---


@st.composite
def broken_calls(draw: Any) -> BrokenCall:
    subject = draw(subjects)
    method = draw(st.sampled_from(["compress", "forward", "generate"]))
    num_rows = draw(st.integers(1, 3))
    lengths = st.lists(st.integers(1, 8), min_size=num_rows, max_size=num_rows)
    context, text = (draw(padded(random_rows(draw(lengths), draw(seeds)))) for _ in range(2))
    masks = [torch.ones_like(each.ids) if each.mask is None else each.mask for each in (context, text)]
    faults: dict[str, Fault] = {"ids": break_ids, "mask": break_mask, "ratio": break_ratio, "keyword": break_keyword}
    if method == "compress":
        arguments = {"input_ids": context.ids, "attention_mask": masks[0]}
        faults["large ratio"] = break_large_ratio
    else:
        arguments = {"input_ids": text.ids, "attention_mask": masks[1]}
        if draw(st.booleans()):
            arguments |= {"context_input_ids": context.ids, "context_attention_mask": masks[0]}
        else:
            arguments["memory"] = subject.model.compress(context.ids, masks[0])
            faults["memory"] = break_memory
    if method == "forward":
        faults["other"] = break_other
    if method == "generate":
        arguments["max_new_tokens"] = 2
    fault = draw(st.sampled_from(sorted(faults)))
    names = faults[fault](draw, subject, arguments)
    return BrokenCall(subject, method, fault, arguments, names)


@torch.no_grad()
@fuzz("broken calls", call=broken_calls())
def test_broken_calls(call):
    assert_refused(call, *call.names)
