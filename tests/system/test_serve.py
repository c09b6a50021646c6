"""The example server: real requests over a socket are answered as `flatout predict` answers."""

import importlib
import io
import json
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import flatout

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "serve"
pytest.importorskip("fastapi", reason="needs FastAPI: pip install 'flatout[serve]'")
uvicorn = pytest.importorskip("uvicorn", reason="needs uvicorn: pip install 'flatout[serve]'")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_pictures_in_module")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> flatout.Run:
    """Return a run on photos of two colours, 20x30 pixels, of which the centre is used."""
    folder, rng = tmp_path_factory.mktemp("serve"), np.random.default_rng(0)
    labels = np.arange(200) % 2
    images = rng.integers(0, 80, (200, 20, 30, 3)).astype(np.uint8)
    images[np.arange(200), :, :, labels] += 150
    np.savez(folder / "data.npz", images=images, labels=labels)
    flags: dict[str, Any] = {"devices": "cpu", "quiet": True, "epochs": 2, "batch_size": 32, "resize": "crop"}
    return flatout.fit("parallel-cnn", folder / "data.npz", out=folder / "run", image_size=20, seed=1, **flags)


@pytest.fixture(scope="module")
def served(run: flatout.Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[int]]]:
    """Return the address of a running server, and a list that grows by the size of every batch."""
    model, batches = tmp_path_factory.mktemp("model") / "model.onnx", []
    run.export(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODEL", str(model))
        patch.syspath_prepend(FOLDER)
        app = importlib.import_module("app")
    compute = app.session.run

    def run_slowly(names: Any, inputs: Any) -> Any:
        batches.append(len(inputs["images"]))
        time.sleep(0.05)  # as a larger model: requests arrive meanwhile
        return compute(names, inputs)

    app.session.run = run_slowly
    server = uvicorn.Server(uvicorn.Config(app.app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}/predict", batches
    server.should_exit = True
    thread.join()
    sys.modules.pop("app", None)


def png(seed: int) -> bytes:
    rng, file = np.random.default_rng(seed), io.BytesIO()
    image = rng.integers(0, 120, (40 + seed, 70, 3 + seed // 2 % 2)).astype(np.uint8)  # some are half transparent
    image[..., seed % 2] += 120
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def ask(url: str, content: bytes) -> dict[str, float]:
    with urllib.request.urlopen(urllib.request.Request(url, content), timeout=300) as response:
        return json.load(response)


def test_concurrent_requests_are_answered_in_batches_as_predict_answers(
    served: tuple[str, list[int]], run: flatout.Run
) -> None:
    url, batches = served
    images = [png(seed) for seed in range(24)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda content: ask(url, content), images))
    assert sum(batches) == 24
    assert max(batches) > 1
    for answer, expected in zip(answers, run.predict(images, top=2), strict=True):
        assert max(answer, key=answer.__getitem__) == expected.classes[0]
        assert answer[expected.classes[0]] == pytest.approx(expected.probabilities[0], abs=0.02)


def test_what_is_no_image_is_refused_and_the_server_goes_on(served: tuple[str, list[int]]) -> None:
    url, _ = served
    for content in (b"no image", b"", png(1)[:80]):
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(url, content)
    with pytest.raises(urllib.error.HTTPError, match="413"):
        ask(url, bytes(30_000_000))
    assert sum(ask(url, png(3)).values()) == pytest.approx(1, abs=1e-5)


def test_the_image_of_docker_has_all_that_the_example_imports() -> None:
    installed = re.search(r"pip install --no-cache-dir (.+)", (FOLDER / "Dockerfile").read_text())
    assert installed is not None
    imported = set(re.findall(r"^(?:import|from) (\w+)", (FOLDER / "app.py").read_text(), re.M))
    needed = {{"PIL": "pillow"}.get(name, name) for name in imported - sys.stdlib_module_names}
    assert needed | {"uvicorn"} == set(installed[1].split())
