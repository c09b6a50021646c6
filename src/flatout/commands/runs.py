"""Commands on finished runs: evaluate, predict, export, compare, report, board, upload."""

from argparse import Namespace
from pathlib import Path

from flatout.commands.command import Output, command, engine_of
from flatout.console import Console
from flatout.errors import InputError


@command(
    "RUN [DATA]",
    "--run --data --tta --devices --engine --allow-untested --allow-code --json",
    "evaluate runs/first new-photos/",
    data={"help": "other data; default: the run's own"},
)
def do_evaluate(args: Namespace, console: Console) -> Output:
    """Test a run again, or on other data."""
    from flatout.console import aligned
    from flatout.inference.calibration import format_calibration
    from flatout.inference.evaluate import evaluate
    from flatout.inference.run import load
    from flatout.tasks import describe_metrics

    run, keys = load(args.run, allow_code=args.allow_code), ("precision", "recall", "f1")
    result = evaluate(run, args.data, devices=args.devices, engine=engine_of(args), console=console, tta=args.tta)
    name = "valid" if result["split"] == "valid" else "test"
    how = ", with test-time augmentation" if result["tta"] else ""
    # The mean of several models' probabilities has none.
    loss = "" if result[f"{name}_loss"] is None else f", loss {result[f'{name}_loss']:.4f}"
    lines = [f"{describe_metrics(name, result)}{loss}{how}"]
    lines += format_calibration(name, result)
    if result["task"] == "multi-label":
        table = [[row["class"], *(f"{row[k]:.3f}" for k in keys), f"{row['support']:,}"] for row in result["per_class"]]
        lines += aligned([["class", *keys, "support"], *table])
    return result, lines


@command(
    "RUN FILE...",
    "--run --top --coverage --explain --tta --on-bad-image --csv --allow-code --json",
    "predict runs/first cat.jpg more-photos/",
)
def do_predict(args: Namespace, console: Console) -> Output:
    """Classify images with a run, or with the ONNX file that it was exported to."""
    from flatout.inference.predict import predict, write_csv
    from flatout.inference.run import OnnxRun, load

    if isinstance(args.run, Path) and args.run.suffix == ".onnx" and not args.run.is_dir():
        if args.explain is not None:
            raise InputError("--explain: heatmaps need the run; an ONNX file has the answers alone")
        run = OnnxRun(args.run)
    else:
        run = load(args.run, allow_code=args.allow_code)
    flags = {"top": args.top, "tta": args.tta, "coverage": args.coverage, "explain": args.explain}
    # In a table, images that cannot be read are rows.
    flags["on_bad_image"] = args.on_bad_image or ("skip" if args.csv else "stop")
    predictions = predict(run, args.files, **flags, note=console.note)
    if args.csv:
        counts = write_csv(args.csv, run, predictions, top=args.top)
        line = f"{args.csv}: {counts['images']:,} images, {counts['unreadable']:,} of them cannot be read"
        return {"run": str(args.run), "csv": str(args.csv), **counts}, [line]
    found = list(predictions)
    lines = [str(p) if p.explanation is None else f"{p}; {p.explanation}" for p in found]
    return {"run": str(args.run), "predictions": [p.to_dict() for p in found]}, lines


@command(
    "RUN",
    "--run --format --out --precision --data --allow-code --json",
    "export runs/first --format onnx --out first.onnx",
    out={"required": True, "metavar": "FILE", "help": "the file; it must not exist"},
    data={"help": "images to verify on; default: the run's own"},
)
def do_export(args: Namespace, console: Console) -> Output:
    """Write a run for other programs (ONNX, torch.export, Keras), verified on its test images."""
    from flatout.inference.export.verify import export
    from flatout.inference.run import load

    run = load(args.run, allow_code=args.allow_code)
    done = export(run, args.out, format=args.format, precision=args.precision, data=args.data, console=console)
    return done.to_dict(), done.lines()


@command("RUN OTHER", "--run --json", "compare runs/first runs/second")
def do_compare(args: Namespace, console: Console) -> Output:
    """Test whether two runs differ by more than chance."""
    from flatout.inference.evaluate import compare, format_comparison

    result = compare(_folder(args.run), _folder(args.other))
    return result, format_comparison(result)


@command("RUN", "--run", "report runs/first")
def do_report(args: Namespace, console: Console) -> Output:
    """Draw a run's pictures and report again."""
    from flatout.report.page import draw_all

    folder = _folder(args.run)
    draw_all(folder)
    path = str(folder / "report.html")
    return {"report": path}, [path]


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
    "--run --private --overwrite --no-pictures --json",
    "upload runs/first hf://USER/NAME",
    overwrite={"help": "replace another content of the repository"},
)
def do_upload(args: Namespace, console: Console) -> Output:
    """Publish a run with a model card on the Hugging Face hub."""
    from flatout.inference.hub import format_upload, upload
    from flatout.inference.run import load

    flags = {"private": args.private, "overwrite": args.overwrite, "pictures": not args.no_pictures}
    result = upload(load(_folder(args.run)), args.url, **flags, console=console)
    return result, format_upload(result)


def _folder(run: Path | str) -> Path:
    """Return a run folder of this host."""
    from flatout.inference.hub import is_published

    if is_published(run):
        raise InputError(f"{run}: this command needs a run folder on this computer; evaluate and predict take hf://")
    return Path(run)
