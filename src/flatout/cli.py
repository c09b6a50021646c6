"""The command line: words to calls, results to lines or JSON, failures to one message and an exit code."""

import argparse
import contextlib
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout import __version__
from flatout.errors import InputError, Stopped, TrainingFailed
from flatout.jobs import builtin_jobs
from flatout.recipe import MAX_IMAGE_SIZE
from flatout.settings import parse_setting

if TYPE_CHECKING:
    from flatout.hosts import Hosts

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130
SIGNALLED = 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 done, 1 training failed, 2 wrong input, 130 or 143 stopped."""
    parsed = _parser().parse_args(arguments)
    # How often a thread of the OpenMP that torch brings looks for work before it sleeps. By default that is so long
    # that on a busy machine waiting threads keep others from the work they wait for.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A class or file name that the terminal cannot show is no reason to fail.
            stream.reconfigure(errors="backslashreplace")
    try:
        with _termination_unwinds():
            parsed.command(parsed)
    except InputError as error:
        print(f"flatout: {error}", file=sys.stderr)
        return WRONG_INPUT
    except TrainingFailed as error:
        print(f"flatout: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("flatout: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone, as `| head` does; Python would complain once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except _StoppedBySignal as stopped:
        return SIGNALLED + stopped.number
    return DONE


@contextlib.contextmanager
def _termination_unwinds() -> Iterator[None]:
    """Let SIGTERM end the command as an exception does, so that locks and temporary files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise _StoppedBySignal(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _StoppedBySignal(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


# --- commands ---------------------------------------------------------------------------------------------------------


def _train(args: argparse.Namespace) -> None:
    from flatout.console import Console
    from flatout.engine.choose import engine_for, is_accelerated
    from flatout.fitting import train_recipe
    from flatout.resolve import resolve
    from flatout.session import Options

    rank, engine = _rank(), engine_for(args.devices, args.engine)
    console = Console(sys.stdout if rank == 0 else None, rank=rank)
    options = Options(
        out=args.out,
        hosts=_hosts(args),
        devices=args.devices,
        engine=engine,
        resume=args.resume,
        overwrite=args.overwrite,
        cache=not args.no_cache,
        # A model that the user names on the command line may be code; one that a file names may not.
        allow_code=args.model is not None,
    )
    try:
        job = args.job
        if args.resume:
            if args.out is None:
                raise InputError("--resume needs --out: the run folder to continue")
            if args.job is not None:
                raise InputError(f"--resume takes the recipe of {args.out}: leave out {args.job}")
            job = _recipe_of(args.out)
        recipe, data = resolve(
            job, args.data, _changes(args), accelerated=is_accelerated(args.devices, engine), console=console
        )
        train_recipe(recipe, data, options, console)
    except Stopped as stopped:
        raise _StoppedBySignal(stopped.signal_number) from None
    finally:
        console.close()


def _rank() -> int:
    """Return which rank a launcher such as torchrun made this process; 0 where there is none."""
    from flatout.engine.launched import launched

    found = launched()
    return found.rank if found else 0


def _hosts(args: argparse.Namespace) -> "Hosts":
    from flatout.hosts import Hosts

    timeout = {} if args.rendezvous_timeout is None else {"timeout": args.rendezvous_timeout}
    return Hosts(nodes=args.nodes, node_rank=args.node_rank, rendezvous=args.rendezvous, **timeout)


def _recipe_of(run: Path) -> Path:
    recipe = run / "recipe.toml"
    if not recipe.is_file():
        raise InputError(f"--resume: {run} is no run folder: it has no recipe.toml")
    return recipe


def _changes(args: argparse.Namespace) -> dict[str, Any]:
    """Return the recipe keys that the flags of `train` change; --set comes last."""
    changes: dict[str, Any] = {}
    flags = {
        "model": args.model,
        "epochs": args.epochs,
        "batch_size": args.batch_size,
        "optimizer.lr": args.lr,
        "seed": args.seed,
        "data.on_bad_image": args.on_bad_image,
    }
    changes |= {key: value for key, value in flags.items() if value is not None}
    if args.weights is not None:
        changes |= {"weights": str(args.weights.absolute()), "pretrained": True}
    if args.no_pretrained:
        changes |= {"pretrained": False, "weights": ""}
    return changes | dict(map(parse_setting, args.set))


def _evaluate(args: argparse.Namespace) -> None:
    from flatout.evaluate import evaluate
    from flatout.run import Run

    run = Run(args.run, allow_code=args.allow_code)
    result = evaluate(run, args.data, devices=args.devices, engine=args.engine, console=_side_console(args))
    if _rank() > 0:
        return
    name = "valid" if result["split"] == "valid" else "test"
    accuracy, correct, count, loss = (result[f"{name}_{k}"] for k in ("accuracy", "correct", "count", "loss"))
    _print(args, result, [f"{name} accuracy {accuracy:.4f} ({correct:,} of {count:,} right), loss {loss:.4f}"])


def _predict(args: argparse.Namespace) -> None:
    from flatout.run import Run

    predictions = Run(args.run, allow_code=args.allow_code).predict(args.files, top=args.top)
    lines = []
    for prediction in predictions:
        pairs = zip(prediction.classes, prediction.probabilities, strict=True)
        lines.append(f"{prediction.file}: " + ", ".join(f"{name} {p:.3f}" for name, p in pairs))
    _print(args, {"run": str(args.run), "predictions": [p.to_dict() for p in predictions]}, lines)


def _report(args: argparse.Namespace) -> None:
    from flatout.report.page import draw_all

    draw_all(args.run)
    print(args.run / "report.html")


def _pack(args: argparse.Namespace) -> None:
    from flatout.advise import advise
    from flatout.data.pack import PackSettings, build_pack
    from flatout.data.prepare import find

    if not 1 <= args.size <= MAX_IMAGE_SIZE:
        raise InputError(f"--size {args.size}: must be from 1 to {MAX_IMAGE_SIZE} pixels")
    found = find(args.data, args.classes or "")
    channels = args.channels or advise(found, str(args.data), accelerated=False)[0].channels
    settings = PackSettings(
        size=args.size,
        channels=channels,
        resize=args.resize,
        on_bad_image=args.on_bad_image or "stop",
        max_bad_share=args.max_bad_share,
    )
    console = _side_console(args)
    pack = build_pack(found, settings, args.out, report=console)
    console.close()
    rate = len(pack.labels) / pack.build_seconds
    lines = [pack.describe(), f"packed in {pack.build_seconds:.1f} s, {rate:,.0f} images per second: {args.out}"]
    _print(args, {"out": str(args.out), "images": len(pack.labels), "skipped": pack.skipped}, lines)


def _check(args: argparse.Namespace) -> None:
    from flatout.data.check import check
    from flatout.data.prepare import find
    from flatout.data.source import Source

    found = find(args.data, args.classes or "")
    source = found if isinstance(found, Source) else found.read()
    result = check(source)
    _print(args, result.to_dict(), result.lines())


def _scale(args: argparse.Namespace) -> None:
    from flatout.console import Console
    from flatout.scaling import lines_of, scale

    flags = {"epochs": args.epochs, "batch_size": args.batch_size}
    changes = {key: value for key, value in flags.items() if value is not None} | dict(map(parse_setting, args.set))
    # Progress goes to stderr: stdout is for the result alone.
    console = Console(sys.stderr)
    try:
        result = scale(
            args.job,
            args.data,
            changes,
            devices=args.devices,
            out=args.out,
            repeats=args.repeats,
            weak=args.weak,
            console=console,
        )
    except Stopped as stopped:
        raise _StoppedBySignal(stopped.signal_number) from None
    finally:
        console.close()
    _print(args, result, lines_of(result))


def _plan(args: argparse.Namespace) -> None:
    from flatout.console import Console
    from flatout.planning import plan
    from flatout.report.plan_text import lines_of

    flags = {"model": args.model, "epochs": args.epochs, "batch_size": args.batch_size}
    changes = {key: value for key, value in flags.items() if value is not None} | dict(map(parse_setting, args.set))
    console = Console(sys.stderr)
    try:
        result = plan(
            args.job,
            args.data,
            changes,
            topologies=args.topology,
            images=args.images,
            classes=args.classes,
            price=args.price,
            largest_batch=args.largest_batch,
            out=args.out,
            console=console,
        )
    finally:
        console.close()
    _print(args, result, lines_of(result))


def _devices(args: argparse.Namespace) -> None:
    from flatout.engine.choose import available, machine

    found, here = available(), machine()
    lines = [f"cpu: {here['cpu']}, {found['cpu']} cores, {here['memory_bytes'] / 2**30:.0f} GiB"]
    lines += [f"{kind}: {count} ({here['gpu'] or kind})" for kind, count in found.items() if kind != "cpu"]
    if len(found) == 1:
        lines.append("no accelerator that torch can use")
    _print(args, {"devices": found, "machine": here}, lines)


def _print(args: argparse.Namespace, result: Any, lines: Sequence[str]) -> None:
    try:
        print(json.dumps(result, indent=2) if args.json else "\n".join(lines), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise InputError(f"the standard output cannot be written: {error.strerror}") from None


def _side_console(args: argparse.Namespace) -> Any:
    """Return a console beside the result: on stdout, or on stderr where stdout is JSON."""
    from flatout.console import Console

    rank = _rank()
    return Console(None if rank else sys.stderr if args.json else sys.stdout, rank=rank)


# --- words ------------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        self.exit(WRONG_INPUT, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="flatout", description="Train image classifiers flat out on whatever accelerators you have.")
    parser.add_argument("--version", action="version", version=f"flatout {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)
    _add_train(commands)

    command = _add(commands, "evaluate", _evaluate, "test a run again, or on other data")
    command.add_argument("run", type=Path, metavar="RUN")
    command.add_argument("--data", metavar="PATH", help="other data; default: the run's own")
    _add_devices(command)
    _add_json(command)
    _add_allow_code(command)

    command = _add(commands, "predict", _predict, "classify images with a run")
    command.add_argument("run", type=Path, metavar="RUN")
    command.add_argument("files", nargs="+", metavar="FILE", help="image files or folders of them")
    command.add_argument("--top", type=int, default=5, metavar="K", help="classes to name for each image (5)")
    _add_json(command)
    _add_allow_code(command)

    command = _add(commands, "report", _report, "draw a run's pictures and page again from its figures")
    command.add_argument("run", type=Path, metavar="RUN")

    command = _add(commands, "pack", _pack, "decode and resize images once, into plain NumPy files")
    command.add_argument("data", metavar="DATA")
    command.add_argument("--size", type=int, required=True, metavar="N", help="height and width in pixels")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="a folder that does not exist yet")
    command.add_argument("--channels", type=int, choices=(1, 3), help="default: by looking at the images")
    command.add_argument("--resize", choices=("stretch", "crop"), default="stretch")
    command.add_argument("--classes", metavar="FILE", help="a list of class names, one a line")
    _add_bad_image(command)
    command.add_argument("--max-bad-share", type=float, default=0.05, metavar="X", help="the most that skip accepts")
    _add_json(command)

    command = _add(commands, "check", _check, "look for unreadable, duplicate and leaked images")
    command.add_argument("data", metavar="DATA")
    command.add_argument("--classes", metavar="FILE", help="a list of class names, one a line")
    _add_json(command)

    _add_scale(commands)
    _add_plan(commands)
    _add_json(_add(commands, "devices", _devices, "list what this machine can train on"))
    return parser


def _add_train(commands: Any) -> None:
    command = _add(commands, "train", _train, "train a job, a recipe file, or a recipe made for your data")
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


def _add_scale(commands: Any) -> None:
    command = _add(commands, "scale", _scale, "measure a job on several choices of devices, side by side")
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


def _add_plan(commands: Any) -> None:
    command = _add(commands, "plan", _plan, "compile a job for TPUs that are not there: does it fit, how fast is it")
    command.add_argument("job", metavar="JOB|RECIPE.toml|PATH", help="as for train; its data is not needed")
    command.add_argument("--topology", required=True, metavar="NAME,...", help="such as v5e:2x4 or v5e:2x4,v6e:4x4")
    command.add_argument("--data", metavar="PATH", help="count the images there, not those published")
    command.add_argument("--images", type=int, metavar="N", help="training images, where they are not to be counted")
    command.add_argument("--classes", type=int, metavar="K", help="their classes")
    command.add_argument("--model", metavar="NAME", help="as for train")
    command.add_argument("--epochs", type=int, metavar="N")
    command.add_argument("--batch-size", type=int, metavar="N", help="the global batch")
    command.add_argument("--price", type=float, metavar="X", help="of one chip for an hour; adds the cost of the job")
    command.add_argument("--largest-batch", action="store_true", help="look for the largest batch that fits")
    command.add_argument("--out", type=Path, metavar="DIR", help="the folder for plan.json and plan.png")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any recipe key, repeatable")
    _add_json(command)


def _add(commands: Any, name: str, call: Callable[[argparse.Namespace], None], about: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".", allow_abbrev=False)
    command.set_defaults(command=call)
    return command


def _add_devices(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--devices", default="auto", metavar="SPEC", help="auto, cpu, 2xcpu, cuda, 4xcuda, cuda:0,2, mps, 8xtpu"
    )
    command.add_argument("--engine", default="auto", metavar="NAME", help="auto, torch, xla")


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _add_allow_code(command: argparse.ArgumentParser) -> None:
    command.add_argument("--allow-code", action="store_true", help="import the run's package.module:factory model")


def _add_bad_image(command: argparse.ArgumentParser) -> None:
    command.add_argument("--on-bad-image", choices=("stop", "skip"), help="what an unreadable image does (stop)")
