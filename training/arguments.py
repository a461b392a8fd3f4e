# SPDX-License-Identifier: Apache-2.0
"""Recipes and command lines of `context-compressors train`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from trl import SFTConfig, TrlParser

from ..configuration.nearest_names import nearest
from ..data.yaml_text import parse_yaml, read_yaml
from .fields import DESCRIPTION, EXAMPLES, USAGE, DataArguments, ModelArguments, TrainingFields

_RECIPES = Path(__file__).parent / "recipes"
_PUT_TOGETHER = ("method_config", "checkpoint_config")


@dataclass
class TrainingConfig(TrainingFields, SFTConfig):
    """`trl.SFTConfig` with the fields of [`TrainingFields`]."""

    def __post_init__(self) -> None:
        self.resolve_fields()
        super().__post_init__()


_GROUPS = (ModelArguments, DataArguments, TrainingConfig)


def read_recipe(path: str) -> dict[str, Any]:
    """Read a recipe's YAML mapping; `ValueError` names the nearest file when there is none, or what is wrong in it."""
    file = Path(path)
    if not file.is_file():
        packaged = {file.relative_to(_RECIPES).as_posix(): file for file in _RECIPES.glob("**/*.yaml")}
        key = path.removeprefix("training/").removeprefix("recipes/")
        if key not in packaged:
            raise ValueError(f"there is no recipe {path!r}{nearest(key, packaged)}")
        file = packaged[key]
    recipe = read_yaml(file)
    if not isinstance(recipe, dict):
        raise ValueError(f"{path} must hold fields and values (a YAML mapping), got {type(recipe).__name__}")
    return recipe


def _merged(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Fields of two recipes; of `method_config` and `checkpoint_config`, fields inside them."""
    merged = {**earlier, **later}
    for name in _PUT_TOGETHER:
        if isinstance(earlier.get(name), dict) and isinstance(later.get(name), dict):
            merged[name] = {**earlier[name], **later[name]}
    return merged


def _fields_of_words(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The command line without `--field null` and fields that are put together, and these as a recipe has them."""
    kept: list[str] = []
    fields: dict[str, Any] = {}
    for word in argv:
        name, _, value = word.partition("=")
        if kept and kept[-1].startswith("--") and (word.lower() == "null" or _field(kept[-1]) in _PUT_TOGETHER):
            name, value = kept.pop(), word
        if name.startswith("--") and value and (value.lower() == "null" or _field(name) in _PUT_TOGETHER):
            fields[_field(name)] = None if value.lower() == "null" else parse_yaml(value, _field(name))
        else:
            kept.append(word)
    return kept, fields


def _field(option: str) -> str:
    return option[2:].replace("-", "_")


def _parser_of(argv: Sequence[str], prog: str) -> tuple[TrlParser, list[str], set[str]]:
    """A parser whose defaults are the recipes', the words that follow them, and the fields that are named."""
    parser = TrlParser(_GROUPS, prog=prog, usage=f"{prog} {USAGE}", description=DESCRIPTION, epilog=EXAMPLES)
    if not argv or {"-h", "--help", "--help-all"}.intersection(argv):
        parser.parse_args(["--help"])
    num_recipes = next((i for i, argument in enumerate(argv) if argument.startswith("-")), len(argv))
    if num_recipes == 0:
        raise ValueError(f"the first argument is the recipe's file, got {argv[0]!r}")
    recipe: dict[str, Any] = {}
    for path in argv[:num_recipes]:
        recipe = _merged(recipe, read_recipe(path))
    words, fields = _fields_of_words(argv[num_recipes:])
    recipe = _merged(recipe, fields)
    # argparse would also take a unique beginning of a name: too easily the wrong field.
    options = {_field(word.partition("=")[0]) for word in words if word.startswith("--")}
    known = {action.dest for action in parser._actions} - {"help"}
    for name in [*recipe, *options]:
        if name not in known:
            dashes = "--" if name in options else ""
            raise ValueError(f"unknown field {dashes + str(name)!r}{nearest(str(name), known)}")
    hints = {name: hint for group in _GROUPS for name, hint in get_type_hints(group).items()}
    # The parser reads numbers in the field's type; a null gives a field that is never null its default back.
    defaults = {
        name: str(value) if type(value) in (int, float) else value
        for name, value in recipe.items()
        if value is not None or type(None) in get_args(hints[name])
    }
    parser.set_defaults_with_config(**defaults)
    return parser, words, {*recipe, *options}


def parse_recipe(argv: Sequence[str], prog: str = "context-compressors train") -> tuple[Any, ...]:
    """Parse `RECIPE.yaml [...] [--field value]` into (ModelArguments, DataArguments, TrainingConfig).

    Later recipes and the command line replace fields (of `method_config` and `checkpoint_config` those inside), and
    null takes one back. `ValueError` names an unknown recipe or field, or a value that is not allowed.
    """
    parser, words, _ = _parser_of(argv, prog)
    return parser.parse_args_into_dataclasses(args=words)


def recorded_recipe(argv: Sequence[str], arguments: Sequence[Any]) -> dict[str, Any]:
    """Return one recipe that says what a command line said, and can be run again."""
    parser, words, named = _parser_of(argv, "")
    # As they were given: the training's own arguments have worked out more from them.
    parsed, _ = parser.parse_known_args(words)
    model, data, training = arguments
    recorded = {**dataclasses.asdict(model), **dataclasses.asdict(data)}
    recorded = {name: value for name, value in recorded.items() if value is not None}
    for entry in dataclasses.fields(training):
        if entry.name in named:
            is_structured = entry.name == "ratio_schedule"
            recorded[entry.name] = vars(training if is_structured else parsed)[entry.name]
    return json.loads(json.dumps(recorded, default=str))
