# SPDX-License-Identifier: Apache-2.0
"""One model in several threads: each call returns what the same call returns alone."""

import sys
import threading

import pytest
import torch
from decal_models import build as build_decal
from tiny_models import METHODS, TRAINING_FREE, Case
from transformers import TextIteratorStreamer

THREADS, ROUNDS = 8, 2
GREEDY = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
CONTEXT = torch.arange(5, 25)[None]
SHORT = torch.cat([torch.arange(40, 49), torch.zeros(11, dtype=torch.long)])[None]
SHORT_MASK = (SHORT != 0).long()
TEXT = torch.tensor([[1, 9, 40, 7]])


@pytest.fixture(autouse=True)
def eager_switching():
    """Threads take turns after every few operations, so that what they share is found out."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def built(name, **fields):
    if name == "decal":
        return build_decal(compression_ratios=(2, 3))
    return Case(next(method for method in METHODS + TRAINING_FREE if method.name == name)).build(**fields)


def together(calls, threads=THREADS, rounds=ROUNDS):
    """Run every call in every thread, each thread from another one on; return the errors."""
    expected = {name: call() for name, call in calls.items()}
    names, barrier, wrong = list(calls), threading.Barrier(threads), []

    def work(number):
        for turn in range(rounds):
            barrier.wait()
            for step in range(len(names)):
                name = names[(number + turn + step) % len(names)]
                try:
                    torch.testing.assert_close(calls[name](), expected[name], atol=1e-5, rtol=1e-5)
                except Exception as error:
                    wrong.append(f"{name}: {str(error)[:200]}")

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return wrong


def parts(memory):
    if memory.embeddings is not None:
        return [memory.embeddings, memory.attention_mask]
    return [tensor for pair in memory.key_values for tensor in pair]


def streamed(model, tokenizer, **inputs):
    streamer = TextIteratorStreamer(tokenizer, timeout=60)
    worker = threading.Thread(target=model.generate, kwargs={**inputs, **GREEDY, "streamer": streamer})
    worker.start()
    text = "".join(streamer)
    worker.join()
    return as_numbers(text)


def as_numbers(text):
    return torch.tensor([ord(letter) for letter in text])


def calls_of(model, tokenizer):
    memory = model.compress(CONTEXT, ratio=2)
    read = {"input_ids": TEXT, "memory": memory}
    padded = {"context_input_ids": SHORT, "context_attention_mask": SHORT_MASK}
    pipe = None if tokenizer is None else model.question_answering(tokenizer)
    calls = {
        "compress": lambda: parts(model.compress(SHORT, SHORT_MASK, ratio=3)),
        "forward": lambda: model(input_ids=TEXT, context_input_ids=CONTEXT).logits,
        "generate": lambda: model.generate(TEXT, **padded, **GREEDY),
        "stream": lambda: streamed(model, tokenizer, **read),
        "pipeline": lambda: as_numbers(pipe("Who?", context="Somebody.", **GREEDY)["answer"]),
    }
    if hasattr(model, "base_language_model"):

        def base():
            with model.base_language_model():
                return model(input_ids=TEXT).logits

        calls["base"] = base
    return {name: torch.no_grad()(call) for name, call in calls.items()}


# Adapters that are switched, one pass for both sides, heads of unlike numbers, and an encoder-decoder.
KINDS = ("mean_pooling", "five_hundred_x", "voco", "ranked_key_values", "snap_kv", "kv_zip", "decal")


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_calls_of_all_kinds_are_right_in_eight_threads(name, tiny_tokenizer):
    assert not together(calls_of(built(name), tiny_tokenizer))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mean_pooling", "five_hundred_x"])
def test_gradients_under_checkpointing_are_right_in_threads(name):
    """Each recomputation uses the adapter of its own forward call, also in a thread that made no such call."""
    model = built(name).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def loss():
        return model(input_ids=TEXT, context_input_ids=CONTEXT, labels=TEXT).loss

    def gradients():
        return torch.autograd.grad(loss(), trained, allow_unused=True)

    expected = gradients()
    model.gradient_checkpointing_enable()
    made, found = loss(), []
    worker = threading.Thread(target=lambda: found.append(torch.autograd.grad(made, trained)))
    worker.start()
    worker.join()
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-4)
    calls = {"gradients": gradients, "compress": torch.no_grad()(lambda: parts(model.compress(CONTEXT, ratio=2)))}
    assert not together(calls, threads=4)


def replica_of(network):
    """Copy a model as `DataParallel` does for each device: its weights are tensors and no parameters."""
    replicas = {module: module._replicate_for_data_parallel() for module in network.modules()}
    for module, replica in replicas.items():
        replica._former_parameters = {}
        for name, child in module._modules.items():
            replica._modules[name] = None if child is None else replicas[child]
        for name, parameter in module._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
            else:
                replica._former_parameters[name] = parameter * 1
                setattr(replica, name, replica._former_parameters[name])
    return replicas[network]


@pytest.mark.parametrize("name", ["mean_pooling", "five_hundred_x"])
def test_a_replica_in_a_thread_is_the_model(name):
    model = built(name).train()
    inputs = {"input_ids": TEXT, "context_input_ids": CONTEXT, "labels": TEXT}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = torch.autograd.grad(model(**inputs).loss, trained, allow_unused=True)
    with model.base_language_model():
        base, alone = model(input_ids=TEXT).logits, replica_of(model)
    found = []

    def work():
        loss = replica_of(model)(**inputs).loss
        found.extend([torch.autograd.grad(loss, trained, allow_unused=True), alone(input_ids=TEXT).logits])

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[1], base)


def test_frequencies_that_follow_the_length_are_a_calls_own():
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 12}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [9.0] * 4}
    model = built("mean_pooling", decoder_config={"rope_parameters": rope})
    rotary = model.model.language_model.rotary_emb
    before, short = rotary.inv_freq.clone(), parts(model.compress(CONTEXT[:, :8]))
    long = parts(model.compress(CONTEXT))
    assert rotary.inv_freq.equal(before)
    model.model.language_model(CONTEXT)
    assert not rotary.inv_freq.equal(before), "the library's own call moves them"
    torch.testing.assert_close(parts(model.compress(CONTEXT[:, :8])), short)
    torch.testing.assert_close(parts(model.compress(CONTEXT)), long)
