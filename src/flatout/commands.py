"""What each command of the command line does: flags to a call, its result to lines or JSON on stdout."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.errors import InputError
from flatout.recipe import MAX_IMAGE_SIZE
from flatout.settings import parse_setting

if TYPE_CHECKING:
    from flatout.dist.rendezvous import Hosts


def do_train(args: argparse.Namespace) -> None:
    """Train a job, a recipe file, or a recipe made for the data."""
    from flatout.console import Console
    from flatout.engine.devices import parse_devices
    from flatout.run.fit import train_recipe
    from flatout.run.resolve import resolve
    from flatout.run.session import Options

    rank, engine = _rank(), _engine(args)
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
            job,
            args.data,
            _changes(args),
            accelerated=parse_devices(args.devices, engine).is_accelerated,
            console=console,
        )
        train_recipe(recipe, data, options, console)
    finally:
        console.close()


def _engine(args: argparse.Namespace) -> str:
    """Return the engine that the flags mean."""
    from flatout.engine.devices import UNTESTED, engine_for

    if args.allow_untested:
        # The processes of several devices inherit it.
        os.environ[UNTESTED] = "1"
    return engine_for(args.devices, args.engine)


def _rank() -> int:
    """Return which rank a launcher such as torchrun made this process; 0 where there is none."""
    from flatout.dist.env import launched

    found = launched()
    return found.rank if found else 0


def _hosts(args: argparse.Namespace) -> "Hosts":
    from flatout.dist.rendezvous import Hosts

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


def do_evaluate(args: argparse.Namespace) -> None:
    """Test a run again, or on other data."""
    from flatout.run.evaluate import evaluate
    from flatout.run.folder import Run

    run = Run(args.run, allow_code=args.allow_code)
    result = evaluate(run, args.data, devices=args.devices, engine=_engine(args), console=_side_console(args))
    if _rank() > 0:
        return
    name = "valid" if result["split"] == "valid" else "test"
    accuracy, correct, count, loss = (result[f"{name}_{k}"] for k in ("accuracy", "correct", "count", "loss"))
    _print(args, result, [f"{name} accuracy {accuracy:.4f} ({correct:,} of {count:,} right), loss {loss:.4f}"])


def do_predict(args: argparse.Namespace) -> None:
    """Classify images with a run."""
    from flatout.run.folder import Run

    predictions = Run(args.run, allow_code=args.allow_code).predict(args.files, top=args.top)
    lines = []
    for prediction in predictions:
        pairs = zip(prediction.classes, prediction.probabilities, strict=True)
        lines.append(f"{prediction.file}: " + ", ".join(f"{name} {p:.3f}" for name, p in pairs))
    _print(args, {"run": str(args.run), "predictions": [p.to_dict() for p in predictions]}, lines)


def do_report(args: argparse.Namespace) -> None:
    """Draw a run's pictures and page again."""
    from flatout.report.page import draw_all

    draw_all(args.run)
    print(args.run / "report.html")


def do_pack(args: argparse.Namespace) -> None:
    """Decode and resize images once, into plain NumPy files."""
    from flatout.data.load import find
    from flatout.data.pack import PackSettings, build_pack
    from flatout.run.advise import advise

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


def do_check(args: argparse.Namespace) -> None:
    """Look for unreadable, duplicate and leaked images."""
    from flatout.data.check import check
    from flatout.data.load import find
    from flatout.data.source import Source

    found = find(args.data, args.classes or "")
    source = found if isinstance(found, Source) else found.read()
    result = check(source)
    _print(args, result.to_dict(), result.lines())


def do_scale(args: argparse.Namespace) -> None:
    """Measure a job on several choices of devices."""
    from flatout.console import Console
    from flatout.scale.scale import lines_of, scale

    changes = _given(args, "epochs", "batch_size")
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
    finally:
        console.close()
    _print(args, result, lines_of(result))


def _given(args: argparse.Namespace, *keys: str) -> dict[str, Any]:
    """Return the recipe keys that flags of the same names change; --set comes last."""
    flags = {key: getattr(args, key) for key in keys}
    return {key: value for key, value in flags.items() if value is not None} | dict(map(parse_setting, args.set))


def do_plan(args: argparse.Namespace) -> None:
    """Compile a job for TPUs that are not there, or measure a few steps on devices that are."""
    from flatout.console import Console
    from flatout.plan.plan import plan
    from flatout.plan.text import lines_of

    changes = _given(args, "model", "epochs", "batch_size")
    console = Console(sys.stderr)
    try:
        result = plan(
            args.job,
            args.data,
            changes,
            topologies=args.topology,
            devices=args.devices,
            engine=args.engine,
            images=args.images,
            classes=args.classes,
            price=args.price,
            largest_batch=args.largest_batch,
            allow_code=args.model is not None,
            out=args.out,
            console=console,
        )
    finally:
        console.close()
    _print(args, result, lines_of(result))


def do_devices(args: argparse.Namespace) -> None:
    """List what this machine can train on."""
    from flatout.engine.devices import available, machine

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
