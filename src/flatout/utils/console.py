"""Messages and progress: a bar on a terminal, lines in a file, a widget in a notebook. All messages are also logged."""

import contextlib
import html
import io
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

# Seconds between two updates of the bar, and between two requests for the loss, which wait for the device.
BAR_INTERVAL, LOSS_INTERVAL = 0.5, 1.0
# Without a bar, progress is printed as a line after these seconds, and then after this share of the elapsed time.
LINE_INTERVAL, LINE_SHARE = 10.0, 0.1


class Display:
    """Prints lines to a stream; subclasses also draw progress in place (`has_bar`)."""

    has_bar = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def handle(self, event: str, *arguments: Any) -> None:
        """Call the method that an event names: `show`, `line` or `close`."""
        getattr(self, event)(*arguments)

    def show(self, text: str, done: int, total: int) -> None:
        """Draw the progress in place; the end of its text may be cut off."""

    def line(self, text: str) -> None:
        """Print a line that stays, above the bar."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Remove the bar."""


class Console:
    """Prints messages and progress, and copies every message to the log of its rank once that is open.

    Without a stream or a display, nothing is printed. Only rank 0 shows progress.
    """

    def __init__(self, stream: TextIO | None = None, *, rank: int = 0, display: Display | None = None) -> None:
        self.rank = rank
        if stream is not None:
            # A terminal without cursor movements, such as that of Emacs, gets lines.
            is_terminal = stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
            display = (_NotebookBar if in_notebook() else _TerminalBar if is_terminal else Display)(stream)
        self._display = display
        self._log: io.RawIOBase | None = None
        self._rank_and_device = ""
        self._pending: list[tuple[str, str]] = []
        self._last_shown = self._last_loss = self._started = time.monotonic()
        self._task: tuple[str, int] = ("", 0)

    @property
    def has_bar(self) -> bool | None:
        """Whether progress is drawn in place; None if nothing is shown."""
        return self._display and self._display.has_bar

    def open_log(self, path: Path, device: str) -> None:
        """Copy every line, those already printed included, to a file; each names the rank and its torch device."""
        self._rank_and_device = f"rank {self.rank} ({device})"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._log = path.open("ab", buffering=0)
        self._write_pending()

    def hand_over(self) -> list[tuple[str, str]]:
        """Return and clear the pending log messages, which the console of another process writes."""
        lines, self._pending = self._pending, []
        return lines

    def close(self) -> None:
        self._show("close")
        if self._log:
            self._log.close()
            self._log = None

    def note(self, text: str) -> None:
        self._pending.append((datetime.now().astimezone().isoformat(timespec="seconds"), text))
        self._write_pending()
        self._show("line", text)

    def is_loss_due(self) -> bool:
        """Return whether to fetch the running loss now: on rank 0, about once a second, independent of `update`."""
        now = time.monotonic()
        if self.rank or now - self._last_loss < LOSS_INTERVAL:
            return False
        self._last_loss = now
        return True

    def update(self, done: int, total: int, unit: str = "images", text: str = "") -> None:
        """Show the progress of a task, its rate and the time left; a change of unit or total begins a new task."""
        if self.rank:
            return
        now = time.monotonic()
        if (unit, total) != self._task:
            self._task, self._started, self._first_done = (unit, total), now, done
            self._last_shown = 0.0 if self.has_bar else now
        interval = BAR_INTERVAL if self.has_bar else max(LINE_INTERVAL, LINE_SHARE * (now - self._started))
        if now - self._last_shown < interval:
            return
        self._last_shown = now
        rate = (done - self._first_done) / max(now - self._started, 1e-9)
        speed = f"{duration((total - done) / rate)} left  {rate:,.0f}/s" if rate > 0 else ""
        text = "  ".join(filter(None, (text, speed, f"{done:,} of {total:,} {unit}")))
        if self.has_bar:
            self._show("show", text, done, total)
        else:
            self.note(text)

    def finish(self) -> None:
        """End the task: remove the bar until the next update."""
        self._task = ("", 0)
        self._show("close")

    def replay(self, event: str) -> None:
        """Show an event that another process's console wrote to its `Relay`."""
        self._show(*json.loads(event))

    def _write_pending(self) -> None:
        if self._log:
            lines = (f"{stamp} {self._rank_and_device}  {text}\n" for stamp, text in self._pending)
            with contextlib.suppress(OSError):  # the disk is full: training continues until a result is written
                self._log.write("".join(lines).encode("utf-8", "backslashreplace"))
            self._pending.clear()

    def _show(self, event: str, *arguments: object) -> None:
        try:
            if self._display is not None:
                self._display.handle(event, *arguments)
        except OSError:
            # The pipe is closed (`| head`) or the disk is full: training continues, and the log has all messages.
            self._display = None


def duration(seconds: float) -> str:
    """Format a duration: `3.1 s`, `47 s`, `4 min 29 s`, `1 h 02 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def counted(count: int, noun: str) -> str:
    """Format a count: `1 step`, `2,000 steps`, `3 classes`."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows with each column as wide as its widest cell; the last cell of a short row may be longer."""
    columns = max(map(len, table))
    widths = [max((len(r[i]) for r in table if i < len(r) - (len(r) < columns)), default=0) for i in range(columns)]
    return [
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(r, widths, strict=False)))
        for r in table
    ]


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook; an imported IPython is not enough."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class Relay(Display):
    """The display of a process without one: a file of events, a JSON array a line, which `Console.replay` shows."""

    def __init__(self, path: Path, *, has_bar: bool) -> None:
        super().__init__(path.open("a", encoding="utf-8"))
        self.has_bar = has_bar

    def handle(self, event: str, *arguments: Any) -> None:
        self.line(json.dumps([event, *arguments]))


class _TerminalBar(Display):
    has_bar = True

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        from rich.console import Console as RichConsole

        self._console = RichConsole(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._progress: Any = None

    def show(self, text: str, done: int, total: int) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
        from rich.table import Column

        if self._progress is None:
            bar_width = min(24, self._console.width // 4)
            room = Column(no_wrap=True, max_width=max(1, self._console.width - bar_width - len(" 100%  ")))
            said = TextColumn("{task.description}", markup=False, table_column=room)
            columns = (BarColumn(bar_width), TaskProgressColumn(), said)
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.add_task("", total=total)
            self._progress.start()
        self._progress.update(0, description=text, completed=done, total=total)

    def line(self, text: str) -> None:
        self._console.print(text)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class _NotebookBar(Display):
    """An HTML progress element that updates in its cell; needs nothing but IPython."""

    has_bar = True
    _handle: Any = None

    def show(self, text: str, done: int, total: int) -> None:
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        self._handle = self._handle or display({"text/plain": ""}, raw=True, display_id=True)
        bar = f'<progress value="{done}" max="{total}" style="width:16em"></progress> {html.escape(text)}'
        self._handle.update({"text/html": bar, "text/plain": text}, raw=True)

    def close(self) -> None:
        if self._handle is not None:
            # A displayed output cannot be removed, only cleared.
            self._handle.update({"text/html": "", "text/plain": ""}, raw=True)
            self._handle = None
