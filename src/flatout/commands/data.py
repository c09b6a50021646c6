"""Commands on images, packed or not: check, look, pack, cache."""

from argparse import Namespace
from datetime import datetime
from pathlib import Path

from flatout.commands.command import Output, changes_of, command, engine_of, size_of
from flatout.console import Console
from flatout.errors import InputError
from flatout.recipe import MAX_CHANNELS, Recipe, with_settings


@command(
    "DATA",
    "--data --labels --apply --suggestions --job --model --epochs --seed --devices --engine --allow-untested"
    " --out --images --classes --set --json",
    "check my-photos/",
    job={"metavar": "JOB", "help": "with --labels: train by this job or recipe.toml; default: one made for the data"},
    out={"help": "with --labels: an empty or new folder; default: a new one under runs/"},
)
def do_check(args: Namespace, console: Console) -> Output:
    """Find unreadable, duplicate and leaked images, and wrong labels."""
    from flatout.data.build import find
    from flatout.data.check import check
    from flatout.data.source import Source

    if args.labels or args.apply or args.suggestions:
        return _check_labels(args, console)
    if args.job or args.model or args.epochs or args.seed or args.out:
        raise InputError("--job, --model, --epochs, --seed and --out go with --labels")
    recipe = _reading(args)
    found = find(args.data, recipe.data, recipe.task, console=console)
    result = check(found if isinstance(found, Source) else found.read())
    return result.to_dict(), result.lines()


def _check_labels(args: Namespace, console: Console) -> Output:
    from flatout.explore.label_files import check_labels

    changes = changes_of(args) | ({"data.classes": args.classes} if args.classes else {})
    return check_labels(
        args.job,
        args.data,
        changes,
        out=args.out,
        apply=args.apply,
        suggestions=args.suggestions,
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
    from flatout.explore.look import look_at
    from flatout.scale.scale import check_free

    check_free(args.out)
    changes = changes_of(args) | ({"data.classes": args.classes} if args.classes else {})
    look = look_at(args.job, args.data, changes, console)
    page = look.save(args.out or Path("runs") / f"look-{look.recipe.job}-{datetime.now():%Y%m%d-%H%M%S}")
    return {**look.figures, "page": str(page)}, [*look.lines(), f"page: {page}"]


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
