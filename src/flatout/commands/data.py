"""Commands on images, packed or not: check, look, pack, cache."""

from argparse import Namespace
from datetime import datetime

from flatout.commands.command import Output, changes_of, command, engine_of, size_of
from flatout.console import Console
from flatout.errors import InputError
from flatout.recipe import MAX_CHANNELS, Recipe, with_settings


@command(
    "DATA",
    "--data --labels --apply --suggestions --minutes --job --model --epochs --seed --devices --engine --allow-untested"
    " --out --images --classes --set --json",
    "check my-photos/",
    job={"metavar": "JOB", "help": "with --labels: train by this job or recipe.toml; default: one made for the data"},
    minutes={"help": "with --labels: make the recipe for so many minutes"},
    out={"help": "with --labels: an empty or new folder; default: a new one under runs/"},
)
def do_check(args: Namespace, console: Console) -> Output:
    """Find unreadable, duplicate and leaked images, and wrong labels."""
    from flatout.analysis.check import check, format_check
    from flatout.data.build import find
    from flatout.data.source import Source

    if args.labels or args.apply or args.suggestions:
        return _check_labels(args, console)
    only_labels = ("minutes", "job", "model", "epochs", "seed", "out")
    if given := next((name for name in only_labels if getattr(args, name) is not None), None):
        raise InputError(f"--{given} requires --labels")
    recipe = _reading(args)
    found = find(args.data, recipe.data, recipe.task, console=console)
    result = check(found if isinstance(found, Source) else found.read(), console)
    console.finish()
    return result, format_check(result)


def _check_labels(args: Namespace, console: Console) -> Output:
    from flatout.analysis.label_errors import check_labels

    changes = changes_of(args) | ({"data.classes": args.classes} if args.classes else {})
    return check_labels(
        args.job,
        args.data,
        changes,
        out=args.out,
        apply=args.apply,
        suggestions=args.suggestions,
        minutes=args.minutes,
        devices=args.devices,
        engine=engine_of(args),
        allow_code=args.model is not None,
        console=console,
    )


@command(
    "DATA",
    "--data --job --images --classes --model --set --out --json",
    "look my-photos/",
    job={"metavar": "JOB", "help": "show what this job or recipe.toml sees; default: a recipe made for the data"},
)
def do_look(args: Namespace, console: Console) -> Output:
    """Look at images, counts, sizes, outliers and augmentation before training."""
    from flatout.analysis.look import format_look, look_at
    from flatout.analysis.output import check_free, default_folder

    check_free(args.out)
    changes = changes_of(args) | ({"data.classes": args.classes} if args.classes else {})
    look = look_at(args.job, args.data, changes, console)
    page = look.save(args.out or default_folder(f"look-{look.recipe.job}"))
    return {**look.figures, "page": str(page)}, [*format_look(look), f"page: {page}"]


@command(
    "DATA",
    "--data --images --size --out --channels --bits --resize --classes --set --on-bad-image --max-bad-share --json",
    "pack my-photos/ --size 128 --out my-photos.pack",
    out={"required": True, "help": "a folder that does not exist yet"},
)
def do_pack(args: Namespace, console: Console) -> Output:
    """Decode and resize images once, into plain NumPy files."""
    from flatout.data.build import build_pack, find
    from flatout.data.pack import PackSettings
    from flatout.train.dataset_stats import look

    size = size_of(args.size)
    if args.channels is not None and not 1 <= args.channels <= MAX_CHANNELS:
        raise InputError(f"--channels {args.channels}: must be from 1 to {MAX_CHANNELS}")
    recipe = _reading(args)
    found = find(args.data, recipe.data, recipe.task, console=console)
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


@command("", "--clear --json", "cache --clear")
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


def _reading(args: Namespace) -> Recipe:
    """Return a recipe with what flags say of reading data."""
    changes = {"data.classes": args.classes or "", **changes_of(args)}
    if others := [key for key in changes if not key.startswith("data.") and key != "task"]:
        raise InputError(f"--set {others[0]}: {args.command} takes task and keys that start with data.")
    return with_settings(changes)
