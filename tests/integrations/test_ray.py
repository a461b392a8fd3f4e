# SPDX-License-Identifier: Apache-2.0
"""`compress-corpus --engine ray` on a cluster of this machine: `make test-integrations`."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from context_compressors import MemoryStore

pytest.importorskip("ray", reason="Ray has an environment of its own: make test-integrations")


@pytest.fixture
def command(small_checkpoints, tmp_path):
    texts = [f"This is page {i} of a long book. " * (i % 7 + 1) for i in range(400)]
    for name, chosen in (("first", texts[:200]), ("second", texts[200:])):
        lines = [json.dumps({"text": text}) for text in chosen]
        (tmp_path / f"{name}.jsonl").write_text("\n".join([*lines, "{no"]), encoding="utf-8")
    inputs = [str(tmp_path / f"{name}.jsonl") for name in ("first", "second")]
    start = [sys.executable, "-P", "-m", "context_compressors.cli", "compress-corpus", *inputs, "--engine", "ray"]
    start += ["--model", str(small_checkpoints / "mean_pooling"), "--store", str(tmp_path / "s.lance"), "--ratio", "4"]
    return [*start, "--workers", "2", "--config", "{batch_size: 8, commit_bytes: 1000, device: cpu}"]


def test_a_run_of_ray_that_is_killed_is_taken_up_again_and_nothing_is_done_twice_or_lost(command, tmp_path):
    process = subprocess.Popen(command)
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        found = MemoryStore.find(tmp_path / "s.lance")
        if found is not None and len(found) >= 16:
            break
        time.sleep(0.02)
    assert process.poll() is None, "it ended before it was killed"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    store = MemoryStore.open(tmp_path / "s.lance")
    # Ray ends its own processes soon after its driver; what they still write is written once.
    time.sleep(10)
    store.refresh()
    before = list(store.ids())
    assert 16 <= len(before) < 400, "it was killed on the way"
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert f"{400 - len(before)} rows with" in result.stderr
    store.refresh()
    wanted = [f"{name}.jsonl:{row}" for name in ("first", "second") for row in range(200)]
    assert sorted(store.ids()) == sorted(wanted)
    assert set(store.texts(before)) == set(before)
    assert store.get(wanted[::40]).validate(finite=True) is None
    failed = (tmp_path / "s.lance.failed.jsonl").read_text(encoding="utf-8").splitlines()
    assert sorted(json.loads(line)["id"] for line in failed) == ["first.jsonl:200", "second.jsonl:200"]
