# SPDX-License-Identifier: Apache-2.0
import random

import pytest

from context_compressors.data.prompts import TASKS, format_prompt, load_prompts


def test_packaged_prompts_are_found_by_name():
    assert format_prompt("reconstruction", path="gmsa") == "Restate the aforementioned Text."
    assert load_prompts("default") == load_prompts()
    assert format_prompt("question_answering", "Who?", path="memory_tokens") == "\n### Question:\nWho?\n### Answer:\n"
    with pytest.raises(ValueError, match=r"no prompts 'memory-tokens'.*did you mean 'memory_tokens'"):
        load_prompts("memory-tokens")


def test_templates_are_drawn_by_the_seed():
    drawn = [format_prompt("summarization", rng=random.Random(seed)) for seed in range(60)]
    assert drawn == [format_prompt("summarization", rng=random.Random(seed)) for seed in range(60)]
    assert set(drawn) == set(load_prompts()["summarization"])


def test_wrong_files_and_tasks_are_refused(tmp_path):
    file = tmp_path / "prompts.yaml"
    file.write_text("summarization: [x]\n")
    with pytest.raises(ValueError, match="one list of templates for each of"):
        load_prompts(str(file))
    other = tmp_path / "other.yaml"
    other.write_text("\n".join(f"{task}: ['no field']" for task in TASKS))
    with pytest.raises(ValueError, match="stands once in a question_answering template"):
        load_prompts(str(other))
    file.write_text("summarization: [x\n")
    with pytest.raises(ValueError, match=r"prompts.yaml is not valid YAML: .*line 2, column 1"):
        load_prompts(str(file))
