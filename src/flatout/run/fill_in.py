"""What a recipe leaves to the data: normalisation, bits, task, loss and order."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from flatout.host import available_memory
from flatout.recipe import Recipe
from flatout.tasks import with_task

if TYPE_CHECKING:
    from flatout.data.feed import Samples
    from flatout.data.pack import Pack
    from flatout.distributed.world import World


def about_splits(recipe: Recipe, pack: "Pack", splits: "Mapping[str, Samples]") -> list[str]:
    """Return sentences that say how the data was split."""
    sentences = []
    taken = [f"{name} {len(s):,}" for name, s in splits.items() if name not in pack.splits]
    if fold := recipe.data.fold:
        held_out = f"train {len(splits['train']):,}, held out {len(splits['valid']):,}"
        sentences.append(f"fold {fold} of {recipe.data.folds}: {held_out}")
    elif taken:
        how = "the same share of all numbers" if pack.task == "regression" else "by class"
        how += " and group" * (pack.groups is not None)
        train = f"train {len(splits['train']):,}"
        sentences.append(f"taken from the training images, {how}: {', '.join(taken)}; {train}")
    if len(splits) == 1:
        sentences.append("no held-out data: accuracy will not be measured")
    return sentences


def filled_in(
    recipe: Recipe,
    pack: "Pack",
    splits: "Mapping[str, Samples]",
    world: "World",
    of_run: Callable[[str], str],
    note: Callable[[str], None],
) -> Recipe:
    """Return the recipe with what it leaves to the data. All ranks call this.

    Args:
        pack: the data.
        of_run: returns the value of a recipe key in the run that is continued; "" in a new run.
    """
    from flatout.data.load import measure
    from flatout.tasks.regression import statistics

    if not recipe.data.bits:
        recipe = recipe.override({"data.bits": pack.bits})
    if not recipe.data.mean:
        mean, std = measure(splits["train"])
        recipe = recipe.override({"data.mean": mean, "data.std": std})
    before, recipe = recipe.loss, with_task(recipe, pack.task)
    if recipe.loss != before:
        note(f"loss = {recipe.loss}: the labels are {pack.task}")
    if pack.task == "regression" and not recipe.data.label_std:
        label_mean, label_std = statistics(splits["train"].labels)
        recipe = recipe.override({"data.label_mean": label_mean, "data.label_std": label_std})
    return _with_order(recipe, splits["train"], world, of_run, note)


def _with_order(
    recipe: Recipe, train: "Samples", world: "World", of_run: Callable[[str], str], note: Callable[[str], None]
) -> Recipe:
    """Replace `data.order = "auto"` by the order of the run that is continued, or of one that suits the host."""
    if recipe.data.order != "auto":
        return recipe
    order = of_run("data.order")
    free = min(world.all_gather_object(available_memory()))
    if not order and train.is_on_disk and train.nbytes > free:
        order = "blocks"
        note(
            f"data.order = blocks: {train.nbytes / 2**30:.1f} GiB of training images are more than the "
            f"{free / 2**30:.1f} GiB of available memory"
        )
    return recipe.override({"data.order": world.broadcast_object(order or "full")})
