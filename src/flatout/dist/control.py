"""Control flags: what any rank asks of all of them, known to every rank after the same step.

The flags travel with the gradients: the engine appends `Control.outgoing` to the step's own all-reduce.
"""

import signal
from collections import deque
from enum import IntFlag
from typing import TYPE_CHECKING

import torch

from flatout.errors import Stopped

if TYPE_CHECKING:
    from flatout.dist.world import World


class Flag(IntFlag):
    """What a rank can ask of all ranks: to fetch the running loss, write a checkpoint, end the run, or change its length."""

    NONE = 0
    LOSS = 1
    CHECKPOINT = 2
    INTERRUPT = 4
    TERMINATE = 8
    REPLAN = 16


FLAGS = tuple(Flag)
# Ranks on accelerators read the flags this many steps later, so that no step waits for the device.
LAG = 8


class Control:
    """The control flags of one rank.

    Attributes:
        outgoing: float32 [flags] on the device, 1 for each flag that this rank requests.
        incoming: float32 [flags] on the device, where the engine writes the sum of `outgoing` over the ranks.
        stop: the signals that this process has received, INTERRUPT and TERMINATE; requested with every step.
        heeded: which of them end a pass without gradients.
    """

    def __init__(self, world: "World") -> None:
        self._world = world
        self._requested = self._received = self.stop = Flag.NONE
        self.heeded = Flag.INTERRUPT | Flag.TERMINATE
        self.outgoing = torch.zeros(len(FLAGS), device=world.device)
        self.incoming = torch.zeros_like(self.outgoing)
        self._sums: deque[tuple[torch.Tensor, torch.Event | None]] = deque()

    def request(self, flags: Flag) -> None:
        """Set the flags that travel with the next step; they replace those requested before."""
        flags |= self.stop
        if self._world.is_joined and flags != self._requested:
            self.outgoing.copy_(torch.tensor([float(flag in flags) for flag in FLAGS]))
        self._requested = flags

    def end_step(self) -> None:
        """Start to copy `incoming` to the host; the engine calls this after each step."""
        if not self._world.is_joined:
            return
        sums, event = self.incoming.to("cpu", non_blocking=True, copy=True), None
        if self._world.device.type != "cpu":
            event = torch.Event(self._world.device)
            event.record()
        self._sums.append((sums, event))

    def check_stop(self) -> None:
        """End a pass without gradients if a rank was told to stop. All ranks call this equally often in a pass.

        Raises:
            Stopped: on every rank after the same call.
        """
        stop = self.stop
        if self._world.is_joined:
            self.request(Flag.NONE)
            self.incoming.copy_(self._world.all_reduce(self.outgoing))
            self.end_step()
            stop = self.received()
            # What was requested in the last training steps is for the loop.
            self._received |= stop & ~(Flag.INTERRUPT | Flag.TERMINATE)
        if stop := stop & self.heeded:
            raise Stopped(signal.SIGTERM if Flag.TERMINATE in stop else signal.SIGINT)

    def exchange(self) -> None:
        """Exchange the flags at once, between the hosts; for engines whose steps run no all-reduce of their own."""
        for flags in self._world.all_gather_object(self._requested):
            self._received |= flags

    def received(self) -> Flag:
        """Return the union of what all ranks requested in the steps since the last call.

        The answer is the same on every rank after the same step; on accelerators it is `LAG` steps old.
        """
        if not self._world.is_joined:
            return self._requested | self.stop
        while len(self._sums) > (0 if self._world.device.type == "cpu" else LAG):
            sums, event = self._sums.popleft()
            if event:
                event.synchronize()
            for flag, number in zip(FLAGS, sums.tolist(), strict=True):
                self._received |= flag if number else Flag.NONE
        received, self._received = self._received, Flag.NONE
        return received
