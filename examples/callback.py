"""A callback of your own: print each epoch, and end training at an accuracy. Run it: `python examples/callback.py`."""

import flatout


class StopAt(flatout.Callback):
    """Ends training when the validation accuracy is high enough."""

    def __init__(self, accuracy):
        self.accuracy, self.best = accuracy, 0.0

    def on_start(self, run):
        """`run` has path, recipe, classes, devices, parameters and epoch."""
        print(f"training {run.recipe.model} in {run.path}")

    def on_epoch_end(self, epoch, metrics):
        """`metrics` is the line of metrics.jsonl; True ends the training."""
        self.best = max(self.best, metrics["valid_accuracy"])
        print(f"epoch {epoch}: {metrics['valid_accuracy']:.3f}")
        return self.best >= self.accuracy

    def on_end(self, summary):
        """`summary` is the content of summary.json."""
        print(f"test accuracy: {summary['test_accuracy']:.3f}")


stop = StopAt(accuracy=0.9)
run = flatout.fit(job="digits", devices="cpu", out="stop-at", quiet=True, callbacks=[stop])
