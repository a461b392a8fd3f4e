# SPDX-License-Identifier: Apache-2.0
"""Arguments of `generate` where each question has one answer: what is refused, and what holds if nothing is said."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def check_generation(given: Mapping[str, Any]) -> None:
    """Refuse what gives several answers to a question, or more than its tokens.

    Args:
        given: arguments of `generate`.

    Raises:
        ValueError: one of them, or of a `generation_config` among them, does.
    """
    own = given.get("generation_config")
    # What a configuration leaves open is `None`; what an argument says holds.
    asked = {name: value for name, value in ({} if own is None else own.to_dict()).items() if value is not None}
    asked |= given
    if (number := asked.get("num_return_sequences", 1)) != 1:
        raise ValueError(f"`num_return_sequences` must be 1, got {number}: a question has one answer")
    if (value := asked.get("return_dict_in_generate", False)) not in (False, None):
        raise ValueError(
            f"`return_dict_in_generate` must be false, got {value}: an answer is its text; call the model's `generate`"
        )


def with_defaults(given: Mapping[str, Any], max_new_tokens: int, pad_token_id: int | None) -> dict[str, Any]:
    """Arguments of `generate`, with what they and a `generation_config` among them leave open: a greedy, short answer,
    one to a question and its tokens alone, whatever the model's own `generation_config` says.

    Args:
        given: the arguments.
        max_new_tokens: most tokens of an answer, where no other length is given.
        pad_token_id: what fills shorter answers of a batch.
    """
    given = dict(given)
    own = copy.deepcopy(given.pop("generation_config", None))
    defaults = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": pad_token_id}
    defaults |= {"num_return_sequences": 1, "return_dict_in_generate": False}
    if own is None:
        if given.get("max_length") is not None:
            del defaults["max_new_tokens"]
        return defaults | given
    given = own.update(**given)
    if own.max_length is not None:
        del defaults["max_new_tokens"]
    own.update(**{name: value for name, value in defaults.items() if getattr(own, name) is None})
    return {**given, "generation_config": own}
