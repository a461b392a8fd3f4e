# SPDX-License-Identifier: Apache-2.0
"""A tiny language model, three questions to it, and its scores and answers one sample at a time, without a cache."""

import math

import torch
from byte_tokenizers import SHAPE, byte_tokenizer, tiny_llama
from transformers import LlamaForCausalLM

from context_compressors.data.prompts import TASKS
from context_compressors.evaluation.evaluate import evaluate_model
from context_compressors.evaluation.rows import SampleAnswers
from context_compressors.evaluation.samples import EvaluationDataset
from context_compressors.evaluation.settings import EvaluationSettings

QA, SUMMARIZATION, CONTINUATION, RECONSTRUCTION = TASKS
ROWS = [
    {
        "context": "Ada keeps a cat named Tom in Rome.",
        "question": "Who keeps a cat?",
        "answers": ["Ada", "Ada herself"],
    },
    {"context": "The box holds 7 pens.", "question": "How many pens?", "answers": ["7"]},
    {
        "context": "A ferry leaves Bern at noon, and another one at six.",
        "question": "When?",
        "answers": ["noon", "six"],
    },
]
CONDITIONS = ["no_context", "full_context", "ratio=2", "ratio=4"]


def make_tokenizer():
    """One token per byte, and three special ones."""
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return byte_tokenizer([*names.values()], **names, model_max_length=10_000)


def make_base(tokenizer, seed, max_position_embeddings=512):
    torch.manual_seed(seed)
    fields = {"max_position_embeddings": max_position_embeddings, "initializer_range": 0.3}
    return LlamaForCausalLM(tiny_llama(tokenizer, **SHAPE, **fields)).eval()


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def naive_inputs(model, tokenizer, condition, context, prompt, start=None):
    """Keyword arguments and the text's ids for one sample under one condition; `start` is the task token, if any."""
    is_compressed = condition.startswith("ratio=")
    context_ids = encode(tokenizer, context)
    text = [tokenizer.bos_token_id if start is None or not is_compressed else start]
    if condition.endswith("full_context"):
        text = text + context_ids
    if is_compressed:
        ratio = int(condition.removeprefix("ratio="))
        return {"memory": model.compress(torch.tensor([context_ids]), ratio=ratio)}, text + encode(tokenizer, prompt)
    return {}, text + encode(tokenizer, prompt)


@torch.no_grad()
def naive_scores(model, tokenizer, condition, triples, reader=None, start=None, ends=False):
    """Token accuracy and perplexity over (context, prompt, target) triples, with EOS where a target `ends`."""
    nll, hits, count = 0.0, 0, 0
    for context, prompt, target in triples:
        extra, text = naive_inputs(model, tokenizer, condition, context, prompt, start)
        target_ids = encode(tokenizer, target) + [tokenizer.eos_token_id] * ends
        logits = (reader or model)(input_ids=torch.tensor([text + target_ids]), **extra).logits[0]
        for place, token in enumerate(target_ids, start=len(text) - 1):
            nll -= float(logits[place].float().log_softmax(-1)[token])
            hits += int(logits[place].argmax()) == token
            count += 1
    return {"token_accuracy": 100 * hits / count, "perplexity": math.exp(nll / count)}


@torch.no_grad()
def naive_answers(
    model, tokenizer, condition, rows, max_new_tokens, template="\nQuestion: {}\nAnswer:", start=None, penalty=1.0
):
    """Greedy answers, one token after another, with no cache and no `generate`."""
    answers = []
    for row in rows:
        prompt = template.format(row.get("question"))
        extra, text = naive_inputs(model, tokenizer, condition, row["context"], prompt, start)
        first = len(text)
        while len(text) < first + max_new_tokens:
            scores = model(input_ids=torch.tensor([text]), **extra).logits[0, -1].tolist()
            for written in set(text[first:]):
                scores[written] = scores[written] / penalty if scores[written] > 0 else scores[written] * penalty
            token = max(range(len(scores)), key=scores.__getitem__)
            if token == tokenizer.eos_token_id:
                break
            text = [*text, token]
        answers.append(tokenizer.decode(text[first:], skip_special_tokens=True).strip())
    return answers


def run(model, tokenizer, rows=ROWS, teacher=None, **options):
    options = {"batch_size": 2, "max_new_tokens": {QA: 6, SUMMARIZATION: 6}, **options}
    data = [EvaluationDataset("tiny", rows)]
    return evaluate_model(model, tokenizer, data, EvaluationSettings(**options), teacher=teacher, progress=False)


def answers_of(scores, dataset="squad", condition="ratio=4"):
    """Two questions about each document."""
    return [
        SampleAnswers(
            dataset, QA, str(row), row // 2, f"{row}?", ["ja", "über\u2028"], {condition: "x"}, {condition: {"f1": f1}}
        )
        for row, f1 in enumerate(scores)
    ]
