"""Run a function on several CPU ranks and bring every rank's answer back.

The ranks are forked from a server that has imported torch once. Ranks of the product's launcher import it anew, which
takes longer than most of these tests; the launcher has tests of its own (tests/system/test_launch.py).
"""

import contextlib
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import torch

from flatout.distributed.environment import launched
from flatout.distributed.world import World, serve_store
from flatout.utils.errors import RankLost

Backend = Literal["memory", "gloo"]

HOST = "127.0.0.1"
# Ranks that take longer hang.
SECONDS = 300.0

_SERVER = multiprocessing.get_context("forkserver")
# What ranks would import themselves: pytest with the module of the test, torch._dynamo with the first DTensor.
_SERVER.set_forkserver_preload(
    ["torch._dynamo", "pytest", "flatout.engine.torch.engine", "torch.distributed.fsdp", "tests.engine.ranks"]
)


def on_ranks(
    size: int, function: Callable[..., Any], *args: Any, backend: Backend = "memory", together: bool = True
) -> list[Any]:
    """Call function(world, *args) on each rank, with one thread; return all answers, or raise what a rank raises.

    One rank is this process. The backend adds the numbers up: the memory of one host, or gloo as between hosts. Unless
    `together`, ranks do not wait for each other at the end.
    """
    if size == 1:
        return [function(World(), *args)]
    # As pickled bytes, since torch would send tensors through shared memory of the rank, which ends.
    asked = pickle.dumps((function, args, backend, together))
    store = serve_store(HOST, 0)
    with contextlib.ExitStack() as stack:
        connections = []
        for rank in range(size):
            # With gloo as if every rank were a host of its own.
            place = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size} if backend == "memory" else {}
            numbers = {"RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": store.port, **place}
            own = {"MASTER_ADDR": HOST, "TORCHELASTIC_USE_AGENT_STORE": "True"}
            variables = {**os.environ, **own, **{name: str(number) for name, number in numbers.items()}}
            receiver, sender = _SERVER.Pipe(duplex=False)
            stack.callback(receiver.close)
            with sender:
                process = _SERVER.Process(target=_rank_main, args=(sender, variables, asked))
                process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            connections.append(receiver)
        return _collect(connections)


def _collect(connections: list[Connection]) -> list[Any]:
    """Return the ranks' answers, or raise the first error; the loss of another rank is none."""
    answers: dict[int, Any] = {}
    lost: list[RankLost] = []
    waiting = {connection: rank for rank, connection in enumerate(connections)}
    deadline = time.monotonic() + SECONDS
    while waiting:
        ready = wait(list(waiting), deadline - time.monotonic())
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} did not answer in {SECONDS:g} s")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                answers[rank], error = pickle.loads(connection.recv_bytes())
            except EOFError:
                raise RuntimeError(f"rank {rank} ended without an answer") from None
            if isinstance(error, RankLost):
                lost.append(error)
            elif error is not None:
                raise error
    if lost:
        raise lost[0]
    return [answers[rank] for rank in range(len(connections))]


def _rank_main(sender: Connection, variables: dict[str, str], asked: bytes) -> None:
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)
    try:
        function, args, backend, together = pickle.loads(asked)
        found = launched()
        assert found is not None
        world = World(found, torch.device("cpu"))
        world.join(found)
        assert world.backend == backend
        try:
            answer = function(world, *args)
            if together:
                world.barrier()
            told = pickle.dumps((answer, None))
        finally:
            world.leave()
    except BaseException as error:
        where = traceback.format_exc()
        error.add_note(f"Rank {variables['RANK']}:\n{where}")
        try:
            told = pickle.dumps((None, error))
            pickle.loads(told)
        except Exception:  # what an error holds may be anything
            told = pickle.dumps((None, RuntimeError(where)))
    sender.send_bytes(told)
