"""What torch's compiler makes of a training step: machine code for a GPU, made and read without one."""

import json
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cuda_mock import device
from tests.cuda_mock.build import CannotBuild, build
from tests.cuda_mock.test_steps import RECORDED, check_recorded

# Registers of a thread: today's largest reduction takes 149. More, and fewer threads run at once.
MAX_REGISTERS = 160


@pytest.mark.slow
def test_a_compiled_step_is_recorded_and_its_kernels_spill_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        build()
    except CannotBuild as error:
        pytest.skip(f"the stand-in for a GPU {error}")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    found = device.run("tests.cuda_mock.scenarios", "compiled")
    assert found["eager"]["notes"] == found["compiled"]["notes"] == [RECORDED]
    check_recorded(found["compiled"])
    # Kernels are fused.
    assert found["compiled"]["start"]["graph nodes"] < found["eager"]["start"]["graph nodes"]
    kernels = resources(tmp_path / "triton")
    assert len(kernels) >= 5
    for name, (registers, spilled_bytes) in kernels.items():
        assert registers <= MAX_REGISTERS, name
        assert spilled_bytes == 0, name


def resources(folder: Path) -> dict[str, tuple[int, int]]:
    """Return registers of a thread and bytes of spilled ones, by kernel, from the machine code in Triton's cache."""
    triton = find_spec("triton")
    assert triton is not None and triton.origin is not None
    cuobjdump = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    found = {}
    for cubin in folder.rglob("*.cubin"):
        command = [cuobjdump, "--dump-resource-usage", cubin]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert json.loads(cubin.with_suffix(".json").read_text())["target"]["arch"] == 90
        usage = re.search(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
        assert usage, said
        # Spilled registers are on the stack.
        found[usage[1]] = int(usage[2]), int(usage[3]) + int(usage[4])
    return found
