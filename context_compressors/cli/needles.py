# SPDX-License-Identifier: Apache-2.0
"""`context-compressors evaluate-needles MODEL --text SOURCE ...`."""

from __future__ import annotations

from collections.abc import Sequence

from .arguments import NearestNameParser, device_name, positive_int

_EXAMPLES = """\
examples:
  # 102 facts in running text, at 256 to 4,096 tokens and every ratio of the checkpoint:
  context-compressors evaluate-needles my-compressor --text books.parquet --output needles.json --plot needles.png

  # Two lengths and two ratios, beside a reader of the full text:
  context-compressors evaluate-needles my-compressor --text books.parquet --lengths 512 1024 --ratios 4 8 \\
      --teacher reader-lora --teacher-base my-base
"""


def build_parser() -> NearestNameParser:
    """The command line of `context-compressors evaluate-needles`."""
    parser = NearestNameParser(
        prog="context-compressors evaluate-needles",
        description="Ask for one fact in running text: without context, with the full text, and at every ratio, by "
        "length of the text and kind of fact.",
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add("model", help="Hub id or folder of the compressor or plain language model")
    add(
        "--text",
        required=True,
        metavar="SOURCE",
        help="running text: FILE (.parquet, .jsonl) or HUB_NAME[:CONFIG][@SPLIT], with a column `text` or `context`",
    )
    add("--lengths", nargs="+", type=positive_int, metavar="N", help="tokens (default: 256 512 1024 2048 4096)")
    add("--needles", type=positive_int, metavar="N", help="facts of each length, a third of each kind (default: 102)")
    add("--ratios", nargs="+", type=positive_int, metavar="R", help="ratios (default: the checkpoint's own)")
    add("--teacher", metavar="MODEL", help="language model, or adapter folder of PEFT, of the bounds")
    add("--teacher-base", metavar="MODEL", help="base of the teacher's adapter (default: where the adapter says)")
    add("--base-model", metavar="MODEL", help="base of a light checkpoint (default: where the checkpoint says)")
    add("--batch-size", type=positive_int, default=8, metavar="B", help="contexts per batch (default: 8)")
    add("--max-new-tokens", type=positive_int, default=32, metavar="N", help="of an answer (default: 32)")
    add("--prompt-format", default="plain", metavar="FORMAT", help="a plain language model's: plain (default) or chat")
    add("--prompts", metavar="NAME", help="packaged prompts or a file of prompts (default: the method's own)")
    add("--output", metavar="FILE", help="write the grid as JSON, anew after each length")
    add("--plot", metavar="PNG", help="draw heat maps")
    add("--seed", type=int, default=0, help="draws facts, texts and places (default: 0)")
    add("--device", type=device_name, default="auto", help='such as "cpu" or "cuda" (default: a GPU if there is one)')
    add("--dtype", default="auto", help='"auto" (as saved, the default), "float32", "bfloat16" or "float16"')
    add("--trust-remote-code", action="store_true", help="run the code that a Hub repository brings")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `context-compressors evaluate-needles`; returns the exit status.

    Raises:
        ValueError, OSError, ImportError: see `evaluate_needles`, `load_model` and `load_dataset_source`.
    """
    arguments = build_parser().parse_args(argv)

    from transformers import AutoTokenizer

    from ..evaluation.evaluate import model_label
    from ..evaluation.loading import load_model
    from ..evaluation.needles import LENGTHS, NUM_NEEDLES, NeedleGrid, evaluate_needles
    from ..evaluation.plots import plot_needles
    from ..evaluation.samples import load_dataset_source
    from ..evaluation.settings import EvaluationSettings
    from ..modeling.checkpoint.pretrained_bases import base_place

    place = base_place(arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=arguments.trust_remote_code)
    rows = load_dataset_source(arguments.text, tokenizer, seed=arguments.seed).examples
    how = {name: getattr(arguments, name) for name in ("dtype", "device", "trust_remote_code")}
    model = load_model(arguments.model, base_model=arguments.base_model, **how)
    teacher = None
    if arguments.teacher is not None:
        teacher = load_model(arguments.teacher, base_model=arguments.teacher_base, **how)
    settings = EvaluationSettings(
        ratios=arguments.ratios and tuple(arguments.ratios),
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        max_new_tokens=dict.fromkeys(("question_answering", "summarisation"), arguments.max_new_tokens),
        prompts=arguments.prompts,
        prompt_format=arguments.prompt_format,
    )

    def write(grid: NeedleGrid) -> None:
        if arguments.output:
            grid.save(arguments.output)

    grid = evaluate_needles(
        model,
        tokenizer,
        [row.get("text") or row.get("context") or "" for row in rows],
        lengths=arguments.lengths or LENGTHS,
        num_needles=arguments.needles or NUM_NEEDLES,
        settings=settings,
        teacher=teacher,
        model_name=model_label(arguments.model),
        notes={"teacher": arguments.teacher and model_label(arguments.teacher)},
        on_result=write,
    )
    written = [arguments.output] if arguments.output else []
    if arguments.plot:
        written.append(plot_needles(grid, arguments.plot))
    print(grid.to_markdown())
    for path in written:
        print(f"wrote {path}")
    return 0
