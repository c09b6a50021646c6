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
    from flatout.run.evaluate import evaluate
    from flatout.run.folder import load
    from flatout.run.trust import lines_of as trust_lines
    from flatout.tasks import describe_metrics

    run, keys = load(args.run, allow_code=args.allow_code), ("precision", "recall", "f1")
    result = evaluate(run, args.data, devices=args.devices, engine=engine_of(args), console=console, tta=args.tta)
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


@command(
    "RUN FILE...",
    "--run --top --coverage --explain --tta --allow-code --json",
    "predict runs/first cat.jpg more-photos/",
)
def do_predict(args: Namespace, console: Console) -> Output:
    """Classify images with a run, or with the ONNX file that it was exported to."""
    from flatout.run.folder import load
    from flatout.run.predict import predict

    if isinstance(args.run, Path) and args.run.suffix == ".onnx" and not args.run.is_dir():
        from flatout.export.onnx_run import OnnxRun

        if args.explain is not None:
            raise InputError("--explain: heatmaps need the run; an ONNX file has the answers alone")
        run = OnnxRun(args.run)
    else:
        run = load(args.run, allow_code=args.allow_code)
    flags = {"top": args.top, "tta": args.tta, "coverage": args.coverage, "explain": args.explain}
    predictions = predict(run, args.files, **flags, note=console.note)
    lines = [str(p) if p.explanation is None else f"{p}; {p.explanation}" for p in predictions]
    return {"run": str(args.run), "predictions": [p.to_dict() for p in predictions]}, lines


@command(
    "RUN",
    "--run --format --out --precision --data --allow-code --json",
    "export runs/first --format onnx --out first.onnx",
    out={"required": True, "metavar": "FILE", "help": "the file, or the folder of --format torch; it must not exist"},
    data={"help": "images to verify on; default: the run's own"},
)
def do_export(args: Namespace, console: Console) -> Output:
    """Write a run for other programs (ONNX, torch.export, plain PyTorch, Keras), verified on its test images."""
    from flatout.export.write import export
    from flatout.run.folder import load

    run = load(args.run, allow_code=args.allow_code)
    done = export(run, args.out, format=args.format, precision=args.precision, data=args.data, console=console)
    return done.to_dict(), done.lines()


@command("RUN OTHER", "--run --json", "compare runs/first runs/second")
def do_compare(args: Namespace, console: Console) -> Output:
    """Test whether two runs differ by more than chance."""
    from flatout.run.compare import compare, lines_of

    result = compare(_folder(args.run), _folder(args.other))
    return result, lines_of(result)


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
    from flatout.hub.upload import lines_of, upload

    result = upload(
        _folder(args.run),
        args.url,
        private=args.private,
        overwrite=args.overwrite,
        pictures=not args.no_pictures,
        console=console,
    )
    return result, lines_of(result)


def _folder(run: Path | str) -> Path:
    """Return a run folder of this host."""
    from flatout.run.published import is_published

    if is_published(run):
        raise InputError(f"{run}: this command needs a run folder on this computer; evaluate and predict take hf://")
    return Path(run)
