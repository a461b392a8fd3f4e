# SPDX-License-Identifier: Apache-2.0
"""The test matrix of all methods, `METHODS` in tiny_models.py, and the fixtures that their tests share.

A test asks for what it can fail on by the name of its argument:

- `method_case`: each method as it comes; `form_case`: one of each memory form, for what all methods share,
- `backbone_case`: on base architectures and attentions,
- `place_case`: with hard settings that move slots or text,
- `weights_case`: with each one that changes what is stored; `adapter_case`: what is adapted,
- `case`: on all bases and with all hard settings.

What else differs, as paddings, ratios and types, is looped inside a test. A test of some cases only is marked
`@pytest.mark.only(condition)`. Of a test that is marked `costly`, the inner loop has one method of each memory form;
`pytest tests/modeling -k <method>` has all of a method.
"""

import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import hypothesis
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

# Tests import the helper modules beside them by name.
sys.path.append(str(Path(__file__).parent))

import harsh_attention
from parameters import disturb
from tiny_bases import PAD, VOCAB_SIZE, base_config, tiny_tokenizer
from tiny_models import CASES, METHOD_CASES, Case

# Its assertions show their values, as those of tests do.
pytest.register_assert_rewrite("random_memories")

# A busy machine is no reason to fail.
hypothesis.settings.register_profile("no_deadline", deadline=None)
hypothesis.settings.load_profile("no_deadline")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "only(condition): of the matrix, the cases that meet it")
    config.addinivalue_line("markers", "costly: of the matrix, one method of each memory form is not slow")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    conditions = [mark.args[0] for mark in metafunc.definition.iter_markers("only")]
    is_costly = metafunc.definition.get_closest_marker("costly") is not None
    for name, cases in CASES.items():
        if name in metafunc.fixturenames:
            cases = [case for case in cases if all(condition(case) for condition in conditions)]
            marks = [() if case.is_quick(name, is_costly) else pytest.mark.slow for case in cases]
            params = [pytest.param(case, marks=mark, id=str(case)) for case, mark in zip(cases, marks, strict=True)]
            metafunc.parametrize(name, params)


@pytest.fixture(autouse=True)
def harsh_kernels(monkeypatch):
    """Every test runs on attention that gives NaN for a query that sees nothing, and no such query comes."""
    harsh_attention.install(monkeypatch)
    yield
    assert not harsh_attention.BLIND, "queries that see nothing reached an attention kernel"


def _random_rows(lengths: list[int], seed: int = 0) -> list[torch.Tensor]:
    """Rows of ordinary token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, VOCAB_SIZE, (length,), generator=generator) for length in lengths]


def _pad_rows(rows: list[torch.Tensor], side: str = "right", value: int = PAD) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `(batch_size, width)`; two pads more than needed, so that no row is without."""
    width = max(len(row) for row in rows) + 2
    ids = torch.full((len(rows), width), value)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for i, row in enumerate(rows):
        spare = width - len(row)
        if side == "left":
            places = torch.arange(spare, width)
        elif side == "right":
            places = torch.arange(len(row))
        else:
            # Pads in the middle and at both ends.
            places = torch.arange(len(row)) + spare // 3
            places[len(row) // 2 :] += spare - spare // 3 - spare // 3
        ids[i, places], mask[i, places] = row, 1
    return ids, mask


def _slots(memory: Any) -> torch.Tensor:
    """Return the states that a memory carries, (batch_size, num_slots, width); of key/values those of all layers."""
    if memory.key_values is None:
        return memory.embeddings
    return torch.cat([part.transpose(1, 2).flatten(2) for pair in memory.key_values for part in pair], dim=2)


@pytest.fixture(scope="session")
def method_cases():
    """Each method as it comes, by name, for the tests of one method alone."""
    return {case.method.name: case for case in METHOD_CASES}


# And each by the name of its method, as `icae`.
for _case in METHOD_CASES:
    globals()[_case.method.name] = pytest.fixture(lambda case=_case: case, scope="session", name=_case.method.name)

# Functions that tests ask for by name.
FUNCTIONS = {"slots": _slots, "random_rows": _random_rows, "pad_rows": _pad_rows, "tiny_base_config": base_config}
for _name, _function in FUNCTIONS.items():
    globals()[_name] = pytest.fixture(lambda function=_function: function, scope="session", name=_name)


@pytest.fixture(scope="session")
def case_on(method_cases):
    """`case_on(method, base)`: a method as it comes, on a base such as "llama-sdpa"."""

    def make(method, base):
        architecture, attention = base.split("-")
        return method_cases[method].on(architecture=architecture, attention=attention)

    return make


@pytest.fixture
def inputs():
    """A question and a context of one row."""
    return {"input_ids": torch.tensor([[1, 9, 40, 7]]), "context_input_ids": torch.arange(5, 18)[None]}


@pytest.fixture(name="tiny_tokenizer")
def new_tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture
def local_hub(tmp_path, monkeypatch):
    """`local_hub(repo_id, config)`: put a new language model into the only cache of the Hub, `local_hub.folder`."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def put(repo_id: str, config: Any, seed: int = 1, dtype: torch.dtype = torch.float32) -> str:
        commit = f"{seed:040x}"
        repository = folder / f"models--{repo_id.replace('/', '--')}"
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.save_pretrained(repository / "snapshots" / commit)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
        return commit

    put.folder = folder
    return put


@pytest.fixture(scope="session")
def start_light():
    """`start_light(case, local_hub, **fields)`: a case's model on a base of the Hub, nothing at its start value."""

    def start(case: Case, hub: Any, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
        config = case.config()
        hub("me/base", config.decoder_config, dtype=dtype)
        fields = {**case.fields, **fields}
        own = {name: fields.pop(name) for name in ("decoder_config", "encoder_config") if name in fields}
        if own.get("encoder_config"):
            # An encoder may be cut to its first layers: its base is not.
            hub("me/encoder", base_config(case.architecture, **own["encoder_config"]), seed=2)
            fields["encoder"] = "me/encoder"
        elif "encoder_config" in own:
            fields["encoder_config"] = config.encoder_config
        torch.manual_seed(0)
        model = case.method.causal_lm_class.from_base("me/base", attn_implementation=case.attention, **fields)
        return disturb(model, 0.15)

    return start
