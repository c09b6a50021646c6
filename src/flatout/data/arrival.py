"""The images of a pack that is being built while a run trains on it: which are there, for all processes of a host."""

import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.errors import DiskFull, InputError

if TYPE_CHECKING:
    from flatout.data.pack import Pack, Progress

POLL_SECONDS = 0.05
_STATE = np.dtype([("done", "i8"), ("has_failed", "i8")])


class Cancelled(Exception):
    """The run has ended, so the pack that was being built for it is not needed."""


def is_available() -> bool:
    """Whether processes can share open files by their numbers, as on Linux."""
    return hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()


class Arrival:
    """The order in which the rows of a pack are decoded, and how many are there; pickled, for another process to wait.

    Args:
        order: int64 [N], all rows.
        begun: called in the process that decodes, when the file of the images is there.
        task: of the pack, which a run that is resumed knows before it has read the data.
    """

    def __init__(self, order: np.ndarray, begun: Callable[["Arrival"], None], task: str = "") -> None:
        self.order, self._begun, self.task = order, begun, task
        self._place = np.empty(len(order), np.int32)
        self._place[order] = np.arange(len(order), dtype=np.int32)
        self.images = ""
        file = os.memfd_create("flatout-arrival")
        os.ftruncate(file, _STATE.itemsize)
        weakref.finalize(self, os.close, file)
        self._path = f"/proc/{os.getpid()}/fd/{file}"
        self._open()

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs to wait."""
        return {"_place": self._place, "images": self.images, "_path": self._path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the memory of the process that decodes."""
        self.__dict__.update(state)
        self._open()

    def _open(self) -> None:
        self._state = np.memmap(self._path, _STATE, "r+", shape=(1,))

    # --- the process that decodes ---------------------------------------------------------------------------------

    def begin(self, images: Path, done: int) -> None:
        """Open the file of the images, of which the first `done` rows in the order are there already."""
        file = os.open(images, os.O_RDONLY)
        weakref.finalize(self, os.close, file)
        # The file is found by its number even when its folder gets another name.
        self.images = f"/proc/{os.getpid()}/fd/{file}"
        self.announce(done)
        self._begun(self)

    def announce(self, done: int) -> None:
        """Let readers have the first `done` rows in the order."""
        self._state["done"][0] = done

    def fail(self, error: Exception) -> None:
        """Have everyone who waits raise an error."""
        kind = type(error) if type(error) in (InputError, DiskFull) else InputError
        with Path(self._path).open("r+b") as file:
            file.seek(_STATE.itemsize)
            pickle.dump((kind, str(error)), file)
        self._state["has_failed"][0] = 1

    # --- readers --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._place)

    @property
    def is_complete(self) -> bool:
        """Whether all rows are there."""
        return int(self._state["done"][0]) == len(self)

    def needed(self, rows: np.ndarray) -> int:
        """Return how many rows in the order must be there for some, int64 [n], to be there."""
        return int(self._place[rows].max(initial=-1)) + 1

    def done(self) -> int:
        """Return how many rows in the order are there."""
        return int(self._state["done"][0])

    def has(self, rows: np.ndarray) -> bool:
        """Return whether rows, int64 [n], are there.

        Raises:
            InputError, DiskFull: they are not, and will not come.
        """
        if self.is_complete or self.done() >= self.needed(rows):
            return True
        if self._state["has_failed"][0]:
            with Path(self._path).open("rb") as file:
                file.seek(_STATE.itemsize)
                kind, message = pickle.load(file)
            raise kind(message)
        return False

    def wait(self, rows: np.ndarray) -> None:
        """Return when rows, int64 [n], are there; raises as `has`."""
        while not self.has(rows):
            time.sleep(POLL_SECONDS)


class Building:
    """Makes a pack in a thread, and gives it to a run as soon as its file is there.

    Args:
        make: makes the pack; it calls `Building.arrival` for the order, if the images are to be decoded in one.
        plan: returns the order in which the rows of a pack are decoded, int64 [N]; None for the order of the file.
        report: shows the progress until the pack is returned, and again in `finish`.
    """

    def __init__(
        self,
        make: "Callable[[Building], Pack]",
        plan: "Callable[[Pack], np.ndarray | None]",
        report: "Progress",
    ) -> None:
        self._make, self._plan, self._report = make, plan, report
        self._is_shown, self._is_cancelled = True, False
        self._arrival: Arrival | None = None
        self._early: Pack | None = None
        self._result: Pack | Exception | None = None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flatout-build", daemon=True)

    def start(self) -> "Pack":
        """Return the pack when it is complete, or when its images begin to arrive; raises what making it raises."""
        self._thread.start()
        try:
            self._is_ready.wait()
        except BaseException:
            self.cancel()
            raise
        if isinstance(self._result, Exception):
            raise self._result
        self._is_shown = False
        pack = self._early or self._result
        assert pack is not None
        return pack

    def arrival(self, pack: "Pack") -> Arrival | None:
        """Return the order in which to decode a pack whose images are still missing; None for that of the file."""
        order = self._plan(pack)
        if order is None:
            return None

        def begun(arrival: Arrival) -> None:
            from dataclasses import replace

            images = np.load(arrival.images, mmap_mode="r")
            self._early = replace(pack, images=images, arrival=arrival, building=self)
            self._is_ready.set()

        self._arrival = Arrival(order, begun, pack.task)
        return self._arrival

    @property
    def has_begun(self) -> bool:
        """Whether a run has the pack already."""
        return self._early is not None

    @contextmanager
    def completed(self) -> Iterator[None]:
        """Complete the pack, also after the run that needs it; if the run fails, what is decoded stays."""
        try:
            yield
        except BaseException:
            self.cancel()
            raise
        self._is_shown = True
        self._thread.join()
        if isinstance(self._result, Exception):
            self._report.note(f"the decoded images are not kept: {self._result}")

    def cancel(self) -> None:
        """End the thread. What is decoded stays, and the next run continues from it."""
        self._is_cancelled = True
        self._thread.join()

    # --- as `Progress` --------------------------------------------------------------------------------------------

    def update(self, done: int, total: int, unit: str = "images") -> None:
        """Show the progress while nothing else is shown; ends the thread if it was cancelled."""
        if self._is_cancelled:
            raise Cancelled
        if self._is_shown:
            self._report.update(done, total, unit)

    def note(self, text: str) -> None:
        """Show one sentence."""
        self._report.note(text)

    def _run(self) -> None:
        try:
            self._result = self._make(self)
        except Cancelled:
            pass
        except Exception as error:  # raised again by whoever waits
            self._result = error
            if self._arrival is not None:
                self._arrival.fail(error)
        self._is_ready.set()
