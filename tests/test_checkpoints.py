# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in the repository: those for everybody in checkpoints/, and the small trained ones for tests."""

import json
import re
import subprocess
from pathlib import Path

import huggingface_hub
import pages
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline

import context_compressors.modeling  # noqa: F401  (makes the Auto classes know this package's methods)
from context_compressors import CompressionCollator, CompressionDataset, MeanPoolingForCausalLM
from context_compressors.data.document_ids import TrainingDocuments
from context_compressors.hub_cards import handler
from context_compressors.hub_cards.repository import build_repository
from context_compressors.modeling.checkpoint.checkpoint_card import facts, usage
from context_compressors.modeling.checkpoint.remote_code import write_code
from context_compressors.training.arguments import DataArguments

ROOT = Path(__file__).resolve().parents[1]
SMALL = ROOT / "tests" / "checkpoints"
PUBLISHED = ROOT / "checkpoints"
TEXT_COMPRESSOR = PUBLISHED / "minilm-keep-drop"
FOLDERS = sorted(path for path in PUBLISHED.glob("*") if path.is_dir() and path != TEXT_COMPRESSOR)
MIB = 2**20
# As reports have them: the ids of a data set's documents, with spaces between them.
DOCUMENT_IDS = re.compile(r'"[0-9a-f]{12}(?: [0-9a-f]{12})*"')


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_there_is_a_checkpoint_for_everybody():
    assert FOLDERS, f"{PUBLISHED} holds no checkpoint"
    assert {folder.name for folder in FOLDERS} == set(pages.CHECKPOINTS), "README's table has all of them"


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_code_beside_published_weights_is_the_code_of_the_package(folder: Path, tmp_path: Path):
    config = AutoConfig.from_pretrained(folder)
    write_code(AutoModelForCausalLM._model_mapping[type(config)], type(config), tmp_path)
    saved = {name: content for name, content in files(folder).items() if name.endswith(".py")}
    assert saved.pop("handler.py") == Path(handler.__file__).read_bytes()
    assert saved == files(tmp_path), "write it again: remote_code.write_code(model_class, config_class, FOLDER)"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_published_card_says_what_the_configuration_does(folder: Path):
    config, card = AutoConfig.from_pretrained(folder), (folder / "README.md").read_text(encoding="utf-8")
    rows = [f"| {name} | {value} |" for name, value in facts(config)]
    for part in (*rows, usage(config, f"checkpoints/{folder.name}")):
        assert part in card


@pytest.mark.slow
@pytest.mark.parametrize("folder", [*FOLDERS, TEXT_COMPRESSOR], ids=lambda folder: folder.name)
def test_a_published_checkpoint_is_small_and_fit_for_the_hub(folder: Path, tmp_path: Path):
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "recipe.yaml"} <= set(files(folder))
    assert (folder / "model.safetensors").stat().st_size <= 24 * MIB
    card = huggingface_hub.ModelCard.load(folder / "README.md").data
    assert card.license == "apache-2.0"
    assert card.base_model_relation == ("finetune" if folder == TEXT_COMPRESSOR else "adapter")
    assert all("/" in name for name in (*card.datasets, *(result.dataset_type for result in card.eval_results or ())))
    assert files(build_repository(folder, tmp_path / "built", local_files_only=True)) == files(folder)


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_cards_code_answers(folder: Path, smollm2_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    code = (folder / "README.md").read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    names = {
        "document": "The Harbour Museum opened in 1974 in a former rope factory.",
        "question": "When did it open?",
    }
    exec(code.replace("document.safetensors", str(tmp_path / "document.safetensors")), names)
    # An hour's training suffices for the kind of an answer, not for its digits, as these cards say.
    assert re.search(r"\b\d{4}\b" if folder.name in pages.CHECKPOINTS[2:] else "1974", names["answer"])


def test_the_text_compressor_is_small_and_loads_with_a_stock_pipeline():
    names = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names | {"recipe.yaml", "training_summary.json", "training_documents.json"} == set(files(TEXT_COMPRESSOR))
    assert sum(map(len, files(TEXT_COMPRESSOR).values())) <= 25_000_000
    found = pipeline("token-classification", model=str(TEXT_COMPRESSOR))("The museum opened in 1974.")
    assert {entry["entity"] for entry in found} <= {"keep", "drop"}
    rows = json.loads((ROOT / "benchmarks" / "comparison" / "comparison.json").read_text(encoding="utf-8"))["rows"]
    scores = {row["scores"].get("f1") for row in rows if row["system"] == "keep_drop_aware"}
    card = huggingface_hub.ModelCard.load(TEXT_COMPRESSOR / "README.md").data
    assert {result.metric_value for result in card.eval_results} <= scores


def reports_in(content: object) -> list[dict]:
    """Return the parts of a result file that name documents, however deep they lie."""
    if isinstance(content, list):
        return [report for entry in content for report in reports_in(entry)]
    if not isinstance(content, dict):
        return []
    documents = content.get("documents")
    if isinstance(documents, dict) and all(isinstance(ids, str) for ids in documents.values()):
        return [content]
    return [report for entry in content.values() for report in reports_in(entry)]


def test_what_trains_chooses_and_is_reported_of_a_committed_checkpoint_shares_no_document():
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "benchmarks").rglob("*.json"))}
    found = {path: reports_in(json.loads(text)) for path, text in texts.items() if DOCUMENT_IDS.search(text)}
    # No file names documents elsewhere.
    for path, text in texts.items():
        named = {ids for report in found.get(path, []) for ids in report["documents"].values()}
        assert {ids.strip('"') for ids in DOCUMENT_IDS.findall(text)} <= named, path.name
    reports = [report for of_file in found.values() for report in of_file]
    assert {folder.name for folder in FOLDERS} <= {report["model"] for report in reports}
    folders = {folder.name: folder for folder in (*FOLDERS, TEXT_COMPRESSOR, *sorted(SMALL.iterdir()))}
    records = {name: TrainingDocuments.of(folder) for name, folder in folders.items()}
    for name, record in records.items():
        assert record is None or not record.trained & record.chose, name
    for report in reports:
        # A comparison also names what trained and chose its own methods.
        parts = [ids for part, ids in report["documents"].items() if part not in ("trained", "chose")]
        reported = {name for ids in parts for name in ids.split()}
        assert len(reported) > 0, report["model"]
        assert report["model"] in report["held_out"]
        # Also of models that are not in the repository, by what was found when they were scored.
        for name, said in report["held_out"].items():
            assert said.get("shared", {}) == {}, name
            if name not in records:
                continue
            record = records[name]
            # One that was trained before there were records says that it has none.
            assert (record is None) == (said["record"] == "none"), name
            assert record is None or not (record.trained | record.chose) & reported, name


def test_what_is_tracked_takes_at_most_90_mib():
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a clone: nothing is tracked")
    tracked = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert sum(path.stat().st_size for path in tracked if path.is_file()) <= 90 * MIB


def test_the_small_checkpoints_take_at_most_8_mb_without_code_or_pickles():
    content = files(SMALL)
    assert sum(map(len, content.values())) <= 8e6
    assert {Path(name).suffix for name in content} == {".json", ".md", ".safetensors"}


@pytest.mark.slow
def test_the_small_compressor_repeats_a_document_from_its_slots_better_the_more_there_are(small_checkpoints: Path):
    compressor = MeanPoolingForCausalLM.from_pretrained(small_checkpoints / "mean_pooling").eval()
    tokenizer = AutoTokenizer.from_pretrained(small_checkpoints / "mean_pooling")
    sources = [{"generated": True, "split": "test", "tasks": ["reconstruction"], "weight": 1}]
    examples = CompressionDataset(
        DataArguments(sources=sources, max_context_tokens=48, canonical_prompts=True), tokenizer, 16
    )
    batch = CompressionCollator.from_tokenizer(tokenizer)([examples[index] for index in range(16)])
    targets = batch["labels"][:, 1:]

    def accuracy(**inputs: object) -> float:
        with torch.no_grad():
            predicted = compressor(**inputs).logits[:, :-1].argmax(-1)
        return float((predicted == targets)[targets != -100].float().mean())

    by_ratio = [accuracy(**batch, ratio=ratio) for ratio in (2, 4, 8, 16)]
    text = {name: batch[name] for name in ("input_ids", "attention_mask")}
    assert by_ratio == sorted(by_ratio, reverse=True)
    assert by_ratio[0] > 0.7
    assert by_ratio[-1] > accuracy(**text) + 0.1
