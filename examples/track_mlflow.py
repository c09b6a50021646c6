"""Log a run to MLflow with a callback: `pip install mlflow`, `python examples/track_mlflow.py`, then `mlflow ui`."""

import mlflow

import flatout


class MLflow(flatout.Callback):
    """Logs recipe, figures and report; any other tracker is served the same way."""

    def on_start(self, run):
        """A resumed run becomes another run of MLflow's, with later steps."""
        mlflow.set_experiment("digits")
        mlflow.start_run(run_name=run.path.name)
        mlflow.log_params({key: str(value)[:500] for key, value in run.recipe.flat().items()})

    def on_epoch_end(self, epoch, metrics):
        """Numbers alone are figures of MLflow's."""
        mlflow.log_metrics({key: value for key, value in metrics.items() if isinstance(value, int | float)}, step=epoch)

    def on_end(self, summary):
        """Runs that failed or were stopped have a reason."""
        mlflow.log_dict(summary, "summary.json")
        mlflow.end_run("FAILED" if summary["stopped"] else "FINISHED")


run = flatout.fit(job="digits", epochs=3, devices="cpu", out="digits-mlflow", callbacks=[MLflow()])
