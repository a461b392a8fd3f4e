# SPDX-License-Identifier: Apache-2.0
"""Files of a comparison at toy size: questions, and answers to them."""

import json
from pathlib import Path


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
