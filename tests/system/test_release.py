"""What is released: the source archive builds a wheel, and that runs where the repository is not."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import flatout

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "flatout"

pytestmark = pytest.mark.slow


def call(*command: object, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    # The test's own settings of Python lead to the repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | environment
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build both from a copy of the tracked files: the wheel from the source archive, offline."""
    folder = tmp_path_factory.mktemp("release")
    tracked = call("git", "ls-files", "--cached", "--others", "--exclude-standard", folder=ROOT).stdout.splitlines()
    for name in tracked:
        if (ROOT / name).is_file():
            (folder / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / "copy" / name)
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder=folder / "copy")
    return folder / "dist"


def test_both_have_all_files_of_the_package_and_nothing_else(dist: Path) -> None:
    files = {str(p.relative_to(ROOT / "src")) for p in PACKAGE.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    about = f"flatout-{flatout.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(about)} == files
    assert {f"{about}licenses/LICENSE", f"{about}METADATA"} <= names
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        inside = {name.partition("/")[2] for name in opened.getnames()}
    assert {f"src/{name}" for name in files} | {"pyproject.toml", "README.md", "LICENSE"} <= inside


def test_the_wheel_runs_in_an_environment_of_its_own(dist: Path, tmp_path: Path) -> None:
    """Its dependencies are those of this environment: nothing is downloaded."""
    call(sys.executable, "-m", "venv", "--without-pip", "env", folder=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    (wheel,) = dist.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    call(*pip, folder=tmp_path)
    own = Path(
        call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=tmp_path).stdout.strip()
    )
    # Without its .pth files, which would lead to the repository.
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    found = call(python, "-c", "import flatout; print(flatout.__file__)", folder=tmp_path).stdout
    assert Path(found.strip()).is_relative_to(own)
    command = tmp_path / "env" / "bin" / "flatout"
    lines = call(command, "--version", folder=tmp_path).stdout.splitlines()
    assert lines[0] == f"flatout {flatout.__version__}"
    assert f"Python {sys.version.split()[0]}" in lines
    assert {"torch", "timm"} <= {line.split()[0] for line in lines}
    call(command, "train", "digits", "--epochs", "3", "--devices", "cpu", "--out", "run", folder=tmp_path)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["test_accuracy"] > 0.5
    assert (tmp_path / "run" / "report.html").is_file()
