# SPDX-License-Identifier: Apache-2.0
"""Files of a comparison at toy size: questions, answers to them, and a trained system."""

import json
from pathlib import Path

from context_compressors.evaluation.rows import SampleAnswers

METRICS = ("f1", "exact_match", "substring_accuracy")


def questions_file(folder: Path, tokenizer, count: int = 3) -> Path:
    file, lines = folder / "squad.jsonl", []
    for number in range(count):
        context = f"The mill {number} stands by the river. It was built by Nora Zill {number}. Bees live in it."
        lines.append(
            {
                "set": "squad",
                "task": "question_answering",
                "id": f"q{number}",
                "question": "Who built the mill?",
                "references": [f"Nora Zill {number}"],
                "context": context,
                "head_ids": [256, 1],
                "context_ids": tokenizer(context, add_special_tokens=False)["input_ids"],
                "prompt_ids": [5, 6],
                "eos_token_id": 257,
                "max_new_tokens": 4,
            }
        )
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def write_answers(folder: Path, name: str, ratio: int, answers: list[str], table: dict) -> None:
    """A peer's answers to the same questions in all sets."""
    lines = [
        {
            "set": title,
            "id": f"q{number}",
            "ratio": ratio,
            "answer": answer,
            "kept_positions": 20 * ratio,
            "memory_bytes": 100,
            "compress_seconds": 0.1,
            "answer_seconds": 0.2,
        }
        for title, entry in table["sets"].items()
        if entry["task"] == "question_answering"
        for number, answer in enumerate(answers)
    ]
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)


def ask(systems, tokenizer) -> str:
    """The same 12 questions in all sets."""
    for folder in (systems.questions, systems.peers):
        folder.mkdir(parents=True)
    text = questions_file(systems.questions, tokenizer, 12).read_text()
    for title in systems.table["sets"]:
        (systems.questions / f"{title}.jsonl").write_text(text.replace('"squad"', f'"{title}"'))
    return text


def write_member(systems, name: str, model_type: str, found: dict[int, tuple[int, int]]) -> None:
    """A trained system's answers: ratio -> how many of the 12 questions are right, and the bytes of a memory."""
    sets = [title for title, entry in systems.table["sets"].items() if entry["task"] == "question_answering"]
    for report, ratios in systems.reports(name, 1, "question_answering").items():
        report.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            {"dataset": title, "condition": f"ratio={ratio}", "costs": {"slots": 5, "memory_bytes": found[ratio][1]}}
            for title in sets
            for ratio in ratios
        ]
        report.write_text(json.dumps({"rows": rows}))
        lines = []
        for title in sets:
            for number in range(12):
                f1 = {ratio: 100.0 * (number < found[ratio][0]) for ratio in ratios}
                scores = {f"ratio={ratio}": dict.fromkeys(METRICS, score) for ratio, score in f1.items()}
                lines.append(
                    SampleAnswers(title, "question_answering", f"q{number}", number, "", [""], {}, scores).to_json()
                )
        report.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")
    systems.checkpoint(name, 1).mkdir(parents=True, exist_ok=True)
    (systems.checkpoint(name, 1) / "config.json").write_text(json.dumps({"model_type": f"{model_type}_compressor"}))
