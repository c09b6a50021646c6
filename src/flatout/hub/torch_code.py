"""Python code that runs a trained network with torch, Pillow and safetensors, without flatout."""

import sys
import textwrap

from flatout.export.plain import network_of
from flatout.export.source import closure
from flatout.models.build import list_names
from flatout.recipe import Recipe
from flatout.run.folder import Run


def torch_code(run: Run, repository: str) -> str:
    """Return a script that classifies `photo.jpg`; empty for networks that only the user's own code can build.

    Of a cross-validation it is that of the first fold.
    """
    first = run.members[0]
    imports, code, model = _network(first)
    if not model:
        return ""
    recipe, photos = first.recipe, _reads_photos(first.recipe)
    imports |= {"import json", "import torch", "from huggingface_hub import hf_hub_download"}
    imports |= {"from safetensors import safe_open"}
    imports |= {"import numpy as np", "from PIL import Image, ImageOps"} if photos else set()
    file = "fold-1/weights.safetensors" if len(run.members) > 1 else "weights.safetensors"
    load = f"""
with safe_open(hf_hub_download("{repository}", "{file}"), "pt") as file:
    metadata = file.metadata()
    weights = {{name: file.get_tensor(name) for name in file.keys()}}
classes = json.loads(metadata["classes"])
mean, std = (torch.tensor(json.loads(metadata[name])).reshape(1, -1, 1, 1) for name in ("mean", "std"))

model = {model}
model.load_state_dict(weights)
model.eval()
"""
    parts = [f"\n\n{code}\n"] if code else []
    return "\n".join([*sorted(imports, key=_import_order), *parts, load, _pixels(recipe), _answer(first)])


def _import_order(line: str) -> tuple[bool, str]:
    """Sort as isort does, in one block: the standard library first."""
    module = line.split()[1]
    return module not in sys.stdlib_module_names, f"{line.startswith('from')} {module.lower()}"


def _network(run: Run) -> tuple[set[str], str, str]:
    """Return imports, classes, and the expression that builds the network with fresh weights; empty for own code."""
    from torch import nn

    name = run.recipe.model
    if name not in list_names() and not name.startswith("timm:"):
        return set(), "", ""
    if name in list_names() and isinstance(run.model, nn.Sequential):
        return {"from collections import OrderedDict", "from torch import nn"}, "", expression(run.model)
    root, call = network_of(run)
    imports, code = closure(root) if root else ({"import timm"}, "")
    return imports, code, call


def expression(module: object) -> str:
    """Return the expression that builds a sequence of torch's own layers."""
    from torch import nn

    if not isinstance(module, nn.Sequential):
        return f"nn.{module!r}"
    names, parts = [name for name, _ in module.named_children()], [expression(part) for part in module.children()]
    if names == [str(number) for number in range(len(names))]:
        return "nn.Sequential(\n" + textwrap.indent("".join(f"{part},\n" for part in parts), "    ") + ")"
    lines = "".join(f"{name}={part},\n" for name, part in zip(names, parts, strict=True))
    return "nn.Sequential(\n    OrderedDict(\n" + textwrap.indent(lines, " " * 8) + "    )\n)"


def _reads_photos(recipe: Recipe) -> bool:
    return recipe.channels in (1, 3) and recipe.data.bits == 8


def _pixels(recipe: Recipe) -> str:
    """Return the lines that make `pixels` of a photo, float32 [1, C, H, W] in 0..1."""
    height, width = recipe.stored_sides
    if not _reads_photos(recipe):
        most = 2**recipe.data.bits - 1
        return f"pixels = torch.zeros(1, {recipe.channels}, {height}, {width})  # your image, divided by {most}"
    # Bilinear with antialiasing, as torch's interpolate with antialias=True.
    way = f"({width}, {height}), Image.Resampling.BILINEAR"
    resized = {
        "squash": f"image.resize({way})",
        "crop": f"ImageOps.fit(image, {way})",
        "pad": f"ImageOps.pad(image, {way})",
    }[recipe.data.resize]
    mode = "L" if recipe.channels == 1 else "RGB"
    lines = [
        f'image = ImageOps.exif_transpose(Image.open("photo.jpg")).convert("{mode}")',
        f"array = np.array({resized}, dtype=np.float32).reshape({height}, {width}, {recipe.channels})",
        "pixels = torch.from_numpy(array).permute(2, 0, 1)[None] / 255",
    ]
    (rows, columns), (top, left) = recipe.eval_sides, _offsets(recipe)
    if (rows, columns) != (height, width):
        lines.append(f"pixels = pixels[:, :, {top} : {top + rows}, {left} : {left + columns}]  # the centre")
    return "\n".join(lines)


def _offsets(recipe: Recipe) -> tuple[int, int]:
    stored, used = recipe.stored_sides, recipe.eval_sides
    return (stored[0] - used[0]) // 2, (stored[1] - used[1]) // 2


def _answer(run: Run) -> str:
    """Return the lines that turn the pixels into an answer."""
    lines = ["with torch.no_grad():", "    logits = model((pixels - mean) / std)[0]"]
    if run.task.name == "regression":
        return "\n".join([*lines, 'print(logits[0] * float(metadata["label_std"]) + float(metadata["label_mean"]))'])
    if run.task.name == "multi-label":
        lines += [
            'thresholds = json.loads(metadata["thresholds"]) or [0.5] * len(classes)',
            "probabilities = logits.sigmoid().tolist()",
        ]
        found = "{name: p for name, p, least in zip(classes, probabilities, thresholds) if p >= least}"
        return "\n".join([*lines, f"print({found})"])
    lines.append('logits /= float(metadata.get("temperature", 1))')
    if run.task.num_outputs(len(run.classes)) == 1:
        lines.append("probabilities = torch.stack([(-logits[0]).sigmoid(), logits[0].sigmoid()])")
    else:
        lines.append("probabilities = logits.softmax(0)")
    return "\n".join([*lines, "print(classes[probabilities.argmax()], probabilities.max().item())"])
