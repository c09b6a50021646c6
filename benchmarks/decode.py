"""Decode and resize JPEG files: Pillow against flatout, alternately in one go; prints JSON.

    python benchmarks/decode.py FOLDER [--size 128] [--repeats 7]

Rates are medians over the repeats; ratios are medians of the ratios within a repeat. Reading the files is included.
"""

import functools
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from common import about, image_files, in_turn, make_parser, median_ratio
from flatout.data.decode import decode_image
from flatout.utils.host import usable_cores


def rate(decode: Callable[[Path], np.ndarray], files: list[Path], threads: int) -> float:
    """Return images per second."""
    if threads == 1:
        start = time.perf_counter()
        for file in files:
            decode(file)
        return len(files) / (time.perf_counter() - start)
    with ThreadPoolExecutor(threads) as pool:
        pool.submit(int).result()
        start = time.perf_counter()
        for _ in pool.map(lambda some: [decode(file) for file in some], [files[i::64] for i in range(64)]):
            pass
        return len(files) / (time.perf_counter() - start)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--images", type=int, default=600, help="how many files at most")
    arguments = parser.parse_args()
    files = image_files(arguments.folder)[: arguments.images]
    size = arguments.size
    torch.set_num_threads(1)
    cores = usable_cores()

    def pillow(file: Path) -> np.ndarray:
        with Image.open(file) as image:
            return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))

    def flatout(file: Path) -> np.ndarray:
        return decode_image(file, size=size, channels=3, resize="squash")

    ways = {
        "pillow_1_thread": (pillow, 1),
        "flatout_1_thread": (flatout, 1),
        f"pillow_{cores}_threads": (pillow, cores),
        f"flatout_{cores}_threads": (flatout, cores),
    }
    for decode, _ in ways.values():  # the files into the page cache, the code into memory
        rate(decode, files, 1)
    timed = {name: functools.partial(rate, decode, files, threads) for name, (decode, threads) in ways.items()}
    rates = in_turn(timed, arguments.repeats)

    def ratio(name: str, against: str) -> float:
        return round(median_ratio(rates[name], rates[against]), 3)

    pixels = []
    for file in files:
        with Image.open(file) as image:
            pixels.append(image.size)
    result = {
        "images": len(files),
        "mean_width_height": [round(float(mean), 1) for mean in np.mean(pixels, axis=0)],
        "size": size,
        "repeats": arguments.repeats,
        "images_per_second": {name: round(statistics.median(values)) for name, values in rates.items()},
        "flatout_over_pillow_per_core": ratio("flatout_1_thread", "pillow_1_thread"),
        "flatout_over_pillow_all_cores": ratio(f"flatout_{cores}_threads", f"pillow_{cores}_threads"),
        "cores_kept_busy": ratio(f"flatout_{cores}_threads", "flatout_1_thread"),
        "cores": cores,
        **about("flatout", "pillow", "simplejpeg", "torch", "numpy"),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
