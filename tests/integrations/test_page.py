# SPDX-License-Identifier: Apache-2.0
"""The page of `context-compressors demo CHECKPOINT` in a real browser: `make test-integrations`."""

import contextlib
import io
import re
import runpy
import shutil
import socket
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from context_compressors import ComprExITForCausalLM, ICAEForCausalLM, SnapKVForCausalLM, cli
from context_compressors.cli.loading import load_compressor
from context_compressors.modeling.parts.prompting import decoder_document_ids, full_context_ids
from context_compressors.serving import page_view as view
from context_compressors.serving.page_answers import PageModel

gradio = pytest.importorskip("gradio", reason="Gradio has an environment of its own: make test-integrations")
playwright = pytest.importorskip("playwright.sync_api", reason="so has Playwright: make test-integrations")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MOST_TOKENS = 400
# With what templates, scripts and markup would make something of.
BAKERY = (
    "The bakery in Lower Street was opened in 1931 by Anna Brekke. It sells <b>rye bread</b> and {{rolls}} for ${1+1} "
    "a dozen. Its oven is heated with beech wood. On Fridays the baker gives what is left to the school. The shop is "
    "closed on Mondays and in the second week of August."
)
FERRY = (
    "The ferry to Skarholm leaves at six in the morning and at four in the afternoon. A ticket costs nine crowns. "
    "The captain is Oskar Lind. In winter the boat stays in the harbour when the wind is above gale force, and the "
    "mail is carried over by sledge."
)
QUESTIONS = {BAKERY: "Who opened the bakery?", FERRY: "What does a ticket for the ferry cost?"}


@pytest.fixture(scope="module")
def folder(small_checkpoints: Path) -> Path:
    return small_checkpoints / "mean_pooling"


@pytest.fixture(scope="module")
def model(folder: Path) -> PageModel:
    compressor, tokenizer = load_compressor(str(folder), dtype="float32")
    return PageModel(compressor.question_answering(tokenizer), MOST_TOKENS)


@pytest.fixture(scope="module")
def outside() -> list:
    """Addresses beyond this machine that this process has connected to."""
    return []


@pytest.fixture(scope="module")
def address(folder: Path, outside: list):
    """The page, as the command serves it."""
    connect = socket.socket.connect

    def noted(self, place):
        if self.family in (socket.AF_INET, socket.AF_INET6) and place[0] not in ("127.0.0.1", "::1", "localhost"):
            outside.append(place)
        return connect(self, place)

    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(socket.socket, "connect", noted)
        patch.setattr(gradio.Blocks, "block_thread", lambda self: None)
        options = ["--max-tokens", str(MOST_TOKENS), "--dtype", "float32"]
        assert cli.main(["demo", str(folder), *options]) == 0
        yield re.search(r"open (http://127\.0\.0\.1:\d+/?) in a browser", printed.getvalue())[1]
    gradio.close_all()


def test_the_space_serves_the_page(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(gradio.Blocks, "block_thread", lambda self: None)
    monkeypatch.setenv("MODEL", str(folder))
    monkeypatch.setenv("PORT", str(port))
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(Path(__file__).parents[2] / "space" / "app.py"), run_name="__main__")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}") as answer:
        assert "gradio" in answer.read().decode()
    gradio.close_all()


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, address: str):
    """Opens the page for a new user; `requests` are those of all of them, `errors` what their consoles say."""
    contexts, requests, errors = [], [], []

    def open_page(width: int = 1280, height: int = 900):
        contexts.append(browser.new_context(viewport={"width": width, "height": height}))
        page = contexts[-1].new_page()
        page.set_default_timeout(120_000)
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        page.locator("#cc-ask").wait_for()
        return page

    open_page.requests, open_page.errors = requests, errors
    yield open_page
    for context in contexts:
        context.close()


def fill(page, document: str, question: str, step: int = 0) -> None:
    page.locator("#cc-document textarea").fill(document)
    page.locator("#cc-question textarea").fill(question)
    page.locator("#cc-ratio input[type=range]").fill(str(step))


def done(page, kind: str) -> str:
    """An answer, as soon as all of it is there."""
    return page.locator(f'.cc-{kind} .cc-answer[data-done="true"]').inner_text().strip()


def answers_of(model: PageModel, document: str, ratio: int) -> dict[str, str]:
    """What the page should show of a question about a document."""
    memory, cost = model.compress(document, ratio)
    asked = QUESTIONS[document]
    *_, slots = model.from_slots(memory, cost, asked)
    *_, text = model.from_text(document, asked)
    return {"text": " ".join(text.text.split()), "slots": " ".join(slots.text.split())}


def test_streamed_answers_are_those_of_the_pipeline_and_of_the_decoder_with_the_whole_text(model: PageModel):
    compressor, tokenizer = model.model, model.pipe.tokenizer
    memory, cost = model.compress(BAKERY, 4)
    shown = list(model.from_slots(memory, cost, QUESTIONS[BAKERY]))
    assert shown[-1].text == model.pipe(QUESTIONS[BAKERY], memory=memory, max_new_tokens=64)["answer"]
    assert [answer.is_done for answer in shown] == [False] * (len(shown) - 1) + [True]
    assert (shown[-1].num_places, shown[-1].num_bytes) == (int(memory.num_slots), memory.nbytes)

    text = decoder_document_ids(compressor.config, tokenizer, BAKERY)
    ids = torch.tensor([full_context_ids(compressor.config, tokenizer, text, QUESTIONS[BAKERY])])
    output = compressor.generate(ids, max_new_tokens=64, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    *_, shown = model.from_text(BAKERY, QUESTIONS[BAKERY])
    assert shown.text == tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip()
    shape = compressor.config.decoder_config
    per_token = 2 * 4 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
    assert shown.num_bytes % per_token == 0
    assert shown.num_places == len(text) <= shown.num_bytes // per_token <= len(text) + 2


def test_an_answer_that_nobody_waits_for_is_no_longer_written(model: PageModel):
    memory, cost = model.compress(BAKERY, 2)
    answer = model.from_slots(memory, cost, QUESTIONS[BAKERY])
    next(answer)
    answer.close()
    # The thread that wrote it has ended: the next one has the model for itself.
    assert answers_of(model, BAKERY, 2)["slots"]


def test_tokens_are_the_documents_own_characters_and_every_one_is_in_its_slot(model: PageModel):
    document = "Zoë paid 3 € for 🥖 and jam."
    memory, _ = model.compress(document, 4)
    inside = model.inside(document, memory)
    assert "".join(inside.pieces).endswith(document)
    assert inside.kind == "windows"
    assert [place for slot in inside.slots for place, _ in slot] == list(range(len(inside.pieces)))
    assert len(inside.slots) == int(memory.num_slots)


def test_slots_of_every_kind_are_shown_and_asked(small_checkpoints: Path):
    base = small_checkpoints / "base"
    tokenizer, decoder = AutoTokenizer.from_pretrained(base), AutoConfig.from_pretrained(base)
    kinds = {"plan": ComprExITForCausalLM, "attention": ICAEForCausalLM, "kept": SnapKVForCausalLM}
    for kind, model_class in kinds.items():
        torch.manual_seed(0)
        compressor = model_class(model_class.config_class(decoder_config=decoder, compression_ratios=(4,))).eval()
        reader = PageModel(compressor.question_answering(tokenizer), MOST_TOKENS)
        memory, cost = reader.compress(FERRY, 4)
        inside = reader.inside(FERRY, memory)
        assert (inside.kind, len(inside.slots)) == (kind, int(memory.num_slots))
        shown = view.inside(inside, 4)
        assert shown.count('<span class="t') == len(inside.pieces)
        for answers in (reader.from_slots(memory, cost, "Why?"), reader.from_text(FERRY, "Why?")):
            assert list(answers)[-1].is_done


def test_a_user_types_asks_reads_and_looks_into_the_slots(visit, model: PageModel, outside: list, tmp_path: Path):
    page = visit()
    assert page.locator("#cc-document textarea").input_value().startswith("The Tarn 40")
    fill(page, BAKERY, QUESTIONS[BAKERY], step=2)
    page.get_by_text("slots at 8x").wait_for()
    page.evaluate(
        """() => {
            window.seen = [];
            new MutationObserver(() => {
                const answer = document.querySelector(".cc-slots .cc-answer");
                if (answer) window.seen.push(answer.innerText.trim());
            }).observe(document.body, {subtree: true, childList: true, characterData: true});
        }"""
    )
    page.locator("#cc-ask").click()
    expected = answers_of(model, BAKERY, 8)
    assert {kind: done(page, kind) for kind in expected} == expected
    parts = [text for text in page.evaluate("window.seen") if text and text != expected["slots"]]
    assert any(expected["slots"].startswith(text) for text in parts), "the answer came all at once"

    memory, _ = model.compress(BAKERY, 8)
    inside = model.inside(BAKERY, memory)
    assert f"slots {int(memory.num_slots)}" in " ".join(page.locator(".cc-slots .cc-costs").inner_text().split())
    # Its text as it is: nothing in it is a template, a script or markup.
    shown = page.locator('[data-panel="slots"] .t').all_text_contents()
    assert "".join(shown).endswith(BAKERY)

    # A token of the eleventh slot, and the slider to the first one.
    page.locator('[data-panel="slots"] .t').nth(8 * 10 + 3).click()
    assert "Slot 11 of" in page.locator(".cc-readout").inner_text()
    marked = page.locator('[data-panel="slots"] .t.on').all_text_contents()
    assert "".join(marked) == "".join(inside.pieces[80:88])
    page.locator(".cc-slot").fill("1")
    assert "".join(page.locator('[data-panel="slots"] .t.on').all_text_contents()) == "".join(inside.pieces[:8])

    page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert (tmp_path / "page.png").stat().st_size > 20_000
    strangers = [url for url in visit.requests if not url.startswith(("http://127.0.0.1:", "data:", "blob:"))]
    assert not strangers
    assert not outside
    assert not visit.errors


def test_what_cannot_be_asked_gets_a_sentence(visit):
    page = visit()

    def refused(document: str, question: str) -> str:
        fill(page, document, question)
        page.locator("#cc-ask").click()
        return page.locator("#cc-answers .cc-message").inner_text()

    assert refused(" ", "Why?").startswith("There is no document")
    fill(page, "word " * MOST_TOKENS * 2, "Why?")
    page.locator("#cc-length .cc-message", has_text="Too long").wait_for()
    fill(page, FERRY, "")
    page.locator("#cc-question textarea").fill("")
    page.locator("#cc-ask").click()
    page.locator("#cc-answers .cc-message", has_text="There is no question").wait_for()


def test_two_users_at_once_get_their_own_answers_on_a_laptop_and_on_a_phone(visit, model: PageModel):
    pages = {BAKERY: visit(), FERRY: visit(390, 844)}
    for document, page in pages.items():
        fill(page, document, QUESTIONS[document], step=1)
    for page in pages.values():
        page.locator("#cc-ask").click()
    expected = {document: answers_of(model, document, 4) for document in pages}
    assert expected[BAKERY] != expected[FERRY]
    for document, page in pages.items():
        assert {kind: done(page, kind) for kind in ("text", "slots")} == expected[document]
        page.locator(".cc-inside").wait_for()
        shown = "".join(page.locator('[data-panel="slots"] .t').all_text_contents())
        assert shown.endswith(document)
        width = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert width[0] <= width[1], "the page is wider than its window"
