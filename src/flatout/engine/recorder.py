"""Record the samples of each step and their augmentation, if FLATOUT_RECORD=1 is set in the environment.

Every rank writes `logs/rank-N.samples.jsonl`, one line per step. The lines of a step, joined in rank order, are the
same on any number of devices. Recording waits for the device in every step.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from flatout.train.progress import Progress


class Recorder:
    """Appends the lines of one rank to `path`; `progress` is kept up to date by the training loop."""

    def __init__(self, path: Path, progress: "Progress") -> None:
        self._path, self._progress = path, progress

    def step(self, samples: "np.ndarray", transforms: "Mapping[str, np.ndarray]") -> None:
        """Write the line of a step.

        Args:
            samples: int64 [B], positions in the training split, without padding.
            transforms: their rows of the tables of `augment.epoch_transforms`, [B, ...] each.
        """
        line = {"epoch": self._progress.epoch + 1, "step": self._progress.step + 1, "samples": samples.tolist()}
        if transforms:
            line["transforms"] = {name: rows.tolist() for name, rows in transforms.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def requested_recorder(logs: Path, rank: int, progress: "Progress") -> Recorder | None:
    """Return a recorder for a rank if the environment requests one."""
    if os.environ.get("FLATOUT_RECORD", "") in ("", "0"):
        return None
    return Recorder(logs / f"rank-{rank}.samples.jsonl", progress)
