# SPDX-License-Identifier: Apache-2.0
"""A Space that serves the page of a checkpoint: set the variable MODEL to its repository."""

import os

from context_compressors.cli import main

raise SystemExit(main(["demo", os.environ["MODEL"], "--host", "0.0.0.0", "--port", os.environ.get("PORT", "7860")]))
