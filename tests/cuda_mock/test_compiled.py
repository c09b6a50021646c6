"""What torch's compiler makes of a training step: machine code for a GPU, made and read without one."""

import itertools
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cuda_mock import device
from tests.cuda_mock.test_steps import RECORDED, check_recorded

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("mock")]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    name: str
    architecture: str  # the GPUs for which it is, such as "sm_90a"
    registers: int  # of a thread, 32 bits each
    spilled_bytes: int  # memory of a thread for what its registers cannot hold


def nvidia_program(name: str) -> Path:
    """Return one of the programs that come with Triton."""
    triton = find_spec("triton")
    assert triton is not None and triton.origin is not None
    return Path(triton.origin).parent / "backends" / "nvidia" / "bin" / name


def read(cubin: Path) -> Kernel:
    """Read the machine code of one kernel."""
    flags = ("--list-elf", "--dump-resource-usage")  # which one call does not combine
    commands = ([nvidia_program("cuobjdump"), flag, cubin] for flag in flags)
    listed = "".join(subprocess.run(c, check=True, capture_output=True, text=True).stdout for c in commands)
    usage = re.search(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", listed)
    code = re.search(r"\.(sm_\w+)\.cubin", listed)
    assert usage and code, listed[:1000]
    name, registers, stack, local = usage.groups()
    # Spilled registers are on the stack, which Triton's kernels use for nothing else.
    return Kernel(name=name, architecture=code[1], registers=int(registers), spilled_bytes=int(stack) + int(local))


def test_a_compiled_step_is_recorded_and_its_kernels_spill_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inductor, triton = tmp_path / "inductor", tmp_path / "triton"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(inductor))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(triton))
    # Processes that compile would import torch first, which takes longer.
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    found = device.run("tests.cuda_mock.scenarios", "compiled")
    assert found["eager"]["notes"] == found["compiled"]["notes"] == [RECORDED]
    check_recorded(found["compiled"])
    # Kernels are fused.
    assert found["compiled"]["start"]["graph nodes"] < found["eager"]["start"]["graph nodes"]
    calls = (re.findall(r"async_compile\.triton\('(\w+)'", path.read_text()) for path in inductor.rglob("*.py"))
    written = Counter(itertools.chain.from_iterable(calls))
    # A kernel may have several variants, of which torch chooses by their times.
    kernels = sorted(map(read, triton.rglob("*.cubin")), key=lambda kernel: -kernel.registers)
    print(f"\n{written.total()} kernels in {len(kernels)} variants")
    for kernel in kernels:
        print(f"{kernel.registers:4} registers {kernel.spilled_bytes:4} bytes spilled  {kernel.name}")
    assert written and written <= Counter(kernel.name for kernel in kernels)
    # With the features of this architecture alone (sm_90a), or without.
    assert {kernel.architecture.removesuffix("a") for kernel in kernels} == {"sm_90"}
    assert [kernel for kernel in kernels if kernel.spilled_bytes] == []


@pytest.mark.parametrize(("values", "are_spilled"), [(100, False), (300, True)])
def test_spilled_registers_are_seen(values: int, are_spilled: bool, tmp_path: Path) -> None:
    """A thread has 255 registers, and this one reads all values before it writes the first."""
    loads = "\n".join(f"ld.volatile.global.f32 %value{n}, [%address+{4 * n}];" for n in range(values))
    stores = "\n".join(f"st.volatile.global.f32 [%address+{4 * n}], %value{n};" for n in range(values))
    registers = f".reg .u64 %address; .reg .f32 %value<{values}>; ld.param.u64 %address, [memory];"
    entry = f".visible .entry kernel(.param .u64 memory) {{ {registers}\n{loads}\n{stores}\nret; }}"
    source, cubin = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
    source.write_text(f".version 8.0\n.target sm_90\n.address_size 64\n{entry}\n")
    subprocess.run([nvidia_program("ptxas"), "--gpu-name=sm_90", source, "-o", cubin], check=True)
    kernel = read(cubin)
    assert kernel.architecture == "sm_90"
    assert (kernel.spilled_bytes > 0) == are_spilled
    assert kernel.registers >= min(values, 200)
