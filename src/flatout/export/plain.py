"""Plain PyTorch: a folder with `model.py`, which needs no flatout, and `weights.safetensors`."""

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from flatout.errors import InputError
from flatout.export.build import bits_of, classifier_of, metadata_of
from flatout.export.graph import Classifier, Member, Novelty, Resize
from flatout.export.source import closure
from flatout.export.verify import Answers, answers_by
from flatout.models.build import net_named, timm_call

if TYPE_CHECKING:
    from flatout.run.folder import Run

_TEXT = '''"""{model}: images to {result}.

    from model import load
    model = load()                      # its weights are in weights.safetensors beside this file
    answers = model(images)             # {dtype} [N, H, W, {channels}], any height and width
    model.metadata["classes"]           # JSON; metadata has the task and the thresholds too

or `python model.py IMAGE...`, with Pillow. Images are resized to {height} x {width} pixels ({resize}) and normalised
here. Where answers are two, the second one is the score of unknown images: they exceed metadata["unknown_threshold"].
Needs {packages}. Written by {producer}.
"""

{imports}


{code}


def load(folder: str | Path = Path(__file__).parent) -> Classifier:
    """Return the classifier in evaluation mode, with its weights and `metadata`, a dict of texts."""
    members = [{members}]
    model = Classifier(Resize({size}, "{resize}", {bits}), members)
    with safe_open(Path(folder) / "weights.safetensors", framework="pt") as file:
        model.load_state_dict({{name: file.get_tensor(name) for name in file.keys()}})
        model.metadata = file.metadata()
    return model.eval().requires_grad_(False)


def read(path: str) -> torch.Tensor:
    """Return the image of a file that Pillow can read, [1, H, W, {channels}]."""
    from PIL import Image, ImageOps

    with Image.open(path) as file:
        image = ImageOps.exif_transpose(file)
{decoding}
    return torch.from_numpy(pixels.reshape(1, *pixels.shape[:2], {channels}))


if __name__ == "__main__":
    model = load()
    for path in sys.argv[1:]:
        answers = model(read(path))
        row = (answers[0] if isinstance(answers, tuple) else answers)[0].tolist()
        named = zip(row, json.loads(model.metadata["classes"]) or ["value"], strict=True)
        print(f"{{path}}:", ", ".join(f"{{name}} {{number:.6g}}" for number, name in sorted(named, reverse=True)))
'''
_IMPORTS = ("import json", "import sys", "import numpy as np", "from pathlib import Path")
# Pillow's, of images with so many channels.
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_OVER_WHITE = """    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
"""


def write(run: "Run", folder: Path) -> None:
    """Write a run as a folder with `model.py` and `weights.safetensors`; see `docs/export.md`.

    Raises:
        InputError: the network is the user's own code.
    """
    from safetensors.torch import save_file

    classifier = classifier_of(run)
    text = _source(run, classifier)
    folder.mkdir()
    (folder / "model.py").write_text(text, encoding="utf-8")
    state = {name: tensor.clone().contiguous() for name, tensor in classifier.state_dict().items()}
    save_file(state, folder / "weights.safetensors", metadata_of(run, "fp32"))


def answers_of(folder: Path) -> Answers:
    """Return a function that runs what the folder's model.py loads."""
    spec = importlib.util.spec_from_file_location("flatout_exported_model", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return answers_by(module.load())


def _source(run: "Run", classifier: Classifier) -> str:
    """Return the text of model.py."""
    recipe, (height, width) = run.recipe, run.recipe.stored_sides
    metadata, bits = metadata_of(run, "fp32"), bits_of(run)
    root, network = network_of(run.members[0])
    roots = [root] if root else []
    imports, code = closure(*roots, Resize, Novelty, Member, Classifier)
    imports |= {*_IMPORTS, "from safetensors import safe_open"} | (set() if root else {"import timm"})
    has_timm = any("import timm" in part for part in (*imports, code))
    members = "".join(f"\n        {_member(network, member)}," for member in classifier.members)  # pyright: ignore
    return _TEXT.format(
        model=recipe.model,
        result="numbers, float32 [N, 1]" if metadata["task"] == "regression" else "probabilities, float32 [N, K]",
        dtype=f"uint{bits}",
        channels=recipe.channels,
        height=height,
        width=width,
        resize=recipe.data.resize,
        packages="torch, numpy, safetensors and timm" if has_timm else "torch, numpy and safetensors",
        producer=metadata["producer"],
        imports="\n".join(sorted(imports, key=lambda line: (line.startswith("from"), line))),
        code=code,
        members=members + "\n    ",
        size=(height, width),
        bits=bits,
        decoding=_decoding(recipe.channels, bits),
    )


def _decoding(channels: int, bits: int) -> str:
    """Return the lines that make `pixels` of a Pillow image, as flatout does."""
    lines = "" if channels == 4 else _OVER_WHITE
    pixels = f'np.array(image.convert("{_MODES.get(channels, "RGB")}"))'
    if bits == 8:
        return f"{lines}    pixels = {pixels}"
    pixels += ".astype(np.uint16) * 257"
    if channels == 1:
        pixels = f'np.array(image, np.uint16) if image.mode.startswith("I") else {pixels}'
    return f"{lines}    pixels = {pixels}"


def network_of(run: "Run") -> "tuple[Callable[..., nn.Module] | None, str]":
    """Return the class or function that makes a run's network, None where it is timm's, and the call.

    Raises:
        InputError: the network is the user's own code.
    """
    recipe, outputs = run.recipe, run.task.num_outputs(len(run.classes))
    net = net_named(recipe.model)
    if net is not None:
        kind, more = (net.func, net.keywords) if isinstance(net, partial) else (net, {})
        words = "".join(f", {name}={value!r}" for name, value in more.items())
        return kind, f"{kind.__name__}({outputs}, {recipe.image_size!r}, {recipe.channels}{words})"
    if not recipe.model.startswith("timm:"):
        raise InputError(
            f"{run.path}: model = {recipe.model!r} is your own code, which --format torch does not copy; "
            "use --format onnx or exported"
        )
    return None, timm_call(recipe, outputs)


def _member(network: str, member: Member) -> str:
    """Return the call that makes a member."""
    words = [f"task={member.task!r}", f"size={member.size!r}", f"channels={len(member.scale)}"]
    words += [f"views={list(member.views)!r}"] if member.views else []
    if member.novelty is not None:
        shape = tuple(member.novelty.means.shape) if hasattr(member.novelty, "means") else (0, 0)
        words += [f"head={member.head!r}"] * bool(member.head) + [f"novelty=Novelty{shape}"]
    return f"Member({network}, {', '.join(words)})"
