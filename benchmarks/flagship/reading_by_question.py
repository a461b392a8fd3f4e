# SPDX-License-Identifier: Apache-2.0
"""Is a memory better read fine where the question asks, and coarse elsewhere, at the same decoder positions?

    python -m benchmarks.flagship.reading_by_question --model RANKED_KEY_VALUES --data qa_squad_train.parquet \
        --first-row 85000 --answers answers.jsonl

A document is eight paragraphs of SQuAD, each a block that is compressed by itself, without any question. For each
question a memory is put together: all blocks at one ratio, or some of them fine and the others coarse. Beside it the
same model, with the same adapter, reads text: all of it, BM25's sentences or paragraph, and what SnapKV keeps of a
reading of document and question. One question for each paragraph; intervals hold 95 % of 10,000 resamples
of the questions, and those of differences are of pairs. A run that is stopped goes on where its answers end.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.common.answers import AnswerLines
from benchmarks.common.questions import questions_by_context
from benchmarks.common.tools import positive_int, tells_errors
from context_compressors import RankedKeyValuesForCausalLM, SnapKVConfig, mixed_memory
from context_compressors.evaluation.alternatives import bm25_context
from context_compressors.evaluation.bootstrap import mean_statistic, percentile_interval, resampled_scores
from context_compressors.evaluation.metrics import squad_scores
from context_compressors.modeling.compressor.context_compression_qa import padded
from context_compressors.modeling.compressor.key_value_selection import ReadContext, kept_places
from context_compressors.modeling.memory.compressed_context import CompressedContext
from context_compressors.modeling.memory.headwise_memory import spread_pairs
from context_compressors.modeling.memory.key_value_memory import filled_cache
from context_compressors.modeling.modeling_snap_kv import SnapKVModel
from context_compressors.modeling.parts.cache_name import CACHE
from context_compressors.modeling.parts.call_views import twin
from context_compressors.modeling.parts.chat_template import prompt_ids
from context_compressors.modeling.parts.prompting import question_ids
from context_compressors.modeling.parts.text_ids import encode
from context_compressors.reporting.environment import environment
from context_compressors.reporting.result_files import write_results
from context_compressors.reporting.tables import markdown_table

_BLOCKS, _PARTS = 8, ("memory", "alone", "text")
_NUM_RESAMPLES = 10_000
# Decoder positions are 1/4, 1/8 and 1/16 of the document's tokens; so many blocks are read fine.
_FINE = {4: 2, 8: 1, 16: 1}
# What is kept of each block.
_RATIOS = (2, 4, 8, 16, 32)
_ATTENTION_RATIO = 16
UNIFORM, BY_BM25, BY_ATTENTION, BY_ANSWER = "uniform", "mixed by BM25", "mixed by attention", "mixed by the answer"
SENTENCES, PARAGRAPH, NO_CONTEXT, FULL = "BM25's sentences", "BM25's paragraph", "no context", "full text"
ALONE = f"BM25's block alone, {_RATIOS[0]}x"
SNAP, SNAP_ON = "SnapKV, question read again", "SnapKV, question goes on"


@dataclass
class Document:
    """Eight paragraphs and a question about each.

    Args:
        paragraphs: their texts.
        questions: one about each.
        answers: of each question, all that are right.
        blocks: token ids of the paragraphs; joined they are the document's.
    """

    paragraphs: list[str]
    questions: list[str]
    answers: list[list[str]]
    blocks: list[list[int]]

    @property
    def ids(self) -> list[int]:
        """Token ids of the whole."""
        return [token for block in self.blocks for token in block]

    def budget(self, ratio: int) -> int:
        """Positions that all blocks take at one ratio."""
        return sum(-(-len(block) // ratio) for block in self.blocks)


@dataclass
class Asked:
    """What the rows have written about one document: for each row a value for each question."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    positions: dict[str, list[int]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, row: str, texts: Sequence[str], positions: Sequence[int]) -> None:
        """Note a row."""
        self.texts.setdefault(row, []).extend(texts)
        self.positions.setdefault(row, []).extend(positions)


def drawn(path: str, first_row: int, count: int, seed: int, tokenizer: PreTrainedTokenizerBase) -> list[Document]:
    """Documents of paragraphs that a seed draws from a Parquet file with `context`, `question` and `answers`."""
    by_context = questions_by_context(path, first_row, at_least=count * _BLOCKS)
    contexts, documents = sorted(by_context), []
    random.Random(seed).shuffle(contexts)
    # Documents that are added later leave the first ones as they are.
    for place in range(count):
        chosen = random.Random(f"{seed}/{place}")
        part = [chosen.choice(by_context[text]) for text in contexts[place * _BLOCKS : (place + 1) * _BLOCKS]]
        texts = [row["context"] for row in part]
        blocks = [encode(tokenizer, text + "\n" * (text is not texts[-1])) for text in texts]
        documents.append(Document(texts, [row["question"] for row in part], [row["answers"] for row in part], blocks))
    return documents


def ranked_blocks(document: Document) -> list[list[int]]:
    """For each question the blocks, the one that BM25 scores highest first."""
    words = bm25s.tokenize(document.paragraphs, stopwords="en", return_ids=False, show_progress=False)
    index = bm25s.BM25()
    index.index(words, show_progress=False)
    ranking = []
    for asked in bm25s.tokenize(document.questions, stopwords="en", return_ids=False, show_progress=False):
        known = [word for word in asked if word in index.vocab_dict]
        scores = index.get_scores(known) if known else np.zeros(_BLOCKS)
        ranking.append(np.argsort(-scores, kind="stable").tolist())
    return ranking


# --- memories ---


@torch.inference_mode()
def ask_memories(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, document: Document, new_tokens: int
) -> Asked:
    """All rows that read a memory."""
    asked, lengths = Asked(), [len(block) for block in document.blocks]
    questions = [question_ids(model.config, tokenizer, question) for question in document.questions]
    finest = model.compress(**padded(document.blocks, model.device), ratio=_RATIOS[0], allow_untrained_ratio=True)
    levels = [finest.at_ratio(ratio) for ratio in _RATIOS]
    known: dict[tuple, str] = {}

    def note(row: str, ratio: int, fine: Sequence[Sequence[int]]) -> None:
        keys = [(place, *sorted(blocks), ratio) for place, blocks in enumerate(fine)]
        memories = [mixed_memory(levels, blocks, document.budget(ratio)) for blocks in fine]
        # Where two ways choose the same blocks, the answer is the same.
        new = {key: memory for key, memory in zip(keys, memories, strict=True) if key not in known}
        if new:
            memory = CompressedContext.stack(new.values())
            texts = written(model, tokenizer, memory, [questions[key[0]] for key in new], new_tokens)
            known.update(zip(new, texts, strict=True))
        asked.add(row, [known[key] for key in keys], [int(memory.num_slots) for memory in memories])

    coarse = mixed_memory(levels, [], document.budget(_ATTENTION_RATIO))
    mass = attention_to_blocks(model, coarse, lengths, questions)
    ranking = {
        BY_BM25: ranked_blocks(document),
        BY_ATTENTION: mass.argsort(dim=1, descending=True, stable=True).tolist(),
        BY_ANSWER: [[own] for own in range(_BLOCKS)],
    }
    asked.facts["rank_of_own_block"] = {
        name: [order.index(own) for own, order in enumerate(orders)] for name, orders in ranking.items()
    }
    for ratio, num_fine in _FINE.items():
        note(f"{UNIFORM} {ratio}x", ratio, [[]] * _BLOCKS)
        for name, orders in ranking.items():
            note(f"{name} {ratio}x", ratio, [order[:num_fine] for order in orders])
    asked.facts |= {f"bytes {ratio}x": level.nbytes for ratio, level in zip(_RATIOS, levels, strict=True)}
    asked.facts["tokens"] = sum(lengths)
    return asked


@torch.inference_mode()
def ask_blocks_alone(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, document: Document, new_tokens: int
) -> Asked:
    """The row that reads one block's memory and nothing else."""
    rows = [order[0] for order in ranked_blocks(document)]
    memory = model.compress(**padded(document.blocks, model.device), ratio=_RATIOS[0]).rows(rows)
    questions = [question_ids(model.config, tokenizer, question) for question in document.questions]
    asked = Asked()
    asked.add(ALONE, written(model, tokenizer, memory, questions, new_tokens), memory.num_slots.tolist())
    return asked


def written(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    memory: CompressedContext,
    questions: Sequence[Sequence[int]],
    new_tokens: int,
) -> list[str]:
    """Greedy answers, one for each row of a memory."""
    text = padded(questions, model.device)
    output = model.generate(
        **text, memory=memory, max_new_tokens=new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
    rows = output[:, text["input_ids"].shape[1] :]
    return [tokenizer.decode(row, skip_special_tokens=True).strip() for row in rows]


def attention_to_blocks(
    model: PreTrainedModel, memory: CompressedContext, lengths: Sequence[int], questions: Sequence[Sequence[int]]
) -> Tensor:
    """What the words of each question attend to in a memory of all blocks, over all layers and heads.

    Returns:
        `(num_questions, num_blocks)`.
    """
    counts = torch.tensor([-(-n // _ATTENTION_RATIO) for n in lengths])
    of_slots = torch.arange(len(lengths)).repeat_interleave(counts)
    # The pairs' blocks go the way of the pairs.
    shape = (*memory.key_values[0][0].shape[:3], 1)
    marks = of_slots[None, None, :, None].expand(shape)
    spread, masks = spread_pairs(replace(memory, check=False, key_values=((marks, marks),) * len(memory.key_values)))
    text = padded(questions, model.device)
    behind = text["attention_mask"] * (torch.arange(text["input_ids"].shape[1]) >= len(model.config.opening_ids))
    mass = torch.zeros(len(questions), len(lengths))
    reader = twin(model.model).eval()
    reader.language_model.set_attn_implementation("eager")

    def hook(layer: int) -> Any:
        def add(module: Any, args: tuple, output: tuple[Tensor, ...]) -> None:
            blocks, is_real = spread[layer][0][0, :, :, 0], masks[layer][0]
            weights = output[1][..., : blocks.shape[1]] * behind[:, None, :, None]
            # The query heads of a key/value head read the same pairs.
            by_head = weights.sum(dim=2).unflatten(1, (len(blocks), -1)).sum(dim=2) * is_real
            mass.index_add_(1, blocks.flatten(), by_head.flatten(1).float())

        return add

    for index, layer in enumerate(reader.language_model.layers):
        layer.self_attn.register_forward_hook(hook(index))
    reader(**text, memory=memory.repeat_interleave(len(questions)), use_cache=False)
    return mass


# --- text ---


class TextReader:
    """The same model, which reads text without a memory; caches may have been cut."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, new_tokens: int):
        self.model, self.tokenizer, self.new_tokens = model, tokenizer, new_tokens
        # Eager attention alone gives its weights away.
        self.model.model.language_model.set_attn_implementation("eager")
        base = model.config.decoder_config.to_dict()
        with torch.device("meta"):
            self.snap_kv = SnapKVModel(SnapKVConfig(decoder_config=base, question_placement="encoder"))

    def read(self, ids: Sequence[int], pairs: Any, position: int, **wanted: Any) -> tuple[Any, Any]:
        """Outputs, and keys and values of each layer of all that was read."""
        outputs = self.model.model(
            input_ids=torch.tensor([list(ids)]),
            attention_mask=torch.ones(1, (pairs[0][0].shape[2] if pairs else 0) + len(ids), dtype=torch.long),
            position_ids=torch.arange(position, position + len(ids))[None],
            cache=filled_cache(pairs, None, True) if pairs else None,
            use_cache=True,
            **wanted,
        )
        return outputs, tuple((layer.keys, layer.values) for layer in outputs[CACHE].layers)

    def write(self, ids: Sequence[int], pairs: Any, position: int, draft: Sequence[int] = ()) -> list[int]:
        """The greedy answer behind what was read, up to its end; as far as it is the draft, in one pass."""
        found: list[int] = []
        while len(found) < self.new_tokens:
            outputs, read = self.read([*ids, *draft], pairs, position)
            states = outputs.last_hidden_state[:, len(ids) - 1 :]
            chosen = self.model.text_logits(states)[0].argmax(dim=-1).tolist()
            agreed = next((at for at, token in enumerate(draft) if token != chosen[at]), len(draft))
            found += chosen[: agreed + 1]
            if self.tokenizer.eos_token_id in found:
                return found[: found.index(self.tokenizer.eos_token_id)]
            rejected = len(draft) - agreed
            pairs = tuple(tuple(states[:, :, : states.shape[2] - rejected] for states in both) for both in read)
            position += len(ids) + agreed
            ids, draft = found[-1:], ()
        return found[: self.new_tokens]

    def ask(self, document: Document) -> Asked:
        """All rows that read text or what is left of its keys and values."""
        asked, ids = Asked(), document.ids
        prompts = [prompt_ids(self.tokenizer, [question], "chat") for question in document.questions]
        head = prompts[0].head
        _, pairs = self.read([*head, *ids], None, 0)
        asked.facts["text_bytes"] = len("\n".join(document.paragraphs).encode())
        for question, order, prompt in zip(document.questions, ranked_blocks(document), prompts, strict=True):
            tail, place = prompt.turns[0], len(head) + len(ids)
            # The question behind the document, and its attention.
            outputs, with_question = self.read(tail, pairs, place, output_attentions=True)
            texts = {NO_CONTEXT: [], PARAGRAPH: document.blocks[order[0]]}
            for ratio in _FINE:
                texts[f"{SENTENCES} {ratio}x"] = bm25_context(self.tokenizer, ids, question, document.budget(ratio))
            # Of each row what is read, behind which pairs and at which position, and the positions that it takes.
            readings: dict[str, tuple[list[int], Any, int, int]] = {FULL: (tail, pairs, place, len(ids))}
            readings |= {row: ([*head, *kept, *tail], None, 0, len(kept)) for row, kept in texts.items()}
            for ratio in _FINE:
                budget = document.budget(ratio)
                kept_pairs = self.snap(with_question, outputs.attentions, place, len(tail), len(head) + budget)
                readings[f"{SNAP} {ratio}x"] = tail, kept_pairs, place, budget
                # All that was read of the question but its last token.
                asked_pairs = [[states[:, :, place:-1] for states in both] for both in with_question]
                going_on = tuple(
                    tuple(torch.cat(halves, dim=2) for halves in zip(*both, strict=True))
                    for both in zip(kept_pairs, asked_pairs, strict=True)
                )
                readings[f"{SNAP_ON} {ratio}x"] = tail[-1:], going_on, place + len(tail) - 1, budget
            draft: list[int] = []
            for row, (given, behind, position, count) in readings.items():
                answer = self.write(given, behind, position, draft)
                # What the full text says is a good guess at the other answers.
                draft = draft or [*answer, self.tokenizer.eos_token_id]
                asked.add(row, [self.tokenizer.decode(answer, skip_special_tokens=True).strip()], [count])
        return asked

    def snap(self, pairs: Any, attentions: Any, num_context: int, num_asked: int, num_slots: int) -> Any:
        """What SnapKV keeps of the opening and the document."""
        places = torch.arange(num_context + num_asked)[None]
        read = ReadContext(pairs, places < num_context, places, attentions)
        priorities = self.snap_kv.priorities(read, torch.tensor([num_slots]), torch.tensor([num_asked]))
        kept = []
        for (keys, values), layer in zip(pairs, priorities, strict=True):
            at = kept_places(layer, read.is_context, torch.tensor([num_slots]), num_slots)[..., None]
            kept.append((keys.take_along_dim(at, dim=2), values.take_along_dim(at, dim=2)))
        return tuple(kept)


# --- results ---


def results_of(documents: Sequence[Document], answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """F1 of each row, and differences of pairs of rows on the questions of both, with their intervals."""
    references = [answer for document in documents for answer in document.answers]
    f1: dict[str, np.ndarray] = {}
    positions: dict[str, list[int]] = {}
    for found in answers:
        for row, texts in found["texts"].items():
            # A part that was stopped has answered fewer documents.
            scores = f1.setdefault(row, np.full(len(references), np.nan))
            for place, text in enumerate(texts, start=found["document"] * _BLOCKS):
                scores[place] = squad_scores([text], [references[place]])["f1"]
            positions.setdefault(row, []).extend(found["positions"][row])
    compared: dict[Any, np.ndarray] = dict(f1)
    for ratio in _FINE:
        others = [*(f"{name} {ratio}x" for name in (UNIFORM, SENTENCES, SNAP, SNAP_ON)), ALONE, PARAGRAPH, FULL]
        for row in (*(f"{name} {ratio}x" for name in (BY_BM25, BY_ATTENTION, BY_ANSWER)), ALONE):
            known = [other for other in others if row in f1 and other in f1 and other != row]
            compared |= {(row, other): f1[row] - f1[other] for other in known}
    statistics = {key: mean_statistic(np.nan_to_num(scores), ~np.isnan(scores)) for key, scores in compared.items()}
    resampled = resampled_scores(statistics, range(len(references)), _NUM_RESAMPLES)
    rows, differences = [], []
    for key, statistic in statistics.items():
        scored = {
            "f1": statistic.score(),
            "interval": list(percentile_interval(resampled[key])),
            "questions": int((~np.isnan(compared[key])).sum()),
        }
        if isinstance(key, str):
            rows.append({"row": key, **scored, "positions": float(np.mean(positions[key]))})
        else:
            differences.append({"row": key[0], "less": key[1], **scored})
    ranks: dict[str, list[int]] = {}
    facts: dict[str, list[float]] = {}
    for found in answers:
        for name, value in found["facts"].items():
            if name == "rank_of_own_block":
                for by, places in value.items():
                    ranks.setdefault(by, []).extend(places)
            else:
                facts.setdefault(name, []).append(value)
    return {
        "documents": len(documents),
        "rows": rows,
        "differences": differences,
        "own_block_first": {by: [float(np.mean(np.array(at) < n)) for n in (1, 2)] for by, at in ranks.items()},
        "mean_of_documents": {name: float(np.mean(values)) for name, values in facts.items()},
    }


def table(results: dict[str, Any]) -> str:
    """The results as tables."""

    def score(entry: dict[str, Any]) -> str:
        low, high = entry["interval"]
        return f"{entry['f1']:.1f} [{low:.1f}, {high:.1f}]"

    rows = markdown_table(
        ["row", "F1", "positions", "questions"],
        [[r["row"], score(r), f"{r['positions']:.0f}", str(r["questions"])] for r in results["rows"]],
    )
    pairs = markdown_table(
        ["row", "less", "difference", "questions"],
        [[r["row"], r["less"], score(r), str(r["questions"])] for r in results["differences"]],
    )
    return f"{rows}\n\n{pairs}"


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.flagship.reading_by_question", description=__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    add = made.add_argument
    add("--model", required=True, help="a checkpoint of ranked key/values")
    add("--data", required=True, help="Parquet file with context, question and answers")
    add("--first-row", type=int, default=0, help="of the file that is used (default: 0)")
    add("--documents", type=positive_int, default=5, help="of eight questions each (default: 5)")
    add("--seed", type=int, default=0, help="draws the paragraphs (default: 0)")
    add("--new-tokens", type=positive_int, default=16, help="longest answer (default: 16)")
    add("--parts", nargs="*", choices=_PARTS, default=_PARTS, help="default: all; none reports what there is")
    add("--answers", required=True, help="JSON lines that are gone on with")
    add("--output", help="where the result goes (default: beside this file)")
    return made


def answered(
    arguments: argparse.Namespace, part: str, documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[int, Asked]]:
    """What a part's rows write, document by document."""
    model = RankedKeyValuesForCausalLM.from_pretrained(arguments.model).eval()
    reader = TextReader(model, tokenizer, arguments.new_tokens) if part == "text" else None
    ask = ask_memories if part == "memory" else ask_blocks_alone
    for place, document in enumerate(tqdm(documents, desc=part, disable=not sys.stderr.isatty())):
        with torch.inference_mode():
            found = reader.ask(document) if reader else ask(model, tokenizer, document, arguments.new_tokens)
        yield place, found


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    documents = drawn(arguments.data, arguments.first_row, arguments.documents, arguments.seed, tokenizer)
    settings = {name: value for name, value in vars(arguments).items() if name in ("first_row", "seed", "new_tokens")}
    settings["data"] = Path(arguments.data).name
    known = AnswerLines(arguments.answers, {"model": Path(arguments.model).name, **settings})
    lines = known.lines
    for part in arguments.parts:
        done = {line["document"] for line in lines if line["part"] == part}
        places = [place for place in range(len(documents)) if place not in done]
        if not places:
            continue
        for index, asked in answered(arguments, part, [documents[place] for place in places], tokenizer):
            known.add({"part": part, "document": places[index], **vars(asked)})
    lines = [line for line in lines if line["document"] < len(documents)]
    results = results_of(documents, sorted(lines, key=lambda line: line["document"]))
    content = {"format_version": 1, "settings": settings, "environment": environment(), **results}
    output = write_results(content, arguments.output or Path(__file__).with_suffix(".json"))
    print(f"{table(results)}\n\nwrote {output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
