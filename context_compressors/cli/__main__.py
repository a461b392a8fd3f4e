# SPDX-License-Identifier: Apache-2.0
"""`python -m context_compressors.cli`: the same as the command `context-compressors`."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
