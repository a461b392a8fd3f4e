# SPDX-License-Identifier: Apache-2.0
"""Compressed contexts in files that cannot be misread."""

import hashlib
import os
import re
import struct

import pytest
import torch
from random_memories import assert_same, make_memory
from safetensors.torch import save_file

from context_compressors.modeling.memory.carriers import carrier_tensors
from context_compressors.modeling.memory.compressed_context import CompressedContext


@pytest.mark.parametrize("carrier", ["embeddings", "key_values"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ratio", [4, torch.tensor([4, 2, 8])])
def test_a_saved_memory_loads_bit_for_bit(tmp_path, carrier, dtype, ratio):
    memory = make_memory(carrier=carrier, dtype=dtype, ratio=ratio, layout="uniform", source="a sha256:1")
    memory.save(tmp_path / "new folder" / "document.safetensors")
    loaded = CompressedContext.load(tmp_path / "new folder" / "document.safetensors", model_id="me/compressor")
    assert_same(loaded, memory)
    assert loaded.source == loaded.to(torch.float64).source == "a sha256:1"
    assert CompressedContext.concatenate([memory, memory]).source == CompressedContext.stack([memory] * 2).source == ""
    assert os.listdir(tmp_path / "new folder") == ["document.safetensors"]
    loaded.save(tmp_path / "again.safetensors")
    files = tmp_path / "again.safetensors", tmp_path / "new folder" / "document.safetensors"
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "memory.safetensors"
    old = make_memory()
    old.save(path)

    def fail(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        make_memory((1,)).save(path)
    assert_same(CompressedContext.load(path), old)
    assert os.listdir(tmp_path) == ["memory.safetensors"]


@pytest.mark.parametrize(
    ("carrier", "expectation", "message"),
    [
        ("embeddings", {"model_id": "me/other"}, "'me/compressor', not of 'me/other'"),
        ("embeddings", {"hidden_size": 64}, "holds embeddings of width 24, the model reads embeddings of width 64"),
        ("key_values", {"hidden_size": 16}, "holds key/values of 3 layers with 2 heads of 8"),
    ],
)
def test_the_memory_of_another_model_is_refused(tmp_path, carrier, expectation, message):
    path = tmp_path / "memory.safetensors"
    make_memory(carrier=carrier).save(path)
    with pytest.raises(ValueError, match=message) as error:
        CompressedContext.load(path, **expectation)
    assert str(path) in str(error.value)


def test_other_files_are_refused(tmp_path):
    save_file({"weight": torch.ones(2)}, tmp_path / "weights.safetensors")
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "note.txt").write_text("The quick brown fox jumps over the lazy dog." * 10)
    (tmp_path / "list.json").write_bytes(struct.pack("<Q", 2) + b"[]")
    (tmp_path / "empty").touch()
    for name in ("weights.safetensors", "model.safetensors", "note.txt", "list.json", "empty"):
        with pytest.raises(ValueError, match="not a memory file") as error:
            CompressedContext.load(tmp_path / name)
        assert name in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("carrier", ["embeddings", "key_values"])
def test_truncations_and_an_altered_byte_anywhere_are_detected(tmp_path, carrier):
    path = tmp_path / "memory.safetensors"
    make_memory((2, 1), carrier=carrier, ratio=torch.tensor([4, 2])).save(path)
    content = path.read_bytes()
    broken = [content[:size] for size in range(0, len(content), 7)]
    # This bit turns letters into the other case, and a padding blank of the header into a control character.
    broken += [content[:i] + bytes([content[i] ^ 0x20]) + content[i + 1 :] for i in range(len(content))]
    for changed in (*broken, content + b"\0"):
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=re.escape(str(path))):
            CompressedContext.load(path)


def test_a_file_of_a_later_version_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "memory.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr("context_compressors.modeling.memory.memory_file.FORMAT_VERSION", "3")
        make_memory().save(path)
    with pytest.raises(ValueError, match="version 3, this code reads 2"):
        CompressedContext.load(path)


@pytest.mark.parametrize("carrier", ["embeddings", "key_values"])
def test_a_memory_that_is_not_finite_or_has_no_name_is_not_saved(tmp_path, carrier):
    path, memory = tmp_path / "memory.safetensors", make_memory(carrier=carrier)
    carrier_tensors(memory)[-1][0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match=f"{carrier} must be finite"):
        memory.save(path)
    with pytest.raises(ValueError, match=r"without `model_id` is not saved.*model\.eval\(\)"):
        make_memory(carrier=carrier, model_id="").save(path)
    assert not path.exists()


def checksummed(header: bytes, data: bytes = b"") -> bytes:
    """A file with this header, and the right checksum where it has a place for one."""
    content = struct.pack("<Q", len(header)) + header + data
    return content.replace(b"0" * 64, hashlib.sha256(content).hexdigest().encode())


OURS = b'"__metadata__":{"format":"context-compressors memory","format_version":"2","sha256":"' + b"0" * 64 + b'"}'


@pytest.mark.parametrize(
    "content",
    [
        checksummed(b"[" * 200_000),
        struct.pack("<Q", 8 << 20) + bytes(9 << 20),
        checksummed(b"{" + OURS + b',"embeddings":{"dtype":"F32","shape":[1],"data_offsets":[0,1e400]}}', bytes(4)),
        checksummed(b"{" + OURS + b',"embeddings":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
    ],
    ids=["deep", "oversized", "infinite", "lacking"],
)
def test_a_hostile_header_is_refused_with_the_files_name(tmp_path, content):
    path = tmp_path / "memory.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        CompressedContext.load(path)
