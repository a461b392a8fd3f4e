# SPDX-License-Identifier: Apache-2.0
"""docs/images/methods/: the pictures of the methods are those that docs/method_pictures draws."""

import re
import runpy
from xml.etree import ElementTree

from pages import DOCS

from context_compressors.configuration.methods import METHODS

SVG = "{http://www.w3.org/2000/svg}"


def test_every_method_has_the_picture_that_the_script_draws_which_stands_alone_and_says_what_it_shows():
    drawn = runpy.run_path(str(DOCS / "method_pictures"))["files"]()
    assert sorted(path.stem for path in drawn) == sorted(METHODS)
    assert sorted((DOCS / "images" / "methods").iterdir()) == sorted(drawn)
    for path, text in drawn.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is old: `python docs/method_pictures`"
        assert len(text.encode()) < 12_000, path.name
        root = ElementTree.fromstring(text)
        assert [element.tag for element in root[:2]] == [f"{SVG}title", f"{SVG}desc"], path.name
        assert all(element.text for element in root[:2]), path.name
        named = {element.get("id") for element in root.iter()}
        assert set(root.get("aria-labelledby", "").split()) <= named, path.name
        # Nothing outside the file: no image, link, script or font, and what a shape refers to is in it.
        kinds = {element.tag.removeprefix(SVG) for element in root.iter()}
        assert kinds <= {"svg", "title", "desc", "style", "defs", "marker", "path", "rect", "text"}, path.name
        assert set(re.findall(r"url\(#(\w+)\)", text)) <= named, path.name
        assert text.count("url(") == text.count("url(#"), path.name
        assert re.findall(r"href|@import|https?:(?!//www\.w3\.org/2000/svg\")", text) == [], path.name
