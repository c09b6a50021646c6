"""The parser of the command line; an operand, such as RUN, may also be given as the flag of its name."""

import argparse
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flatout import __version__
from flatout.cli.commands import COMMANDS, SHELLS
from flatout.config import known_keys
from flatout.config.jobs import builtin_jobs
from flatout.config.settings import nearest
from flatout.utils.errors import WRONG_INPUT
from flatout.utils.host import installed

# The keys of `train.callbacks.TRACKERS`, whose import would take as long as the rest of the help.
TRACKERS = ("tensorboard", "wandb")
_FLAGS: dict[str, dict[str, Any]] = {
    "--run": {"metavar": "RUN", "help": "the run folder"},
    "--data": {"metavar": "PATH", "help": "folder, archive, CSV, IDX, JSON, .npz, .npy, shards, pack or URL"},
    "--model": {"metavar": "NAME", "help": "one of ours, timm:NAME, package.module:factory or file.py:factory"},
    "--epochs": {"type": int, "metavar": "N", "help": "passes over the training images"},
    "--minutes": {"type": float, "metavar": "M", "help": "train as long as fits into so many minutes, report included"},
    "--folds": {"type": int, "metavar": "K", "help": "cross-validation: K runs, each tested on a K-th of the images"},
    "--batch-size": {"type": int, "metavar": "N", "help": "the global batch, on any number of devices"},
    "--lr": {"type": float, "metavar": "X", "help": "learning rate"},
    "--seed": {"type": int, "metavar": "N", "help": "seed of weights, sample order and augmentation"},
    "--set": {"action": "append", "default": [], "metavar": "KEY=VALUE", "help": "any recipe key; repeatable"},
    "--weights": {"type": Path, "metavar": "PATH", "help": "initial weights: a file or a run folder"},
    "--pretrained": {"action": argparse.BooleanOptionalAction, "help": "start from published weights, or random ones"},
    "--on-bad-image": {"choices": ("stop", "skip"), "help": "what to do with unreadable images (stop)"},
    "--out": {"type": Path, "metavar": "DIR", "help": "an empty or new folder; default: a new one under runs/"},
    "--resume": {"action": "store_true", "help": "continue the run in --out"},
    "--private": {"action": "store_true", "help": "create the repository for its owner alone"},
    "--overwrite": {"action": "store_true", "help": "replace the run in --out"},
    "--track": {"action": "append", "default": [], "choices": TRACKERS, "help": "experiment tracker; repeatable"},
    "--no-cache": {"action": "store_true", "help": "do not keep the decoded images for the next run"},
    "--devices": {
        "type": str.lower,
        "default": "auto",
        "metavar": "SPEC",
        "help": "auto, cpu, 2xcpu, cuda, 4xcuda, cuda:0,2, mps, 8xtpu",
    },
    "--engine": {"default": "auto", "metavar": "NAME", "help": "auto, torch or xla"},
    "--allow-code": {"action": "store_true", "help": "import the run's package.module:factory model"},
    "--port": {"type": int, "metavar": "N", "help": "the port, or the next free one (8420)"},
    "--clear": {"action": "store_true", "help": "remove all that is not in use"},
    "--json": {"action": "store_true", "help": "print one JSON object and nothing else"},
    "--top": {"type": int, "default": 5, "metavar": "K", "help": "classes per image (5)"},
    "--coverage": {"type": float, "metavar": "P", "help": "add the set that holds the right class with probability P"},
    "--explain": {"nargs": "?", "const": "", "metavar": "DIR", "help": "heatmaps of the evidence, in a new folder"},
    "--format": {"metavar": "NAME", "help": "onnx, the only format"},
    "--csv": {"type": Path, "metavar": "FILE", "help": "write a row for each image as it is classified; a new file"},
    "--labels": {"action": "store_true", "help": "find wrong labels: trains on parts of the data"},
    "--tta": {"action": "store_true", "help": "test-time augmentation: average over views of each image"},
    "--size": {"required": True, "metavar": "N|HxW", "help": "height and width in pixels"},
    "--channels": {"type": int, "metavar": "C", "help": "default: as the images have"},
    "--job": {"metavar": "JOB", "help": "a built-in job or a recipe.toml"},
    "--check": {"type": Path, "metavar": "NPZ", "help": "arrays images and logits of the source framework, to compare"},
    "--verbose": {"action": "store_true", "help": "list which layer of the file became which of the model"},
    "--classes": {"metavar": "FILE", "dest": "class_file", "help": "a list of class names, one per line"},
    "--gpu": {"metavar": "NAME,...", "help": "NVIDIA GPUs to estimate for, such as h100,rtx4090,l4"},
    "--image-size": {"metavar": "N|HxW", "help": "height and width in pixels; default: the job's or the model's"},
    "--inference": {"action": "store_true", "help": "with --gpu: predictions instead of training"},
    "--topology": {"metavar": "NAME,...", "help": "TPUs to compile for, such as v5e:2x4 or v5e:2x4,v6e:4x4"},
    "--images": {"metavar": "DIR", "dest": "image_folder", "help": "the folder of the images that a CSV file lists"},
    "--price": {"type": float, "metavar": "X", "help": "of one chip or GPU for an hour; adds the cost of the job"},
    "--nodes": {"default": "1", "metavar": "N|MIN:MAX", "help": "hosts (1); MIN:MAX continues without lost ones"},
    "--rendezvous": {"default": "", "metavar": "HOST:PORT", "help": "an address of the first host"},
    "--rendezvous-timeout": {"type": float, "default": 120.0, "metavar": "S", "help": "wait for all hosts (120)"},
    "--hang-timeout": {"type": float, "default": 300.0, "metavar": "S", "help": "end a rank without progress (300)"},
    "--restarts": {"type": int, "metavar": "N", "help": "restart after losing a rank or host (0, or MAX - MIN)"},
}
_OPERANDS = {
    "JOB": f"one of {', '.join(builtin_jobs())}; a recipe.toml; or the path of your data",
    "RUN": "the run folder",
    "URL": "its new address, hf://USER/NAME",
    "OTHER": "the run folder to compare it with",
    "DATA": _FLAGS["--data"]["help"],
    "FILE": "image files, or folders of them",
    "SHELL": "bash, zsh or fish",
    "DIR": "the folder that holds the runs (runs)",
}
# Flags and operands that shells complete with files, and with the words here.
_PATHS = {"--run", "--out", "--images", "--data", "--weights", "--classes", "--check", "--csv"}
_PATHS |= {"JOB", "RUN", "OTHER", "DIR", "DATA", "FILE"}
_WORDS = {"--devices": "auto cpu 2xcpu cuda mps 8xtpu", "--engine": "auto torch xla", "SHELL": " ".join(SHELLS)}
_EXAMPLES = """Examples:
  flatout check my-photos/                         what is in the data, and what is wrong with it
  flatout train my-photos/ --out runs/first        train on it; one folder per class is enough
  flatout train my-photos/ --minutes 10            the best model in ten minutes
  flatout predict runs/first new-photos/           class names with probabilities
  flatout train fashion-mnist --devices 4xcuda     a built-in job on four GPUs

`flatout COMMAND --help` has the flags of a command."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with a suggestion."""

    def error(self, message: str) -> Any:
        if unknown := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            message = f"{unknown[1]!r}: {nearest(unknown[1], re.split(', ', unknown[2].replace(chr(39), '')))}"
        self.exit(WRONG_INPUT, f"{self.prog}: {message}\n")


class _Version(argparse.Action):
    """Prints the versions of flatout, Python, and the installed libraries that results depend on, a line each."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        found = {"flatout": __version__, "Python": platform.python_version()}
        found |= installed("torch", "timm", "numpy", "pillow", "simplejpeg", "openvino", "jax", "torchax", "keras")
        print("\n".join(f"{name} {version}" for name, version in found.items()))
        parser.exit()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed arguments; `command` is the name in `COMMANDS`. Ends the process on help and wrong usage."""
    parser, subparsers = _make_parsers()
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser.set_defaults(completion=completion)
    if not given:
        parser.print_help(sys.stderr)
        parser.exit(WRONG_INPUT)
    end = given.index("--") if "--" in given else len(given)
    args, extra = parser.parse_known_args(given[:end])
    command, subparser = COMMANDS[args.command], subparsers[args.command]
    usage = subparser.format_usage().strip()
    if flag := next((word.partition("=")[0] for word in extra if word.startswith("-")), ""):
        words = [word for word in subparser._option_string_actions if word.startswith("--")]
        subparser.error(f"there is no flag {flag}; {nearest(flag, words)}")
    if any(re.fullmatch("(--[a-z-]+=)?", word) for word in given):
        # As a path it would be the current folder.
        subparser.error(f"an argument is empty; {usage}")
    # argparse leaves operands behind flags among the unknown arguments.
    operands = [*getattr(args, "operands", ()), *extra, *given[end + 1 :]]
    for operand in command.operands.split():
        name = operand.strip("[].").lower()
        if getattr(args, name, None) is not None:
            continue
        if not operands and not operand.startswith("["):
            subparser.error(f"{operand} is missing; {usage}")
        if operand.endswith("..."):
            args.files, operands = operands, []
        else:
            setattr(args, name, operands.pop(0) if operands else None)
    if operands:
        subparser.error(f"unexpected argument {operands[0]!r}; {usage}")
    return args


def help_of(command: str = "") -> str:
    """Return the help text of a command, or that of the program."""
    parser, subparsers = _make_parsers()
    return (subparsers[command] if command else parser).format_help()


def completion(shell: str) -> str:
    """Return the script that completes commands, flags and their values in a shell: bash, zsh or fish."""
    import shtab

    words = _WORDS | {"--set": " ".join(f"{key}=" for key in known_keys())}
    parser, subparsers = _make_parsers()
    for action in (action for subparser in subparsers.values() for action in subparser._actions):
        # Of several operands the last one.
        name = (action.option_strings or [word.strip("[].") for word in str(action.metavar).split()])[-1]
        if action.choices is None and name in words:
            action.complete = shtab.cmd(rf"printf '%s\n' {words[name]}")  # pyright: ignore
        elif action.choices is None and name in _PATHS:
            action.complete = shtab.FILE  # pyright: ignore
    return shtab.complete(parser, shell)


def _make_parsers() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(
        prog="flatout",
        description="Train image classifiers fast, on any hardware.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the versions of flatout and its libraries")
    made = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        about = command.do.__doc__ or ""
        subparser = made.add_parser(
            name,
            help=about[0].lower() + about[1:-1],
            description=about,
            epilog=f"Example: flatout {command.example}",
            usage=" ".join(filter(None, ("flatout", name, command.operands, "[flags]"))),
            allow_abbrev=False,
        )
        if command.operands:
            words = [word.strip("[].") for word in command.operands.split()]
            texts = {word: command.changes.get(word, {}).get("help", _OPERANDS[word]) for word in words}
            about = "; ".join(f"{word}: {text}" if len(words) > 1 else text for word, text in texts.items())
            subparser.add_argument("operands", nargs="*", metavar=command.operands, help=about)
        for flag in command.flags.split():
            subparser.add_argument(flag, **{**_FLAGS[flag], **command.changes.get(flag[2:], {})})
    return parser, made.choices
