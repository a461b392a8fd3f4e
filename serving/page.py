# SPDX-License-Identifier: Apache-2.0
"""A page to try a checkpoint on: `context-compressors demo CHECKPOINT` (extra `demo`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ..evaluation.metrics import normalize_answer
from . import page_view as view
from .page_answers import Answer, PageModel

# Users who may wait for the model, which answers one at a time.
_WAITING = 64
# Those of the reader's own machine.
_FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "sans-serif")
_MONO_FONTS = ("ui-monospace", "Menlo", "Consolas", "monospace")


@dataclass(frozen=True)
class Example:
    """A document to start with.

    Args:
        title: what it is.
        text: the whole text.
        questions: what can be asked.
        answers: for each question those that count as right; the first one stands in the text.
    """

    title: str
    text: str
    questions: Sequence[str] = ()
    answers: Sequence[Sequence[str]] = ()


def import_gradio() -> ModuleType:
    """Gradio, which sends nothing about its use; `ImportError` where it is not installed."""
    # Read when it is imported.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio
    except ImportError as error:
        raise ImportError("the page needs Gradio: pip install -e '.[demo]' in the clone") from error
    return gradio


class Page:
    """The page: what is on it, and what it answers. It keeps nothing of a user: that is in the arguments."""

    def __init__(self, model: PageModel, name: str, facts: Sequence[str], examples: Sequence[Example]):
        self._gr = import_gradio()
        self.model, self.examples = model, {example.title: example for example in examples}
        self._name = name
        self.blocks = self._build(facts, examples[0])

    def open(self, host: str = "127.0.0.1", port: int | None = None) -> str:
        """Serve the page, on this machine alone if not told otherwise, and give its address."""
        here, gr = Path(__file__).parent, self._gr
        theme = gr.themes.Base(
            primary_hue=gr.themes.colors.teal, neutral_hue=gr.themes.colors.slate, font=_FONTS, font_mono=_MONO_FONTS
        )
        colours = {"fill": "*primary_700", "fill_hover": "*primary_800", "fill_dark": "*primary_700"}
        theme.set(
            button_primary_text_color="white", **{f"button_primary_background_{k}": v for k, v in colours.items()}
        )
        _, address, _ = self.blocks.launch(
            server_name=host,
            server_port=port,
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            theme=theme,
            css_paths=here / "page.css",
            head=f"<script>{(here / 'page.js').read_text(encoding='utf-8')}</script>",
            footer_links=[],
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            enable_monitoring=False,
        )
        return address

    # --- what it answers ---

    def accepted(self, document: str, question: str) -> Sequence[str]:
        """Return what counts as right, where that is known: of a question of an example."""
        for example in self.examples.values():
            for known, answers in zip(example.questions, example.answers, strict=True):
                if known == question.strip() and normalize_answer(answers[0]) in normalize_answer(document):
                    return answers
        return ()

    def ask(self, document: str, question: str, step: float, seen: tuple[str, int] | None) -> Iterator[Any]:
        """Answer a question from the slots and from the full text, then look into the slots."""
        same = self._gr.skip()
        try:
            self.model.check(document, question)
        except ValueError as error:
            yield view.message(str(error)), same, seen
            return
        ratio, accepted = self.model.ratios[int(step)], self.accepted(document, question)
        yield view.answers(None, None, ratio), same, seen
        memory, cost = self.model.compress(document, ratio)
        text: Answer | None = None
        slots: Answer | None = None
        for slots in self.model.from_slots(memory, cost, question):
            yield view.answers(text, slots, ratio, accepted), same, seen
        for text in self.model.from_text(document, question):
            yield view.answers(text, slots, ratio, accepted), same, seen
        if seen != (document, ratio):
            inside = view.inside(self.model.inside(document, memory), ratio)
            yield view.answers(text, slots, ratio, accepted), inside, (document, ratio)

    def note(self, document: str, step: float) -> tuple[str, str]:
        """How long a document is and how many slots it gives, and the marks below the slider."""
        number, most, ratio = self.model.num_tokens(document), self.model.max_tokens, self.model.ratios[int(step)]
        if number > most:
            text = view.message(f"Too long: at least {number:,} tokens, and at most {most:,} can be read.")
        else:
            slots = self.model.model.config.num_slots(number, ratio) if document.strip() else 0
            text = f'<div class="cc-note">{number:,} of at most {most:,} tokens, {slots:,} slots at {ratio}x</div>'
        return text, view.marks(self.model.ratios, ratio)

    def choose(self, title: str) -> tuple[str, Any, str]:
        """An example with its questions."""
        example = self.examples[title]
        return example.text, self._gr.Radio(choices=list(example.questions), value=None, visible=True), ""

    def edited(self, document: str) -> Any:
        """The example's questions, which leave with its text."""
        return self._gr.Radio(visible=any(document == example.text for example in self.examples.values()))

    # --- what is on it ---

    def _build(self, facts: Sequence[str], first: Example) -> Any:
        gr = self._gr
        with gr.Blocks(analytics_enabled=False, title=f"{self._name} · context-compressors") as blocks:
            gr.HTML(view.header(self._name, facts))
            with gr.Row():
                with gr.Column(scale=5, min_width=300):
                    document, note, example = self._document(first)
                with gr.Column(scale=7, min_width=300):
                    question, chips, step, marks, asks = self._question(first)
                    shown = gr.HTML(
                        view.answers(None, None, self.model.ratios[0], waiting="Ask a question."), elem_id="cc-answers"
                    )
            inside = gr.HTML("")
            seen = gr.State(None)
            # Only what asks the model waits its turn: seconds are of an answer that has the machine for itself.
            alone: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1, "show_progress": "minimal"}
            quick: dict[str, Any] = {"show_progress": "hidden"}
            results = [shown, inside, seen]
            for trigger, function, inputs, outputs, how in (
                (asks.click, self.ask, [document, question, step, seen], results, alone),
                (question.submit, self.ask, [document, question, step, seen], results, alone),
                (document.change, self.note, [document, step], [note, marks], quick),
                (step.change, self.note, [document, step], [note, marks], quick),
                (example.input, self.choose, example, [document, chips, question], quick),
                (chips.input, lambda text: text, chips, question, quick),
                (document.input, self.edited, document, chips, quick),
            ):
                trigger(function, inputs, outputs, api_visibility="private", **how)
        return blocks.queue(max_size=_WAITING, api_open=False)

    def _document(self, first: Example) -> tuple[Any, ...]:
        gr = self._gr
        text = gr.Textbox(
            first.text, label="Document", lines=11, max_lines=11, placeholder="Paste a text …", elem_id="cc-document"
        )
        note = gr.HTML(self.note(first.text, 0)[0], elem_id="cc-length")
        example = gr.Dropdown(list(self.examples), value=first.title, label="Examples")
        return text, note, example

    def _question(self, first: Example) -> tuple[Any, ...]:
        gr, ratios = self._gr, self.model.ratios
        with gr.Row(equal_height=False):
            text = gr.Textbox(
                next(iter(first.questions), ""),
                label="Question",
                lines=1,
                max_lines=3,
                scale=5,
                min_width=260,
                elem_id="cc-question",
            )
            asks = gr.Button("Ask", variant="primary", scale=1, min_width=110, elem_id="cc-ask")
        chips = gr.Radio(list(first.questions), show_label=False, container=False, elem_id="cc-questions")
        with gr.Column(elem_id="cc-compression"):
            steps = {"step": 1, "label": "Compression: tokens per slot", "visible": len(ratios) > 1}
            step = gr.Slider(0, max(1, len(ratios) - 1), 0, buttons=[], elem_id="cc-ratio", **steps)
            marks = gr.HTML(view.marks(ratios, ratios[0]))
        return text, chips, step, marks, asks
