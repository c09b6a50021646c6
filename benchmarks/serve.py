"""Latency and throughput of the example server, `examples/serve/app.py`, by real requests; prints JSON.

    python benchmarks/serve.py MODEL.onnx PHOTOS [--clients 1 8 32] [--seconds 20]

PHOTOS is a folder of image files. Server and clients share the machine. Each client sends the next photo when it has
the answer to its last one, over a connection that stays open.
"""

import http.client
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from common import about, image_files, make_parser

APP = Path(__file__).resolve().parents[1] / "examples" / "serve"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_for(port: int, server: "subprocess.Popen[bytes]") -> None:
    while server.poll() is None:
        try:
            return socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.1)
    sys.exit("the server has ended")


def ask(port: int, photos: list[bytes], until: float, first: int) -> list[float]:
    """Send one photo after the other, and return the seconds that each took."""
    connection, seconds = http.client.HTTPConnection("127.0.0.1", port), []
    for photo in itertools.islice(itertools.cycle(photos), first, None):
        began = time.perf_counter()
        if began > until:
            connection.close()
            return seconds
        connection.request("POST", "/predict", photo)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        answer.read()
        seconds.append(time.perf_counter() - began)
    return seconds


def measure(port: int, photos: list[bytes], clients: int, seconds: float) -> dict[str, Any]:
    results: list[list[float]] = [[] for _ in range(clients)]
    began = time.perf_counter()

    def client(number: int) -> None:
        results[number] = ask(port, photos, began + seconds, 7 * number)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took, all_ms = time.perf_counter() - began, 1000 * np.concatenate(results)
    p50, p95 = (round(float(value), 1) for value in np.percentile(all_ms, [50, 95]))
    rate = round(len(all_ms) / took, 1)
    return {"clients": clients, "images": len(all_ms), "images_per_second": rate, "p50_ms": p50, "p95_ms": p95}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=20)
    args = parser.parse_args()
    files = image_files(args.photos, ".jpg", ".jpeg", ".png")[:200]
    photos, port = [file.read_bytes() for file in files], free_port()
    command = [sys.executable, "-m", "uvicorn", "app:app", "--port", str(port), "--log-level", "error"]
    environment = {**os.environ, "MODEL": str(args.model.absolute())}
    with subprocess.Popen(command, cwd=APP, env=environment) as server:
        try:
            wait_for(port, server)
            measure(port, photos, 4, 3)  # warm up
            rows = [measure(port, photos, clients, args.seconds) for clients in args.clients]
        finally:
            server.terminate()
    mean_bytes = sum(map(len, photos)) // len(photos)
    found = {"model": args.model.name, "photos": len(photos), "mean_bytes": mean_bytes, "rows": rows}
    print(json.dumps({**found, **about("onnxruntime", "fastapi", "uvicorn")}, indent=2))


if __name__ == "__main__":
    main()
