"""Commands that train, or say what training would take: train, lr, bench, scale, plan."""

import shlex
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.commands.command import Output, changes_of, command, engine_of
from flatout.console import Console
from flatout.errors import InputError
from flatout.settings import parse_setting

if TYPE_CHECKING:
    from flatout.data.source import DataRef, Source
    from flatout.recipe import Recipe
    from flatout.train.request import Options


@command(
    "[JOB]",
    "--data --images --model --minutes --epochs --folds --batch-size --lr --seed --set --weights --pretrained"
    " --on-bad-image --out --resume --overwrite --no-cache --track --devices --engine --allow-untested"
    " --nodes --node-rank --rendezvous --rendezvous-timeout --restarts --hang-timeout",
    "train my-photos/ --epochs 20 --out runs/first",
    out={"help": "the run folder; default: a new one under runs/"},
)
def do_train(args: Namespace, console: Console) -> None:
    """Train a job, a recipe, or your own data."""
    # Before imports, which take seconds.
    began = time.perf_counter()
    from flatout.distributed.environment import Hosts
    from flatout.engine.devices import parse_devices
    from flatout.train import claim
    from flatout.train.recipes import resolve, start_of
    from flatout.train.request import Options, TrainRequest, check
    from flatout.train.trackers import callbacks_of

    engine = engine_of(args)
    timeout = {} if args.rendezvous_timeout is None else {"timeout": args.rendezvous_timeout}
    options = Options(
        out=args.out,
        hosts=Hosts(nodes=args.nodes, node_rank=args.node_rank, rendezvous=args.rendezvous, **timeout),
        restarts=args.restarts,
        hang_timeout=args.hang_timeout,
        minutes=args.minutes,
        began=began,
        devices=args.devices,
        engine=engine,
        resume=args.resume,
        overwrite=args.overwrite,
        cache=not args.no_cache,
        # A model that the user names on the command line may be code; one that a file names may not.
        allow_code=args.model is not None,
        callbacks=callbacks_of(args.track),
    )
    job = _job_to_resume(args) if args.resume else args.job
    changes, reasons = changes_of(args), list[str]()
    plain, is_complete = start_of(job, changes)
    claim.check(options)
    check(plain, options)
    if (place := str(args.data or job or "").partition("?")[0]) or is_complete:
        # The name alone: an address may hold a password.
        console.note(f"looking at {plain.job if is_complete else Path(place).absolute().name}")
    devices = parse_devices(args.devices, engine)
    # This imports torch, which takes seconds.
    from flatout.engine.factory import speeds_on
    from flatout.train.run import train

    recipe, data = resolve(
        job,
        args.data,
        changes,
        accelerated=devices.is_accelerated,
        console=console,
        seconds=options.seconds,
        began=began,
        speeds=speeds_on(args.devices, engine),
        explain=reasons.append,
    )
    train(TrainRequest(recipe=recipe, data=data, options=replace(options, notes=tuple(reasons))), console)


def _job_to_resume(args: Namespace) -> str | Path:
    """Return the recipe in --out; before a first start has written one, the job, so that a loop repeats one command."""
    from flatout.recipe import load_recipe
    from flatout.train.recipes import is_of_job

    if args.out is None:
        raise InputError("--resume needs --out, the run folder to continue")
    recipe = args.out / "recipe.toml"
    if recipe.is_file():
        if args.job is not None and not is_of_job(load_recipe(recipe), args.job):
            raise InputError(f"--resume: the run in {args.out} is not of {args.job}; remove {args.job}")
        return recipe
    if args.job is None:
        raise InputError(f"--resume: {args.out} is not a run folder: it has no recipe.toml; to start it, name the job")
    return args.job


@command(
    "[JOB]",
    "--data --model --batch-size --seed --set --weights --pretrained --devices --engine --allow-untested --out --json",
    "lr fashion-mnist --data data/ --batch-size 512",
)
def do_lr(args: Namespace, console: Console) -> Output:
    """Find a learning rate: train some steps while it rises."""
    from flatout.analysis.lr_finder import find_rate, format_lr

    recipe, data, options = _measured_job(args, console)
    result = find_rate(recipe, data, replace(options, out=args.out), console)
    if result["lr"] is None:
        return {**result, "train": None}, format_lr(result)
    train = _train_command(args, result["lr"])
    return {**result, "train": train}, [*format_lr(result), f"train with it: {train}"]


def _train_command(args: Namespace, lr: float) -> str:
    """Return the command that trains what the flags of `lr` describe."""
    words = ["flatout", "train", *([args.job] if args.job else [])]
    for flag in ("data", "model", "batch_size", "seed", "weights"):
        if (value := getattr(args, flag)) is not None:
            words += [f"--{flag.replace('_', '-')}", str(value)]
    if args.pretrained is not None:
        words.append("--pretrained" if args.pretrained else "--no-pretrained")
    # A rate given with --set would take precedence over --lr.
    words += [word for text in args.set if parse_setting(text)[0] != "optimizer.lr" for word in ("--set", text)]
    for flag in ("devices", "engine"):
        if (value := getattr(args, flag)) != "auto":
            words += [f"--{flag}", value]
    return shlex.join([*words, "--lr", f"{lr:g}"])


@command(
    "JOB",
    "--data --model --batch-size --seed --set --devices --engine --allow-untested --json",
    "bench fashion-mnist --devices cpu",
)
def do_bench(args: Namespace, console: Console) -> Output:
    """Measure the input path, the step and both, and say what limits training."""
    from flatout.analysis.throughput import bench, format_bench

    result = bench(*_measured_job(args, console), console)
    return result, format_bench(result)


def _measured_job(args: Namespace, console: Console) -> "tuple[Recipe, DataRef | Source, Options]":
    """Return what a command measures: the recipe and the data of a job, and how to run it."""
    from flatout.engine.devices import parse_devices
    from flatout.train.recipes import resolve
    from flatout.train.request import Options

    engine = engine_of(args)
    accelerated = parse_devices(args.devices, engine).is_accelerated
    recipe, data = resolve(args.job, args.data, changes_of(args), accelerated=accelerated, console=console)
    return recipe, data, Options(devices=args.devices, engine=engine, allow_code=args.model is not None)


@command(
    "JOB",
    "--devices --data --out --epochs --batch-size --repeats --weak --set --json",
    "scale fashion-mnist --devices cpu,2xcpu --repeats 3",
    devices={"metavar": "SPEC,...", "required": True, "help": "such as cpu,2xcpu or cpu,cuda,4xcuda"},
)
def do_scale(args: Namespace, console: Console) -> Output:
    """Measure a job on several choices of devices."""
    from flatout.analysis.scale import format_scale, scale

    result = scale(
        args.job,
        args.data,
        changes_of(args),
        devices=args.devices,
        out=args.out,
        repeats=args.repeats,
        weak=args.weak,
        console=console,
    )
    return result, format_scale(result)


@command(
    "JOB",
    "--topology --devices --engine --data --images --classes --model --epochs --batch-size --price --largest-batch"
    " --out --set --json",
    "plan fashion-mnist --topology v5e:2x4,v5e:4x4",
    devices={"metavar": "SPEC,...", "default": None, "help": "devices to measure, such as cpu,2xcpu"},
    images={"type": int, "metavar": "N", "dest": "images", "help": "training images, instead of counting them"},
    classes={"type": int, "metavar": "K", "help": "number of classes, instead of counting them"},
)
def do_plan(args: Namespace, console: Console) -> Output:
    """Estimate speed and memory of a job on TPUs, or measure a few steps here."""
    from flatout.analysis.plan import format_plan, plan

    result = plan(
        args.job,
        args.data,
        changes_of(args),
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
    return result, format_plan(result)
