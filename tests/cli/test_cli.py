# SPDX-License-Identifier: Apache-2.0
"""The commands compress and ask on a tiny model."""

import json
import math
from pathlib import Path

import pytest
import torch
from byte_tokenizers import byte_tokenizer, tiny_llama
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import context_compressors
from context_compressors import cli
from context_compressors.cli.compress import Document, compress_all
from context_compressors.configuration.configuration_mean_pooling import MeanPoolingConfig
from context_compressors.configuration.configuration_ranked_key_values import RankedKeyValuesConfig
from context_compressors.modeling.memory.compressed_context import CompressedContext
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.modeling.modeling_ranked_key_values import RankedKeyValuesForCausalLM

TEXTS = {"first": "The mill stands by the river.", "second": "Nora keeps eleven bees, and Olaf none at all."}


@pytest.fixture(scope="module")
def llama(tokenizer):
    return tiny_llama(tokenizer, num_hidden_layers=2, max_position_embeddings=256)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def model_folder(llama, tokenizer, tmp_path_factory):
    torch.manual_seed(0)
    model = MeanPoolingForCausalLM(MeanPoolingConfig(decoder_config=llama, compression_ratios=(4, 8)))
    # Weights at their usual start leave the slots without influence on the answer.
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def documents(tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    return [str(tmp_path / f"{name}.txt") for name in TEXTS]


def slots(text, ratio):
    return math.ceil(len(text.encode()) / ratio)


def test_compress_keeps_several_ratios_apart_and_takes_the_first_by_default(model_folder, documents, tmp_path, capsys):
    text = TEXTS["first"]
    arguments = ["compress", model_folder, documents[0], "--output", str(tmp_path)]
    assert cli.main([*arguments, "--ratio", "4", "--ratio", "8"]) == 0
    assert cli.main(arguments) == 0
    printed = capsys.readouterr()
    assert set(printed.out.split()) == set(map(str, tmp_path.glob("*.safetensors")))
    assert f"1 documents with {len(text)} tokens: {slots(text, 4)} slots" in printed.err
    found = {path.name: int(CompressedContext.load(path).num_slots) for path in tmp_path.glob("*.safetensors")}
    assert found == {
        "first.x4.safetensors": slots(text, 4),
        "first.x8.safetensors": slots(text, 8),
        "first.safetensors": slots(text, 4),
    }


def test_progress_moves_within_a_long_document(model_folder, monkeypatch):
    config = MeanPoolingConfig.from_pretrained(model_folder, chunk_size=8)
    model = MeanPoolingForCausalLM.from_pretrained(model_folder, config=config).eval()
    model.model.tokens_at_once = 16
    pipe, moved = model.question_answering(PreTrainedTokenizerFast.from_pretrained(model_folder)), []
    monkeypatch.setattr("tqdm.auto.tqdm.update", lambda bar, n: moved.append(n) or setattr(bar, "n", bar.n + n))
    list(compress_all(pipe, [Document("a", "A text. " * 5)], [4]))
    assert moved == [16, 16, 8, 0]


def test_models_that_are_no_compressors_are_refused(llama, model_folder, documents, tmp_path, capsys):
    plain, foreign, looped = (tmp_path / name for name in ("plain", "foreign", "looped"))
    LlamaForCausalLM(llama).save_pretrained(plain)
    foreign.mkdir()
    looped.mkdir()
    (looped / "config.json").symlink_to("config.json")
    fields = json.loads((Path(model_folder) / "config.json").read_text(encoding="utf-8"))
    (foreign / "config.json").write_text(json.dumps({**fields, "model_type": "someone_elses"}), encoding="utf-8")
    for model, message in (
        (plain, "is a model of type 'llama', not a context compressor"),
        (foreign, "has the unknown method 'someone_elses'"),
        (looped, "its config.json cannot be read"),
        (tmp_path / "nowhere", "there is no model"),
    ):
        assert cli.main(["compress", str(model), *documents, "--output", str(tmp_path / "out")]) == 1
        assert message in capsys.readouterr().err
    assert cli.main(["compress", str(plain), *documents, documents[0]]) == 1
    assert "two documents have the name 'first'" in capsys.readouterr().err


def ask(capsys, *arguments):
    capsys.readouterr()
    assert cli.main(["ask", *arguments, "--max-new-tokens", "8"]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_a_memory_file_and_its_document_give_the_same_answer(model_folder, documents, tmp_path, capsys):
    assert cli.main(["compress", model_folder, *documents, "--output", str(tmp_path)]) == 0
    memories = [str(tmp_path / f"{name}.safetensors") for name in TEXTS]
    question = ["--question", "Where is it?"]
    answers = [ask(capsys, model_folder, memory, *question) for memory in memories]
    assert answers == [ask(capsys, model_folder, document, *question) for document in documents]
    assert answers[0] != answers[1]
    assert ask(capsys, model_folder, *memories, *question) in answers


@pytest.mark.slow
def test_the_full_text_is_asked_without_a_memory(model_folder, documents, capsys):
    pipe = MeanPoolingForCausalLM.from_pretrained(model_folder).question_answering(
        PreTrainedTokenizerFast.from_pretrained(model_folder)
    )
    texts = [Path(document).read_text() for document in documents]
    answer = pipe("Who?", context=texts, join="likeliest", full_text=True, max_new_tokens=8)["answer"]
    assert "\n".join(ask(capsys, model_folder, *documents, "--full-text", "--question", "Who?")) == answer


def test_a_memory_file_is_asked_at_a_coarser_ratio_that_it_holds(llama, tokenizer, documents, tmp_path, capsys):
    folder, ratio = str(tmp_path / "ranked"), ["--ratio", "8", "--question", "Who?"]
    torch.manual_seed(0)
    model = RankedKeyValuesForCausalLM(RankedKeyValuesConfig(decoder_config=llama, compression_ratios=(2, 8)))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    # Bytes beyond ASCII would all be written as the same sign.
    torch.nn.init.zeros_(model.get_output_embeddings().weight[128:])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert cli.main(["compress", folder, documents[0], "--ratio", "2", "--output", str(tmp_path)]) == 0
    memory = str(tmp_path / "first.safetensors")
    answer = ask(capsys, folder, memory, *ratio)
    assert answer == ask(capsys, folder, documents[0], *ratio) != ask(capsys, folder, memory, *ratio[2:])
    assert ask(capsys, folder, memory, documents[1], *ratio) == ask(capsys, folder, *documents, *ratio)


@pytest.mark.slow
def test_a_checkpoint_that_compresses_questions_is_asked_about_documents(tokenizer, documents, tmp_path, capsys):
    torch.manual_seed(0)
    t5 = {"vocab_size": 258, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    t5 |= {"pad_token_id": 0, "eos_token_id": 257, "decoder_start_token_id": 256}
    config = context_compressors.DeCALConfig(decoder_config=t5, question_placement="encoder")
    model = context_compressors.DeCALForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    folder = str(tmp_path / "model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pipe = model.question_answering(tokenizer, max_new_tokens=8)
    questions = ["Who?", "Where is it?"]
    options = [part for question in questions for part in ("--question", question)]
    for path, text in zip(documents, TEXTS.values(), strict=True):
        expected = [answer["answer"] for answer in pipe(questions, context=text)]
        assert "\n".join(ask(capsys, folder, path, *options)) == "\n".join(expected)
    memory = tmp_path / "memory.safetensors"
    model.compress(torch.tensor([[5, 6, 7]])).save(memory)
    for arguments, message in (
        (
            ["compress", folder, documents[0], "--output", str(tmp_path / "memories")],
            "`ask` about the document itself",
        ),
        (["ask", folder, str(memory), "--question", "Who?"], "memory files are not asked: give a document"),
    ):
        assert cli.main(arguments) == 1
        error = capsys.readouterr().err
        assert "compresses a document together with its question" in error
        assert message in error
    assert not (tmp_path / "memories").exists()


@pytest.mark.parametrize("command", ["ask", "compress", "compress-corpus"])
def test_a_ratio_is_checked_before_a_model_is_loaded(command, documents, model_folder, tmp_path, monkeypatch, capsys):
    def load(*arguments, **options):
        raise AssertionError("it was loaded")

    monkeypatch.setattr("context_compressors.modeling.checkpoint.pretrained_bases.load_from_place", load)
    output = ["--output", str(tmp_path / "out")]
    asked = {
        "ask": [model_folder, documents[0], "--question", "Who?"],
        "compress": [model_folder, documents[0], *output],
        "compress-corpus": [documents[0], "--model", model_folder, "--store", str(tmp_path / "s.lance")],
    }
    assert cli.main([command, *asked[command], "--ratio", "3"]) == 1
    assert f"--ratio 3: {model_folder} was trained for the ratios [4, 8]" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_ask_refuses_what_it_cannot_do(model_folder, documents, tmp_path, capsys):
    assert cli.main(["compress", model_folder, documents[0], "--output", str(tmp_path)]) == 0
    memory = tmp_path / "first.safetensors"
    for arguments, message in (
        ([str(memory), "--ratio", "8", "--question", "Who?"], "`ratio` must be 4, the memory's own, got 8"),
        (["nowhere.safetensors"], "nowhere.safetensors"),
        (["-"], "questions must be given with --question"),
        ([str(memory), "--full-text"], "--full-text reads documents, not memory files"),
        (
            [*documents, "--full-text", "--ratio", "4"],
            "--full-text reads documents, not memory files, and at no --ratio",
        ),
    ):
        assert cli.main(["ask", model_folder, *arguments]) == 1
        assert message in capsys.readouterr().err
