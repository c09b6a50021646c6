"""Start one process for each device, on this host, and get the answer of the first.

They are started through torchrun's library, but not through its agent, whose rendezvous listens on every interface.
"""

import contextlib
import logging
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.dist import heartbeat as vitals
from flatout.console import Console
from flatout.errors import InputError
from flatout.dist.rendezvous import Hosts, Meeting
from flatout.dist.worker import Payload, said_file
from flatout.dist.supervisor import Asked, Rank, Supervisor, end_all
from flatout.dist.watchdog import end_process

if TYPE_CHECKING:
    from flatout.engine.devices import Devices

__all__ = ["Hosts", "run_on_ranks"]


def run_on_ranks(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    devices: "Devices",
    hosts: Hosts | None = None,
    threads: int,
    console: Console,
) -> Any:
    """Call a function in one new process for each device, and return what the first of them returns.

    Args:
        function: called as function(console, *args) in each process, which is a rank of torch.distributed as the usual
            variables say (RANK, WORLD_SIZE, LOCAL_RANK, ...). It and its arguments may be defined in `__main__`.
        args: its arguments.
        devices: one process is started for each.
        hosts: the hosts of the run; each calls this. Default: this one alone.
        threads: OMP_NUM_THREADS of each process, unless the user has set it.
        console: shows what rank 0's console is told.

    Raises:
        InputError, TrainingFailed, Stopped, KeyboardInterrupt: as the function raised them.
        InputError: an argument cannot be pickled; the hosts did not meet.
        TrainingFailed: a rank died, hung, or raised something else, and all others were ended. The message names it,
            and has the last lines of its log.
    """
    import cloudpickle

    names = devices.names
    try:
        call = cloudpickle.dumps((function, tuple(args)))
    except Exception as error:  # what users' objects hold may raise anything
        raise InputError(
            "the model or the data cannot be given to other processes, of which each device needs one "
            f"({type(error).__name__}: {error}); keep locks, open files and the like out of them, "
            "and out of the global variables that they use"
        ) from error
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="flatout-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        meeting = stack.enter_context(contextlib.closing(Meeting(hosts or Hosts(), len(names))))
        board = stack.enter_context(contextlib.closing(vitals.create(len(names))))
        payload = Payload(
            launcher=os.getpid(),
            path=_search_path(),
            python_path=os.environ.get("PYTHONPATH"),
            call=call,
            shows=console.has_display,
            has_bar=console.has_bar,
            lines=console.hand_over(),
        )
        (folder / "payload").write_bytes(pickle.dumps(payload))
        asked = stack.enter_context(_signals())
        ranks = _start(names, meeting, board, folder, threads)
        stack.callback(end_all, ranks)
        return Supervisor(ranks, folder, board, meeting, console, asked).run()


@contextlib.contextmanager
def _signals() -> Iterator[Asked]:
    """Note SIGINT and SIGTERM instead of dying of them; other threads than the main one get none."""
    asked = Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, frame: Any) -> None:
        asked.at_once = asked.at_once or (asked.number != 0 and number == signal.SIGINT)
        asked.number = asked.number or number

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- starting ---------------------------------------------------------------------------------------------------------


def _start(names: Sequence[str], meeting: Meeting, board: vitals.Board, folder: Path, threads: int) -> list[Rank]:
    """Start a process for each device."""
    from torch.distributed.elastic.multiprocessing import start_processes

    # torch logs what it starts and ends; here the verdict tells that.
    logging.getLogger("torch.distributed.elastic.multiprocessing").setLevel(logging.CRITICAL)
    numbers = [meeting.first_rank + i for i in range(len(names))]
    commands = {i: ("-P", "-m", "flatout.dist.worker", str(folder)) for i in range(len(names))}
    shared = _environment(meeting, board, threads)
    environments = {
        i: shared | {"RANK": str(number), "LOCAL_RANK": str(i), "FLATOUT_DEVICE": name}
        for i, (number, name) in enumerate(zip(numbers, names, strict=True))
    }
    files = _logs_specs({i: str(said_file(folder, number)) for i, number in enumerate(numbers)})
    result: list[Any] = []

    def call() -> None:
        try:
            result.append(start_processes("flatout", sys.executable, commands, environments, files))
        except BaseException as error:
            result.append(error)

    # In a thread of its own, as in the main one torch would replace the signal handlers, for good.
    starter = threading.Thread(target=call, name="start ranks")
    starter.start()
    starter.join()
    if isinstance(result[0], BaseException):
        _end_unknown(board)
        raise result[0]
    ranks = []
    for i, number in enumerate(numbers):
        handler = result[0].subprocess_handlers[i]
        # Closes this process's copies of the output files, with the least of signals.
        handler.close(signal.SIGCONT)
        ranks.append(Rank(number=number, device=names[i], local_rank=i, process=handler.proc))
    return ranks


def _environment(meeting: Meeting, board: vitals.Board, threads: int) -> dict[str, str]:
    """Return the variables that all ranks of this host have, those of torchrun among them."""
    environment = {
        "WORLD_SIZE": meeting.world_size,
        "LOCAL_WORLD_SIZE": board.local_size,
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": meeting.port,
        # The launcher keeps the store: every rank is its client.
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "FLATOUT_VITALS": board.path,
        # So that flatout is found as it was here, whatever changed sys.path.
        "PYTHONPATH": os.pathsep.join(_search_path()),
    }
    # torch's own words about lost connections say nothing that the messages of ranks and launcher do not.
    defaults = {"OMP_NUM_THREADS": threads, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if meeting.interface:
        defaults |= {"GLOO_SOCKET_IFNAME": meeting.interface, "NCCL_SOCKET_IFNAME": f"={meeting.interface}"}
    environment |= {name: value for name, value in defaults.items() if name not in os.environ}
    return {name: str(value) for name, value in environment.items()}


def _search_path() -> list[str]:
    return [str(Path(entry).absolute()) for entry in sys.path if isinstance(entry, str)]


def _logs_specs(files: dict[int, str]) -> Any:
    """Return where each rank's output goes: both streams to one file, once `rank.main` has joined them."""
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class Files(LogsSpecs):
        @property
        def root_log_dir(self) -> str:
            return str(Path(files[0]).parent)

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            nowhere = dict.fromkeys(envs, os.devnull)
            return LogsDest(stdouts=nowhere, stderrs=files, error_files=nowhere)

    return Files()


def _end_unknown(board: vitals.Board) -> None:
    """End the ranks that were started before the start of another failed."""
    for vital in map(board.read, range(board.local_size)):
        if vital.pid and vital.phase != vitals.Phase.ENDED:
            end_process(vital.pid)
