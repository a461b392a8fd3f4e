# SPDX-License-Identifier: Apache-2.0
"""Peers of other libraries in the comparison: what they are asked for, what is counted, and what answers read.

kvpress and llmlingua are stood in for by classes with the fields, arguments and defaults of kvpress 0.5.5 and
llmlingua 0.2.2.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from byte_tokenizers import tiny_llama
from comparison_files import questions_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

# What kvpress's classes have beside `compression_ratio`.
PRESS_FIELDS = {
    "StreamingLLMPress": {"n_sink": 4},
    "SnapKVPress": {"window_size": 64, "kernel_size": 5},
    "ExpectedAttentionPress": {
        "n_future_positions": 512,
        "n_sink": 4,
        "use_covariance": True,
        "use_vnorm": True,
        "epsilon": 0.0,
    },
    "KnormPress": {},
    "TOVAPress": {},
}


@dataclass
class ScorerPress:
    """Leaves some places of what is read within it, in no order, as many as kvpress would leave, and `more`."""

    compression_ratio: float = 0.0

    def __post_init__(self):
        assert 0 <= self.compression_ratio < 1
        self.more, self.read = 0, []

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        hooks = [model.model.register_forward_pre_hook(self.note)]
        hooks += [
            layer.self_attn.register_forward_hook(self.forward_hook, with_kwargs=True) for layer in model.model.layers
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def note(self, module: Any, inputs: tuple) -> None:
        self.read.append(inputs[0].tolist())

    def forward_hook(self, module: Any, inputs: tuple, kwargs: dict, output: Any) -> Any:
        layer = kwargs["cache"].layers[module.layer_idx]
        read = module, kwargs["hidden_states"], layer.keys, layer.values, output[1], kwargs
        layer.keys, layer.values = self.compress(*read)
        return output

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        num_read = keys.shape[2]
        assert hidden_states.shape[1] == num_read
        num_kept = max(1, int(num_read * (1 - self.compression_ratio))) + self.more
        self.kept = torch.randperm(num_read, generator=torch.Generator().manual_seed(num_read))[:num_kept]
        return keys[:, :, self.kept], values[:, :, self.kept]


class PromptCompressor:
    """Keeps the start of a text, as long as it is asked for; puts the question behind it, as llmlingua does."""

    def __init__(
        self,
        model_name="NousResearch/Llama-2-7b-hf",
        device_map="cuda",
        model_config=None,
        open_api_config=None,
        use_llmlingua2=False,
        llmlingua2_config=None,
    ):
        library = sys.modules["llmlingua.prompt_compressor"]
        library.made.append((model_name, device_map, model_config, use_llmlingua2))
        self.oai_tokenizer = library.tiktoken.encoding_for_model("gpt-3.5-turbo")
        self.tokenizer = AutoTokenizer.from_pretrained(model_name)
        self.model = AutoModelForCausalLM.from_pretrained(model_name, dtype=model_config["torch_dtype"])

    def compress_prompt(
        self,
        context,
        instruction="",
        question="",
        rate=0.5,
        target_token=-1,
        iterative_size=200,
        context_budget="+100",
        condition_in_question="none",
        reorder_context="original",
        dynamic_context_compression_ratio=0.0,
        condition_compare=False,
        rank_method="llmlingua",
        concate_question=True,
    ):
        call = {name: value for name, value in locals().items() if name != "self"}
        assert rate <= 1
        assert question or rank_method != "longllmlingua"
        assert len(self.oai_tokenizer.encode("The mill stands")) == 3
        (ids,), behind = self.tokenizer(context).input_ids, [question] if question and concate_question else []
        if target_token == -1:
            num_question = len(self.tokenizer(question).input_ids)
            target_token = (num_question + len(ids)) * rate - (num_question if concate_question else 0)
        sys.modules["llmlingua.prompt_compressor"].calls.append({**call, "asked": target_token})
        start = self.tokenizer.decode(ids[: round(target_token)])
        return {"compressed_prompt": "\n\n".join([f" {start}\n", *behind])}

    # Negative log-likelihoods of the ids up to `end`, behind those that keys and values are of.
    def get_ppl(
        self,
        text,
        granularity="sentence",
        input_ids=None,
        attention_mask=None,
        past_key_values=None,
        return_kv=False,
        end=None,
        condition_mode="none",
        condition_pos_id=0,
    ):
        past = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        ids = input_ids[:, past:end]
        mask = attention_mask[:, :end]
        output = self.model(ids, attention_mask=mask, past_key_values=past_key_values, use_cache=True)
        loss = torch.nn.functional.cross_entropy(output.logits[0, :-1], ids[0, 1:], reduction="none")
        loss = loss.mean() if granularity == "sentence" else loss
        return (loss, output.past_key_values) if return_kv else loss


@pytest.fixture(scope="module")
def peers(script) -> ModuleType:
    return script("comparison.peers")


@pytest.fixture
def kvpress(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    library = ModuleType("kvpress")
    for name, fields in PRESS_FIELDS.items():
        described = [(field, type(value), value) for field, value in fields.items()]
        setattr(library, name, make_dataclass(name, described, bases=(ScorerPress,)))
    monkeypatch.setitem(sys.modules, "kvpress", library)
    return library


def fetches(name: str) -> None:
    raise OSError(f"{name}'s table is fetched")


@pytest.fixture
def llmlingua(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module with the class, with what was `made`, and `calls`."""
    package, library = ModuleType("llmlingua"), ModuleType("llmlingua.prompt_compressor")
    library.PromptCompressor = PromptCompressor
    library.tiktoken = SimpleNamespace(encoding_for_model=fetches)
    library.made, library.calls = [], []
    package.prompt_compressor = library
    for module in (package, library):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return library


@pytest.fixture(scope="module")
def reader(tokenizer) -> LlamaForCausalLM:
    """Of two layers, whose heads share keys and values; weights so large that what it writes hangs on all it reads."""
    torch.manual_seed(0)
    fields = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.5}
    return LlamaForCausalLM(tiny_llama(tokenizer, max_position_embeddings=1024, **fields)).eval()


def question(num_tokens: int, **fields: Any) -> dict[str, Any]:
    context = [(7 * place * place + 3 * place) % 251 for place in range(num_tokens)]
    ends = {"eos_token_id": -1, "max_new_tokens": 12}
    return {"head_ids": [256, 1, 2], "context_ids": context, "prompt_ids": [5, 6, 7, 8, 9], **ends, **fields}


def rows_of(asked: dict[str, Any], is_aware: bool) -> tuple[list[int], list[int]]:
    """Return the tokens that a press compresses, and those that follow."""
    split = len(asked["prompt_ids"]) - 1 if is_aware else 0
    read, rest = asked["prompt_ids"][:split], asked["prompt_ids"][split:]
    return [*asked["head_ids"], *asked["context_ids"], *read], rest


def bytes_of(cache: Any, start: int) -> int:
    """Of the places from one on, in bfloat16."""
    tensors = [tensor[:, :, start:] for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.bfloat16().contiguous().nbytes for tensor in tensors)


def written_with_places_hidden(
    reader: Any, row: list[int], kept: torch.Tensor, rest: list[int], count: int
) -> list[int]:
    """The likeliest ids behind a row and a rest from which all places of the row but some are hidden, read anew each
    time, without a cache."""
    written: list[int] = []
    for _ in range(count):
        ids = [*row, *rest, *written]
        seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        seen[len(row) :, : len(row)] = False
        seen[len(row) :, kept] = True
        written.append(int(reader(torch.tensor([ids]), attention_mask=seen[None, None]).logits[0, -1].argmax()))
    return written


@pytest.mark.parametrize("is_aware", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 9, 50, 128, 129, 255, 384])
def test_a_press_keeps_a_place_for_ratio_tokens_beside_opening_and_question(
    peers, kvpress, reader, num_tokens: int, is_aware: bool
):
    asked = question(num_tokens)
    system = peers.Press("knorm_aware" if is_aware else "knorm", reader)
    row, rest = rows_of(asked, is_aware)
    others, read = len(row) - num_tokens, system.read(asked)
    # Once for all ratios.
    assert system.press.read == [[row]]
    for ratio in (1, 2, 3, 4, 5, 7, 8, 16, 500):
        state, kept, memory_bytes = system.compress(asked, read, ratio)
        assert kept == -(-num_tokens // ratio)
        assert [layer.keys.shape[2] for layer in state[0].layers] == [others + kept] * 2
        assert memory_bytes == bytes_of(state[0], others) == kept * 2 * 2 * 2 * 4 * 2
        assert state[1:] == (rest, len(row))
    assert len(system.press.read) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["snapkv", "snapkv_aware"])
def test_a_question_counts_on_behind_the_whole_context_and_sees_what_is_left_of_it(peers, kvpress, reader, name: str):
    system, asked = peers.Press(name, reader), question(90)
    row, rest = rows_of(asked, name.endswith("_aware"))
    written, read = {}, system.read(asked)
    for ratio in (1, 2, 8):
        state, *_ = system.compress(asked, read, ratio)
        written[ratio] = system.answer(asked, state)
        assert written[ratio] == written_with_places_hidden(reader, row, system.press.kept, rest, 12)
    assert len(set(map(tuple, written.values()))) == 3
    # EOS is the last, but where the whole length is asked for.
    eos = written[8][4]
    for fields, count in (({}, written[8].index(eos) + 1), ({"whole_length": True}, 12)):
        state, *_ = system.compress(asked, read, 8)
        assert system.answer({**asked, "eos_token_id": eos, **fields}, state) == written[8][:count]


def write_question(folder: Path, tokenizer) -> dict[str, Any]:
    context = "The mill stands by the river. It was built by Nora Zill. Bees live in it, and café guests."
    ids = tokenizer(context, add_special_tokens=False)["input_ids"]
    text = {"set": "squad", "id": "q", "question": "Who built the mill?", "context": context}
    asked = question(0, **text, context_ids=ids)
    (folder / "squad.jsonl").write_text(f"{json.dumps(asked)}\n")
    return asked


@pytest.mark.parametrize("name", ["llmlingua", "longllmlingua"])
def test_llmlingua_is_asked_for_as_many_tokens_as_others_and_its_text_is_read(
    peers, llmlingua, base: Path, tokenizer, tmp_path: Path, name: str
):
    asked, output = write_question(tmp_path, tokenizer), tmp_path / "answers.jsonl"
    # The small model is the base, and not what reads.
    of_reader = shutil.copytree(base, tmp_path / "reader")
    options = ["--reader", str(of_reader), "--base", str(base), "--dtype", "float32", "--ratios", "1", "4"]
    files = ["--questions", str(tmp_path / "squad.jsonl"), "--output", str(output)]
    peers.main(["--system", name, *options, *files])
    config = {"trust_remote_code": False, "torch_dtype": torch.float32}
    assert llmlingua.made == [(str(base), "cpu", config, False)]
    model, lines = AutoModelForCausalLM.from_pretrained(base), output.read_text().splitlines()
    for ratio, call, line in zip((1, 4), llmlingua.calls, map(json.loads, lines), strict=True):
        assert call["asked"] == len(asked["context_ids"]) / ratio
        assert (call["context"], call["iterative_size"]) == ([asked["context"]], 50)
        own = (call["question"], call["rank_method"], call["condition_in_question"], call["condition_compare"])
        is_long = name == "longllmlingua"
        whole = (asked["question"], name, "after_condition", True) if is_long else ("", name, "none", False)
        assert own == whole
        # No question is in it, nor white space about it.
        left = tokenizer.decode(asked["context_ids"][: round(call["asked"])]).strip()
        ids = tokenizer(left, add_special_tokens=False)["input_ids"]
        assert (line["kept_positions"], line["memory_bytes"]) == (len(ids), len(left.encode()))
        row = torch.tensor([[*asked["head_ids"], *ids, *asked["prompt_ids"]]])
        found = model.generate(row, max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=257)
        assert line["answer"] == tokenizer.decode(found[0, row.shape[1] :], skip_special_tokens=True).strip()


def test_llmlingua_goes_on_behind_keys_and_values_that_it_cut(peers, llmlingua, reader, tokenizer, tmp_path: Path):
    reader.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    compressor = peers._prompt_compressor(str(tmp_path), torch.float32, torch.device("cpu"))
    ids = torch.tensor([question(40)["context_ids"]])
    mask = torch.ones_like(ids)
    whole, pairs = compressor.get_ppl("", "token", ids, mask, past_key_values=None, return_kv=True)
    assert len(whole) == 39
    for start, end in ((15, 30), (20, 40)):
        # As the library cuts them: a list for each layer.
        pairs = [[keys[:, :, :start], values[:, :, :start]] for keys, values in pairs]
        cut = pairs
        loss, pairs = compressor.get_ppl("", "token", ids, mask, past_key_values=cut, return_kv=True, end=end)
        torch.testing.assert_close(loss, whole[start : end - 1], rtol=1e-4, atol=1e-4)
        assert [tensor.shape[2] for pair in pairs for tensor in pair] == [end] * 4
        assert [tensor.shape[2] for pair in cut for tensor in pair] == [start] * 4
    mean = compressor.get_ppl("", granularity="sentence", input_ids=ids, attention_mask=mask)
    torch.testing.assert_close(mean, whole.mean())


def answers_of(path: Path) -> list[dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if "seconds" not in name} for line in lines]


def test_peers_answer_as_generate_does_and_go_on_where_they_stopped(script, base: Path, tokenizer, tmp_path: Path):
    peers, file, output = script("comparison.peers"), questions_file(tmp_path, tokenizer), tmp_path / "cut.jsonl"
    options = ["--reader", str(base), "--base", str(base), "--dtype", "float32", "--questions", f"{file}#2"]
    peers.main(["--system", "cut", "--ratios", "1", "4", "--output", str(output), *options])
    found = answers_of(output)
    assert [(line["id"], line["ratio"]) for line in found] == [("q0", 1), ("q0", 4), ("q1", 1), ("q1", 4)]
    model, question = AutoModelForCausalLM.from_pretrained(base), json.loads(file.read_text().splitlines()[0])
    for line, kept in zip(found, (None, -(-len(question["context_ids"]) // 4)), strict=False):
        context = question["context_ids"][:kept]
        row = torch.tensor([[*question["head_ids"], *context, *question["prompt_ids"]]])
        output_ids = model.generate(row, max_new_tokens=4, do_sample=False, eos_token_id=257, pad_token_id=257)
        assert line["answer"] == tokenizer.decode(output_ids[0, row.shape[1] :], skip_special_tokens=True).strip()
        assert (line["kept_positions"], line["memory_bytes"]) == (len(context), len(tokenizer.decode(context)))
    # Killed in the middle of the third line.
    whole = output.read_text().splitlines(keepends=True)
    output.write_text("".join(whole[:2]) + whole[2][:20])
    peers.main(["--system", "cut", "--ratios", "1", "4", "--output", str(output), *options])
    assert answers_of(output) == found
    peers.main(
        ["--system", "self_information", "--ratios", "1", "4", "--output", str(tmp_path / "own.jsonl"), *options]
    )
    whole, quarter, *_ = answers_of(tmp_path / "own.jsonl")
    assert whole == found[0]
    assert quarter["kept_positions"] == found[1]["kept_positions"]
    states = [*question["head_ids"][:1], *question["context_ids"]]
    logits = model(torch.tensor([states])).logits[0, :-1].log_softmax(-1)
    nll = -logits[range(len(states) - 1), states[1:]]
    kept = sorted(nll.topk(quarter["kept_positions"]).indices.tolist())
    assert quarter["memory_bytes"] == len(
        tokenizer.decode([question["context_ids"][place] for place in kept]).encode()
    )
    peers.main(["--system", "no_context", "--ratios", "0", "--output", str(tmp_path / "none.jsonl"), *options])
    assert [line["kept_positions"] for line in answers_of(tmp_path / "none.jsonl")] == [0, 0]
