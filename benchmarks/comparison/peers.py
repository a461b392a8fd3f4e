# SPDX-License-Identifier: Apache-2.0
"""Answers of the baselines, one question at a time, with their costs.

Run by run.py in the environment that has the system's library: nothing of this package is imported before a system
asks for it. A second start goes on with the output.

    python -m benchmarks.comparison.peers --system cut --reader R --base BASE --questions FILE --ratios 4 --output OUT
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

Question = Mapping[str, Any]
# System -> its class in kvpress, and arguments. SnapKV's window is that of the question, or of the context's end.
_PRESSES = {
    "streamingllm": ("StreamingLLMPress", {"n_sink": 4}),
    "snapkv": ("SnapKVPress", {"window_size": 32}),
    "expected_attention": ("ExpectedAttentionPress", {}),
    "knorm": ("KnormPress", {}),
    "tova": ("TOVAPress", {}),
}
_AWARE = "_aware"
KEEP_DROP = Path(__file__).parents[2] / "checkpoints" / "minilm-keep-drop"
# Contexts of up to `iterative_size` tokens stay whole.
_LINGUA = {"iterative_size": 50}
_LONG_LINGUA = {
    "rank_method": "longllmlingua",
    "condition_in_question": "after_condition",
    "reorder_context": "sort",
    "dynamic_context_compression_ratio": 0.3,
    "condition_compare": True,
    "context_budget": "+100",
}


class TextSystem:
    """Text that replaces the context.

    Args:
        name: no_context, full_context, cut or bm25.
        reader: reads it, and answers.
        tokenizer: the reader's.
    """

    def __init__(self, name: str, reader: Any, tokenizer: Any):
        self.name, self.reader, self.tokenizer = name, reader, tokenizer

    def read(self, question: Question) -> Any:
        """Return what is read of a context once for all ratios."""
        return None

    def kept_ids(self, question: Question, read: Any, budget: int) -> list[int]:
        """Return the remaining token ids of the context."""
        if self.name == "bm25":
            from context_compressors.evaluation.alternatives import bm25_context

            return bm25_context(self.tokenizer, question["context_ids"], question["question"], budget)
        return question["context_ids"][:budget]

    def compress(self, question: Question, read: Any, ratio: int) -> tuple[Any, int, int]:
        """Return what answers need, its positions and its bytes."""
        num_tokens = len(question["context_ids"])
        ids = self.kept_ids(question, read, -(-num_tokens // ratio) if ratio else 0)
        return ids, len(ids), len(self.tokenizer.decode(ids).encode())

    def answer(self, question: Question, ids: Any) -> list[int]:
        """Return the token ids of the answer."""
        row = [*question["head_ids"], *ids, *question["prompt_ids"]]
        return greedy(self.reader, DynamicCache(), row, 0, question)


class SelfInformation(TextSystem):
    """Keep the tokens that the base expects least.

    Args:
        reader: reads what is left, and answers.
        tokenizer: the reader's.
        base: folder of the model that expects them.
    """

    def __init__(self, reader: Any, tokenizer: Any, base: str):
        from context_compressors import from_base

        super().__init__("self_information", reader, tokenizer)
        # Of no method but the base in it.
        self.base = from_base(base, method="streaming_llm", dtype=reader.dtype).to(reader.device)

    def read(self, question: Question) -> Any:
        from context_compressors.evaluation.alternatives import self_information

        return self_information(self.base, question["head_ids"][0], question["context_ids"])

    def kept_ids(self, question: Question, read: Any, budget: int) -> list[int]:
        from context_compressors.evaluation.alternatives import informative_context

        return informative_context(question["context_ids"], read, budget)


class KeepDrop(TextSystem):
    """Keep the sentences, or the single words, that a text compressor of this package scores highest.

    Args:
        name: keep_drop, keep_drop_aware, which sees the question, or keep_drop_words, which selects as LLMLingua-2.
        reader: reads what is left, and answers.
        tokenizer: the reader's.
        checkpoint: folder of the text compressor.
    """

    def __init__(self, name: str, reader: Any, tokenizer: Any, checkpoint: Path):
        from context_compressors import TextCompressor

        super().__init__(name, reader, tokenizer)
        self.compressor = TextCompressor.from_pretrained(checkpoint)

    def kept_ids(self, question: Question, read: Any, budget: int) -> list[int]:
        from context_compressors.evaluation.alternatives import kept_words

        if self.name == "keep_drop_words":
            return self._single_words(question["context_ids"], budget)
        asked = question["question"] if self.name.endswith(_AWARE) else None
        return kept_words(self.compressor, self.tokenizer, question["context_ids"], asked, budget)

    def _single_words(self, context_ids: Sequence[int], budget: int) -> list[int]:
        text = self.tokenizer.decode(context_ids, clean_up_tokenization_spaces=False)
        words, scores = text.split(), self.compressor.word_scores(text)
        kept: list[int] = []
        for place in sorted(range(len(words)), key=lambda place: -scores[place]):
            budget -= len(self._ids(f" {words[place]}"))
            if budget < 0:
                break
            kept.append(place)
        return self._ids("".join(f" {words[place]}" for place in sorted(kept)))

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


class LLMLingua(TextSystem):
    """LLMLingua and LongLLMLingua, with the base as their small model.

    Args:
        name: llmlingua or longllmlingua.
        reader: reads what is left, and answers.
        tokenizer: the reader's.
        base: folder of the small model.
    """

    def __init__(self, name: str, reader: Any, tokenizer: Any, base: str):
        super().__init__(name, reader, tokenizer)
        self.compressor = _prompt_compressor(base, reader.dtype, reader.device)

    def compress(self, question: Question, read: Any, ratio: int) -> tuple[Any, int, int]:
        # A rate would be of the question, too, which is not in what is returned.
        arguments: dict[str, Any] = {"target_token": len(question["context_ids"]) / ratio, **_LINGUA}
        if self.name == "longllmlingua":
            arguments |= {"question": question["question"], "concate_question": False, **_LONG_LINGUA}
        found = self.compressor.compress_prompt([question["context"]], **arguments)["compressed_prompt"].strip()
        ids = self.tokenizer(found, add_special_tokens=False)["input_ids"]
        return ids, len(ids), len(found.encode())


def _prompt_compressor(base: str, dtype: torch.dtype, device: torch.device) -> Any:
    """LLMLingua on a local model; see peers in README.md for what stands in place of its own."""
    import llmlingua.prompt_compressor as library

    class Counter:
        """Count tokens without fetching the library's table; the count is unused."""

        def encode(self, text: str) -> list[str]:
            return text.split()

    class Pairs(DynamicCache):
        """A cache indexed by layer, as the library expects."""

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self.layers[index].keys, self.layers[index].values

    class Compressor(library.PromptCompressor):
        def get_ppl(self, *args: Any, past_key_values: Any = None, return_kv: bool = False, **kwargs: Any) -> Any:
            cache = None
            if past_key_values is not None:
                cache = Pairs()
                for layer, (keys, values) in enumerate(past_key_values):
                    cache.update(keys, values, layer)
            found = super().get_ppl(*args, past_key_values=cache, return_kv=return_kv, **kwargs)
            if not return_kv:
                return found
            return found[0], [(layer.keys, layer.values) for layer in found[1].layers]

    library.tiktoken.encoding_for_model = lambda name: Counter()
    config = {"trust_remote_code": False, "torch_dtype": dtype}
    return Compressor(base, device_map=str(device), model_config=config)


class Press:
    """Keys and values that kvpress keeps; the question continues at the positions after the whole context.

    Args:
        name: one of `_PRESSES`, with "_aware" behind it where the question is read with the context. Then all of the
            prompt but its last token is in what is compressed, and adds as many places to what is kept.
        reader: reads, and answers.
    """

    def __init__(self, name: str, reader: Any):
        import kvpress

        kind, arguments = _PRESSES[name.removesuffix(_AWARE)]
        self.reader, self.is_aware = reader, name.endswith(_AWARE)
        self.press = getattr(kvpress, kind)(**arguments)
        config = reader.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # Kept in bfloat16, whatever is computed in.
        self.position_bytes = (
            2 * config.num_hidden_layers * config.num_key_value_heads * size * torch.bfloat16.itemsize
        )

    def read(self, question: Question) -> Any:
        """Return each layer's input to the press, what follows it, and the number of positions."""
        split = len(question["prompt_ids"]) - 1 if self.is_aware else 0
        row = [*question["head_ids"], *question["context_ids"], *question["prompt_ids"][:split]]
        layers = []

        def keep_all(*layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
            layers.append(layer)
            _, _, keys, values, *_ = layer
            return keys, values

        self.press.compress = keep_all
        with self.press(self.reader):
            self.reader.model(torch.tensor([row], device=self.reader.device), past_key_values=DynamicCache())
        del self.press.compress
        return layers, question["prompt_ids"][split:], len(row)

    def compress(self, question: Question, read: Any, ratio: int) -> tuple[Any, int, int]:
        layers, rest, num_read = read
        num_tokens = len(question["context_ids"])
        num_kept = -(-num_tokens // ratio)
        # The library keeps int(n (1 - ratio)) places: half a place more is not cut to one less.
        self.press.compression_ratio = 1 - (num_read - num_tokens + num_kept + 0.5) / num_read
        cache = DynamicCache()
        for number, layer in enumerate(layers):
            cache.update(*self.press.compress(*layer), number)
        num_kept = cache.get_seq_length() - (num_read - num_tokens)
        return (cache, rest, num_read), num_kept, num_kept * self.position_bytes

    def answer(self, question: Question, state: Any) -> list[int]:
        cache, rest, position = state
        return greedy(self.reader, cache, rest, position, question)


class Compressor:
    """A checkpoint of this package, to measure seconds.

    Args:
        folder: the checkpoint.
        base: folder of its base.
        dtype: of the weights.
        memory_dtype: that memories are kept in, "bfloat16", "int8", "int4" or "int2".
        device: what it runs on.
    """

    def __init__(self, folder: str, base: str, dtype: str, memory_dtype: str, device: str):
        from context_compressors.cli.loading import load_compressor
        from context_compressors.evaluation.slot_origins import context_tokenizer

        self.model, tokenizer = load_compressor(folder, device=device, dtype=dtype, base_model=base)
        self.tokenizer = context_tokenizer(self.model, tokenizer)
        self.memory_dtype = memory_dtype

    def read(self, question: Question) -> Any:
        """Return the context's ids in the encoder's tokens."""
        from context_compressors.modeling.parts.text_ids import document_ids

        ids = document_ids(self.model.config, self.tokenizer, question["context"])
        return torch.tensor([ids], device=self.model.device)

    def compress(self, question: Question, read: Any, ratio: int) -> tuple[Any, int, int]:
        memory = self.model.compress(read, ratio=ratio, allow_untrained_ratio=True)
        dtype = self.memory_dtype
        memory = memory.to(dtype=dtype) if dtype == "bfloat16" else memory.quantize(dtype)
        return memory, int(memory.num_slots), memory.nbytes

    def answer(self, question: Question, memory: Any) -> list[int]:
        row = torch.tensor([[*question["head_ids"], *question["prompt_ids"]]], device=self.model.device)
        eos, most = question["eos_token_id"], question["max_new_tokens"]
        options = {"do_sample": False, "eos_token_id": eos, "pad_token_id": eos, "max_new_tokens": most}
        options["min_new_tokens"] = most if question.get("whole_length") else 0
        return self.model.generate(row, memory=memory, **options)[0, row.shape[1] :].tolist()


def greedy(model: Any, cache: DynamicCache, ids: Sequence[int], position: int, question: Question) -> list[int]:
    """Return the ids that a model writes greedily after a cache and a row, EOS included.

    Args:
        model: a causal language model.
        cache: what it has read.
        ids: what it reads next.
        position: the id of the first of these.
        question: has `eos_token_id` and `max_new_tokens`; with `whole_length` EOS ends nothing.
    """
    written: list[int] = []
    ends = () if question.get("whole_length") else (question["eos_token_id"],)
    while len(written) < question["max_new_tokens"] and not (written and written[-1] in ends):
        row = torch.tensor([list(ids)], device=model.device)
        place = torch.arange(position, position + len(ids), device=model.device)[None]
        output = model(row, past_key_values=cache, position_ids=place, logits_to_keep=1)
        position, ids = position + len(ids), [int(output.logits[0, -1].argmax())]
        written += ids
    return written


def make_system(arguments: argparse.Namespace, tokenizer: Any) -> Any:
    """Return the system that the command line names."""
    name = arguments.system
    if arguments.checkpoint is not None:
        folder, base = arguments.checkpoint, arguments.base
        return Compressor(folder, base, arguments.dtype, arguments.memory_dtype, arguments.device)
    reader = AutoModelForCausalLM.from_pretrained(arguments.reader, dtype=getattr(torch, arguments.dtype))
    reader = reader.to(arguments.device).eval()
    if name.removesuffix(_AWARE) in _PRESSES:
        return Press(name, reader)
    if name.startswith("keep_drop"):
        return KeepDrop(name, reader, tokenizer, KEEP_DROP)
    if name == "self_information":
        return SelfInformation(reader, tokenizer, arguments.base)
    if name.endswith("llmlingua"):
        return LLMLingua(name, reader, tokenizer, arguments.base)
    return TextSystem(name, reader, tokenizer)


def ask(system: Any, question: Question, ratios: Sequence[int], tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Yield a system's answer to one question at each ratio, with positions, bytes and seconds.

    A context is read once; the seconds of it are in those of each ratio.
    """
    start = time.perf_counter()
    read = system.read(question)
    read_seconds = _now() - start
    for ratio in ratios:
        start = time.perf_counter()
        state, kept, memory_bytes = system.compress(question, read, ratio)
        compressed = _now()
        ids = system.answer(question, state)
        yield {
            "set": question["set"],
            "id": question["id"],
            "ratio": ratio,
            "answer": tokenizer.decode(ids, skip_special_tokens=True).strip(),
            "kept_positions": kept,
            "memory_bytes": memory_bytes,
            "compress_seconds": read_seconds + compressed - start,
            "answer_seconds": time.perf_counter() - compressed,
        }


def _now() -> float:
    """Return the time after the accelerator has finished."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a JSONL file."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    yield from (json.loads(line) for line in text.split("\n")[:-1])


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--system", required=True, metavar="NAME", help="of peers in systems.yaml; any name with --checkpoint")
    add("--reader", metavar="FOLDER", help="language model that reads what is left of a context")
    add("--base", required=True, metavar="FOLDER", help="the base: small model of LLMLingua, and of --checkpoint")
    add("--checkpoint", metavar="FOLDER", help="a compressor, in place of a peer")
    kept = "that memories of --checkpoint are kept in (default: bfloat16)"
    add("--memory-dtype", default="bfloat16", choices=("bfloat16", "int8", "int4", "int2"), help=kept)
    add("--questions", nargs="+", required=True, metavar="FILE[#N]", help="JSONL of questions, the first N of them")
    add("--ratios", nargs="+", type=int, required=True, metavar="R", help="tokens for a position; 0: none are kept")
    add("--dtype", default="bfloat16", help="of the weights (default: bfloat16)")
    add("--device", default="cpu", help="such as cuda (default: cpu)")
    add("--whole-length", action="store_true", help="write as many tokens as an answer may have, whatever EOS says")
    add("--output", required=True, metavar="FILE", help="JSONL of answers")
    return parser


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    """Ask a system its open questions; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    output = Path(arguments.output)
    kept = list(lines_of(output))
    done = {(line["set"], line["id"], line["ratio"]) for line in kept}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(f"{json.dumps(line)}\n" for line in kept), encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(arguments.base)
    system = make_system(arguments, tokenizer)
    with output.open("a", encoding="utf-8") as file:
        for entry in arguments.questions:
            path, _, number = entry.partition("#")
            questions = list(lines_of(Path(path)))[: int(number) if number else None]
            for question in questions:
                question["whole_length"] = arguments.whole_length
                left = [ratio for ratio in arguments.ratios if (question["set"], question["id"], ratio) not in done]
                for answer in ask(system, question, left, tokenizer) if left else ():
                    print(json.dumps(answer), file=file, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
