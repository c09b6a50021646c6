"""Run a function on several CPU ranks, as a real run does, and bring every rank's answer back."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from flatout.console import Console
from flatout.dist.env import launched
from flatout.dist.launcher import spawn
from flatout.dist.world import World

Backend = Literal["memory", "gloo"]


def on_ranks(size: int, function: Callable[..., Any], *args: Any, backend: Backend = "memory") -> list[Any]:
    """Call function(world, *args) on each rank, with one thread; return all answers, in the order of the ranks.

    Args:
        size: ranks; one is this process.
        function: of a module that can be imported.
        args: its arguments.
        backend: what adds the ranks' numbers up: the memory of one host, or what works between hosts too.
    """
    if size == 1:
        return [function(World(), *args)]
    return _launch(size, _answers_of_all, function, args, backend)


def on_ranks_that_part(size: int, function: Callable[..., Any], *args: Any, backend: Backend = "memory") -> Any:
    """As `on_ranks`, for ranks that cannot speak to each other afterwards; return the first one's answer."""
    return _launch(size, _answer_of_one, function, args, backend)


def _launch(size: int, call: Callable[..., Any], function: Callable[..., Any], args: Sequence[Any], backend: str):
    return spawn(call, (function, args, backend), names=["cpu"] * size, threads=1, console=Console())


def _answers_of_all(console: Console, function: Callable[..., Any], args: Sequence[Any], backend: str) -> list[Any]:
    world = _join(backend)
    answers = world.all_gather_object(function(world, *args))
    world.leave()
    return answers


def _answer_of_one(console: Console, function: Callable[..., Any], args: Sequence[Any], backend: str) -> Any:
    world = _join(backend)
    try:
        return function(world, *args)
    finally:
        world.leave()


def _join(backend: str) -> World:
    found = launched()
    assert found is not None
    if backend == "gloo":
        # As if every rank were a host of its own.
        found = dataclasses.replace(found, local_rank=0, local_size=1)
    world = World(found, torch.device("cpu"))
    world.join(found)
    assert world.backend == backend
    return world
