"""The host: its processor, cores and memory. The only module that counts them."""

import contextlib
import os
import platform
import resource
from functools import cache
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")  # the limits of a container


def usable_cores() -> int:
    """Return the number of logical cores that this process may use, within the quota of a container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # "max" is not a number
        quota, period = map(int, (_CGROUP / "cpu.max").read_text().split())
        cores = min(cores, max(1, -(-quota // period)))
    return cores


def physical_cores() -> int:
    """Return the number of physical cores that this process may use: hyper-threads do not speed up arithmetic."""
    import psutil

    return max(1, min(usable_cores(), psutil.cpu_count(logical=False) or usable_cores()))


def available_memory() -> int:
    """Return the bytes of memory that can be allocated without swapping, within the limit of a container."""
    import psutil

    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError, LookupError):
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        # The file cache counts as used; its inactive part can be reclaimed.
        free = min(free, limit - used + int(counts["inactive_file"]))
    return free


def peak_rss_bytes() -> int:
    # On Linux, getrusage includes the peak of the parent process, which is kept across exec.
    if lines := _lines("/proc/self/status", "VmHWM"):
        return int(lines[0].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on macOS in bytes


def processor_name() -> str:
    names = _lines("/proc/cpuinfo", "model name")
    return names[0] if names else platform.processor() or platform.machine()


def processor_flags() -> set[str]:
    """Return the instruction-set flags of the processor; empty if the system does not list them."""
    return {flag for line in _lines("/proc/cpuinfo", "flags", "Features")[:1] for flag in line.split()}


def installed(*packages: str) -> dict[str, str]:
    """Return the versions of those packages that are installed, without importing them, which would take seconds."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str] = {}
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _lines(path: str, *keys: str) -> list[str]:
    """Return the values of the lines `KEY: VALUE` with one of the keys; none if the file cannot be read."""
    with contextlib.suppress(OSError):
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        return [line.partition(":")[2].strip() for line in lines if line.startswith(keys)]
    return []


@cache
def process_place() -> str:
    """Return the PID namespace of this process: the host, and its container on Linux."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return f"{platform.node()}/{namespace}".replace(" ", "-")
