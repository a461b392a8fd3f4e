# SPDX-License-Identifier: Apache-2.0
"""The page of the server, in a real browser: `make test-integrations`."""

import json
import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from running_server import Running, server
from transformers import AutoConfig, AutoTokenizer

from context_compressors import ComprExITForCausalLM, ICAEForCausalLM, SnapKVForCausalLM, cli

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# With what templates, scripts and markup would make something of.
BAKERY = (
    "The bakery in Lower Street was opened in 1931 by Anna Brekke. It sells <b>rye bread</b> and {{rolls}} for ${1+1} "
    "a dozen. </script> Its oven is heated with beech wood. On Fridays the baker gives what is left to the school."
)
QUESTION = "Who opened the bakery?"
EXAMPLES = [{"title": "bakery", "text": BAKERY, "questions": [{"question": QUESTION, "answers": ["Anna Brekke"]}]}]


@pytest.fixture
def running(pipe):
    started = Running(server.create_app("m", pipe, examples=EXAMPLES))
    yield started
    started.stop()


def test_the_page_holds_the_checkpoint_and_its_examples(running, pipe):
    status, page = running.ask("GET", "/")
    assert status == 200
    shown = json.loads(re.search(r'id="checkpoint">(.*?)</script>', page)[1])
    assert shown["examples"] == EXAMPLES
    assert (shown["name"], shown["ratios"]) == ("m", sorted(pipe.model.config.compression_ratios))
    shape = pipe.model.config.decoder_config
    assert shown["bytes_per_token"] == 2 * 4 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
    assert not re.search(r"https?://", page), "the page loads nothing from elsewhere"


def test_the_demo_of_a_checkpoint_and_the_space_serve_the_page(small_checkpoints, monkeypatch):
    served = []
    monkeypatch.setattr(server, "run", lambda app, host, port, grace: served.append((app, host, port, grace)))
    folder = str(small_checkpoints / "mean_pooling")
    assert cli.main(["demo", folder, "--port", "0", "--device", "cpu", "--config", "{grace: 3}"]) == 0
    monkeypatch.setenv("MODEL", folder)
    monkeypatch.setenv("PORT", "0")
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(Path(__file__).parents[2] / "space" / "app.py"), run_name="__main__")
    assert [where for _, *where in served] == [["127.0.0.1", 0, 3], ["0.0.0.0", 0, 30]]
    assert all(any(route.path == "/" for route in app.routes) for app, *_ in served)


@pytest.mark.parametrize("kind", ["windows", "plan", "attention", "kept"])
def test_tokens_are_the_documents_own_characters_and_every_slot_names_some(kind, serve, pipe, small_checkpoints):
    document = "Zoë paid 3 € for 🥖 and jam."
    if kind != "windows":
        classes = {"plan": ComprExITForCausalLM, "attention": ICAEForCausalLM, "kept": SnapKVForCausalLM}
        base = small_checkpoints / "base"
        decoder = AutoConfig.from_pretrained(base)
        torch.manual_seed(0)
        config = classes[kind].config_class(decoder_config=decoder, compression_ratios=(4,))
        pipe = classes[kind](config).eval().question_answering(AutoTokenizer.from_pretrained(base))
    found = serve({"m": pipe}).ask("POST", "/page/slots", {"text": document, "ratio": 4})[1]
    assert "".join(found["pieces"]).endswith(document)
    assert (found["kind"], len(found["slots"])) == (kind, int(pipe.compress(document, ratio=4).num_slots))
    places = [place for slot in found["slots"] for place, _ in slot]
    assert set(places) <= set(range(len(found["pieces"])))
    assert kind != "windows" or places == list(range(len(found["pieces"])))


@pytest.mark.parametrize("size", [(1280, 900), (390, 844)])
def test_a_user_asks_reads_both_answers_and_looks_into_the_slots(running, pipe, size):
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright: make test-integrations")
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(viewport=dict(zip(("width", "height"), size, strict=True))).new_page()
        page.set_default_timeout(120_000)
        requests, errors = [], []
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"http://127.0.0.1:{running.port}/")
        assert page.locator("#document").input_value() == BAKERY
        page.locator("#question").fill("")
        page.locator("#ask").click()
        assert "There is no question" in page.locator("#message").inner_text()
        page.locator("#questions button").first.click()
        page.locator("#ratio").select_option("8")
        page.locator("#ask").click()
        shown = {
            kind: page.locator(f'.card.{kind} .answer[data-done="true"]').inner_text().strip()
            for kind in ("slots", "text")
        }
        memory = pipe.compress(BAKERY, ratio=8)
        assert shown["slots"] == " ".join(pipe(QUESTION, memory=memory, max_new_tokens=64)["answer"].split())
        full = pipe(QUESTION, context=BAKERY, full_text=True, max_new_tokens=64)["answer"]
        assert shown["text"] == " ".join(full.split())
        assert f"slots {int(memory.num_slots)}" in " ".join(page.locator(".slots .costs").inner_text().split())
        assert "the document says “Anna Brekke”" in page.locator(".card.slots .verdict").inner_text()
        page.locator("#inside .tokens span").first.wait_for()
        assert "".join(page.locator(".tokens span").all_text_contents()).endswith(BAKERY)
        page.locator(".tokens span").nth(8 * 2 + 3).click()
        assert "Slot 3 of" in page.locator(".readout").inner_text()
        assert page.locator(".tokens span.on").count() == 8
        page.locator("#document").fill("A text of one's own.")
        assert page.locator("#questions button").count() == 0
        width = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert width[0] <= width[1], "the page is wider than its window"
        assert not errors
        assert all(url.startswith(f"http://127.0.0.1:{running.port}/") for url in requests)
        browser.close()
