"""Commands on this machine: devices, completion."""

from argparse import Namespace

from flatout.commands.command import Output, command
from flatout.console import Console
from flatout.errors import InputError
from flatout.settings import nearest

SHELLS = ("bash", "zsh", "fish")


@command("", "--json", "devices")
def do_devices(args: Namespace, console: Console) -> Output:
    """List the devices of this machine."""
    from flatout.engine.devices import available, machine

    found, here = available(), machine()
    lines = [f"cpu: {here['cpu']}, {found['cpu']} cores, {here['memory_bytes'] / 2**30:.0f} GiB"]
    names = {"cuda": f" ({here['gpu']})", "tpu": " (--engine xla)"}
    lines += [f"{kind}: {count}{names.get(kind, '')}" for kind, count in found.items() if kind != "cpu"]
    if len(found) == 1:
        lines.append("no GPU or TPU")
    return {"devices": found, "machine": here}, lines


@command("SHELL", "", "completion bash")
def do_completion(args: Namespace, console: Console) -> Output:
    """Print the script that completes commands in your shell."""
    if args.shell not in SHELLS:
        raise InputError(f"flatout completion {args.shell}: {nearest(args.shell, SHELLS)}")
    script = args.completion(args.shell)
    return {"shell": args.shell, "script": script}, [script]
