"""What users have called while a run trains: their own callbacks, and the trackers of experiments."""

# Names of trackers: the package, the extra that installs it, and the choices of `--track`.
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
