"""The public call `fit`, and how its arguments become recipe keys and data."""

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.config import Augment, Recipe, known_keys
from flatout.distributed.environment import Launched, launched
from flatout.engine.devices import engine_for
from flatout.inference.run import Ensemble, Run, load
from flatout.models.build import copied
from flatout.models.keras import KerasModule, is_keras
from flatout.train import run_dir
from flatout.train.callbacks import Callback, callbacks_of, user_functions
from flatout.train.request import Options
from flatout.utils import run_files
from flatout.utils.console import Console
from flatout.utils.errors import InputError, Stopped

if TYPE_CHECKING:
    from torch import nn


def fit(
    model: "nn.Module | str | Any" = None,
    data: object = None,
    labels: object = None,
    *,
    validation_data: object = None,
    job: str | Path | Recipe | None = None,
    out: str | Path | None = None,
    devices: str = "auto",
    engine: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    cache: bool = True,
    restarts: int | None = None,
    hang_timeout: float = 300.0,
    minutes: float | None = None,
    callbacks: Callback | str | Sequence[Callback | str] = (),
    metrics: Any = (),
    transform: Any = (),
    batch_transforms: Any = (),
    quiet: bool = False,
    **changes: Any,
) -> Run:
    """Train a classifier and return the run.

    A module or Keras model passed in is trained: afterwards it has the weights of the run, and a module is in
    evaluation mode on the CPU. This applies to several devices too. After an error or an interruption it is unchanged;
    `flatout.load(out, model=model).model` then loads what was trained. With `folds=K` (cross-validation) copies are
    trained, the model is unchanged, and the run is an `Ensemble`.

    Args:
        model: a torch module, a Keras 3 model, one of our names, `timm:NAME`, `package.module:factory` or
            `file.py:factory`; None for the job's model, or one chosen for the data.
        data: a path; images as an array, with `labels`; a pair (images, labels), or a dict or tuple of such pairs for
            train, valid and test; the same with torch data sets. None for the job's data.
        labels: the labels of `data`, if that is an array of images.
        validation_data: a pair or a data set for validation.
        job: a built-in job, a recipe file or a Recipe to start from; by default a recipe is made for the data.
        out: the run folder; by default a new one under `runs/`.
        devices: a device SPEC such as `auto`, `cpu`, `2xcpu`, `cuda:0,2`, `8xtpu`. Several devices also work in
            notebooks, in a REPL, and in scripts without `if __name__ == "__main__"`.
        engine: `torch`, `xla`, or `auto`: XLA for TPUs and Keras models, torch otherwise.
        resume: continue the run in `out`.
        overwrite: replace the run in `out`.
        cache: keep the decoded images for the next run.
        restarts: how often the ranks of several devices restart from the newest checkpoint after losing one.
        hang_timeout: seconds without progress, as in a callback, after which one of several ranks is ended.
        minutes: train as many steps as fit into this time, from this call to the report.
        callbacks: `flatout.Callback` objects, and names of experiment trackers: `tensorboard`, `wandb`.
        metrics: functions of labels and predictions, such as `sklearn.metrics.cohen_kappa_score`, in a list or a dict
            by name. They are computed on the validation and test images, and named as in `valid_cohen_kappa_score`.
        transform: a function of one training image, float32 [C, H, W] in 0..1, augmented, on the device; or several.
            Each is called in every epoch and returns a changed image; validation and test images are not changed. Torch
            engine only.
        batch_transforms: functions of training images, float32 [B, C, H, W], augmented and normalised, on the device;
            each returns changed images. Torch engine only.
        quiet: print nothing.
        **changes: recipe keys, such as `epochs=5`, `batch_size=256`, `lr=0.01`, `optimizer="adam"` or
            `optimizer=flatout.SGD(lr=0.01)`, `augment=flatout.Augment(flip=True)` or `augment={"flip": True}`.
            On the torch engine, `loss` may also be a loss of torch or another function of logits and targets that
            returns a loss for each image, [B]. `label_smoothing`, and `class_weights` of several labels, are up to it.

    Raises:
        InputError: an argument or the data is wrong; the message names it and the fix.
        TrainingFailed: training cannot continue; the weights of the last good epoch are in the run folder.
    """
    began = time.perf_counter()
    # Imported here: its time belongs to the run.
    from flatout.train.run import train_job

    rank = (launched() or Launched()).rank
    console = Console(None if quiet or rank else sys.stdout, rank=rank)
    loss = changes.get("loss")
    own_loss = changes.pop("loss") if callable(loss) and not isinstance(loss, type) else None
    functions, flat = user_functions(own_loss, transform, batch_transforms, metrics), recipe_changes(changes)
    data, module = join_data(data, labels, validation_data), None
    if resume and job is None and out and (Path(out) / run_files.RECIPE).is_file():
        job = Path(out) / run_files.RECIPE
    if isinstance(model, str):
        flat["model"] = model
    elif model is not None:
        module = KerasModule(model) if is_keras(model) else copied(model)
        flat["model"] = f"python:{type(module).__qualname__}"
    if isinstance(module, KerasModule):
        engine = "xla" if engine == "auto" else engine
        flat = {**module.conventions(console.note), **flat}
    engine = engine_for(devices, engine)
    options = Options(
        out=Path(out) if out else None,
        devices=devices,
        engine=engine,
        resume=resume,
        overwrite=overwrite,
        cache=cache,
        restarts=restarts,
        hang_timeout=hang_timeout,
        minutes=minutes,
        began=began,
        allow_code=isinstance(model, str),
        callbacks=callbacks_of(callbacks),
        functions=functions,
    )
    try:
        run_dir.check(options)
        folder = train_job(job, data, flat, options, console, module=module)
    except Stopped:
        raise KeyboardInterrupt from None
    finally:
        console.close()
    run = load(folder, model=None if isinstance(model, str) else model, allow_code=options.allow_code)
    if module is not None and not isinstance(run, Ensemble):
        _ = run.model  # loads the weights into the model given
    return run


def recipe_changes(arguments: Mapping[str, object]) -> dict[str, object]:
    """Convert the keyword arguments of `fit` to dotted recipe keys; a unique last part, such as `lr`, is enough."""
    changes: dict[str, object] = {}
    for key, value in arguments.items():
        if key == "augment" and value is None:
            value = Augment()
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        elif hasattr(value, "item") and not getattr(value, "shape", ()):  # a NumPy or torch number
            value = value.item()  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(value, Mapping) and key != "class_weights":
            added = {f"{key}.{inner}": v for inner, v in value.items()}
        elif key in ("optimizer", "schedule", "augment") and not isinstance(value, str):
            raise InputError(
                f'{key} = {value!r}: give a name, such as optimizer="adam", or a section, such as '
                "flatout.Adam(lr=0.001) or flatout.Augment(flip=True); functions go into transform= or "
                "batch_transforms="
            )
        elif key in ("optimizer", "schedule"):
            added = {f"{key}.name": value}
        else:
            full = [known for known in known_keys() if known.rpartition(".")[2] == key]
            added = {full[0] if len(full) == 1 else key: str(value) if isinstance(value, Path) else value}
        if twice := changes.keys() & added.keys():
            raise InputError(f"{twice.pop()} is given twice")
        changes |= added
    return changes


def join_data(data: object, labels: object, validation_data: object) -> Any:
    """Return the data of `fit(model, images, labels, validation_data=...)` as one value."""
    parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, tuple) else (data,)
    if any(hasattr(part, "collate_fn") for part in (*parts, validation_data)):
        raise InputError(
            "data: flatout orders samples and makes batches by itself; instead of a DataLoader, give loader.dataset "
            'and batch_size=, and class_weights="balanced" for rare classes'
        )
    if labels is not None:
        if isinstance(data, str | Path | Mapping | tuple):
            raise InputError("labels: go with an array of images only: flatout.fit(model, images, labels)")
        data = (data, labels)
    if validation_data is None:
        return data
    if data is None or isinstance(data, str | Path):
        raise InputError(
            "validation_data: goes with arrays and data sets only; images in files need a folder valid/ beside train/"
        )
    if isinstance(data, Mapping) and "valid" in data:
        raise InputError("validation_data: data has validation images already, under the key 'valid'; remove one")
    return {**(data if isinstance(data, Mapping) else {"train": data}), "valid": validation_data}
