"""Convert the large fixtures of other frameworks and compare logits with those of the framework that wrote them.

    python tests/convert/fixtures/make_fixtures.py FRAMEWORK --large DIR     for each framework, in its environment
    python benchmarks/convert.py DIR

The result has, for each file, the largest difference of logits, absolute and over the largest logit.
"""

import fnmatch
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from common import about, make_parser, write
from flatout.models.convert.convert import Shape, convert
from flatout.utils.errors import InputError

FORMATS = {
    "saved": "SavedModel (Keras {keras})",
    "exported": "SavedModel of `model.export` (Keras 3)",
    "objects": "checkpoint of objects (Keras 3)",
    "estimator": "checkpoint of names, as Estimator's",
    "checkpoint": "checkpoint of Keras 2",
    ".weights.h5": ".weights.h5",
    "weights.h5": ".h5, weights (Keras 2)",
    ".h5": ".h5 (Keras {keras})",
    ".keras": ".keras",
    ".pdparams": ".pdparams",
    ".ckpt": "Lightning .ckpt",
    ".pth": "torch .pth",
    "legacy.pt": "torch .pt, the format until 1.5",
    ".safetensors": "safetensors",
}


def model_of(network: str) -> str:
    """Return the name of the model for a network of the fixtures."""
    network = network.removesuffix("-functional")
    return f"timm:{network}" if network.startswith("resnet") else network


def measure(file: Path, folder: Path) -> dict[str, Any]:
    match = re.match(r"(?P<framework>keras2?|tf|paddle|torch)-(?P<rest>.*)", file.name)
    assert match, file
    ending = next(ending for ending in FORMATS if file.name.endswith(ending))
    network = re.sub(r"[-.]?$", "", match["rest"].removesuffix(ending))
    check = file.with_name(f"{match['framework']}-{network}.npz")
    row = {
        "format": FORMATS[ending].format(keras=2 if match["framework"] == "keras2" else 3),
        "network": network,
        "file": file.name,
    }
    out = folder / "out.safetensors"
    options: dict[str, Any] = {"check": check, "report": lambda text: None}
    try:
        result = convert(file, model_of(network), out, shape=Shape(), **options)
    except InputError as error:
        return {**row, "error": str(error)}
    out.unlink()
    keys = ("matched", "difference", "absolute_difference")
    return {**row, **{key: result[key] for key in keys}}


def main() -> None:
    parser = make_parser(__doc__, "convert")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--only", default="*", metavar="PATTERN", help="measure these files, and keep the other results"
    )
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if args.only != "*":
        before = json.loads(args.out.read_text())["files"]
        rows = [row for row in before if not fnmatch.fnmatch(row["file"], args.only)]
    with tempfile.TemporaryDirectory() as folder:
        for file in sorted(args.folder.glob(args.only)):
            if file.suffix != ".npz":
                rows.append(measure(file, Path(folder)))
                print(rows[-1], flush=True)
    result = {**about("flatout", "torch", "timm", "numpy", "h5py"), "files": rows}
    write(result, args.out)


if __name__ == "__main__":
    main()
