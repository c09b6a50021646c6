"""Calls the callbacks of a run: in the main process alone, but all processes learn how that ended."""

import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flatout.callbacks.base import RunInfo
from flatout.distributed.environment import launched
from flatout.errors import CallbackFailed
from flatout.report.run_files import read_summary
from flatout.run.progress import Progress

if TYPE_CHECKING:
    from flatout.data.pack import Pack
    from flatout.run.session import Session


class Calls:
    """The callbacks of a run. Every process makes this and calls its methods; without callbacks they do nothing.

    Making it calls `on_start`.

    Raises:
        CallbackFailed: a callback raised an exception; raised on every process.
    """

    def __init__(self, session: "Session", pack: "Pack", progress: Progress) -> None:
        self._session, self._callbacks, self._world = session, session.options.callbacks, session.world

        def info() -> tuple[RunInfo]:
            return (
                RunInfo(
                    path=session.out,
                    recipe=session.recipe,
                    classes=pack.classes,
                    devices=session.devices,
                    parameters=session.parameters,
                    epoch=progress.epoch,
                ),
            )

        self._call("on_start", info)

    def epoch(self, line: dict[str, Any]) -> str:
        """Call `on_epoch_end` with a line of metrics.jsonl; return why training ends here, or ""."""

        def arguments() -> tuple[int, dict[str, Any]]:
            return line["epoch"], {key: value for key, value in line.items() if key != "epoch"}

        return self._call("on_epoch_end", arguments)

    def end(self, failure: Exception | None) -> Exception | None:
        """Call `on_end`; return `failure`, or that of a callback."""
        try:
            self._call("on_end", lambda: (read_summary(self._session.out, {}),))
        except CallbackFailed as error:
            return failure or error
        return failure

    def _call(self, method: str, arguments: Callable[[], tuple[Any, ...]]) -> str:
        if not self._callbacks:
            return ""
        outcome = self._world.broadcast_object(self._call_each(method, arguments) if self._world.is_main else "")
        if isinstance(outcome, CallbackFailed):
            raise outcome
        return outcome

    def _call_each(self, method: str, arguments: Callable[[], tuple[Any, ...]]) -> str | CallbackFailed:
        ended = ""
        for callback in self._callbacks:
            name = f"{type(callback).__name__}.{method}"
            try:
                # Each gets its own: one may change it.
                if getattr(callback, method)(*arguments()) is True:
                    ended = f"{name} ended training"
            except Exception as error:
                if launched() is not None:
                    # The traceback does not travel to the process that shows the message; this goes to the log.
                    traceback.print_exception(error, file=sys.stderr)
                failure = CallbackFailed(f"the callback {name} raised {_described(error)}")
                failure.__cause__ = error
                return failure
        return ended


def _described(error: Exception) -> str:
    """Return type and text of an exception, and the line of the callback that it came from."""
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    # The first frame is that of the call here.
    frame = frames[min(1, len(frames) - 1)]
    return f"{text} ({frame.filename}, line {frame.lineno})"
