# SPDX-License-Identifier: Apache-2.0
"""The reference pages of the site: every public name with its docstring, one page for each top-level folder."""

from collections import defaultdict

import mkdocs_gen_files

import context_compressors

pages = defaultdict(list)
for name in context_compressors.__all__[1:]:
    where = getattr(context_compressors, name).__module__
    pages[where.split(".")[1]].append(f"{where}.{name}")
for folder, names in sorted(pages.items()):
    with mkdocs_gen_files.open(f"reference/{folder}.md", "w") as page:
        page.write(f"# {folder.replace('_', ' ').capitalize()}\n\n")
        page.writelines(f"::: {name}\n\n" for name in names)
