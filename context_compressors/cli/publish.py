# SPDX-License-Identifier: Apache-2.0
"""`context-compressors publish card | upload | export-decoder`, and `convert`."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from .. import __version__
from .command import BASE_MODEL, DTYPE, argument, command

_RECORDS = ("training_documents.json", "training_summary.json", "recipe.yaml")
# Ranks that vLLM reserves memory for.
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


@command(
    "publish card",
    "Write the card (README.md) of a checkpoint from its training run and its evaluation.",
    argument("folder", help="checkpoint folder, with recipe.yaml and training_summary.json"),
    argument("--scores", nargs="+", default=[], metavar="FILE", help="reports of `evaluate --output`"),
    argument("--limit", action="append", required=True, metavar="TEXT", help="what it cannot do; one sentence each"),
    argument("--model-id", metavar="NAME", help="repository or folder that the snippet loads (default: the folder)"),
    argument("--license", default="apache-2.0", metavar="ID", help="license of the weights (default: %(default)s)"),
    argument("--new-version", metavar="NAME", help="repository of the checkpoint that replaces this one"),
    examples="""
context-compressors publish card outputs/my-compressor --scores results.json --limit "It has read English only."
""",
)
def card(arguments: argparse.Namespace) -> None:
    """Run `context-compressors publish card`."""
    from ..hub_cards.cards import write_card

    fields = {name: vars(arguments)[name] for name in ("model_id", "license", "new_version")}
    print(f"wrote {write_card(arguments.folder, arguments.scores, arguments.limit, **fields)}")


@command(
    "publish upload",
    "Build a Hub repository from a checkpoint's folder, and push it in one commit.",
    argument("checkpoint", help="folder of the checkpoint"),
    argument("repository", help="repository on the Hub, such as me/my-compressor"),
    argument("--dry-run", action="store_true", help="show the files and their sizes, and open no connection"),
    argument("--weights", default="saved", choices=("saved", "light", "full"), help="light: without the base's"),
    BASE_MODEL,
    argument("--include", action="append", default=[], metavar="FILE", help="a file that is refused otherwise"),
    argument("--license", metavar="ID", help="license of the weights (default: the card's, or else the base's)"),
    argument("--tag", default=f"v{__version__}", help="name of the version (default: %(default)s)"),
    argument("--public", action="store_true", help="let everybody see it (default: private)"),
    examples="""
context-compressors publish upload outputs/my-compressor me/my-compressor --dry-run
context-compressors publish upload outputs/my-compressor me/my-compressor --weights light --base-model Qwen/Qwen3-0.6B
""",
)
def upload(arguments: argparse.Namespace) -> None:
    """Run `context-compressors publish upload`."""
    from huggingface_hub.utils import validate_repo_id

    from ..hub_cards.repository import build_repository, push_repository, tree

    validate_repo_id(arguments.repository)
    with tempfile.TemporaryDirectory() as scratch:
        folder = build_repository(
            arguments.checkpoint,
            scratch,
            weights=arguments.weights,
            base_model=arguments.base_model,
            license=arguments.license,
            local_files_only=arguments.dry_run,
            include=arguments.include,
        )
        print(f"{arguments.repository}, {'public' if arguments.public else 'private'}, {arguments.tag}")
        print(tree(folder))
        if not arguments.dry_run:
            print(push_repository(folder, arguments.repository, tag=arguments.tag, private=not arguments.public))


@command(
    "publish export-decoder",
    "Write a checkpoint's decoder as a folder that vLLM and others serve: a plain language model without code of its "
    "own, or an adapter of the base.",
    argument("checkpoint", help="Hub id or folder of the compressor"),
    argument("output", help="folder to write; it does not exist, or is empty"),
    argument("--as", dest="form", default="merged", choices=("merged", "lora"), help="(default: %(default)s)"),
    DTYPE,
    BASE_MODEL,
    examples="""
context-compressors publish export-decoder my-compressor my-decoder
context-compressors publish export-decoder my-compressor my-adapter --as lora
""",
)
def export_decoder(arguments: argparse.Namespace) -> None:
    """Run `context-compressors publish export-decoder`."""
    from ..data.document_ids import record_file
    from ..modeling.checkpoint.pretrained_bases import tokenizer_from_place
    from ..modeling.compressor.serving import export_decoder, is_untouched_base
    from .loading import load_compressor

    name, output = arguments.checkpoint, arguments.output
    model, _ = load_compressor(name, device="cpu", dtype=arguments.dtype, base_model=arguments.base_model)
    # Not that of `load_compressor`, which splits special tokens: a server fills the chat template with them.
    export_decoder(model, tokenizer_from_place(name), output, arguments.form)
    # A training that starts from the decoder counts the documents of this one.
    for file in (record_file(name, record, on_hub=True) for record in _RECORDS):
        if file is not None:
            shutil.copyfile(file, Path(output, file.name))
    base = model.config.base_model_name_or_path
    if arguments.form == "lora":
        adapter = json.loads((Path(output) / "adapter_config.json").read_text(encoding="utf-8"))
        rank = next((rank for rank in _VLLM_RANKS if rank >= adapter["r"]), _VLLM_RANKS[-1])
        # Without its targets vLLM adapts the embedding table, too, and fails where a chat holds embeddings and text.
        options = f"--max-lora-rank {rank} --lora-target-modules {' '.join(sorted(adapter['target_modules']))}"
        print(f"vllm serve {base} --enable-prompt-embeds --enable-lora {options} --lora-modules decoder={output}")
        return
    if is_untouched_base(model):
        print(f"nothing of this decoder was trained: it is {base}, which a server may load in its place")
    print(f"vllm serve {output} --enable-prompt-embeds")


@command(
    "convert",
    "Convert a checkpoint of ComprExIT, ICAE, 500xCompressor, AutoCompressor, LCLM, COCOM or PISCO.",
    argument("name", metavar="NAME", help="Hub id or folder of the checkpoint, or a file of its tensors"),
    argument("output", metavar="OUT", help="folder to write; it does not exist, or is empty"),
    argument("--base", metavar="MODEL", help="Hub id or folder of the language model, where the checkpoint lacks it"),
    examples="""
context-compressors convert Jiang-nan/comprexit-1b-4x-sft comprexit-1b
context-compressors convert mistral_7b_ft_icae.safetensors icae --base mistralai/Mistral-7B-Instruct-v0.2
""",
)
def convert(arguments: argparse.Namespace) -> None:
    """Run `context-compressors convert`."""
    from ..modeling.checkpoint import published_formats

    kind = published_formats.convert(arguments.name, arguments.output, arguments.base)
    print(f"wrote {arguments.output}, of the format {kind}")
