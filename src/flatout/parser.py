"""The words of the command line: which commands there are, which flags they take, which function does them."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flatout import __version__, commands
from flatout.errors import WRONG_INPUT
from flatout.jobs import builtin_jobs


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        self.exit(WRONG_INPUT, f"{self.prog}: {message}\n")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; what it parses has `command`, the function of `commands.py` to call with it."""
    parser = _Parser(prog="flatout", description="Train image classifiers flat out on whatever accelerators you have.")
    parser.add_argument("--version", action="version", version=f"flatout {__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)
    _add_train(subparsers)

    command = _add(subparsers, "evaluate", commands.do_evaluate, "test a run again, or on other data")
    command.add_argument("run", type=Path, metavar="RUN")
    command.add_argument("--data", metavar="PATH", help="other data; default: the run's own")
    _add_devices(command)
    _add_json(command)
    _add_allow_code(command)

    command = _add(subparsers, "predict", commands.do_predict, "classify images with a run")
    command.add_argument("run", type=Path, metavar="RUN")
    command.add_argument("files", nargs="+", metavar="FILE", help="image files or folders of them")
    command.add_argument("--top", type=int, default=5, metavar="K", help="classes to name for each image (5)")
    _add_json(command)
    _add_allow_code(command)

    command = _add(subparsers, "report", commands.do_report, "draw a run's pictures and page again from its figures")
    command.add_argument("run", type=Path, metavar="RUN")

    command = _add(subparsers, "pack", commands.do_pack, "decode and resize images once, into plain NumPy files")
    command.add_argument("data", metavar="DATA")
    command.add_argument("--size", type=int, required=True, metavar="N", help="height and width in pixels")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="a folder that does not exist yet")
    command.add_argument("--channels", type=int, choices=(1, 3), help="default: by looking at the images")
    command.add_argument("--resize", choices=("stretch", "crop"), default="stretch")
    command.add_argument("--classes", metavar="FILE", help="a list of class names, one a line")
    _add_bad_image(command)
    command.add_argument("--max-bad-share", type=float, default=0.05, metavar="X", help="the most that skip accepts")
    _add_json(command)

    command = _add(subparsers, "check", commands.do_check, "look for unreadable, duplicate and leaked images")
    command.add_argument("data", metavar="DATA")
    command.add_argument("--classes", metavar="FILE", help="a list of class names, one a line")
    _add_json(command)

    _add_scale(subparsers)
    _add_plan(subparsers)
    _add_json(_add(subparsers, "devices", commands.do_devices, "list what this machine can train on"))
    return parser


def _add_train(subparsers: Any) -> None:
    command = _add(subparsers, "train", commands.do_train, "train a job, a recipe file, or a recipe made for your data")
    jobs = ", ".join(builtin_jobs())
    command.add_argument(
        "job", nargs="?", metavar="JOB", help=f"one of {jobs}; a recipe.toml; or the path of your data"
    )
    command.add_argument("--data", metavar="PATH", help="folder, CSV, IDX, JSON, .npz, .npy or pack")
    command.add_argument("--model", metavar="NAME", help="one of ours, timm:NAME, or package.module:factory")
    command.add_argument("--epochs", type=int, metavar="N")
    command.add_argument("--batch-size", type=int, metavar="N", help="the global batch, on however many devices")
    command.add_argument("--lr", type=float, metavar="X", help="learning rate")
    command.add_argument("--seed", type=int, metavar="N")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any recipe key, repeatable")
    command.add_argument(
        "--weights", type=Path, metavar="PATH", help="start from these weights: a file or a run folder"
    )
    command.add_argument("--no-pretrained", action="store_true", help="start from random weights whatever the job says")
    _add_bad_image(command)
    command.add_argument("--out", type=Path, metavar="DIR", help="the run folder; default: a new one under runs/")
    command.add_argument("--resume", action="store_true", help="continue the run in --out")
    command.add_argument("--overwrite", action="store_true", help="replace the run in --out")
    command.add_argument("--no-cache", action="store_true", help="do not keep the decoded images for the next run")
    _add_devices(command)
    hosts = command.add_argument_group("several hosts", "the same command on each; or torchrun, Slurm, Kubernetes")
    hosts.add_argument("--nodes", type=int, default=1, metavar="N", help="how many hosts take part (1)")
    hosts.add_argument("--node-rank", type=int, default=0, metavar="R", help="which of them this one is, from 0")
    hosts.add_argument("--rendezvous", default="", metavar="HOST:PORT", help="where host 0 awaits the others")
    hosts.add_argument("--rendezvous-timeout", type=float, metavar="S", help="seconds to wait for them (120)")


def _add_scale(subparsers: Any) -> None:
    command = _add(subparsers, "scale", commands.do_scale, "measure a job on several choices of devices, side by side")
    command.add_argument("job", metavar="JOB", help="as for train")
    command.add_argument(
        "--devices", required=True, metavar="SPEC,SPEC,...", help="such as cpu,2xcpu or cpu,cuda,4xcuda"
    )
    command.add_argument("--data", metavar="PATH", help="as for train")
    command.add_argument("--out", type=Path, metavar="DIR", help="an empty or new folder; default: one under runs/")
    command.add_argument("--epochs", type=int, metavar="N")
    command.add_argument("--batch-size", type=int, metavar="N", help="the global batch; with --weak that per device")
    command.add_argument("--repeats", type=int, default=1, metavar="N", help="runs of each SPEC, interleaved (1)")
    command.add_argument("--weak", action="store_true", help="let the batch grow with the number of devices")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any recipe key, repeatable")
    _add_json(command)


def _add_plan(subparsers: Any) -> None:
    about = "does a job fit, and how fast is it: compiled for TPUs that are not there, or measured on devices that are"
    command = _add(subparsers, "plan", commands.do_plan, about)
    command.add_argument("job", metavar="JOB|RECIPE.toml|PATH", help="as for train; its data is not needed")
    command.add_argument("--topology", metavar="NAME,...", help="TPUs to compile for: v5e:2x4 or v5e:2x4,v6e:4x4")
    command.add_argument("--devices", metavar="SPEC,...", help="devices to measure: cpu,2xcpu or cuda,4xcuda")
    command.add_argument("--engine", default="auto", metavar="NAME", help="with --devices: auto, torch, xla")
    command.add_argument("--data", metavar="PATH", help="count the images there, not those published")
    command.add_argument("--images", type=int, metavar="N", help="training images, where they are not to be counted")
    command.add_argument("--classes", type=int, metavar="K", help="their classes")
    command.add_argument("--model", metavar="NAME", help="as for train")
    command.add_argument("--epochs", type=int, metavar="N")
    command.add_argument("--batch-size", type=int, metavar="N", help="the global batch")
    command.add_argument("--price", type=float, metavar="X", help="of one chip for an hour; adds the cost of the job")
    command.add_argument("--largest-batch", action="store_true", help="look for the largest batch that fits the TPUs")
    command.add_argument("--out", type=Path, metavar="DIR", help="an empty or new folder; default: one under runs/")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any recipe key, repeatable")
    _add_json(command)


def _add(subparsers: Any, name: str, call: Callable[[argparse.Namespace], None], about: str) -> argparse.ArgumentParser:
    command = subparsers.add_parser(
        name, help=about, description=about[0].upper() + about[1:] + ".", allow_abbrev=False
    )
    command.set_defaults(command=call)
    return command


def _add_devices(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--devices", default="auto", metavar="SPEC", help="auto, cpu, 2xcpu, cuda, 4xcuda, cuda:0,2, mps, 8xtpu"
    )
    command.add_argument("--engine", default="auto", metavar="NAME", help="auto, torch, xla")
    command.add_argument(
        "--allow-untested", action="store_true", help="let --engine torch use torch_tpu, which was never tried"
    )


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _add_allow_code(command: argparse.ArgumentParser) -> None:
    command.add_argument("--allow-code", action="store_true", help="import the run's package.module:factory model")


def _add_bad_image(command: argparse.ArgumentParser) -> None:
    command.add_argument("--on-bad-image", choices=("stop", "skip"), help="what an unreadable image does (stop)")
