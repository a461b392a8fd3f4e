# SPDX-License-Identifier: Apache-2.0
"""Name the digit on a picture from 1 or 2 VoCo tokens in place of its 16 or 64 image tokens.

    python -m benchmarks.voco_digits.measure
    python -m benchmarks.voco_digits.measure --image-tokens 16 --seeds 0 1 --base-steps 50 --steps 50

A tiny model of LLaVA's shape learns to answer from all image tokens ("image", the upper bound). VoCo starts from it
and trains its language model whole, in the default and in the enhanced position layout. Beside them stand the same
model asked without the picture ("no image"), and VoCo before its training ("untrained").

The pictures are the 1,797 of scikit-learn's digits (8 by 8 pixels), in three parts that never meet: one to train on,
one by which the step is chosen, one to report. Every seed has its own weights and its own order of pictures. Intervals
(95 %) are of a bootstrap that draws seeds and pictures.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from transformers.utils import logging

from benchmarks.common.tools import (
    add_place_arguments,
    device_of,
    positive_int,
    save_and_report,
    script_parser,
    tells_errors,
)
from context_compressors import VoCoForCausalLM
from context_compressors.reporting.tables import markdown_table

BOS, EOS, PAD, IMAGE, QUESTION = range(10, 15)
LAYOUTS = ("default", "enhanced")
PARTS = {"train": 1197, "choose": 300, "report": 300}
IMAGE_SIZE, HIDDEN_SIZE, LAYERS = 8, 32, 2
BATCH_SIZE, RATE = 32, 6e-3
# Steps between two looks at the part by which the step is chosen.
LOOK_EVERY = 25


def digits(device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    """Pictures `(n, 1, 8, 8)` between -1 and 1 and their digits `(n,)`, of each part; always the same parts."""
    from sklearn.datasets import load_digits

    found = load_digits()
    pictures = torch.tensor(found.images, dtype=torch.float32, device=device)[:, None] / 8 - 1
    labels = torch.tensor(found.target, device=device)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels))).to(device).split([*PARTS.values()])
    return {part: (pictures[rows], labels[rows]) for part, rows in zip(PARTS, order, strict=True)}


def language_and_vision(num_image_tokens: int) -> LlavaForConditionalGeneration:
    """An untrained LLaVA with 1, 4, 16 or 64 image tokens for a picture of 8 by 8 pixels."""
    side = math.isqrt(num_image_tokens)
    shape = {"hidden_size": HIDDEN_SIZE, "intermediate_size": 2 * HIDDEN_SIZE, "num_attention_heads": 4}
    vision = CLIPVisionConfig(
        **shape, num_hidden_layers=1, num_channels=1, image_size=IMAGE_SIZE, patch_size=IMAGE_SIZE // side
    )
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "vocab_size": QUESTION + 1}
    text = LlamaConfig(**shape, **ids, num_hidden_layers=LAYERS, max_position_embeddings=256)
    parts = {"vision_config": vision, "text_config": text}
    config = LlavaConfig(**parts, image_token_index=IMAGE, image_seq_length=num_image_tokens, vision_feature_layer=-1)
    return LlavaForConditionalGeneration(config)


def rows_of(labels: Tensor, *before: int) -> Tensor:
    """A row of token ids for each digit: those in front of it, then the digit, `(batch_size, num_tokens)`."""
    return torch.cat([labels.new_tensor(before).expand(len(labels), -1), labels[:, None]], dim=1)


def answer_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the digit behind what was read; `logits` are of all tokens of `rows_of`."""
    return torch.nn.functional.cross_entropy(logits[:, -2], labels)


class Reader:
    """A way to read digits from pictures: the base with or without the picture, or VoCo."""

    def __init__(self, model: Any, num_image_tokens: int = 0, num_voco: int = 0):
        self.model, self.num_image_tokens, self.num_voco = model, num_image_tokens, num_voco

    def logits(self, pictures: Tensor, labels: Tensor) -> Tensor:
        """Logits of every token, `(batch_size, num_tokens, vocab_size)`."""
        image, text = [BOS, *[IMAGE] * self.num_image_tokens], rows_of(labels, QUESTION)
        if not self.num_voco:
            pixels = {"pixel_values": pictures} if self.num_image_tokens else {}
            return self.model(rows_of(labels, *image, QUESTION), **pixels, use_cache=False).logits
        context = labels.new_tensor(image).expand(len(labels), -1)
        return self.model(text, memory=self.model.compress(context, pixel_values=pictures)).logits

    @torch.no_grad()
    def is_right(self, pictures: Tensor, labels: Tensor) -> Tensor:
        """Return whether the digit is the likeliest token, `(n,)` bool; the digit itself is not read."""
        self.model.eval()
        return self.logits(pictures, labels)[:, -2].argmax(dim=1) == labels


def train(reader: Reader, data: dict[str, tuple[Tensor, Tensor]], steps: int, seed: int) -> list[float]:
    """Train a reader's model and leave it at its best step on the choosing part; its accuracies there.

    AdamW's rate falls to 0 along a cosine after a warmup of 3 %, as in VoCo-LLaMA's training.
    """
    model, (pictures, labels) = reader.model, data["train"]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    warmup = max(1, round(0.03 * steps))

    def factor(step: int) -> float:
        return min((step + 1) / warmup, (1 + math.cos(math.pi * step / steps)) / 2)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    generator = torch.Generator().manual_seed(seed)
    curve: list[float] = []
    best: dict[str, Tensor] = {}
    for step in range(steps):
        model.train()
        rows = torch.randint(len(labels), (BATCH_SIZE,), generator=generator).to(labels.device)
        loss = answer_loss(reader.logits(pictures[rows], labels[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % LOOK_EVERY == 0 or step + 1 == steps:
            curve.append(reader.is_right(*data["choose"]).float().mean().item())
            if curve[-1] == max(curve):
                best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(best)
    return curve


def measure(arguments: argparse.Namespace, num_image_tokens: int) -> list[dict[str, Any]]:
    """The rows of a number of image tokens: for each reader and seed which answers of the reporting part are right."""
    device = device_of(arguments)
    data = digits(device)
    rows: dict[str, dict[str, Any]] = {}

    def note(name: str, reader: Reader, curve: list[float] | None = None, **settings: Any) -> None:
        row = rows.setdefault(name, {"image_tokens": num_image_tokens, "reader": name, **settings, "right": []})
        row["right"].append(reader.is_right(*data["report"]).long().tolist())
        if curve is not None:
            row.setdefault("choosing_accuracy", []).append(curve)

    for seed in arguments.seeds:
        torch.manual_seed(seed)
        base = language_and_vision(num_image_tokens).to(device)
        reader = Reader(base, num_image_tokens)
        note("image", reader, train(reader, data, arguments.base_steps, seed))
        note("no image", Reader(base))
        with tempfile.TemporaryDirectory() as folder:
            base.save_pretrained(folder)
            for num_voco in arguments.voco_tokens:
                for layout in LAYOUTS:
                    torch.manual_seed(seed)
                    model = VoCoForCausalLM.from_base(
                        folder,
                        num_voco_tokens=num_voco,
                        position_layout=layout,
                        encoder_lora=None,
                        trainable_parameters=["language_model", "lm_head", "memory_embeddings"],
                    ).to(device)
                    reader = Reader(model, num_image_tokens, num_voco)
                    settings = {"voco_tokens": num_voco, "layout": layout}
                    note(f"{num_voco} VoCo, {layout}, untrained", reader, **settings)
                    curve = train(reader, data, arguments.steps, seed)
                    note(f"{num_voco} VoCo, {layout}", reader, curve, **settings)
        print(f"{num_image_tokens} image tokens, seed {seed}: " + ", ".join(map(_latest, rows.values())), flush=True)
    return list(rows.values())


def _latest(row: dict[str, Any]) -> str:
    return f"{row['reader']} {100 * np.mean(row['right'][-1]):.1f}"


def interval(right: Sequence[Sequence[int]] | np.ndarray, num_resamples: int = 2000) -> tuple[float, float, float]:
    """Mean of `(num_seeds, num_pictures)` in percent and its 95 % interval over seeds and pictures."""
    values, generator = np.asarray(right, dtype=np.float64), np.random.default_rng(0)
    seeds, pictures = values.shape
    drawn = [
        values[generator.integers(seeds, size=seeds)][:, generator.integers(pictures, size=pictures)].mean()
        for _ in range(num_resamples)
    ]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return 100 * float(values.mean()), 100 * float(low), 100 * float(high)


def with_differences(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with their scores, and enhanced less default positions of each number of VoCo tokens behind them."""
    result = [{**row, "accuracy": interval(row["right"])} for row in rows]
    trained = {(row["image_tokens"], row["reader"]): row for row in rows}
    for (num_tokens, name), row in trained.items():
        other = trained.get((num_tokens, name.replace("default", "enhanced")))
        if row.get("layout") == "default" and "untrained" not in name and other is not None:
            difference = np.subtract(other["right"], row["right"])
            title = f"{row['voco_tokens']} VoCo, enhanced less default"
            result.append({"image_tokens": num_tokens, "reader": title, "accuracy": interval(difference)})
    return result


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people: a column for each number of image tokens."""
    counts = sorted({row["image_tokens"] for row in rows})
    found = {(row["reader"], row["image_tokens"]): row["accuracy"] for row in rows}
    shown = {key: f"{mean:.1f} [{low:.1f}, {high:.1f}]" for key, (mean, low, high) in found.items()}
    names = list(dict.fromkeys(row["reader"] for row in rows))
    body = [[name, *[shown.get((name, count), "") for count in counts]] for name in names]
    return markdown_table(["read from", *[f"{count} image tokens" for count in counts]], body)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = script_parser(__doc__)
    add = parser.add_argument
    add("--image-tokens", nargs="+", type=positive_int, default=[16, 64], metavar="N", help="default: 16 64")
    add("--voco-tokens", nargs="+", type=positive_int, default=[1, 2], metavar="M", help="default: 1 2")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="S", help="default: 0 1 2")
    add("--base-steps", type=positive_int, default=400, metavar="N", help="of the base's training (default: 400)")
    add("--steps", type=positive_int, default=200, metavar="N", help="of each training of VoCo (default: 200)")
    add_place_arguments(parser)
    return parser


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    logging.disable_progress_bar()
    rows = [row for count in arguments.image_tokens for row in measure(arguments, count)]
    rows = with_differences(rows)
    save_and_report(__file__, arguments, rows, table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
