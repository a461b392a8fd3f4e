# SPDX-License-Identifier: Apache-2.0
"""`python upload.py`, from a checkout: the same as `context-compressors publish upload`."""

import sys

from context_compressors.cli import main

if __name__ == "__main__":
    sys.exit(main(["publish", "upload", *sys.argv[1:]]))
