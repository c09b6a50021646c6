"""Record a training step as a CUDA graph, so that its hundreds of kernels cost one launch."""

from collections.abc import Callable

import torch

from flatout.engine.eager.split import Inputs, Source

# Lazy initialisation (cuBLAS handles, cuDNN's choice of algorithm, optimizer state) must be over before recording.
EAGER_STEPS = 3


class Slots:
    """The tensors that a recorded step reads: the same ones for every batch."""

    def __init__(self) -> None:
        self._inputs: Inputs | None = None
        self._placed: Source | None = None

    def fill(self, placed: Source, inputs: Inputs) -> None:
        """Copy a batch into them."""
        held = self._inputs
        if held is None:
            self._placed, self._inputs = placed, inputs.clone()
            return
        assert self._placed is placed
        held.samples.copy_(inputs.samples)
        held.weights.copy_(inputs.weights)
        held.total_weight.copy_(inputs.total_weight)
        if inputs.images is not None:
            assert held.images is not None
            held.images.copy_(inputs.images)

    def contents(self) -> tuple[Source, Inputs]:
        """Return the split and the batch."""
        assert self._placed is not None
        assert self._inputs is not None
        return self._placed, self._inputs


class CapturedStep:
    """Calls a step eagerly a few times, then records it and replays the record.

    The step must read its inputs from tensors that stay in place and must not wait for the device. If it cannot be
    recorded, it goes on eagerly, and the reason is reported once.
    """

    def __init__(self, step: Callable[[], None], prepare: Callable[[], None], report: Callable[[str], None]) -> None:
        self._step, self._prepare, self._report = step, prepare, report
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls = 0
        self._failed = False
        # Recording happens beside the default stream; the eager steps run there as well, so that the memory is shared.
        self._stream = torch.cuda.Stream()

    def __call__(self) -> None:
        """Run the step once."""
        if self._graph is None and self._calls >= EAGER_STEPS and not self._failed:
            self._record()
        if self._graph is not None:
            self._graph.replay()
            return
        self._calls += 1
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._prepare()
            self._step()
        torch.cuda.current_stream().wait_stream(self._stream)

    def _record(self) -> None:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            self._prepare()
            with torch.cuda.graph(graph, stream=self._stream):
                self._step()
        except RuntimeError as error:
            self._failed = True
            torch.cuda.synchronize()
            self._report(f"the step runs without a CUDA graph: {str(error).splitlines()[0]}")
            return
        self._graph = graph
        self._report("the whole step runs as one CUDA graph")
