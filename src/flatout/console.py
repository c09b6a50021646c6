"""What a person sees while something runs: a bar on a terminal, plain lines elsewhere, a widget in a notebook.

Every line goes to the log of the run as well.
"""

import contextlib
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TextIO

# Seconds between two looks at the progress; each look at the loss waits for the device.
BAR_INTERVAL = 0.5
LINE_INTERVAL = 10.0


class Bar(Protocol):
    """A progress display that is redrawn in place."""

    def show(self, text: str, done: int, total: int) -> None:
        """Draw the state."""
        ...

    def line(self, text: str) -> None:
        """Print a line that stays, above the bar."""
        ...

    def close(self) -> None:
        """Remove the bar."""
        ...


class Console:
    """Prints notes and progress, and copies every line to the run's log once that is open.

    Args:
        stream: where lines go; None prints nothing.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._log: TextIO | None = None
        self._pending: list[str] = []
        self._bar = _make_bar(stream)
        self._interval = BAR_INTERVAL if self._bar else LINE_INTERVAL
        self._last_shown = self._started = time.monotonic()
        self._task: tuple[str, int] = ("", 0)

    def open_log(self, path: Path) -> None:
        """Copy every line, those already printed included, to a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._log = path.open("a", encoding="utf-8")
        self._log.writelines(self._pending)
        self._log.flush()
        self._pending.clear()

    def close(self) -> None:
        """Remove the bar and close the log."""
        if self._bar:
            self._bar.close()
        if self._log:
            self._log.close()
            self._log = None

    def note(self, text: str) -> None:
        """Print one line."""
        stamped = f"{datetime.now().astimezone().isoformat(timespec='seconds')} rank 0  {text}\n"
        if self._log:
            self._log.write(stamped)
            self._log.flush()
        else:
            self._pending.append(stamped)
        try:
            if self._bar:
                self._bar.line(text)
            elif self._stream:
                print(text, file=self._stream, flush=True)
        except OSError:
            # Nobody reads any more (`| head`), or the disk behind is full: the work goes on, and the log has it all.
            self._stream = self._bar = None

    def is_due(self) -> bool:
        """Return whether it is time to look at the progress again."""
        return time.monotonic() - self._last_shown >= self._interval

    def update(self, done: int, total: int, unit: str = "images", text: str = "") -> None:
        """Show how far a task has come, its rate and the time left; a change of unit or total begins a new task."""
        now = time.monotonic()
        if (unit, total) != self._task:
            self._task, self._started, self._first_done = (unit, total), now, done
            self._last_shown = now if not self._bar else 0.0
        if now - self._last_shown < self._interval:
            return
        self._last_shown = now
        rate = (done - self._first_done) / max(now - self._started, 1e-9)
        left = f", {duration((total - done) / rate)} left" if rate > 0 else ""
        line = f"{text}{' ' if text else ''}{done:,} of {total:,} {unit}, {rate:,.0f} per second{left}"
        if self._bar:
            self._bar.show(line, done, total)
        else:
            self.note(line)

    def finish(self) -> None:
        """End the task: remove the bar until the next update."""
        self._task = ("", 0)
        if self._bar:
            self._bar.close()


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


def _make_bar(stream: TextIO | None) -> Bar | None:
    if stream is None:
        return None
    if "ipykernel" in sys.modules:
        return _NotebookBar(stream)
    return _TerminalBar(stream) if stream.isatty() else None


class _TerminalBar:
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

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._handle: Any = None

    def show(self, text: str, done: int, total: int) -> None:
        from html import escape

        from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]

        html = HTML(f'<progress value="{done}" max="{total}" style="width:16em"></progress> {escape(text)}')
        if self._handle is None:
            self._handle = display(html, display_id=True)
        else:
            self._handle.update(html)

    def line(self, text: str) -> None:
        print(text, file=self._stream)

    def close(self) -> None:
        from IPython.display import HTML  # pyright: ignore[reportMissingImports]

        if self._handle is not None:
            with contextlib.suppress(AttributeError):
                self._handle.update(HTML(""))
            self._handle = None
