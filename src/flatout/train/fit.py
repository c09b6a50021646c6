"""The public call `fit`: from data, a model and a recipe to a run folder."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.config import Recipe
from flatout.inference.run import Ensemble, Run, load
from flatout.train.request import Options, TrainRequest
from flatout.utils.console import Console
from flatout.utils.errors import Stopped

if TYPE_CHECKING:
    from torch import nn

    from flatout.train.callbacks import Callback


def fit(
    model: "nn.Module | str | Any" = None,
    data: Any = None,
    labels: Any = None,
    *,
    validation_data: Any = None,
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
    callbacks: "Callback | str | Sequence[Callback | str]" = (),
    metrics: Any = (),
    transform: Any = (),
    batch_transforms: Any = (),
    quiet: bool = False,
    **changes: Any,
) -> Run:
    """Train a classifier and return the run.

    A module or Keras model passed in is trained: afterwards it has the weights of the run, and a module is in
        evaluation mode on the CPU. This applies to several devices too. After an error or an interruption it is
        unchanged;
    `flatout.load(out, model=model).model` then loads what was trained. With `folds=K` (cross-validation) copies are
    trained, the model is unchanged, and the run is an `Ensemble`.

    Args:
        model: a torch module, a Keras 3 model, one of our names, `timm:NAME`, `package.module:factory` or
            `file.py:factory`; None for the job's model, or one chosen for the data.
        data: a path; images as an array, with `labels`; a pair (images, labels), or a dict or tuple of such pairs for
            train, valid and test; the same with torch data sets and DataLoaders. None for the job's data.
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
        callbacks: `flatout.Callback` objects, and names of experiment trackers: `tensorboard`, `wandb`, `trackio`,
            `mlflow`.
        metrics: functions of labels and predictions, such as `sklearn.metrics.cohen_kappa_score`, in a list or a dict
            by name. They are computed on the validation and test images, and named as in `valid_cohen_kappa_score`.
        transform: a function of one training image, float32 [C, H, W] in 0..1, augmented, on the device; or several.
            Each is called in every epoch and returns a changed image; validation and test images are not changed. Torch
            engine only.
        batch_transforms: functions of training images, float32 [B, C, H, W], augmented and normalised, on the device;
            each returns changed images. Torch engine only.
        quiet: print nothing.
        **changes: recipe keys, such as `epochs=5`, `batch_size=256`, `lr=0.01`, `optimizer="adam"` or
            `optimizer=flatout.SGD(lr=0.01)`, `augment=flatout.Augment(flip=True)` or `augment={"flip": True}`. Torch
            objects are accepted as well: `optimizer=torch.optim.RAdam`,
            `loss=nn.CrossEntropyLoss(label_smoothing=0.1)`. `loss` may also be a function of logits and targets that
            returns a loss for each image, [B], on the torch engine.

    Raises:
        InputError: an argument or the data is wrong; the message names it and the fix.
        TrainingFailed: training cannot continue; the weights of the last good epoch are in the run folder.
    """
    began = time.perf_counter()
    import sys

    from flatout.distributed.environment import launched
    from flatout.engine.devices import engine_for, parse_devices
    from flatout.engine.factory import speeds_on
    from flatout.models.build import copied
    from flatout.models.keras import KerasModule, is_keras
    from flatout.train import claim
    from flatout.train.fit_arguments import check_names, is_own_loss, join_data, loader_batch_size, recipe_changes
    from flatout.train.recipes import resolve
    from flatout.train.run import train
    from flatout.train.trackers import callbacks_of
    from flatout.train.user_functions import user_functions

    check_names(changes, fit)
    process = launched()
    rank = process.rank if process else 0
    console = Console(None if quiet or rank else sys.stdout, rank=rank)
    own_loss = changes.pop("loss") if is_own_loss(changes.get("loss")) else None
    functions, flat = user_functions(own_loss, transform, batch_transforms, metrics), recipe_changes(changes)
    if (loaded := loader_batch_size(data)) is not None:
        flat.setdefault("batch_size", loaded)
    data = join_data(data, labels, validation_data)
    module = None
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
    reasons: list[str] = []
    try:
        claim.check(options)
        recipe, found = resolve(
            job,
            data,
            flat,
            accelerated=parse_devices(devices, engine).is_accelerated,
            console=console,
            seconds=options.seconds,
            began=began,
            speeds=speeds_on(devices, engine),
            explain=reasons.append,
        )
        functions.check(recipe, engine)
        options = dataclasses.replace(options, notes=(*reasons, *functions.notes()))
        folder = train(TrainRequest(recipe=recipe, data=found, options=options, module=module), console)
    except Stopped:
        raise KeyboardInterrupt from None
    finally:
        console.close()
    run = load(folder, model=None if isinstance(model, str) else model, allow_code=options.allow_code)
    if module is not None and not isinstance(run, Ensemble):
        _ = run.model  # loads the weights into the model given
    return run
