"""Tasks by name, and the task of a recipe."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flatout.config import Recipe
from flatout.config.settings import nearest
from flatout.tasks.base import Task
from flatout.tasks.multi_label import MultiLabel
from flatout.tasks.regression import Regression
from flatout.tasks.single_label import SingleLabel
from flatout.utils.errors import InputError

TASKS: dict[str, type[Task]] = {task.name: task for task in (SingleLabel, MultiLabel, Regression)}


def task_named(name: object) -> Task:
    """Return a task without a recipe, for displaying results; single-label for an unknown name."""
    return TASKS.get(str(name), SingleLabel)()


def task_of(recipe: Recipe, thresholds: tuple[float, ...] = (), temperature: float = 1.0) -> Task:
    """Return the task of a recipe; `auto` is treated as single-label."""
    return TASKS["single-label" if recipe.task == "auto" else recipe.task](
        loss=recipe.loss,
        label_smoothing=recipe.label_smoothing,
        is_balanced=recipe.class_weights == "balanced",
        label_mean=recipe.data.label_mean,
        label_std=recipe.data.label_std or 1.0,
        thresholds=thresholds,
        temperature=temperature,
    )


def weights_of(recipe: Recipe, task: Task, labels: np.ndarray, classes: Sequence[str]) -> np.ndarray | None:
    """Return the weights of the classes in the loss, float32 [classes]; None if all are equal.

    Raises:
        InputError: the recipe does not have one for each class, or names one that the data does not have.
    """
    given = recipe.class_weights
    if isinstance(given, str):
        return task.class_weights(labels, len(classes)) if task.is_balanced else None
    if isinstance(given, dict):
        if unknown := given.keys() - set(classes):
            name = min(unknown)
            raise InputError(f"class_weights: the data has no class {name!r}; {nearest(name, classes)}")
        return np.array([given.get(name, 1.0) for name in classes], np.float32)
    if len(given) != len(classes):
        raise InputError(
            f"class_weights has {len(given)} numbers, but the data has {len(classes)} classes; "
            'for some alone, name them: {"' + classes[0] + '": 2.0}'
        )
    return np.array(given, np.float32)


def describe_metrics(split: str, figures: Mapping[str, Any]) -> str:
    """Return the main metrics of a split in words; `figures` are those of `summary.json`, including `task`."""
    return TASKS[figures["task"]].describe(split, figures)


def with_task(recipe: Recipe, name: str) -> Recipe:
    """Return a recipe with the task of the data, and that task's loss in place of a default loss.

    Raises:
        InputError: the recipe has another task, or options that this task does not support.
    """
    task = TASKS[name]
    if recipe.task not in ("auto", name):
        raise InputError(f"task = {recipe.task!r}: the labels of the data are {name}; set task = {name!r}")
    loss = task.losses[0] if recipe.loss == Recipe.loss else recipe.loss
    if loss not in task.losses:
        raise InputError(f"loss = {loss!r}: the losses of a {name} task are {', '.join(task.losses)}")
    task.check(recipe)
    return recipe.override({"task": name, "loss": loss})
