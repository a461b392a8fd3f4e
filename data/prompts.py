# SPDX-License-Identifier: Apache-2.0
"""Prompt templates: what stands between a context and the target, read from `prompts.yaml` or another such file."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..configuration.nearest_names import nearest
from .yaml_text import read_yaml

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TASKS = ("question_answering", "summarization", "continuation", "reconstruction")
DEFAULT_PROMPTS = "default"


@cache
def load_prompts(path: str | None = None) -> Mapping[str, tuple[str, ...]]:
    """Read the templates of every task, the canonical one first, from a YAML file or a packaged one, by name."""
    # "default" is `prompts.yaml`, every other name N is `prompts_N.yaml`.
    files = sorted(Path(__file__).parent.glob("prompts*.yaml"))
    packaged = {file.stem.removeprefix("prompts").lstrip("_") or DEFAULT_PROMPTS: file for file in files}
    file = packaged.get(path or DEFAULT_PROMPTS, Path(path or ""))
    if not file.is_file():
        raise ValueError(f"there are no prompts {path!r}: give a YAML file or a name{nearest(path or '', packaged)}")
    content = dict(read_yaml(file))
    if set(content) != set(TASKS):
        raise ValueError(f"{file} must hold one list of templates for each of {TASKS}, got {sorted(content)}")
    for task, templates in content.items():
        for template in templates:
            if template.count("{question}") != (task == "question_answering"):
                raise ValueError(f"{file}: {{question}} stands once in a question_answering template: {template!r}")
    return MappingProxyType({task: tuple(content[task]) for task in TASKS})


def format_prompt(
    task: str, question: str = "", *, rng: random.Random | None = None, path: str | Mapping[str, str] | None = None
) -> str:
    """Fill a task's template, the canonical one or one that `rng` draws, of a file, a packaged name or a mapping."""
    prompts = {name: (text,) for name, text in path.items()} if isinstance(path, Mapping) else load_prompts(path)
    templates: Sequence[str] = prompts[task]
    template = templates[0] if rng is None else rng.choice(templates)
    # str.format would trip over braces inside the question.
    return template.replace("{question}", question)


def default_prompts(config: PreTrainedConfig) -> str | dict[str, str] | None:
    """Return the prompts that a compressor is asked with when none are named."""
    if config.prompts is None:
        return None if config.usual_prompts == "default" else config.usual_prompts
    return {**{task: load_prompts(config.usual_prompts)[task][0] for task in TASKS}, **config.prompts}
