"""Every architecture of timm, from a weights file of its own to a trained and reloaded classifier; prints a table.

    python benchmarks/architectures.py [NAME ...] [--match 'vit*'] [--size 64] [--log FILE] [--smallest]

For each architecture, in a process of its own:

| stage | what must hold |
|---|---|
| size | the network takes images of `usable_size(--size)` |
| build | a network with random weights and its published number of classes, of the published size; saved as a file |
| load | a network for 5 classes and the usable size takes the file; its last layer starts small |
| head | the head is found; after a fit to the features of 4 random images, logits are those of the fit |
| step | one training step of all layers; logits are finite, and head and body have changed |
| reload | weights saved and loaded into a new network give equal logits |

A network without a linear head is `ok` without the stage "head", and says so. One that is estimated to need more than
`--memory` is not tried, and an encoder without a classifier is refused, as in training. Results are appended to `--log`
as JSON lines; architectures in it are not tried again, unless `--again` is given and they failed. `--out` gets the
table: name, image size, parameters, result.
"""

import copy
import fnmatch
import json
import math
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from safetensors.torch import save_file
from torch import nn
from torch.overrides import TorchFunctionMode

from common import about, make_parser
from flatout.config import Recipe, from_dict
from flatout.data.batches import Split
from flatout.distributed.world import World
from flatout.engine.torch.engine import TorchEngine
from flatout.models.build import build_model, check_name, quiet, usable_size
from flatout.models.heads import FeatureNetwork, find_head, set_head
from flatout.models.layers import head_modules
from flatout.models.pretrained import load_pretrained
from flatout.models.weights import load_exactly, read_weights, save_tensors
from flatout.train.loop import LoopHooks, TrainingLoop
from flatout.train.request import Progress
from flatout.utils.console import duration
from flatout.utils.errors import InputError

IMAGES, CLASSES, BATCH = 4, 5, 2
# Random numbers of a network are drawn once for so many elements, a prime, and repeated: no two rows are equal.
BLOCK = 1_000_003
# Copies of the weights that a trial has at once: two networks, a gradient, a momentum, a file in memory.
COPIES, BASE_BYTES = 6, 1_500_000_000


class RepeatedDraws(TorchFunctionMode):
    """Fills large tensors with a repeated block of draws: most of a trial of a large network would be its draws."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        draws = func in (torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.erfinv_)
        if not draws or args[0].is_meta or args[0].numel() <= BLOCK or not args[0].is_contiguous():
            return func(*args, **(kwargs or {}))
        flat = args[0].view(-1)
        func(flat[:BLOCK], *args[1:], **(kwargs or {}))
        for part in flat[BLOCK:].split(BLOCK):
            part.copy_(flat[: len(part)])
        return args[0]


def parameters_of(name: str) -> int:
    """Return the number of parameters, without making them."""
    with quiet(), torch.device("meta"):
        return sum(p.numel() for p in timm.create_model(name).parameters())


def attempt(name: str, wanted: int, report: Any) -> str:
    """Run the stages, each of which `report` gets first; return what is worth a note."""
    report("size", {})
    size = usable_size(f"timm:{name}", wanted, channels=3)
    report("build", {"size": size})
    with tempfile.TemporaryDirectory() as folder, quiet():
        torch.manual_seed(1)
        with RepeatedDraws():
            original = timm.create_model(name)
        report("build", {"parameters": sum(p.numel() for p in original.parameters())})
        path = Path(folder) / "published.safetensors"
        save_file({key: tensor.contiguous().clone() for key, tensor in original.state_dict().items()}, path)
        del original
        report("load", {})
        recipe = from_dict(
            {
                "model": f"timm:{name}",
                "image_size": size,
                "channels": 3,
                "epochs": 1,
                "max_steps": 1,
                "batch_size": BATCH,
                "task": "single-label",
                "weights": str(path),
                "precision": "fp32",
                "optimizer": {"name": "sgd", "lr": 0.001},
                "clip_norm": 100.0,  # some random networks multiply gradients by a million
                "data": {"mean": [0.5] * 3, "std": [0.25] * 3},
            }
        )
        sentences: list[str] = []
        with RepeatedDraws():
            model = build_model(recipe, CLASSES)
            load_pretrained(model, recipe, sentences.append)
        assert "starts fresh" in sentences[-1], sentences[-1]
        path.unlink()
        samples = random_images(recipe)
        report("head", {})
        note = fit_head(model, recipe, samples)
        report("step", {})
        before = {key: p.detach().clone() for key, p in model.named_parameters()}
        logits = trained_logits(model, recipe, samples)
        moved = [key for key, p in model.named_parameters() if not torch.equal(p, before[key])]
        heads = tuple(f"{name}." for name in head_modules(model))
        # Blocks that start as the identity leave most layers without a gradient in the first step.
        assert any(key.startswith(heads) for key in moved), "the step does not change the head"
        assert any(not key.startswith(heads) for key in moved), "the step changes only the head"
        del before
        report("reload", {})
        saved = Path(folder) / "trained.safetensors"
        save_tensors(saved, model.state_dict(), {})
        with RepeatedDraws():
            again = build_model(recipe, CLASSES)
        load_exactly(again, read_weights(saved)[0], saved)
        difference = np.abs(evaluated(again, recipe, samples) - logits).max()
        assert difference <= 1e-5 * np.abs(logits).max(), f"logits of the reloaded network differ by {difference:.2g}"
    return note


def random_images(recipe: Recipe) -> Split:
    images = np.random.default_rng(0).integers(0, 256, (IMAGES, *recipe.image_sides, 3), dtype=np.uint8)
    return Split(images=images, rows=np.arange(IMAGES), labels=np.arange(IMAGES) % CLASSES)


@torch.no_grad()
def fit_head(model: nn.Module, recipe: Recipe, samples: Split) -> str:
    """Fit the head by least squares, assert that the logits are those of the fit, and undo it."""
    head = find_head(model, recipe.image_sides, 3)
    if head is None:
        return "no linear head"
    network = FeatureNetwork(model, head)
    # Rounded as the engine does it: some random networks multiply a difference in the last bit.
    images = torch.from_numpy(samples.images[:]).permute(0, 3, 1, 2).float() * (1 / (255 * 0.25)) - 2
    features = torch.cat([network(batch) for batch in images.split(BATCH)])
    assert features.isfinite().all(), "features are not finite"
    targets = torch.eye(CLASSES)[torch.from_numpy(samples.labels)]
    centred = features.double() - features.double().mean(0)
    scale = centred.std() + 1e-12
    gram = (centred / scale) @ (centred / scale).T + torch.eye(IMAGES)
    weight = (torch.linalg.solve(gram, targets.double()).T @ (centred / scale) / scale).float()
    bias = (targets.mean(0) - weight @ features.mean(0)) * head.has_bias
    own = [(p, p.clone()) for layer in head.of(model) for p in layer.parameters()]
    set_head(model, head, weight, bias)
    expected, found = features @ weight.T + bias, evaluated(model, recipe, samples)
    difference = np.abs(found - expected.numpy()).max()
    # Random networks may give nearly equal features to all images, from which a fit takes small differences.
    largest = float((features.abs() @ weight.abs().T).max()) + 1
    if difference > 1e-5 * largest:
        # Some of them multiply a difference in the last bit by thousands: so much their features are uncertain.
        precise = copy.deepcopy(network).double()
        exact = torch.cat([precise(batch.double()) for batch in images.split(BATCH)])
        rounding = float(((exact - features).abs() @ weight.abs().T.double()).max())
        text = f"logits differ from those of the fit by {difference:.2g} of {largest:.2g}, rounding by {rounding:.2g}"
        assert difference <= 2 * rounding, text  # both ways round
    for parameter, value in own:
        parameter.copy_(value)
    return ""


def engine_of(model: nn.Module, recipe: Recipe) -> TorchEngine:
    return TorchEngine(model, recipe, world=World(device=torch.device("cpu")))


def evaluated(model: nn.Module, recipe: Recipe, samples: Split) -> np.ndarray:
    engine = engine_of(model, recipe)
    logits = engine.place(samples).evaluate(with_logits=True).logits
    engine.close()
    assert logits is not None
    return logits


def trained_logits(model: nn.Module, recipe: Recipe, samples: Split) -> np.ndarray:
    """Train one step; return the logits of the images."""
    engine = engine_of(model, recipe)
    placed = engine.place(samples)
    placed.compile()
    TrainingLoop(engine, World(), recipe, {"train": placed}, Progress(), LoopHooks()).run()
    logits = placed.evaluate(with_logits=True).logits
    engine.close()
    assert logits is not None
    assert np.isfinite(logits).all(), "logits are not finite after a step"
    return logits


# --- processes ---


def child(name: str, wanted: int, memory: int, pipe: Connection) -> None:
    """Run the stages in a process that may use so many bytes, and send each."""
    os.setsid()
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    # For the engine, too: two of these processes with two threads each take three times as long as with one.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    stage = ""

    def report(now: str, found: dict[str, Any]) -> None:
        nonlocal stage
        stage = now
        pipe.send({"stage": now, **found})

    try:
        pipe.send({"stage": "ok", "note": attempt(name, wanted, report)})
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:300] or "no message"
        where = f"{Path(place.filename).name}:{place.lineno}"
        pipe.send({"stage": stage, "error": f"{type(error).__name__}: {text} ({where})"})


def tried(name: str, wanted: int, seconds: float, memory: int) -> dict[str, Any]:
    """Return the result of an architecture."""
    began = time.perf_counter()
    result: dict[str, Any] = {"name": name, "parameters": parameters_of(name), "size": None, "result": ""}
    try:
        check_name(f"timm:{name}")
    except InputError as error:
        return {**result, "result": f"refused: {error}", "seconds": 0.0}
    if (need := BASE_BYTES + COPIES * 4 * result["parameters"]) > memory:
        return {**result, "result": f"not tried: needs about {need / 1e9:.0f} GB", "seconds": 0.0}
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(name, wanted, memory, sender))
    process.start()
    sender.close()
    stage, ended = "start", ""
    while not ended:
        if not receiver.poll(max(0.0, began + seconds - time.perf_counter())):
            ended = f"{stage}: took more than {seconds:g} s"
            break
        try:
            message = receiver.recv()
        except EOFError:
            process.join()
            ended = f"{stage}: the process ended with code {process.exitcode}"
            break
        stage = message["stage"]
        result |= {key: message[key] for key in ("size", "parameters") if key in message}
        if stage == "ok":
            ended = f"ok, {message['note']}" if message["note"] else "ok"
        elif "error" in message:
            ended = f"{stage}: {message['error']}"
            if "MemoryError" in ended or "can't allocate memory" in ended:
                ended = f"out of memory: {stage} needs more than {memory / 1e9:g} GB"
    process.kill()
    process.join()
    return {**result, "result": ended, "seconds": round(time.perf_counter() - began, 1)}


def smallest_of_each_family(names: list[str]) -> list[str]:
    """Return one architecture of each module of timm's: the one with the fewest parameters."""
    families: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        module = timm.model_entrypoint(name).__module__
        families.setdefault(module, []).append((parameters_of(name), name))
    return sorted(min(members)[1] for members in families.values())


def main() -> None:
    parser = make_parser(__doc__, "architectures")
    parser.add_argument("names", nargs="*", help="architectures; by default all of timm's")
    parser.add_argument("--match", default="*", help="a shell pattern of names")
    parser.add_argument("--smallest", action="store_true", help="only the smallest architecture of each family")
    parser.add_argument("--again", action="store_true", help="try those in the log again that were not ok")
    parser.add_argument("--most-parameters", type=float, default=math.inf, help="leave out larger ones")
    parser.add_argument("--size", type=int, default=64, help="the wanted image size")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit for an architecture")
    parser.add_argument("--memory", type=float, default=12.0, help="limit for an architecture, in GB")
    parser.add_argument("--log", type=Path, default=Path("architectures.jsonl"), help="results, one to a line")
    args = parser.parse_args()

    names = [name for name in args.names or timm.list_models() if fnmatch.fnmatch(name, args.match)]
    if args.smallest:
        names = smallest_of_each_family(names)
    lines = args.log.read_text().splitlines() if args.log.exists() else []
    results = {result["name"]: result for result in map(json.loads, lines)}
    done = [name for name, result in results.items() if not args.again or result["result"].startswith("ok")]
    left = [name for name in names if name not in done]
    if args.most_parameters < math.inf:
        left = [name for name in left if parameters_of(name) <= args.most_parameters]
    print(f"{len(names)} architectures, {len(left)} of them to try", flush=True)
    began = time.perf_counter()
    with args.log.open("a") as log:
        for count, name in enumerate(left, start=1):
            results[name] = result = tried(name, args.size, args.seconds, int(args.memory * 1e9))
            log.write(json.dumps(result) + "\n")
            log.flush()
            remaining = (time.perf_counter() - began) / count * (len(left) - count)
            line = f"{name}: {result['result']}, {result['seconds']} s"
            print(f"[{count}/{len(left)}, {duration(remaining)} left] {line}", flush=True)
    table = [results[name] for name in sorted(results)]
    rows = [[row["name"], row["size"], row["parameters"], row["result"]] for row in table]
    counted = [row["result"].partition(":")[0].partition(",")[0] for row in table]
    counts = {kind: counted.count(kind) for kind in dict.fromkeys(counted)}
    content = {**about("timm", "torch", "flatout"), "wanted_size": args.size, "counts": counts}
    text = json.dumps(content, indent=2)[:-2] + ',\n  "architectures": [\n'
    text += ",\n".join(f"    {json.dumps(row)}" for row in rows) + "\n  ]\n}\n"
    args.out.write_text(text)
    seconds = sum(row["seconds"] for row in table)
    summary = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    print(f"{len(table)} architectures in {duration(seconds)}: {summary}")
    sys.exit(0 if set(counts) <= {"ok", "refused", "not tried"} else 1)


if __name__ == "__main__":
    main()
