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
