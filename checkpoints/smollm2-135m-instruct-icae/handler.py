# SPDX-License-Identifier: Apache-2.0
"""The handler of an Inference Endpoint: a document becomes a memory, and questions are answered from it."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class EndpointHandler:
    """Answers `{"inputs": {"question": ..., "context": ...}, "parameters": {"ratio": 4, "max_new_tokens": 32}}`.

    Without a question it returns `{"memory": ...}` as base64, which later requests send in place of `context`.

    Args:
        path: the repository's folder.
    """

    def __init__(self, path: str = "") -> None:
        model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, dtype="auto")
        if torch.accelerator.is_available():
            model.to(torch.accelerator.current_accelerator())
        self.pipe = model.eval().question_answering(AutoTokenizer.from_pretrained(path, trust_remote_code=True))

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        """Answer a request; `ValueError` without a context or memory, or as the pipeline."""
        inputs, parameters = data["inputs"], data.get("parameters") or {}
        if not isinstance(inputs, dict) or ("context" in inputs) == ("memory" in inputs):
            raise ValueError('inputs must have either "context" or "memory", and may have a "question"')
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "memory.safetensors"
            if "question" not in inputs:
                self.pipe.compress(inputs["context"], **parameters).save(file)
                return {"memory": base64.b64encode(file.read_bytes()).decode()}
            if "context" in inputs:
                return self.pipe(inputs["question"], context=inputs["context"], **parameters)
            file.write_bytes(base64.b64decode(inputs["memory"], validate=True))
            return self.pipe(inputs["question"], memory=file, **parameters)
