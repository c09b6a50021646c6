"""The commands. Each takes the parsed arguments and a console, and returns what it prints, if anything."""

import os
import shlex
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from flatout.console import Console
from flatout.errors import InputError
from flatout.recipe import MAX_CHANNELS, MAX_IMAGE_SIZE, Data, with_settings
from flatout.settings import Size, nearest, one_or_both, parse_setting

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
SHELLS = ("bash", "zsh", "fish")


def _command(operands: str, flags: str, example: str, **changes: dict[str, Any]) -> Callable[[Any], Any]:
    def register(do: Any) -> Any:
        COMMANDS[do.__name__.removeprefix("do_")] = Command(do, operands, flags, example, changes)
        return do

    return register


@_command(
    "[JOB]",
    "--data --images --model --minutes --epochs --folds --batch-size --lr --seed --set --weights --no-pretrained"
    " --on-bad-image --out --resume --overwrite --no-cache --track --devices --engine --allow-untested"
    " --nodes --node-rank --rendezvous --rendezvous-timeout --restarts",
    "train my-photos/ --epochs 20 --out runs/first",
    out={"help": "the run folder; default: a new one under runs/"},
)
def do_train(args: Namespace, console: Console) -> None:
    """Train a job, a recipe, or your own data."""
    # Before imports, which take seconds.
    began = time.perf_counter()
    from flatout.callbacks.trackers import callbacks_of
    from flatout.dist.hosts import Hosts
    from flatout.engine.devices import parse_devices
    from flatout.engine.factory import rate_on
    from flatout.run.fit import train_recipe
    from flatout.run.options import Options
    from flatout.run.resolve import resolve

    engine = _engine(args)
    timeout = {} if args.rendezvous_timeout is None else {"timeout": args.rendezvous_timeout}
    options = Options(
        out=args.out,
        hosts=Hosts(nodes=args.nodes, node_rank=args.node_rank, rendezvous=args.rendezvous, **timeout),
        restarts=args.restarts,
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
    devices, reasons = parse_devices(args.devices, engine), list[str]()
    recipe, data = resolve(
        job,
        args.data,
        _changes(args),
        accelerated=devices.is_accelerated,
        console=console,
        seconds=options.seconds,
        rate=rate_on(args.devices, engine),
        explain=reasons.append,
    )
    train_recipe(recipe, data, replace(options, notes=tuple(reasons)), console)


@_command(
    "[JOB]",
    "--data --model --batch-size --seed --set --weights --no-pretrained --devices --engine --allow-untested"
    " --out --json",
    "lr fashion-mnist --data data/ --batch-size 512",
)
def do_lr(args: Namespace, console: Console) -> Output:
    """Find a learning rate: train some steps while it rises."""
    from flatout.engine.devices import parse_devices
    from flatout.lr.range_test import find_rate, lines_of
    from flatout.run.options import Options
    from flatout.run.resolve import resolve

    engine = _engine(args)
    accelerated = parse_devices(args.devices, engine).is_accelerated
    recipe, data = resolve(args.job, args.data, _changes(args), accelerated=accelerated, console=console)
    options = Options(out=args.out, devices=args.devices, engine=engine, allow_code=args.model is not None)
    result = find_rate(recipe, data, options, console)
    if result["lr"] is None:
        return {**result, "train": None}, lines_of(result)
    train = _train_command(args, result["lr"])
    return {**result, "train": train}, [*lines_of(result), f"train with it: {train}"]


def _train_command(args: Namespace, lr: float) -> str:
    """Return the command that trains what the flags of `lr` describe."""
    words = ["flatout", "train", *([args.job] if args.job else [])]
    for flag in ("data", "model", "batch_size", "seed", "weights"):
        if (value := getattr(args, flag)) is not None:
            words += [f"--{flag.replace('_', '-')}", str(value)]
    words += ["--no-pretrained"] * args.no_pretrained
    # A rate given with --set would take precedence over --lr.
    words += [word for text in args.set if parse_setting(text)[0] != "optimizer.lr" for word in ("--set", text)]
    for flag in ("devices", "engine"):
        if (value := getattr(args, flag)) != "auto":
            words += [f"--{flag}", value]
    return shlex.join([*words, "--lr", f"{lr:g}"])


def _engine(args: Namespace) -> str:
    from flatout.engine.devices import UNTESTED, engine_for

    if args.allow_untested:
        # The processes of several devices inherit it.
        os.environ[UNTESTED] = "1"
    return engine_for(args.devices, args.engine)


def _job_to_resume(args: Namespace) -> str | Path:
    """Return the recipe in --out; before a first start has written one, the job, so that a loop repeats one command."""
    from flatout.recipe import load_recipe
    from flatout.run.resolve import is_of_job

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


def _changes(args: Namespace) -> dict[str, Any]:
    """Return the recipe keys that flags change; --set comes last."""
    given = vars(args)
    keys = {"lr": "optimizer.lr", "on_bad_image": "data.on_bad_image", "image_folder": "data.images"}
    keys |= {"folds": "data.folds"}
    flags = ("model", "epochs", "batch_size", "seed", *keys)
    changes = {keys.get(flag, flag): given[flag] for flag in flags if given.get(flag) is not None}
    if given.get("weights") is not None:
        changes |= {"weights": str(args.weights.absolute()), "pretrained": True}
    if given.get("no_pretrained"):
        changes |= {"pretrained": False, "weights": ""}
    return changes | dict(map(parse_setting, args.set))


@_command(
    "RUN [DATA]",
    "--run --data --tta --devices --engine --allow-untested --allow-code --json",
    "evaluate runs/first new-photos/",
    data={"help": "other data; default: the run's own"},
)
def do_evaluate(args: Namespace, console: Console) -> Output:
    """Test a run again, or on other data."""
    from flatout.console import aligned
    from flatout.run.evaluate import evaluate
    from flatout.run.folder import load
    from flatout.run.trust import lines_of as trust_lines
    from flatout.tasks import describe_metrics

    run, keys = load(args.run, allow_code=args.allow_code), ("precision", "recall", "f1")
    result = evaluate(run, args.data, devices=args.devices, engine=_engine(args), console=console, tta=args.tta)
    name = "valid" if result["split"] == "valid" else "test"
    how = ", with test-time augmentation" if result["tta"] else ""
    # The mean of several models' probabilities has none.
    loss = "" if result[f"{name}_loss"] is None else f", loss {result[f'{name}_loss']:.4f}"
    lines = [f"{describe_metrics(name, result)}{loss}{how}"]
    lines += trust_lines(name, result)
    if result["task"] == "multi-label":
        table = [[row["class"], *(f"{row[k]:.3f}" for k in keys), f"{row['support']:,}"] for row in result["per_class"]]
        lines += aligned([["class", *keys, "support"], *table])
    return result, lines


@_command(
    "RUN FILE...",
    "--run --top --coverage --explain --tta --allow-code --json",
    "predict runs/first cat.jpg more-photos/",
)
def do_predict(args: Namespace, console: Console) -> Output:
    """Classify images with a run."""
    from flatout.run.folder import load
    from flatout.run.predict import predict

    run = load(args.run, allow_code=args.allow_code)
    predictions = predict(run, args.files, top=args.top, tta=args.tta, coverage=args.coverage, explain=args.explain)
    lines = [str(p) if p.explanation is None else f"{p}; {p.explanation}" for p in predictions]
    return {"run": str(args.run), "predictions": [p.to_dict() for p in predictions]}, lines


@_command("RUN OTHER", "--run --json", "compare runs/first runs/second")
def do_compare(args: Namespace, console: Console) -> Output:
    """Test whether two runs differ by more than chance."""
    from flatout.run.compare import compare, lines_of

    result = compare(args.run, Path(args.other))
    return result, lines_of(result)


@_command("RUN", "--run", "report runs/first")
def do_report(args: Namespace, console: Console) -> Output:
    """Draw a run's pictures and report again."""
    from flatout.report.page import draw_all

    draw_all(args.run)
    path = str(args.run / "report.html")
    return {"report": path}, [path]


@_command("[DIR]", "--port", "board runs/")
def do_board(args: Namespace, console: Console) -> None:
    """Show all runs of a folder on a local web page."""
    from flatout.board.serve import serve

    serve(Path(args.dir or "runs"), args.port, console)


@_command(
    "JOB",
    "--devices --data --out --epochs --batch-size --repeats --weak --set --json",
    "scale fashion-mnist --devices cpu,2xcpu --repeats 3",
    devices={"metavar": "SPEC,...", "required": True, "help": "such as cpu,2xcpu or cpu,cuda,4xcuda"},
)
def do_scale(args: Namespace, console: Console) -> Output:
    """Measure a job on several choices of devices."""
    from flatout.scale.scale import lines_of, scale

    result = scale(
        args.job,
        args.data,
        _changes(args),
        devices=args.devices,
        out=args.out,
        repeats=args.repeats,
        weak=args.weak,
        console=console,
    )
    return result, lines_of(result)


@_command(
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
    from flatout.plan.plan import plan
    from flatout.plan.text import lines_of

    result = plan(
        args.job,
        args.data,
        _changes(args),
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
    return result, lines_of(result)


def _data_options(args: Namespace) -> Data:
    """Return the `data` section of a recipe that flags describe."""
    changes = {"data.classes": args.classes or "", **_changes(args)}
    if others := [key for key in changes if not key.startswith("data.")]:
        raise InputError(f"--set {others[0]}: {args.command} takes keys that start with data.")
    return with_settings(changes).data


@_command(
    "DATA",
    "--data --labels --apply --suggestions --job --model --epochs --seed --devices --engine --allow-untested"
    " --out --images --classes --set --json",
    "check my-photos/",
    job={"metavar": "JOB", "help": "with --labels: train by this job or recipe.toml; default: one made for the data"},
    out={"help": "with --labels: an empty or new folder; default: a new one under runs/"},
)
def do_check(args: Namespace, console: Console) -> Output:
    """Find unreadable, duplicate and leaked images, and wrong labels."""
    from flatout.data.check import check
    from flatout.data.load import find
    from flatout.data.source import Source

    if args.labels or args.apply or args.suggestions:
        return _check_labels(args, console)
    if args.job or args.model or args.epochs or args.seed or args.out:
        raise InputError("--job, --model, --epochs, --seed and --out go with --labels")
    found = find(args.data, _data_options(args), console=console)
    result = check(found if isinstance(found, Source) else found.read())
    return result.to_dict(), result.lines()


def _check_labels(args: Namespace, console: Console) -> Output:
    from flatout.explore.label_files import check_labels

    changes = _changes(args) | ({"data.classes": args.classes} if args.classes else {})
    return check_labels(
        args.job,
        args.data,
        changes,
        out=args.out,
        apply=args.apply,
        suggestions=args.suggestions,
        devices=args.devices,
        engine=_engine(args),
        allow_code=args.model is not None,
        console=console,
    )


@_command(
    "DATA",
    "--data --job --images --classes --model --set --out --json",
    "look my-photos/",
    job={"metavar": "JOB", "help": "show what this job or recipe.toml sees; default: a recipe made for the data"},
)
def do_look(args: Namespace, console: Console) -> Output:
    """Look at images, counts, sizes, outliers and augmentation before training."""
    from flatout.explore.look import look_at
    from flatout.scale.scale import check_free

    check_free(args.out)
    changes = _changes(args) | ({"data.classes": args.classes} if args.classes else {})
    look = look_at(args.job, args.data, changes, console)
    page = look.save(args.out or Path("runs") / f"look-{look.recipe.job}-{datetime.now():%Y%m%d-%H%M%S}")
    return {**look.figures, "page": str(page)}, [*look.lines(), f"page: {page}"]


@_command(
    "DATA",
    "--data --images --size --out --channels --bits --resize --classes --set --on-bad-image --max-bad-share --json",
    "pack my-photos/ --size 128 --out my-photos.pack",
    out={"required": True, "help": "a folder that does not exist yet"},
)
def do_pack(args: Namespace, console: Console) -> Output:
    """Decode and resize images once, into plain NumPy files."""
    from flatout.data.build import build_pack
    from flatout.data.load import find
    from flatout.data.pack import PackSettings
    from flatout.run.facts import look

    size = _size(args.size)
    if args.channels is not None and not 1 <= args.channels <= MAX_CHANNELS:
        raise InputError(f"--channels {args.channels}: must be from 1 to {MAX_CHANNELS}")
    found = find(args.data, _data_options(args), console=console)
    settings = PackSettings(
        size=size,
        channels=args.channels or look(found, str(args.data), accelerated=False).channels,
        resize=args.resize,
        on_bad_image=args.on_bad_image or "stop",
        max_bad_share=args.max_bad_share,
        bits=args.bits or 0,
    )
    pack = build_pack(found, settings, args.out, report=console)
    console.finish()
    rate = len(pack.labels) / pack.build_seconds
    lines = [pack.describe(), f"packed in {pack.build_seconds:.1f} s, {rate:,.0f} images/s: {args.out}"]
    return {"out": str(args.out), "images": len(pack.labels), "skipped": pack.skipped}, lines


def _size(text: str) -> Size:
    """Return the size that `N` or `HxW` names."""
    both = [int(side) if side.isdecimal() else 0 for side in text.lower().split("x")]
    if len(both) > 2 or not all(1 <= side <= MAX_IMAGE_SIZE for side in both):
        raise InputError(f"--size {text}: must be N or HxW, such as 96x160, each from 1 to {MAX_IMAGE_SIZE} pixels")
    return one_or_both((both[0], both[-1]))


@_command("", "--json", "devices")
def do_devices(args: Namespace, console: Console) -> Output:
    """List the devices of this machine."""
    from flatout.engine.devices import available, machine

    found, here = available(), machine()
    lines = [f"cpu: {here['cpu']}, {found['cpu']} cores, {here['memory_bytes'] / 2**30:.0f} GiB"]
    names = {"cuda": f" ({here['gpu']})", "tpu": " (--engine xla)"}
    lines += [f"{kind}: {count}{names.get(kind, '')}" for kind, count in found.items() if kind != "cpu"]
    if len(found) == 1:
        lines.append("no GPU or TPU")
    return {"devices": found, "machine": here}, lines


@_command("", "--clear --json", "cache --clear")
def do_cache(args: Namespace, console: Console) -> Output:
    """Show or clear the decoded and downloaded data."""
    from flatout.data.cache import cache_folder, clear, entries

    shown, what = entries(), "entries"
    if args.clear:
        shown, kept = clear(shown)
        what = f"entries removed, {len(kept)} in use or not removable" if kept else "entries removed"
    total = sum(entry.size_bytes for entry in shown)
    lines = [
        f"{entry.size_bytes / 1e6:10,.1f} MB  {datetime.fromtimestamp(entry.used):%Y-%m-%d}  {entry.what}"
        for entry in shown
    ]
    lines.append(f"{total / 1e6:10,.1f} MB  in {len(shown)} {what}: {cache_folder()}")
    found = [{"path": str(entry.path), "what": entry.what, "bytes": entry.size_bytes} for entry in shown]
    return {"folder": str(cache_folder()), "removed" if args.clear else "entries": found}, lines


@_command("SHELL", "", "completion bash")
def do_completion(args: Namespace, console: Console) -> Output:
    """Print the script that completes commands in your shell."""
    if args.shell not in SHELLS:
        raise InputError(f"flatout completion {args.shell}: {nearest(args.shell, SHELLS)}")
    script = args.completion(args.shell)
    return {"shell": args.shell, "script": script}, [script]
