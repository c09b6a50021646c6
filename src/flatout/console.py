"""What a person sees while something runs: a bar on a terminal, plain lines elsewhere, a widget in a notebook.

Every line goes to the log of its rank as well.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TextIO

# Seconds between two updates of the progress, and between two requests for the loss, which wait for the device.
BAR_INTERVAL = 0.5
LOSS_INTERVAL = 1.0
LINE_INTERVAL = 10.0


class Display(Protocol):
    """Where a console shows things.

    Attributes:
        has_bar: whether progress is drawn in place; else it becomes lines.
    """

    has_bar: bool

    def show(self, text: str, done: int, total: int) -> None:
        """Draw the progress in place."""
        ...

    def line(self, text: str) -> None:
        """Print a line that stays, above the bar."""
        ...

    def close(self) -> None:
        """Remove the bar."""
        ...


class Console:
    """Prints notes and progress, and copies every line to the log of its rank once that is open.

    Args:
        stream: where lines go; None prints nothing.
        rank: the process among those of the run. Only rank 0 looks at the progress.
        device: torch's name of the rank's device, for the log; it may be set until the log is open.
        display: in place of a stream.
    """

    def __init__(
        self, stream: TextIO | None = None, *, rank: int = 0, device: str = "", display: Display | None = None
    ) -> None:
        self.rank, self.device = rank, device
        self._display = display or _make_display(stream)
        self._log: TextIO | None = None
        self._pending: list[tuple[str, str]] = []
        self._interval = math.inf if rank else BAR_INTERVAL if self.has_bar else LINE_INTERVAL
        self._last_shown = self._last_loss = self._started = time.monotonic()
        self._task: tuple[str, int] = ("", 0)

    @property
    def has_display(self) -> bool:
        """Whether anything is shown."""
        return self._display is not None

    @property
    def has_bar(self) -> bool:
        """Whether progress is drawn in place."""
        return self._display is not None and self._display.has_bar

    def open_log(self, path: Path) -> None:
        """Copy every line, those already printed included, to a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._log = path.open("a", encoding="utf-8")
        for line in self._pending:
            self._write(*line)
        self._pending.clear()

    def hand_over(self) -> list[tuple[str, str]]:
        """Return the lines that wait for a log, for the console of another process, which writes it."""
        lines, self._pending = self._pending, []
        return lines

    def take_over(self, lines: Sequence[tuple[str, str]]) -> None:
        """Put the lines of another process's console first in the log; they have been shown."""
        self._pending[:0] = lines

    def close(self) -> None:
        """Remove the bar and close the log."""
        self._shown(lambda display: display.close())
        if self._log:
            self._log.close()
            self._log = None

    def note(self, text: str) -> None:
        """Print one line."""
        stamp = datetime.now().astimezone().isoformat(timespec="seconds")
        if self._log:
            self._write(stamp, text)
        else:
            self._pending.append((stamp, text))
        self._shown(lambda display: display.line(text))

    def is_loss_due(self) -> bool:
        """Return whether to fetch the running loss now: on rank 0, about once a second, independent of `update`."""
        now = time.monotonic()
        if self.rank or now - self._last_loss < LOSS_INTERVAL:
            return False
        self._last_loss = now
        return True

    def update(self, done: int, total: int, unit: str = "images", text: str = "") -> None:
        """Show how far a task has come, its rate and the time left; a change of unit or total begins a new task."""
        now = time.monotonic()
        if (unit, total) != self._task:
            self._task, self._started, self._first_done = (unit, total), now, done
            self._last_shown = now if not self.has_bar else 0.0
        if now - self._last_shown < self._interval:
            return
        self._last_shown = now
        rate = (done - self._first_done) / max(now - self._started, 1e-9)
        left = f", {duration((total - done) / rate)} left" if rate > 0 else ""
        line = f"{text}{' ' if text else ''}{done:,} of {total:,} {unit}, {rate:,.0f} per second{left}"
        if self.has_bar:
            self._shown(lambda display: display.show(line, done, total))
        else:
            self.note(line)

    def finish(self) -> None:
        """End the task: remove the bar until the next update."""
        self._task = ("", 0)
        self._shown(lambda display: display.close())

    def replay(self, event: str) -> None:
        """Show what a console in another process wrote to its `Relay`."""
        name, *arguments = json.loads(event)
        self._shown(lambda display: getattr(display, name)(*arguments))

    def _write(self, stamp: str, text: str) -> None:
        assert self._log
        device = f" ({self.device})" if self.device else ""
        self._log.write(f"{stamp} rank {self.rank}{device}  {text}\n")
        self._log.flush()

    def _shown(self, action: Callable[[Display], None]) -> None:
        if self._display is None:
            return
        try:
            action(self._display)
        except OSError:
            # Nobody reads any more (`| head`), or the disk behind is full: the work goes on, and the log has it all.
            self._display = None


def duration(seconds: float) -> str:
    """Return a time for people: `3.1 s`, `47 s`, `4 min 29 s`, `1 h 02 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook; having imported one is not enough."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class Relay:
    """The display of a console in a process that has none: a file of events, which the launcher's console replays.

    Args:
        path: the file, one JSON array a line.
        has_bar: whether the launcher's display has one.
    """

    def __init__(self, path: Path, *, has_bar: bool) -> None:
        self.has_bar = has_bar
        self._file = path.open("a", encoding="utf-8")

    def show(self, text: str, done: int, total: int) -> None:
        """Have the progress drawn."""
        self._send("show", text, done, total)

    def line(self, text: str) -> None:
        """Have a line printed."""
        self._send("line", text)

    def close(self) -> None:
        """Have the bar removed."""
        self._send("close")

    def _send(self, *event: str | int) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()


def _make_display(stream: TextIO | None) -> Display | None:
    if stream is None:
        return None
    if in_notebook():
        return _NotebookBar(stream)
    return _TerminalBar(stream) if stream.isatty() else _Lines(stream)


class _Lines:
    """Plain lines, in a pipe or a file."""

    has_bar = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, text: str, done: int, total: int) -> None:
        self.line(text)

    def line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is drawn that would have to go."""


class _TerminalBar:
    has_bar = True

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console as RichConsole

        self._console = RichConsole(file=stream, highlight=False, soft_wrap=True)
        self._progress: Any = None

    def show(self, text: str, done: int, total: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        if self._progress is None:
            columns = (BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.add_task(text, total=total)
            self._progress.start()
        self._progress.update(0, description=text, completed=done, total=total)

    def line(self, text: str) -> None:
        self._console.print(text, markup=False)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class _NotebookBar:
    """An HTML progress element that updates in its cell; needs nothing but IPython."""

    has_bar = True

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._handle: Any = None

    def show(self, text: str, done: int, total: int) -> None:
        from html import escape

        bar = f'<progress value="{done}" max="{total}" style="width:16em"></progress> {escape(text)}'
        self._draw({"text/html": bar, "text/plain": text})

    def line(self, text: str) -> None:
        print(text, file=self._stream)

    def close(self) -> None:
        if self._handle is not None:
            # An output that is shown cannot be taken back, only emptied.
            self._draw({"text/html": "", "text/plain": ""})
            self._handle = None

    def _draw(self, forms: dict[str, str]) -> None:
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        if self._handle is None:
            self._handle = display(forms, raw=True, display_id=True)
        else:
            self._handle.update(forms, raw=True)
