"""Run a function on every device: in this process, in one process per device, or as an already launched rank."""

from collections.abc import Callable, Sequence
from typing import Any

from flatout.distributed.environment import HANG_TIMEOUT, Hosts, launched
from flatout.distributed.launch import launch
from flatout.engine.devices import parse_devices
from flatout.utils.console import Console
from flatout.utils.errors import InputError


def run_on_devices(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    spec: str,
    engine: str,
    console: Console,
    hosts: Hosts | None = None,
    restarts: int | None = None,
    hang_timeout: float = HANG_TIMEOUT,
    threads: int | None = None,
    own_process: bool = False,
) -> Any:
    """Call function(console, world, *args) on every rank, with a joined world; return the first rank's result.

    Args:
        function, args: they may be defined in `__main__`, such as a notebook.
        spec, engine: the devices of this host, and their engine.
        console: shows the output of rank 0's console.
        hosts: the hosts of the run; each calls this. Default: this host only.
        restarts: how often the ranks are restarted after losing one. Default: as often as hosts may be lost.
        hang_timeout: seconds without progress after which one of several ranks is ended.
        threads: OMP_NUM_THREADS of each new process, unless the user has set it. Default: all cores, shared evenly.
        own_process: start a process even for a single device.

    Raises:
        InputError, TrainingFailed, Stopped, KeyboardInterrupt: as the function raised them.
        InputError: an argument cannot be pickled; the hosts did not meet.
        TrainingFailed: a rank died, hung, or raised something else, and all others were ended. The message names it and
            has the last lines of its log.
    """
    from flatout.engine.torch.accelerator import cpu_threads

    call = (spec, engine, hang_timeout, function, args)
    if launched() is not None:
        return _join_and_call(console, *call)
    hosts = hosts or Hosts()
    restarts = hosts.most - hosts.least if restarts is None else restarts
    names = parse_devices(spec, engine).ranks.names
    if len(names) == hosts.most == 1 and restarts == 0 and not own_process:
        return _join_and_call(console, *call)
    threads = threads or cpu_threads(len(names))
    return launch(_join_and_call, call, names=names, threads=threads, console=console, hosts=hosts, restarts=restarts)


def check_batch(batch: int, ranks: int) -> None:
    """Raise InputError if a batch has fewer samples than ranks."""
    if batch < ranks:
        raise InputError(
            f"batch_size = {batch} is less than one sample for each of the {ranks} ranks: "
            "use a larger batch or fewer devices"
        )


def _join_and_call(
    console: Console, spec: str, engine: str, hang_timeout: float, function: Callable[..., Any], args: Sequence[Any]
) -> Any:
    from flatout.engine.factory import join

    world = join(spec, engine, hang_timeout)
    result = function(console, world, *args)
    # All hosts end together, so that none mistakes another's end for a failure.
    world.barrier()
    world.leave()
    return result
