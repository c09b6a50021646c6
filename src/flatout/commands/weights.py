"""Commands on weights: convert."""

from argparse import Namespace
from pathlib import Path

from flatout.commands.command import Output, command, size_of
from flatout.console import Console
from flatout.errors import InputError


@command(
    "FILE",
    "--model --out --mapping --check --size --classes --channels --epsilon --verbose --json",
    "convert model.keras --model fashion-cnn --out weights.safetensors",
    FILE={"help": "weights of Paddle, TensorFlow, Keras, torch or Lightning; of a checkpoint, its folder or prefix"},
    model={"required": True},
    out={"required": True, "metavar": "FILE", "help": "a new .safetensors file"},
    size={"required": False, "help": "height and width of the model's images; default: as the file has them"},
    classes={"type": int, "metavar": "K", "help": "outputs of the model; default: as the file has them"},
    channels={"help": "of the model's images; default: as the file has them"},
)
def do_convert(args: Namespace, console: Console) -> Output:
    """Convert weights of another framework to a model's."""
    from flatout.models.convert.convert import Shape, convert, format_conversion

    for flag, value in (("classes", args.classes), ("channels", args.channels)):
        if value is not None and value < 1:
            raise InputError(f"--{flag} {value}: must be at least 1")
    if args.epsilon is not None and not 0 < args.epsilon < 1:
        raise InputError(f"--epsilon {args.epsilon:g}: must be between 0 and 1")
    result = convert(
        Path(args.file),
        args.model,
        args.out,
        shape=Shape(args.classes, size_of(args.size) if args.size else None, args.channels),
        mapping=args.mapping,
        check=args.check,
        epsilon=args.epsilon,
        report=console.note,
    )
    return result, format_conversion(result, verbose=args.verbose)
