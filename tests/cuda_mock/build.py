"""Build the mock: one library that stands in for the CUDA runtime, the driver, cuBLAS, cuDNN and NCCL.

The headers are those of the wheels that torch depends on, so the mock has the versions that torch was built for. It is
built once for its sources and torch's version, into `build/cuda_mock`.
"""

import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SOURCES = ("runtime.cpp", "libraries.cpp", "driver.cpp")
# The headers that the sources include, each in the wheel of its library.
HEADERS = ("cuda.h", "cublasLt.h", "cudnn.h", "nccl.h")
# What torch's libraries ask of others that the mock stands in for. Solvers, FFT and sparse products are NVIDIA's own.
MOCKED = re.compile(r"(cuda|__cuda|cublas|cudnn|nccl|cu(?=[A-Z]))")
# Of the rest, what succeeds by doing nothing or by creating a descriptor, and what computes.
NOTHING = re.compile(
    r"cuda(DeviceEnablePeerAccess|Profiler\w+|MemcpyToSymbol|StreamDestroy|FuncSetAttribute|KernelSetAttributeForDevice)"
    r"|cublas(SetWorkspace_v2|SetSmCountTarget|Lt(MatmulDesc|MatrixLayout|MatmulPreference)(Destroy|SetAttribute))"
    r"|cudnn(DestroyTensorDescriptor|SetTensorNdDescriptor|Backend(DestroyDescriptor|Finalize|SetAttribute))"
    r"|nccl(CommFinalize|CommDeregister|GroupStart|GroupEnd|RedOpDestroy)"
)
CREATES = re.compile(r"cublasLt\w+Create|cudnnCreateTensorDescriptor")
PRODUCT = re.compile(r"cublas[SDCZH]?(Gemm|gemm|gemv|dot|Dot)")


class CannotBuild(Exception):
    """The mock cannot be built here; the message names what is missing."""


def build() -> Path:
    """Return the library, built unless it is there."""
    if sys.platform != "linux" or not all(map(shutil.which, ("g++", "nm"))):
        raise CannotBuild("needs Linux, g++ and nm")
    packages = _site_packages()
    includes = sorted({path.parent for name in HEADERS for path in packages.glob(f"nvidia/*/include/{name}")})
    if not all(any((folder / name).exists() for folder in includes) for name in HEADERS):
        raise CannotBuild("needs a torch with CUDA, whose wheels have NVIDIA's headers")
    texts = [(HERE / name).read_bytes() for name in ("mock.hpp", *SOURCES, Path(__file__).name)]
    digest = hashlib.sha256(b"\0".join([*texts, version("torch").encode()])).hexdigest()[:16]
    library = ROOT / "build" / "cuda_mock" / digest / "libcuda.so.1"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = _compile(Path(folder), packages, includes)
            # Another process may have built it meanwhile; each replaces the file as a whole.
            made.replace(library)
    return library


def _site_packages() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent.parent


def _compile(folder: Path, packages: Path, includes: list[Path]) -> Path:
    # Triton's wheel, on which torch depends, has headers that the wheel of the runtime includes and lacks.
    others = packages / "triton" / "backends" / "nvidia" / "include"
    flags = ["g++", "-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-Wno-deprecated-declarations", f"-I{HERE}"]
    flags += [f"-I{include}" for include in includes] + ["-idirafter", str(others)]
    objects = [folder / f"{Path(name).stem}.o" for name in SOURCES]
    compilers = [
        subprocess.Popen([*flags, "-c", str(HERE / name), "-o", str(made)])
        for name, made in zip(SOURCES, objects, strict=True)
    ]
    if any(list(map(subprocess.Popen.wait, compilers))):
        raise RuntimeError("the mock does not compile; see the output of g++")
    wanted = _symbols("--undefined-only", sorted((packages / "torch" / "lib").glob("*.so")))
    missing = {name for name in wanted if MOCKED.match(name)} - _symbols("--defined-only", objects)
    stubs, library = folder / "stubs.cpp", folder / "libcuda.so.1"
    stubs.write_text(_stubs(sorted(missing)))
    # By this name, loaders and `dlopen` find the library in place of the driver's.
    linked = ["-shared", "-Wl,-soname,libcuda.so.1", "-o", str(library), "-ldl", "-lpthread"]
    subprocess.run([*flags, str(stubs), *map(str, objects), *linked], check=True)
    return library


def _symbols(which: str, files: list[Path]) -> set[str]:
    dynamic = ["--dynamic"] if files[0].suffix == ".so" else []
    command = ["nm", "--format=just-symbols", *dynamic, which, *map(str, files)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line.split("@")[0] for line in listed.splitlines()}


def _stubs(names: list[str]) -> str:
    """Return the source of functions that nobody wrote: matrix products are kernels, what is not known fails."""
    lines = ['extern "C" {', "int mock_blas_kernel(void*, const char*);", "int mock_unsupported(const char*);"]
    lines.append("int mock_create(void*);")
    for name in names:
        if PRODUCT.match(name):
            lines.append(f'int {name}(void* handle) {{ return mock_blas_kernel(handle, "{name}"); }}')
        elif CREATES.fullmatch(name):
            lines.append(f"int {name}(void* descriptor) {{ return mock_create(descriptor); }}")
        else:
            result = "0" if NOTHING.fullmatch(name) else f'mock_unsupported("{name}")'
            lines.append(f"int {name}() {{ return {result}; }}")
    return "\n".join([*lines, "}", ""])


if __name__ == "__main__":
    print(build())
