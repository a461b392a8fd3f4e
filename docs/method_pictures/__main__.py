# SPDX-License-Identifier: Apache-2.0
"""One picture for each method, in one style: docs/images/methods/<name>.svg.

    python docs/method_pictures

writes all of them. They show the defaults: what reads the context and how slots come about (left), and how the decoder
reads them with the question (right).
"""

from pathlib import Path

import key_value_pictures as pairs
import slot_pictures as slots

FOLDER = Path(__file__).parents[1] / "images" / "methods"
METHODS = [slots.mean_pooling, slots.compression_tokens, slots.icae, slots.autocompressor, slots.tcp_autoencoder]
METHODS += [slots.pcc, slots.gmsa, slots.xrag, slots.comprexit, slots.decal, pairs.five_hundred_x, pairs.voco]
METHODS += [pairs.activation_beacon, pairs.snap_kv, pairs.streaming_llm, pairs.kv_zip, pairs.ranked_key_values]


def files() -> dict[Path, str]:
    """What stands in each file."""
    return {FOLDER / f"{draw.__name__}.svg": draw().svg() for draw in METHODS}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
