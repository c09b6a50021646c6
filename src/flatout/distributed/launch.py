"""Start a process for each device of this host, and return what the first rank returns."""

import contextlib
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.console import Console
from flatout.data.cache import temporary_folder
from flatout.dist.env import launched
from flatout.dist.hosts import Hosts
from flatout.errors import InputError, Stopped, TrainingFailed, signals_handled

if TYPE_CHECKING:
    from flatout.dist.worker import Payload


def spawn(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    names: Sequence[str],
    threads: int,
    console: Console,
    hosts: Hosts | None = None,
    restarts: int = 0,
) -> Any:
    """Call function(console, *args) in one new process for each device name; see `flatout.run.launch`."""
    import cloudpickle

    from flatout.dist.worker import Payload

    try:
        call = cloudpickle.dumps((function, tuple(args)))
    except Exception as error:  # users' objects may raise anything
        raise InputError(
            "the model or the data cannot be sent to the processes of the devices "
            f"({type(error).__name__}: {error}); remove locks, open files and the like from them, "
            "and from the global variables that they use"
        ) from error
    payload = Payload(
        launcher=os.getpid(),
        path=_search_path(),
        python_path=os.environ.get("PYTHONPATH"),
        call=call,
        has_display=console.has_display,
        has_bar=console.has_bar,
        lines=console.hand_over(),
    )
    try:
        return _run(payload, names, threads, console, hosts or Hosts(), restarts)
    except (InputError, TrainingFailed, Stopped, KeyboardInterrupt) as error:
        # Its traceback, which a notebook keeps, would keep the store and its port.
        error.__context__ = None
        raise error.with_traceback(None)  # noqa: B904


def _run(
    payload: "Payload", names: Sequence[str], threads: int, console: Console, hosts: Hosts, restarts: int
) -> Any:
    """Run the ranks of this host; return the first one's value, or raise why there is none."""
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError

    from flatout.dist.elastic import Agent, Signals
    from flatout.dist.one_host import OneHost
    from flatout.dist.rendezvous import Rendezvous

    with contextlib.ExitStack() as stack:
        try:
            folder, held = temporary_folder()
            stack.callback(os.close, held)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            (folder / "payload").write_bytes(pickle.dumps(payload))
        except OSError as error:
            raise TrainingFailed(
                f"the temporary folder cannot be written: {error.strerror or error}; free space in it, or set TMPDIR to "
                "another one"
            ) from None
        signals = Signals()
        stack.enter_context(signals_handled(signals.note, signal.SIGINT, signal.SIGTERM))
        rendezvous = OneHost(folder) if hosts.most == 1 else Rendezvous.open(hosts)
        agent = Agent(names, folder, rendezvous, restarts, console, signals)
        agent.environment = _environment(threads)
        stack.callback(agent.close)
        rendezvous.check()
        kind, where = InputError, f"--rendezvous {hosts.rendezvous}"
        try:
            agent.run()
        except RendezvousTimeoutError:
            kind = TrainingFailed if rendezvous.attempt else InputError
            raise kind(
                f"{where}: {rendezvous.missing()} in {hosts.timeout:g} s; start the same command there, or wait longer "
                "with --rendezvous-timeout"
            ) from None
        except RendezvousClosedError:
            raise kind(f"{where}: the run has ended: {rendezvous.hear(0) or 'see the other hosts'}") from None
        except RendezvousError:
            raise kind(f"{where}: the first host is gone; see its output") from None
        if agent.error is not None:
            raise agent.error
        return agent.value()


def _environment(threads: int) -> dict[str, str]:
    """Return the variables of all ranks, besides torch's."""
    # torch's warnings about lost connections repeat what the messages say.
    defaults = {"OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    defaults = {name: value for name, value in defaults.items() if name not in os.environ}
    # flatout is found as it was here, whatever changed sys.path.
    return {**defaults, "PYTHONPATH": os.pathsep.join(_search_path())}


def _search_path() -> list[str]:
    return [str(Path(entry).absolute()) for entry in sys.path if isinstance(entry, str)]
