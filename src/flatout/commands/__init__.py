"""The commands. Each takes the parsed arguments and a console, and returns what it prints, if anything."""

from flatout.commands import training, runs, data, weights, machine  # noqa: I001  the order of the help text
from flatout.commands.command import COMMANDS
from flatout.commands.machine import SHELLS

__all__ = ["COMMANDS", "SHELLS", "data", "machine", "runs", "training", "weights"]
