"""A recipe describes a training run completely, except the devices: frozen dataclasses that check themselves.

It comes from a built-in job, a TOML file or code, is changed by `Recipe.override` only, and is written into the run
folder, so that the file alone repeats the run.
"""

from flatout.config.recipe import (
    FREE_KEYS,
    MAX_CHANNELS,
    MAX_IMAGE_SIZE,
    OPTIMIZERS,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Augment,
    Data,
    Momentum,
    Optimizer,
    Recipe,
    Schedule,
    from_dict,
    known_keys,
    load_recipe,
    of_run,
    with_settings,
)
