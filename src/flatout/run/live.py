"""Figures within epochs: a line every few seconds, for who watches a run from another process.

`logs/live.jsonl` is written by the main process. A line takes about 0.1 ms; the lines become fewer in a long run.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

from flatout.run.progress import Progress

# Seconds between lines: at least so many, and this share of the time since the first.
LIVE_SECONDS, LIVE_SHARE = 2.0, 0.004


class LiveFile:
    """Appends to the file while the loop runs.

    A line has `time` (seconds since 1970), `epoch` (finished epochs, with the fraction of the current one), `loss` (the
    mean since it was last fetched), `images_per_second`, `wait_fraction` (share of the time spent waiting for images),
    `cpu_percent` (100 for each busy core) and `rss_bytes` of the main process, and `device_bytes` (the most so far).

    Args:
        steps: of an epoch.
        device_bytes: returns the most memory used on the device, None where that is not known.
    """

    def __init__(self, path: Path, progress: Progress, steps: int, device_bytes: Callable[[], int | None]) -> None:
        import psutil

        self._path, self._progress, self._steps, self._device_bytes = path, progress, steps, device_bytes
        self._process = psutil.Process()
        self._process.cpu_percent()  # the next call measures from here
        self._is_open = True
        self._began = self._last = time.perf_counter()
        self._before = self._totals()

    def step(self, loss: float | None) -> None:
        """Write a line if one is due; called after every step."""
        now = time.perf_counter()
        if self._is_open and now - self._last >= max(LIVE_SECONDS, LIVE_SHARE * (now - self._began)):
            self._last = now
            try:
                self._write(loss)
            except OSError:
                self._is_open = False  # nothing depends on this file: training continues

    def _totals(self) -> tuple[int, float, float]:
        progress = self._progress
        return progress.images_trained, progress.train_seconds, progress.wait_seconds

    def _write(self, loss: float | None) -> None:
        totals, progress = self._totals(), self._progress
        images, seconds, waited = (after - before for after, before in zip(totals, self._before, strict=True))
        self._before = totals
        line = {
            "time": round(time.time(), 2),
            "epoch": round(progress.position(self._steps) / self._steps, 4),
            "loss": loss,
            "images_per_second": round(images / seconds, 1) if seconds > 0 else None,
            "wait_fraction": round(waited / seconds, 4) if seconds > 0 else None,
            "cpu_percent": self._process.cpu_percent(),
            "rss_bytes": self._process.memory_info().rss,
            "device_bytes": self._device_bytes(),
        }
        # Unbuffered: of a line that does not fit on the disk, nothing is left to write at the end.
        with self._path.open("ab", buffering=0) as file:
            file.write((json.dumps(line) + "\n").encode())
