"""What the ranks ask of each other: it is added up with the gradients, so that all know it after the same step."""

from collections import deque

import torch

from flatout.engine.base import Ask
from flatout.dist.world import World

KINDS = tuple(Ask)
# GPU ranks read the answer so many steps later, so as not to wait for the device.
LAG = 8


class Asks:
    """One rank's part.

    Attributes:
        own: float32 [kinds] on the device, 1 for what this rank asks for.
        total: float32 [kinds] on the device, how many ranks asked for each in the step.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._last = Ask.NOTHING
        self.own = torch.zeros(len(KINDS), device=world.device)
        self.total = torch.zeros_like(self.own)
        self._answers: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    def put(self, ask: Ask) -> None:
        """Take what this rank asks for with the next step."""
        if self._world.is_joined and ask != self._last:
            self.own.copy_(torch.tensor([float(bool(ask & one)) for one in KINDS]))
        self._last = ask

    def take_answer(self) -> None:
        """Note the total of the step that was enqueued last."""
        if not self._world.is_joined:
            return
        answer, event = self.total.to("cpu", non_blocking=True, copy=True), None
        if self._world.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        self._answers.append((answer, event))

    def asked(self) -> Ask:
        """See `Engine.asked`."""
        if not self._world.is_joined:
            return self._last
        found = Ask.NOTHING
        while len(self._answers) > (LAG if self._world.device.type == "cuda" else 0):
            answer, event = self._answers.popleft()
            if event:
                event.synchronize()
            for one, number in zip(KINDS, answer.tolist(), strict=True):
                found |= one if number else Ask.NOTHING
        return found
