"""What every command is made of: its table entry, and what flags that several commands take mean."""

import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.console import Console
from flatout.errors import InputError
from flatout.recipe import MAX_IMAGE_SIZE
from flatout.settings import Size, one_or_both, parse_setting

# The result for --json, and the lines that are printed otherwise.
Output = tuple[Any, Sequence[str]]


@dataclass(frozen=True)
class Command:
    """A function, whose docstring is the help text, and its words: `changes` are those to the table of flags."""

    do: Callable[[Namespace, Console], Output | None]
    operands: str  # such as `RUN [DATA]` or `RUN FILE...`
    flags: str
    example: str
    changes: dict[str, dict[str, Any]]


COMMANDS: dict[str, Command] = {}


def command(operands: str, flags: str, example: str, **changes: dict[str, Any]) -> Callable[[Any], Any]:
    """Register a function as the command that its name says, without `do_`; the words are those of `Command`."""

    def register(do: Any) -> Any:
        COMMANDS[do.__name__.removeprefix("do_")] = Command(do, operands, flags, example, changes)
        return do

    return register


def engine_of(args: Namespace) -> str:
    """Return the engine that the flags choose."""
    from flatout.engine.devices import UNTESTED, engine_for

    if args.allow_untested:
        # The processes of several devices inherit it.
        os.environ[UNTESTED] = "1"
    return engine_for(args.devices, args.engine)


def changes_of(args: Namespace) -> dict[str, Any]:
    """Return the recipe keys that flags change; --set comes last."""
    given = vars(args)
    keys = {"lr": "optimizer.lr", "on_bad_image": "data.on_bad_image", "image_folder": "data.images"}
    keys |= {"folds": "data.folds"}
    flags = ("model", "epochs", "batch_size", "seed", "pretrained", *keys)
    changes = {keys.get(flag, flag): given[flag] for flag in flags if given.get(flag) is not None}
    if given.get("weights") is not None:
        changes |= {"weights": str(args.weights.absolute()), "pretrained": True}
    if given.get("pretrained") is False:
        changes |= {"pretrained": False, "weights": ""}
    return changes | dict(map(parse_setting, args.set))


def size_of(text: str) -> Size:
    """Return the size that `N` or `HxW` names."""
    both = [int(side) if side.isdecimal() else 0 for side in text.lower().split("x")]
    if len(both) > 2 or not all(1 <= side <= MAX_IMAGE_SIZE for side in both):
        raise InputError(f"--size {text}: must be N or HxW, such as 96x160, each from 1 to {MAX_IMAGE_SIZE} pixels")
    return one_or_both((both[0], both[-1]))
