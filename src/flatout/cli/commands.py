"""The commands, in the order of the help text. Each returns what it prints, if anything."""

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.config import MAX_CHANNELS, MAX_IMAGE_SIZE, Recipe, load_recipe, with_settings
from flatout.config.settings import Size, collapse_size, nearest, parse_setting
from flatout.data.cache import cache_folder, entries, remove
from flatout.distributed.environment import Hosts
from flatout.engine.devices import available, engine_for, machine, parse_devices
from flatout.utils.console import Console, aligned, counted
from flatout.utils.errors import InputError
from flatout.utils.files import check_free, default_folder, make_folder

if TYPE_CHECKING:
    from flatout.data.source import DataSource, ImageDataset
    from flatout.inference.run import Run
    from flatout.train.request import Options

# The result for --json, and the lines that are printed otherwise.
Output = tuple[Any, Sequence[str]]


@dataclass(frozen=True)
class Command:
    """A function, whose docstring is the help text; `changes` override entries of the table of flags."""

    do: Callable[[Namespace, Console], Output | None]
    operands: str  # such as `RUN [DATA]` or `RUN FILE...`
    flags: str
    example: str
    changes: dict[str, dict[str, Any]]


COMMANDS: dict[str, Command] = {}


def command(operands: str, flags: str, example: str, **changes: dict[str, Any]) -> Callable[[Any], Any]:
    """Register a function as the command of its name without `do_`; for the arguments see `Command`."""

    def register(do: Any) -> Any:
        COMMANDS[do.__name__.removeprefix("do_")] = Command(do, operands, flags, example, changes)
        return do

    return register


# Flags, and the recipe keys that they change.
KEYS = {name: name for name in ("model", "epochs", "batch_size", "seed", "pretrained", "image_size", "weights")}
KEYS |= {"lr": "optimizer.lr", "folds": "data.folds", "on_bad_image": "data.on_bad_image"}
KEYS |= {"image_folder": "data.images", "class_file": "data.classes"}


def changes_of(args: Namespace) -> dict[str, Any]:
    """Return the recipe keys that flags change; --set comes last."""
    changes = {key: value for flag, key in KEYS.items() if (value := getattr(args, flag, None)) is not None}
    if "image_size" in changes:
        changes["image_size"] = size_of(args.image_size, "--image-size")
    if "weights" in changes:
        changes |= {"weights": str(args.weights), "pretrained": True}
    if getattr(args, "pretrained", None) is False:
        changes |= {"pretrained": False, "weights": ""}
    return changes | dict(map(parse_setting, args.set))


def picked(args: Namespace, names: str) -> dict[str, Any]:
    """Return flags as keyword arguments, for a function whose parameters have their names."""
    return {name: getattr(args, name) for name in names.split()}


def size_of(text: str, flag: str = "--size") -> Size:
    """Return the size that `N` or `HxW` names."""
    both = [int(side) if side.isdecimal() else 0 for side in text.lower().split("x")]
    if len(both) > 2 or not all(1 <= side <= MAX_IMAGE_SIZE for side in both):
        raise InputError(f"{flag} {text}: must be N or HxW, such as 96x160, each from 1 to {MAX_IMAGE_SIZE} pixels")
    return collapse_size((both[0], both[-1]))


@command(
    "[JOB]",
    "--data --images --model --minutes --epochs --folds --batch-size --lr --seed --set --weights --pretrained"
    " --on-bad-image --out --resume --overwrite --no-cache --track --devices --engine"
    " --nodes --rendezvous --rendezvous-timeout --restarts --hang-timeout",
    "train my-photos/ --epochs 20 --out runs/first",
    out={"help": "the run folder; default: a new one under runs/"},
)
def do_train(args: Namespace, console: Console) -> None:
    """Train a job, a recipe, or your own data."""
    # Before imports, which take seconds.
    began = time.perf_counter()
    from flatout.train import run_dir
    from flatout.train.callbacks import callbacks_of
    from flatout.train.recipes import start_of
    from flatout.train.request import Options, check_request

    engine = engine_for(args.devices, args.engine)
    options = Options(
        **picked(args, "out restarts hang_timeout minutes devices resume overwrite"),
        hosts=Hosts(**picked(args, "nodes rendezvous"), timeout=args.rendezvous_timeout),
        began=began,
        engine=engine,
        cache=not args.no_cache,
        # A model given on the command line may be code; one given in a file may not.
        allow_code=args.model is not None,
        callbacks=callbacks_of(args.track),
    )
    job = _job_to_resume(args) if args.resume else args.job
    changes = changes_of(args)
    plain, is_complete = start_of(job, changes)
    run_dir.check(options)
    check_request(plain, options)
    if (place := str(args.data or job or "").partition("?")[0]) or is_complete:
        # The name alone: a URL may contain a password.
        console.note(f"looking at {plain.job if is_complete else Path(place).absolute().name}")
    parse_devices(args.devices, engine)  # refuses wrong ones before the import of torch, which takes seconds
    from flatout.train.run import train_job

    train_job(job, args.data, changes, options, console)


def _job_to_resume(args: Namespace) -> str | Path:
    """Return the recipe in --out if it exists, else the job, so that a loop can repeat one command."""
    from flatout.train.recipes import is_of_job

    if args.out is None:
        raise InputError("--resume needs --out, the run folder to continue")
    recipe = args.out / "recipe.toml"
    if recipe.is_file():
        if args.job is not None and not is_of_job(load_recipe(recipe), args.job):
            raise InputError(
                f"--resume: the run in {args.out} is not of {args.job}; leave it out, or choose another --out"
            )
        return recipe
    if args.job is None:
        raise InputError(f"--resume: {args.out} is not a run folder: it has no recipe.toml; to start it, name the job")
    return args.job


@command(
    "[JOB]",
    "--data --model --batch-size --seed --set --weights --pretrained --devices --engine --out --json",
    "lr fashion-mnist --data data/ --batch-size 512",
)
def do_lr(args: Namespace, console: Console) -> Output:
    """Find a learning rate: train some steps while it rises."""
    from flatout.analysis.lr_finder import find_rate, format_lr

    recipe, data, options = _measured_job(args, console)
    result = find_rate(recipe, data, replace(options, out=args.out), console)
    return result, format_lr(result)


@command(
    "JOB",
    "--data --model --batch-size --seed --set --devices --engine --json",
    "bench fashion-mnist --devices cpu",
)
def do_bench(args: Namespace, console: Console) -> Output:
    """Measure the input path, the step and both, and say what limits training."""
    from flatout.analysis.throughput import bench, format_bench

    result = bench(*_measured_job(args, console), console)
    return result, format_bench(result)


def _measured_job(
    args: Namespace, console: Console, **more: Any
) -> "tuple[Recipe, DataSource | ImageDataset, Options]":
    """Return recipe, data and options of a job to measure; `more` goes to `resolve`."""
    from flatout.train.recipes import resolve
    from flatout.train.request import Options

    engine = engine_for(args.devices, args.engine)
    accelerated = parse_devices(args.devices, engine).is_accelerated
    recipe, data = resolve(args.job, args.data, changes_of(args), accelerated=accelerated, console=console, **more)
    return recipe, data, Options(devices=args.devices, engine=engine, allow_code=args.model is not None)


@command(
    "JOB",
    "--devices --data --out --epochs --batch-size --set --json",
    "scale fashion-mnist --devices cpu,2xcpu",
    devices={"metavar": "SPEC,...", "required": True, "help": "such as cpu,2xcpu or cpu,cuda,4xcuda"},
)
def do_scale(args: Namespace, console: Console) -> Output:
    """Measure a job on several choices of devices."""
    from flatout.analysis.throughput import format_scale, scale

    result = scale(args.job, args.data, changes_of(args), **picked(args, "devices out"), console=console)
    return result, format_scale(result)


@command(
    "[JOB]",
    "--gpu --topology --data --images --classes --model --image-size --epochs --batch-size"
    " --inference --price --out --set --json",
    "plan --model timm:resnet50 --images 1281167 --classes 1000 --gpu h100,rtx4090",
    images={"type": int, "metavar": "N", "dest": "images", "help": "training images, instead of counting them"},
    classes={"type": int, "metavar": "K", "dest": "classes", "help": "number of classes, instead of counting them"},
)
def do_plan(args: Namespace, console: Console) -> Output:
    """Estimate speed, memory and cost of a job on GPUs or TPUs that you don't have."""
    from flatout.analysis.plan import format_plan, plan

    flags = {"topologies": args.topology, "gpus": args.gpu, "allow_code": args.model is not None}
    flags |= picked(args, "inference images classes price out")
    result = plan(args.job, args.data, changes_of(args), **flags, console=console)
    return result, format_plan(result)


@command(
    "RUN [DATA]",
    "--run --data --tta --devices --engine --allow-code --json",
    "evaluate runs/first new-photos/",
    data={"help": "other data; default: the run's own"},
)
def do_evaluate(args: Namespace, console: Console) -> Output:
    """Test a run again, or on other data."""
    from flatout.inference.evaluate import evaluate, prefix_of
    from flatout.report.page import SET_COLUMNS, prediction_sets, trust
    from flatout.tasks import describe_metrics

    run = _run_of(args)
    result = evaluate(run, args.data, **picked(args, "devices engine tta"), console=console)
    name = prefix_of(result["split"])
    # The mean of several models' probabilities has no loss.
    loss = "" if result[f"{name}_loss"] is None else f", loss {result[f'{name}_loss']:.4f}"
    lines = [f"{describe_metrics(name, result)}{loss}{', with test-time augmentation' if result['tta'] else ''}"]
    lines += [f"{about}: {value}" for about, value in trust(result, name)]
    tables = [[SET_COLUMNS, *sets]] if (sets := prediction_sets(result)) else []
    if result["task"] == "multi-label":
        keys = ("class", "precision", "recall", "f1")
        rows = ([*(row[key] for key in keys), f"{row['support']:,}"] for row in result["per_class"])
        tables.append([[*keys, "support"], *rows])
    for table in tables:
        lines += aligned([[f"{x:.3f}" if isinstance(x, float) else str(x) for x in row] for row in table])
    return result, lines


def _run_of(args: Namespace) -> "Run":
    from flatout.inference.run import load

    return load(args.run, allow_code=args.allow_code)


@command(
    "RUN FILE...",
    "--run --top --coverage --explain --tta --on-bad-image --csv --allow-code --json",
    "predict runs/first cat.jpg more-photos/",
)
def do_predict(args: Namespace, console: Console) -> Output:
    """Classify images with a run."""
    from flatout.inference.predict import predict, write_csv

    run = _run_of(args)
    # In a table, images that cannot be read are rows.
    bad = args.on_bad_image or ("skip" if args.csv else "stop")
    flags = picked(args, "top tta coverage explain")
    predictions = predict(run, args.files, **flags, on_bad_image=bad, note=console.note)
    if args.csv:
        counts = write_csv(args.csv, run, predictions, top=args.top)
        line = f"{args.csv}: {counted(counts['images'], 'image')}, {counts['unreadable']:,} of them cannot be read"
        return {"run": str(args.run), "csv": str(args.csv), **counts}, [line]
    found = list(predictions)
    lines = [str(p) if p.explanation is None else f"{p}; {p.explanation}" for p in found]
    return {"run": str(args.run), "predictions": [p.to_dict() for p in found]}, lines


@command(
    "RUN",
    "--run --format --out --data --allow-code --json",
    "export runs/first --format onnx --out first.onnx",
    out={"required": True, "metavar": "FILE", "help": "the file; it must not exist"},
    data={"help": "images to verify on; default: the run's own"},
)
def do_export(args: Namespace, console: Console) -> Output:
    """Write a run for other programs (ONNX), verified on its test images."""
    from flatout.inference.export import FORMAT, export

    if args.format not in (None, FORMAT):
        raise InputError(f"--format {args.format}: the only format is {FORMAT}")
    done = export(_run_of(args), args.out, data=args.data, console=console)
    return done.to_dict(), done.lines()


@command("RUN OTHER", "--run --json", "compare runs/first runs/second")
def do_compare(args: Namespace, console: Console) -> Output:
    """Test whether two runs differ by more than chance."""
    from flatout.inference.evaluate import compare, format_comparison

    result = compare(Path(args.run), Path(args.other))
    return result, format_comparison(result)


@command("RUN", "--run", "report runs/first")
def do_report(args: Namespace, console: Console) -> Output:
    """Draw a run's pictures and report again."""
    from flatout.report.page import draw_all

    draw_all(Path(args.run))
    return None, [str(Path(args.run) / "report.html")]


@command("[DIR]", "--port", "board runs/")
def do_board(args: Namespace, console: Console) -> None:
    """Show all runs of a folder on a local web page."""
    try:
        from flatout.analysis.board import serve_board
    except ModuleNotFoundError as error:
        raise InputError(f"board needs the package {error.name}: pip install 'flatout[board]'") from None
    serve_board(Path(args.dir or "runs"), args.port, console)


@command(
    "RUN URL",
    "--run --private --overwrite --json",
    "upload runs/first hf://USER/NAME",
    overwrite={"help": "replace the files of the repository"},
)
def do_upload(args: Namespace, console: Console) -> Output:
    """Publish a run with a model card on the Hugging Face hub."""
    from flatout.inference.hub import format_upload, upload
    from flatout.inference.run import load

    # As a path, since only a run of this machine can be published.
    result = upload(load(Path(args.run)), args.url, **picked(args, "private overwrite"), console=console)
    return result, format_upload(result)


@command(
    "DATA",
    "--data --labels --minutes --job --model --epochs --seed --devices --engine --out --images --classes --set --json",
    "check my-photos/",
    job={"metavar": "JOB", "help": "with --labels: train by this job or recipe.toml; default: one made for the data"},
    minutes={"help": "with --labels: make the recipe for so many minutes"},
    out={"help": "with --labels: an empty or new folder; default: a new one under runs/"},
)
def do_check(args: Namespace, console: Console) -> Output:
    """Find unreadable, duplicate and leaked images, and wrong labels."""
    from flatout.analysis.check import check, format_check

    if args.labels:
        return _check_labels(args, console)
    only_labels = ("minutes", "job", "model", "epochs", "seed", "out", "devices", "engine")
    if given := [name for name in only_labels if getattr(args, name) not in (None, "auto")]:
        raise InputError(f"--{given[0]} requires --labels")
    _, data = _data_of(args, console)
    result = check(data.read(), console)
    console.finish()
    return result, format_check(result)


def _check_labels(args: Namespace, console: Console) -> Output:
    from flatout.analysis.label_errors import COST_OF_FOLDS, FOLDS, find_label_errors, write_errors
    from flatout.engine.factory import speeds_on

    check_free(args.out)
    minutes, speeds = args.minutes, speeds_on(args.devices, engine_for(args.devices, args.engine))
    if minutes is not None and not minutes > 0:
        raise InputError(f"--minutes {minutes:g}: must be greater than 0")
    if minutes is not None and args.job is not None:
        raise InputError(f"--minutes {minutes:g}: needs a generated recipe: remove --job")
    seconds = None if minutes is None else 60 * minutes / COST_OF_FOLDS
    recipe, data, options = _measured_job(args, console, seconds=seconds, speeds=speeds)
    if recipe.pretrained and minutes is not None:
        # Each fold computes the features of all images.
        recipe, data, options = _measured_job(args, console, seconds=60 * minutes / FOLDS, speeds=speeds)
    if not recipe.pretrained:
        console.note(f"finding wrong labels takes about {COST_OF_FOLDS} times as long as training once")
    found = find_label_errors(recipe, data, options, console)
    return write_errors(found, make_folder(args.out or default_folder(f"labels-{recipe.job}")))


@command(
    "DATA",
    "--data --job --images --classes --model --set --out --json",
    "look my-photos/",
    job={"metavar": "JOB", "help": "show what this job or recipe.toml sees; default: a recipe made for the data"},
)
def do_look(args: Namespace, console: Console) -> Output:
    """Look at images, counts, sizes, outliers and augmentation before training."""
    from flatout.analysis.look import format_look, look_at

    check_free(args.out)
    look = look_at(args.job, args.data, changes_of(args), console)
    page = look.save(args.out or default_folder(f"look-{look.recipe.job}"))
    return {**look.figures, "page": str(page)}, [*format_look(look), f"page: {page}"]


@command(
    "DATA",
    "--data --images --size --out --channels --classes --set --on-bad-image --json",
    "pack my-photos/ --size 128 --out my-photos.pack",
    out={"required": True, "help": "a folder that does not exist yet"},
)
def do_pack(args: Namespace, console: Console) -> Output:
    """Decode and resize images once, into plain NumPy files."""
    from flatout.data.build import build_pack
    from flatout.data.pack import PackSettings
    from flatout.train.auto_recipe import measure_dataset

    size = size_of(args.size)
    if args.channels is not None and not 1 <= args.channels <= MAX_CHANNELS:
        raise InputError(f"--channels {args.channels}: must be from 1 to {MAX_CHANNELS}")
    recipe, found = _data_of(args, console)
    channels = args.channels or measure_dataset(found, accelerated=False).channels
    settings = PackSettings(**vars(recipe.data), size=size, channels=channels)
    pack = build_pack(found, settings, args.out, report=console)
    console.finish()
    rate = len(pack.labels) / pack.build_seconds
    lines = [pack.describe(), f"packed in {pack.build_seconds:.1f} s, {rate:,.0f} images/s: {args.out}"]
    return {"out": str(args.out), "images": len(pack.labels), "skipped": pack.skipped}, lines


@command("", "--clear --json", "cache --clear")
def do_cache(args: Namespace, console: Console) -> Output:
    """Show or clear the decoded and downloaded data."""
    found, what = entries(), "entries"
    shown = [entry for entry in found if not args.clear or remove(entry.path)]
    if args.clear:
        kept = len(found) - len(shown)
        what = f"entries removed, {kept} in use or not removable" if kept else "entries removed"
    rows = [(entry.size_bytes, f"{datetime.fromtimestamp(entry.used):%Y-%m-%d}  {entry.what}") for entry in shown]
    rows.append((sum(size for size, _ in rows), f"in {len(shown)} {what}: {cache_folder()}"))
    lines = [f"{size / 1e6:10,.1f} MB  {about}" for size, about in rows]
    listed = [{"path": str(entry.path), "what": entry.what, "bytes": entry.size_bytes} for entry in shown]
    return {"folder": str(cache_folder()), "removed" if args.clear else "entries": listed}, lines


def _data_of(args: Namespace, console: Console) -> "tuple[Recipe, DataSource | ImageDataset]":
    """Return a recipe with the flags for reading data, and the data."""
    from flatout.data.detect import find

    changes = changes_of(args)
    if others := [key for key in changes if not key.startswith("data.") and key != "task"]:
        raise InputError(
            f"--set {others[0]}: {args.command} takes only task, and keys of the section data, such as data.images"
        )
    recipe = with_settings(changes)
    return recipe, find(args.data, recipe.data, recipe.task, console=console)


@command(
    "FILE",
    "--model --out --check --size --classes --channels --verbose --json",
    "convert model.keras --model fashion-cnn --out weights.safetensors",
    FILE={"help": "weights of Paddle, TensorFlow, Keras, torch or Lightning; of a checkpoint, its folder or prefix"},
    model={"required": True},
    out={"required": True, "metavar": "FILE", "help": "a new .safetensors file"},
    size={"required": False, "help": "height and width of the model's images; default: as the file has them"},
    classes={"type": int, "metavar": "K", "dest": "classes", "help": "outputs of the model; default: as in the file"},
    channels={"help": "of the model's images; default: as the file has them"},
)
def do_convert(args: Namespace, console: Console) -> Output:
    """Convert weights of another framework to a model's."""
    from flatout.models.convert.convert import Shape, convert, format_conversion

    for flag, value in picked(args, "classes channels").items():
        if value is not None and value < 1:
            raise InputError(f"--{flag} {value}: must be at least 1")
    shape = Shape(args.classes, size_of(args.size) if args.size else None, args.channels)
    result = convert(Path(args.file), args.model, args.out, shape=shape, check=args.check, report=console.note)
    return result, format_conversion(result, verbose=args.verbose)


SHELLS = ("bash", "zsh", "fish")


@command("", "--json", "devices")
def do_devices(args: Namespace, console: Console) -> Output:
    """List the devices of this machine."""
    found, here = available(), machine()
    lines = [f"cpu: {here['cpu']}, {found['cpu']} cores, {here['memory_bytes'] / 2**30:.0f} GiB"]
    names = {"cuda": f" ({here['gpu']})", "tpu": " (--engine xla)"}
    lines += [f"{kind}: {count}{names.get(kind, '')}" for kind, count in found.items() if kind != "cpu"]
    if len(found) == 1:
        lines.append("no GPU or TPU")
    return {"devices": found, "machine": here}, lines


@command("SHELL", "", "completion bash")
def do_completion(args: Namespace, console: Console) -> Output:
    """Print the script that completes commands in your shell."""
    if args.shell not in SHELLS:
        raise InputError(f"flatout completion {args.shell}: {nearest(args.shell, SHELLS)}")
    return None, [args.completion(args.shell)]
