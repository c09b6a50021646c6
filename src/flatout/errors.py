"""The ways a run can end early that are not a bug in flatout."""


class InputError(ValueError):
    """Something the user gave is wrong: a file, a flag, a value.

    The message is all the user sees, so it names the thing and the mend. The command line exits with 2.
    """


class TrainingFailed(RuntimeError):
    """Training could not go on (a non-finite loss, a lost device). The command line exits with 1."""


class RankLost(TrainingFailed):
    """Another process of the run is gone: what this one was doing with it cannot be finished. Never the first cause."""


class Stopped(Exception):
    """The user or the system asked the run to end; `signal_number` says how."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that a device or the host has no memory left; torch's are RuntimeErrors."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _OUT_OF_MEMORY)
