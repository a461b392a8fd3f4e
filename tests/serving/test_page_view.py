# SPDX-License-Identifier: Apache-2.0
"""What the page shows, without Gradio and a browser; all else is in tests/integrations."""

import re
from types import SimpleNamespace

from context_compressors.serving import page_view
from context_compressors.serving.page import Example, Page
from context_compressors.serving.page_answers import Answer


def waiting(text, slots):
    return re.findall(r'cc-waiting">([^<]*)<', page_view.answers(text, slots, 2))


def test_only_what_is_being_read_says_so():
    written = Answer(1, 1, 0.1, "An answer", 0.1, is_done=True)
    assert waiting(None, None) == ["waiting for the other answer …", "reading …"]
    assert waiting(None, Answer(1, 1, 0.1, "An")) == ["waiting for the other answer …"]
    assert waiting(None, written) == ["reading …"]
    assert waiting(written, written) == []


def test_an_examples_questions_leave_with_its_text():
    page = Page.__new__(Page)
    page._gr = SimpleNamespace(Radio=dict)
    page.examples = {"mill": Example("mill", "A mill.", ("Who?",), (("Olaf",),))}
    assert page.edited("A text of my own.") == {"visible": False}
    assert page.edited("A mill.") == {"visible": True}
