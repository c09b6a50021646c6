"""Write down which samples each step took, and how each was augmented, where FLATOUT_RECORD asks for it.

With FLATOUT_RECORD=1 in the environment, every rank writes `logs/rank-N.samples.jsonl`, a line for each step. Put
together in the order of the ranks, the lines of a step are the same on any number of devices. To write them is to wait
for the device in every step.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from flatout.run.progress import Progress

VARIABLE = "FLATOUT_RECORD"


class Recorder:
    """Writes the lines of one rank.

    Args:
        path: the file; lines are added to what is there, as a resumed run goes on.
        progress: where training stands, kept up to date by the loop.
    """

    def __init__(self, path: Path, progress: "Progress") -> None:
        self._path, self._progress = path, progress

    def step(self, samples: "np.ndarray", transforms: "np.ndarray | None") -> None:
        """Write what one step takes.

        Args:
            samples: int64 [B], positions in the training split, padding left out.
            transforms: their rows of `augment.epoch_transforms`, [B, ...]; None where nothing is random.
        """
        line = {"epoch": self._progress.epoch + 1, "step": self._progress.step + 1, "samples": samples.tolist()}
        if transforms is not None:
            line["transforms"] = transforms.tolist()
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def asked_for(logs: Path, rank: int, progress: "Progress") -> Recorder | None:
    """Return a recorder for a rank if the environment asks for one."""
    if os.environ.get(VARIABLE, "") in ("", "0"):
        return None
    return Recorder(logs / f"rank-{rank}.samples.jsonl", progress)
