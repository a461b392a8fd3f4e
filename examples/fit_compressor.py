# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["context-compressors", "detect-secrets>=1.5"]
#
# [tool.uv.sources]
# context-compressors = { path = ".." }
# ///
"""Fit a compressor to your own texts, write its card, and upload it, in one file.

In a clone:

    uv run examples/fit_compressor.py Qwen/Qwen3-0.6B --data 'notes/*.md' --output my-compressor

On a machine of the Hub, where `path = ".."` above becomes `url = "..."` of the wheel of `make dist`:

    hf jobs uv run --flavor a10g-small --secrets HF_TOKEN examples/fit_compressor.py Qwen/Qwen3-0.6B \\
        --data Salesforce/wikitext:wikitext-2-raw-v1@train#500 --output my-compressor --push me/my-compressor
"""

import argparse
import sys

from context_compressors.cli import main

LIMIT = "It was fitted to few texts and was not evaluated."


def run(*words: str) -> None:
    """Run a command of the package; exits where it fails."""
    if code := main(list(words)):
        sys.exit(code)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="Hub id or folder of a language model")
    parser.add_argument("--data", nargs="+", required=True, help="texts, as `context-compressors fit` takes them")
    parser.add_argument("--output", required=True, help="folder of the compressor")
    parser.add_argument("--contexts", default="100", help="that it is fitted to (default: %(default)s)")
    parser.add_argument("--push", metavar="REPOSITORY", help="upload it, to a private repository")
    arguments = parser.parse_args()
    output = arguments.output
    run("fit", arguments.base, "--data", *arguments.data, "--output", output, "--contexts", arguments.contexts)
    card = ["publish", "card", output, "--limit", LIMIT]
    run(*card, *(["--model-id", arguments.push] if arguments.push else []))
    if arguments.push:
        run("publish", "upload", output, arguments.push)
