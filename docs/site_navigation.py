# SPDX-License-Identifier: Apache-2.0
"""The site's navigation has a page for each method of the register, under the page's own title."""

from typing import Any

from context_compressors.configuration.methods import METHODS


def on_config(config: Any) -> None:
    """Add the methods' pages, in the order of the register."""
    (pages,) = (entry["Methods"] for entry in config.nav if isinstance(entry, dict) and "Methods" in entry)
    pages += [f"docs/methods/{method}.md" for method in METHODS]
