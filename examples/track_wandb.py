"""Log a run to Weights & Biases: `python examples/track_wandb.py`, or `flatout train digits --track wandb`.

Needs `pip install 'flatout[wandb]'` and `wandb login`; WANDB_MODE=offline needs no account.
"""

import flatout

run = flatout.fit(
    job="digits", epochs=3, devices="cpu", out="digits-wandb", callbacks=[flatout.WandB(project="digits")]
)
