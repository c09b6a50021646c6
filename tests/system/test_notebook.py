"""Several devices from the cells of a notebook, in a real kernel."""

import asyncio
import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import psutil
import pytest

pytestmark = pytest.mark.slow

CELL_SECONDS = 90
FOLDER = Path(__file__).resolve().parents[2] / "examples"
# Examples, and a run of each.
EXAMPLES = {
    "first_model": "first-model",
    "your_own_folder": "own-functions",
    "colab": "runs/colab",
    "kaggle_tpu": "kaggle-tpu",
}
# On two simulated devices, as no TPU is here.
SHORTER = {"else 1\nrun = ": "else 0.15\nrun = ", '"epochs": 3': '"epochs": 1', '"8xcpu"': '"2xcpu"'}
# The page has small pictures; a busy machine needs all of a short budget.
NO_PICTURES = """
from flatout.report import pictures
from flatout.train import budget

def draw(path, *_):
    from PIL import Image  # variables are removed
    Image.new("L", (3, 2)).save(path)

pictures.draw_curves = pictures.draw_predictions = pictures.draw_answers = draw
budget.REPORT_SECONDS = 0.0
"""
SETUP = """
import threading, time
import numpy as np, torch, flatout
from flatout.train.request import Options
from torch import nn

class Net(nn.Module):
    def __init__(self, pause=0.0):
        super().__init__()
        torch.manual_seed(5)
        self.conv, self.norm, self.head = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 3)
        self.pause, self.calls = pause, 0
    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            print("the model speaks")
        time.sleep(self.pause)
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))

labels = np.arange(120) % 3
images = (np.random.default_rng(0).integers(0, 40, (120, 10, 10)) + 90 * labels[:, None, None]).astype(np.uint8)
settings = dict(batch_size=16, epochs=6, optimizer=flatout.Adam(lr=0.02), devices="2xcpu")
"""


class Notebook(nbclient.NotebookClient):
    """A notebook whose cells are given one by one, and watched while they run."""

    def __init__(self, folder: Path, seconds: float) -> None:
        resources = {"metadata": {"path": str(folder)}}
        notebook = nbformat.v4.new_notebook()
        super().__init__(notebook, timeout=seconds, allow_errors=True, resources=resources)
        self.folder = folder
        self._shown: list[str] = []
        self._when: tuple[str, Callable[[], None]] | None = None

    @property
    def kernel(self) -> psutil.Process:
        assert self.km
        return psutil.Process(self.km.provisioner.process.pid)  # pyright: ignore

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] in ("display_data", "update_display_data"):
            self._shown.append(msg["content"]["data"].get("text/html", ""))
            if self._when and self._when[0] in self._shown[-1]:
                act, self._when = self._when[1], None
                act()
        return super().process_message(msg, cell, cell_index)

    def interrupt(self) -> None:
        assert self.km
        self._interrupting = asyncio.ensure_future(self.km.interrupt_kernel())  # pyright: ignore

    def cell(self, source: str, when: tuple[str, Callable[[], None]] | None = None) -> "Outputs":
        """Run a cell, and do something once it displays a text; no process and no temporary file may be left."""
        self._shown, self._when = [], when
        cell = nbformat.v4.new_code_cell(source)
        self.nb.cells.append(cell)
        self.execute_cell(cell, len(self.nb.cells) - 1)
        assert self._when is None, f"never displayed: {self._when}"
        assert not self.kernel.children(recursive=True)
        assert not list((self.folder / "tmp").glob("flatout*"))
        return Outputs(cell.outputs, self._shown)


class Outputs:
    """What a cell gave: printed text, value, error, and all that was displayed, also what was later replaced."""

    def __init__(self, outputs: list[Any], shown: list[str]) -> None:
        self.shown = shown
        self.left = [o["data"]["text/html"] for o in outputs if o["output_type"] == "display_data"]
        self.text = "".join(o["text"] for o in outputs if o["output_type"] == "stream")
        self.value = next((o["data"]["text/plain"] for o in outputs if o["output_type"] == "execute_result"), "")
        error = next((o for o in outputs if o["output_type"] == "error"), None)
        self.error = (error["ename"], error["evalue"]) if error else None
        self.traceback = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error["traceback"])) if error else ""


@contextlib.contextmanager
def kernel_in(folder: Path, seconds: float = CELL_SECONDS) -> Iterator[Notebook]:
    (folder / "tmp").mkdir()
    notebook = Notebook(folder, seconds)
    with notebook.setup_kernel(env=os.environ | {"IPYTHONDIR": str(folder), "TMPDIR": str(folder / "tmp")}):
        yield notebook


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with kernel_in(tmp_path_factory.mktemp("notebook")) as opened:
        assert opened.cell(SETUP).error is None
        yield opened


@pytest.fixture(scope="module")
def whole(notebook: Notebook) -> Outputs:
    """Train in a cell, on two devices."""
    return notebook.cell('net = Net()\nrun = flatout.fit(net, (images, labels), out="whole", **settings)\nrun')


def test_progress_and_result_show_in_the_cell(notebook: Notebook, whole: Outputs) -> None:
    assert whole.error is None, whole.error
    assert whole.value.startswith("Run('whole', model='python:Net', accuracy=")
    bars = [shown for shown in whole.shown if shown.startswith('<progress value="')]
    assert all("images trained" in bar for bar in bars)
    assert bars
    assert set(whole.left) == {""}, "the bar goes when it is done"
    assert re.findall(r"^epoch (\d)/6 ", whole.text, re.MULTILINE) == list("123456")
    assert notebook.cell('run.summary["devices"], run.summary["world_size"]').value == "('2xcpu', 2)"
    assert "the model speaks" not in whole.text
    for rank in (0, 1):
        assert "the model speaks\n" in (notebook.folder / "whole" / "logs" / f"rank-{rank}.log").read_text()


def test_the_run_is_used_in_later_cells(notebook: Notebook, whole: Outputs) -> None:
    assert notebook.cell("type(run.model) is Net, run.model.training").value == "(True, False)"
    assert notebook.cell("net.training, net.head.weight.equal(run.model.head.weight)").value == "(False, True)"
    assert notebook.cell("Net().head.weight.equal(net.head.weight)").value == "False"
    evaluated = notebook.cell('result = run.evaluate((images, labels), devices="2xcpu")\nresult["devices"]')
    assert (evaluated.error, evaluated.value) == (None, "'2xcpu'")
    predicted = notebook.cell(
        "ours = [int(p.classes[0]) for p in run.predict(images, top=1)]\n"
        'sum(a == b for a, b in zip(ours, labels)) == result["test_correct"] > 100'
    )
    assert (predicted.error, predicted.value) == (None, "True")
    report = notebook.cell("run.show()")
    assert "<iframe srcdoc=" in report.left[0]
    assert report.text == "", "no warning"


def test_an_interrupted_cell_stops_all_ranks_and_can_be_resumed(notebook: Notebook, whole: Outputs) -> None:
    notebook.cell("Options.__init__.__kwdefaults__['report'] = False")
    fit = 'run = flatout.fit(Net({pause}), (images, labels), out="stopped", {more}**settings)\nrun.summary["stopped"]'
    stopped = notebook.cell(fit.format(pause=0.2, more=""), when=("epoch 2/6", notebook.interrupt))
    assert stopped.error == ("KeyboardInterrupt", "")
    assert "direct cause" not in stopped.traceback
    assert "interrupted in epoch" in stopped.text
    assert list((notebook.folder / "stopped" / "checkpoints").iterdir())
    resumed = notebook.cell(fit.format(pause=0, more="resume=True, "))
    assert resumed.error is None, resumed.error
    assert "resumed after epoch" in resumed.text
    assert resumed.value == ""
    weights = [f'flatout.load("{name}", model=Net()).model.head.weight' for name in ("whole", "stopped")]
    assert notebook.cell(f"torch.allclose({', '.join(weights)}, rtol=1e-5)").value == "True"


def test_a_model_that_other_processes_cannot_have(notebook: Notebook) -> None:
    held = notebook.cell("""
class Held(Net):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

flatout.fit(Held(), (images, labels), **settings)
""")
    assert held.error is not None
    assert held.error[0] == "InputError"
    assert "Held cannot be copied" in held.error[1]


def test_the_examples_run(tmp_path: Path) -> None:
    """One after the other in one kernel, each without the variables and in another folder than the others."""
    shortened = set[str]()
    # Compiling for simulated devices takes long on a busy machine.
    with kernel_in(tmp_path, 4 * CELL_SECONDS) as notebook:
        for name, run in EXAMPLES.items():
            (tmp_path / name).mkdir()
            notebook.cell(f"%reset -f\n%cd -q {tmp_path / name}")
            for cell in nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells:
                if cell.cell_type == "code":
                    source = re.sub(r"\bepochs=\d", "epochs=1", cell.source)
                    shortened |= {shown for shown in SHORTER if shown in source}
                    for shown, short in SHORTER.items():
                        source = source.replace(shown, short)
                    done = notebook.cell(source)
                    assert done.error is None, f"{name}: {done.traceback}"
            assert (tmp_path / name / run / "report.html").is_file()
            notebook.cell(NO_PICTURES)
    assert shortened == SHORTER.keys()
    summary = json.loads((tmp_path / "kaggle_tpu" / "kaggle-tpu" / "summary.json").read_text())
    assert (summary["engine"], summary["devices"], summary["world_size"]) == ("xla", "2xcpu", 2)
    assert (tmp_path / "kaggle_tpu" / "own-net" / "weights.safetensors").is_file()
