# SPDX-License-Identifier: Apache-2.0
"""Reading a recipe from YAML files and the command line."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from trl import SFTConfig, TrlParser

from ..configuration.nearest_names import nearest
from ..data.yaml_text import read_yaml
from .fields import DESCRIPTION, DataArguments, ModelArguments, TrainingFields, check_finite, examples, usage


@dataclass
class TrainingConfig(TrainingFields, SFTConfig):
    """`trl.SFTConfig` with what compression adds: the fields of [`TrainingFields`]."""

    def __post_init__(self) -> None:
        self.check_fields()
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        check_finite("learning_rate", self.learning_rate)
        if self.max_steps != -1 and self.max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, or -1 for epochs, got {self.max_steps}")
        if self.max_steps == -1:
            check_finite("num_train_epochs", self.num_train_epochs)
        super().__post_init__()


_GROUPS = (ModelArguments, DataArguments, TrainingConfig)


def _check_names(parser: TrlParser, recipe: dict[str, Any], argv: Sequence[str]) -> None:
    known = {action.dest for action in parser._actions} - {"help"}
    for name in recipe:
        if name not in known:
            raise ValueError(f"unknown field {name!r} in the recipe{nearest(str(name), known)}")
    for argument in argv:
        name = argument.partition("=")[0]
        if name.startswith("--") and name[2:].replace("-", "_") not in known:
            # argparse would also take a unique beginning of a name: too easily the wrong field.
            raise ValueError(f"unknown field {name!r}{nearest(name[2:].replace('-', '_'), known)}")


def read_recipe(path: str) -> dict[str, Any]:
    """Read a recipe's YAML mapping; `ValueError` names the nearest file when there is none, or what is wrong in it."""
    file = Path(path)
    if not file.is_file():
        packaged = {
            p.relative_to(Path(__file__).parent).as_posix(): p for p in Path(__file__).parent.glob("recipes/**/*.yaml")
        }
        names = {name.removeprefix("recipes/"): p for name, p in packaged.items()} | packaged
        key = path.removeprefix("training/")
        if key not in names:
            raise ValueError(f"there is no recipe {path!r}{nearest(key, names)}")
        file = names[key]
    recipe = read_yaml(file)
    if not isinstance(recipe, dict):
        raise ValueError(f"{path} must hold fields and values (a YAML mapping), got {type(recipe).__name__}")
    return recipe


def _over(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Fields of two recipes; of `method_config` and `checkpoint_config`, fields inside them."""
    merged = {**earlier, **later}
    for name in ("method_config", "checkpoint_config"):
        both: list[Any] = [recipe.get(name) for recipe in (earlier, later)]
        if all(isinstance(fields, dict) for fields in both):
            merged[name] = {**both[0], **both[1]}
    return merged


_KINDS = {int: "a whole number", float: "a number, such as 0.5 or 1.0e-3", bool: "true or false", str: "a text"}


def _with_values_checked(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe's fields in the types that they have; a null gives one that is never null its default back.

    Texts stay: as on the command line, the parser reads numbers from them. What the library calls a text may be more.
    """
    own = {entry.name for group in (ModelArguments, DataArguments, TrainingFields) for entry in fields(group)}
    hints = {name: hint for group in _GROUPS for name, hint in get_type_hints(group).items()}
    checked: dict[str, Any] = {}
    for name, value in recipe.items():
        is_union = get_origin(hints[name]) in (Union, UnionType)
        kinds = set(get_args(hints[name])) if is_union else {hints[name]}
        if value is None:
            if type(None) in kinds:
                checked[name] = None
            continue
        kinds -= {type(None)}
        kind: Any = kinds.pop() if len(kinds) == 1 else None
        if kind is str and name not in own:
            kind = None
        if kind is int and isinstance(value, float) and value.is_integer():
            # YAML reads 1.0e+4 as a float.
            value = int(value)
        allowed: Any = {int: int, float: (int, float), bool: bool, str: str}.get(kind, object)
        is_other = not isinstance(value, allowed) or (isinstance(value, bool) and kind in (int, float))
        if is_other and not (isinstance(value, str) and kind is not str):
            raise ValueError(f"{name} must be {_KINDS[kind]}, got {value!r}")
        checked[name] = value
    return checked


def _without_nulls(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command line without `--field null`, and the names of these fields."""
    kept, names, rest = [], [], deque(argv)
    while rest:
        argument = rest.popleft()
        name, _, value = argument.partition("=")
        is_last = len(rest) < 2 or rest[1].startswith("--")
        if name.startswith("--") and not value and rest and rest[0].lower() == "null" and is_last:
            value = rest.popleft()
        if name.startswith("--") and value.lower() == "null":
            names.append(name[2:].replace("-", "_"))
        else:
            kept.append(argument)
    return kept, names


def _read_fields(argv: Sequence[str], parser: TrlParser) -> tuple[dict[str, Any], list[str]]:
    """The fields of the recipes in a command line, one over the other, and what follows them there."""
    num_recipes = next((i for i, argument in enumerate(argv) if argument.startswith("-")), len(argv))
    if num_recipes == 0:
        raise ValueError(f"the first argument is the recipe's file, got {argv[0]!r}")
    recipe: dict[str, Any] = {}
    for path in argv[:num_recipes]:
        recipe = _over(recipe, read_recipe(path))
    rest = list(argv[num_recipes:])
    _check_names(parser, recipe, rest)
    rest, nulls = _without_nulls(rest)
    return _with_values_checked({**recipe, **dict.fromkeys(nulls)}), rest


def parse_recipe(argv: Sequence[str], prog: str = "context-compressors train") -> tuple[Any, ...]:
    """Parse `RECIPE.yaml [...] [--field value]` into (ModelArguments, DataArguments, TrainingConfig).

    Several recipes are read in order, a later one over an earlier one (`method_config` and `checkpoint_config` field
    by field, so that one recipe may name a method and another its positions); the command line over both. `--field
    null` takes back what a recipe says, and so does null in a later recipe.

    Raises:
        ValueError: no such recipe, an unknown field (the nearest right one is named), or a value not allowed.
    """
    parser = _parser(prog)
    if not argv or {"-h", "--help", "--help-all"}.intersection(argv):
        parser.parse_args(["--help"])
    recipe, rest = _read_fields(argv, parser)
    parser.set_defaults_with_config(**recipe)
    return parser.parse_args_into_dataclasses(args=rest)


def recorded_recipe(argv: Sequence[str], arguments: Sequence[Any]) -> dict[str, Any]:
    """One recipe that says what a command line said, and can be run again.

    Args:
        argv: the recipes and fields that were given.
        arguments: what [`parse_recipe`] made of them.

    Returns:
        All fields of model and data that have a value, and of the training those that were given.
    """
    parser = _parser()
    recipe, rest = _read_fields(argv, parser)
    options = {argument.partition("=")[0] for argument in rest}
    named = {action.dest for action in parser._actions if options.intersection(action.option_strings)}
    parser.set_defaults_with_config(**recipe)
    # As they were given: the training's own arguments have worked out more from them.
    given, _ = parser.parse_known_args(rest)
    model, data, training = arguments
    recorded = {
        name: value
        for group in (model, data)
        for name, value in dataclasses.asdict(group).items()
        if value is not None
    }
    for entry in fields(training):
        if entry.name in named | recipe.keys():
            is_structured = entry.name == "ratio_schedule"
            recorded[entry.name] = getattr(training if is_structured else given, entry.name)
    return json.loads(json.dumps(recorded, default=str))


def _parser(prog: str = "context-compressors train") -> TrlParser:
    return TrlParser(_GROUPS, prog=prog, usage=usage(prog), description=DESCRIPTION, epilog=examples(prog))
