# SPDX-License-Identifier: Apache-2.0
"""Checkpoints to upload."""

import shutil
import socket

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from context_compressors import MeanPoolingForCausalLM
from context_compressors.hub_cards import repository


@pytest.fixture(scope="session")
def secrets_found():
    return {}


@pytest.fixture(autouse=True)
def each_text_searched_once(secrets_found, monkeypatch):
    """Search each text for secrets once in a session: the code beside every checkpoint takes seconds."""
    search = repository._secrets

    def search_once(texts):
        for path, text in texts.items():
            if (path, text) not in secrets_found:
                secrets_found[path, text] = list(search({path: text}))
            yield from secrets_found[path, text]

    monkeypatch.setattr(repository, "_secrets", search_once)


@pytest.fixture
def no_connection(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A base, and a whole and a light checkpoint on it, of which each test has copies."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    (folder / "base" / "README.md").write_text("---\nlicense: mit\n---\n# Base\n")
    (folder / "base" / "LICENSE").write_text("The base's license.\n")
    for name, fields in (("checkpoint", {}), ("light", {"hub_id": "me/base"})):
        torch.manual_seed(0)
        model = MeanPoolingForCausalLM.from_base(folder / "base", compression_ratios=[2, 4], **fields)
        model.save_pretrained(folder / name)
    return folder


@pytest.fixture
def base(saved, tmp_path):
    return shutil.copytree(saved / "base", tmp_path / "base")


@pytest.fixture
def checkpoint(saved, tmp_path):
    return shutil.copytree(saved / "checkpoint", tmp_path / "checkpoint")


@pytest.fixture
def without_code(checkpoint):
    """A checkpoint whose own files are soon read, for tests of one more file beside them."""
    for path in checkpoint.glob("*.py"):
        path.unlink()
    return checkpoint


@pytest.fixture
def light(saved, tmp_path):
    return shutil.copytree(saved / "light", tmp_path / "light")
