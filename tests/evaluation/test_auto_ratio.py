# SPDX-License-Identifier: Apache-2.0
"""`ratio="auto"` where ratios are given: evaluation, command line, collections and stores."""

import json

import pytest
import torch
from naive_twin import QA, RECONSTRUCTION, ROWS, naive_scores, run

from context_compressors import cli
from context_compressors.evaluation.report import EvaluationReport
from context_compressors.evaluation.report_tables import report_markdown
from context_compressors.modeling.memory.compressed_context import CompressedContext
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.reporting.result_files import rounded

TEXTS = [row["context"] for row in ROWS]


@pytest.fixture(scope="module")
def selecting(folders, tokenizer):
    """Folder of a compressor that takes 2, 4 and 4 for the three texts; two texts lie on each side of its border."""
    base, folder = str(folders / "base"), folders / "selecting"
    torch.manual_seed(2)
    model = MeanPoolingForCausalLM.from_base(base, compression_ratios=(2, 4), ratio_selector=True, chunk_size=64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    predicted = [float(model.model.predicted_log_ratios(torch.tensor([tokenizer(text).input_ids]))) for text in TEXTS]
    lowest, second = sorted(predicted)[:2]
    with torch.no_grad():
        model.model.ratio_selector.bias += 1.585 - (lowest + second) / 2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def pipe(selecting, tokenizer):
    return MeanPoolingForCausalLM.from_pretrained(selecting).eval().question_answering(tokenizer)


@pytest.mark.slow
def test_scores_and_the_reached_ratio_are_those_of_each_text_at_its_own(pipe, tokenizer, tmp_path):
    model = pipe.model
    memory = pipe.compress(TEXTS, ratio="auto")
    chosen = memory.ratio.tolist()
    assert sorted(chosen) == [2, 4, 4]
    settings = {"ratios": (4, "auto"), "alternatives": ("cut",), "batch_size": 2}
    report = run(model, tokenizer, tasks=(RECONSTRUCTION, QA), **settings)
    expected = {"nll": 0.0, "count": 0}
    for row, ratio in zip(ROWS, chosen, strict=True):
        triple = (row["context"], "\nRepeat the text above:", row["context"])
        found = naive_scores(model, tokenizer, f"ratio={ratio}", [triple])
        expected["nll"] += float(torch.tensor(found["perplexity"]).log()) * len(row["context"])
        expected["count"] += len(row["context"])
    perplexity = float(torch.tensor(expected["nll"] / expected["count"]).exp())
    assert report.score("tiny", RECONSTRUCTION, "ratio=auto", "perplexity") == pytest.approx(perplexity, rel=1e-4)
    rows = {row.condition: row for row in report.rows if row.task == QA}
    assert list(rows) == ["no_context", "full_context", "ratio=4", "ratio=auto", "cut=4", "cut=auto"]
    slots = memory.num_slots.float()
    reached = sum(map(len, TEXTS)) / float(slots.sum())
    assert 2 < reached < 4
    costs = rows["ratio=auto"].costs
    assert costs["slots"] == pytest.approx(float(slots.mean()))
    assert costs["reached_ratio"] == pytest.approx(reached)
    assert [name for name, row in rows.items() if "reached_ratio" in row.costs] == ["ratio=auto"]
    # Text at the same number of positions, document by document.
    assert list(rows["ratio=auto"].differences) == ["cut=auto"]
    assert rows["cut=auto"].costs["decoder_positions"] == costs["decoder_positions"]
    assert "tokens a slot" in report_markdown(report)
    assert report.settings["ratio_scale"] == 0
    report.save(tmp_path / "report.json")
    read = EvaluationReport.load(tmp_path / "report.json").rows[-3]
    assert (read.condition, read.costs["reached_ratio"]) == ("ratio=auto", rounded(reached))
    assert report.ratios(RECONSTRUCTION) == [4, "auto"]
    assert report.reached_ratio(QA) == pytest.approx(reached)


@pytest.mark.slow
def test_commands_take_auto_and_the_scale(selecting, folders, pipe, tmp_path, capsys, qa_file):
    files = []
    for index, text in enumerate(TEXTS):
        files.append(tmp_path / f"{index}.txt")
        files[-1].write_text(text, encoding="utf-8")
    argv = [str(selecting), *map(str, files), "--output", str(tmp_path / "memories"), "--device", "cpu"]
    memory = pipe.compress(TEXTS, ratio="auto")
    assert cli.main(["compress", *argv, "--ratio", "auto", "--ratio", "2"]) == 0
    num_slots = int(memory.num_slots.sum()) + sum(-(-len(text) // 2) for text in TEXTS)
    assert f"{num_slots} slots" in capsys.readouterr().err
    stored = [CompressedContext.load(tmp_path / "memories" / f"{index}.xauto.safetensors") for index in range(3)]
    assert [int(one.ratio) for one in stored] == memory.ratio.tolist()
    capsys.readouterr()
    question = ["--question", "Who keeps a cat?", "--device", "cpu", "--max-new-tokens", "6", "--ratio", "auto"]
    assert cli.main(["ask", str(selecting), str(files[0]), *question]) == 0
    answer = pipe("Who keeps a cat?", context=TEXTS[0], ratio="auto", max_new_tokens=6)["answer"]
    assert capsys.readouterr().out.strip() == answer
    report = tmp_path / "report.json"
    asked = ["--data", str(qa_file), "--tasks", QA, "--ratios", "auto", "--max-new-tokens", "2"]
    assert cli.main(["evaluate", str(selecting), *asked, "--device", "cpu", "--output", str(report)]) == 0
    content = json.loads(report.read_text())
    assert (content["settings"]["ratios"], content["settings"]["ratio_scale"]) == (["auto"], 0)
    plain, document = str(folders / "tiny-compressor"), str(files[0])
    with pytest.raises(SystemExit):
        cli.main(["compress", plain, document, "--ratio", "automatic"])
    with pytest.raises(ValueError, match="--ratio auto needs a compressor with a ratio selector"):
        cli.compress.main([plain, document, "--ratio", "auto", "--output", str(tmp_path / "none")])
