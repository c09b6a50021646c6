"""Record a training step as a CUDA graph, so that launching its hundreds of kernels takes one call."""

from collections import Counter
from collections.abc import Callable

from flatout.engine.eager.accelerator import Accelerator
from flatout.engine.eager.split import Inputs, Source

# Lazy initialisation (cuBLAS handles, cuDNN's choice of algorithms, optimizer state) must be over before recording.
EAGER_STEPS = 3


class CapturedStep:
    """Runs a step eagerly a few times, then records it and replays the record.

    The step reads its inputs from tensors that stay in place, and must not wait for the device. Its Python numbers
    become constants of the record, so batches with other numbers (the short last batch of an epoch) run eagerly; all
    ranks agree on which these are. Where recording fails, all steps run eagerly, and the reason is reported once.

    Args:
        step: computes a batch of a split.
        forget_gradients: sets every gradient to None, so that the backward pass allocates new ones.
    """

    def __init__(
        self,
        step: Callable[[Source, Inputs], None],
        forget_gradients: Callable[[], None],
        accelerator: Accelerator,
        report: Callable[[str], None],
    ) -> None:
        self._step, self._forget_gradients = step, forget_gradients
        self._accelerator, self._report = accelerator, report
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._graph, self._is_off = None, False
        self._constants: tuple[int, ...] = ()
        self._inputs: Inputs | None = None
        self._source: Source | None = None

    def __call__(self, source: Source, inputs: Inputs) -> None:
        """Run the step once."""
        constants = inputs.constants
        if source is not self._source:
            self.release()
            self._source = source
        if self._graph is None and not self._is_off and self._seen[constants] == EAGER_STEPS:
            self._record(source, inputs)
        if self._graph is not None and constants == self._constants:
            assert self._inputs is not None
            self._inputs.copy_(inputs)
            self._graph.replay()
            return
        self._seen[constants] += 1
        self._forget_gradients()
        self._step(source, inputs)

    def _record(self, source: Source, inputs: Inputs) -> None:
        self._forget_gradients()
        static = inputs.clone()
        try:
            if not self._accelerator.has_room_for_graph():
                raise RuntimeError("too little memory for a graph beside eager steps")
            self._graph = self._accelerator.capture(lambda: self._step(source, static))
        except RuntimeError as error:
            self._is_off = True
            self._report(f"the step runs without a CUDA graph: {str(error).splitlines()[0]}")
            return
        self._inputs, self._constants = static, inputs.constants
        self._report("the whole step runs as one CUDA graph")

    def release(self) -> None:
        """Free the record, so that its communicator can be closed; later steps are recorded anew."""
        if self._graph is not None:
            self._graph.reset()
        self._graph = None
        self._seen.clear()
