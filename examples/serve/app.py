"""Serve an ONNX file of `flatout export` over HTTP; images that arrive while the model computes form the next batch.

pip install fastapi uvicorn onnxruntime pillow numpy
MODEL=model.onnx uvicorn app:app --port 8000
curl --data-binary @photo.jpg http://localhost:8000/predict
"""

import asyncio
import contextlib
import io
import json
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import onnxruntime
from fastapi import FastAPI, HTTPException, Request
from PIL import Image, ImageOps, UnidentifiedImageError

MOST, MOST_BYTES = 32, 20_000_000  # images in a batch, and bytes in a request
session = onnxruntime.InferenceSession(os.environ.get("MODEL", "model.onnx"))
about = session.get_modelmeta().custom_metadata_map
mode = {"1": "L", "3": "RGB"}[about["channels"]]
classes, (height, width) = json.loads(about["classes"]) or ["value"], json.loads(about["image_size"])
resize = {"squash": Image.Image.resize, "crop": ImageOps.fit, "pad": ImageOps.pad}[about["resize"]]
Image.MAX_IMAGE_PIXELS = 50_000_000  # Pillow refuses images of twice as many, so memory stays bounded
waiting: asyncio.Queue[tuple[np.ndarray, asyncio.Future[np.ndarray]]] = asyncio.Queue()


def decode(content: bytes) -> np.ndarray:
    """Return an encoded image as the model takes it, uint8 [height, width, C]."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    if image.mode.startswith(("I", "F")):
        raise ValueError("it has more than 8 bits per channel")
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    image = resize(image.convert(mode), (width, height), Image.Resampling.BILINEAR)
    return np.array(image).reshape(height, width, -1)


async def answer() -> None:
    """Compute batches of the images that wait, for ever."""
    while True:
        batch = [await waiting.get()]
        batch += [waiting.get_nowait() for _ in range(min(MOST - 1, waiting.qsize()))]
        images = np.stack([image for image, _ in batch])
        rows: Sequence[Any]
        try:
            rows = (await asyncio.to_thread(session.run, ["probabilities"], {"images": images}))[0]
        except Exception as error:  # these clients get it, and the next batch is computed
            rows = [error] * len(batch)
        for (_, future), row in zip(batch, rows, strict=True):
            if not future.done():  # else its client has gone
                future.set_exception(row) if isinstance(row, Exception) else future.set_result(row)


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Compute while the server runs."""
    task = asyncio.create_task(answer())
    yield
    task.cancel()


app = FastAPI(title="flatout", lifespan=lifespan)


@app.post("/predict")
async def predict(request: Request) -> dict[str, float]:
    """Return the probability of each class for the image in the body."""
    body = bytearray()
    async for part in request.stream():  # to its end, since a client that still sends gets no answer
        body += part if len(body) <= MOST_BYTES else b""
    if len(body) > MOST_BYTES:
        raise HTTPException(413, f"the image has more than {MOST_BYTES:,} bytes")
    try:
        image = await asyncio.to_thread(decode, bytes(body))
    except UnidentifiedImageError:
        raise HTTPException(400, "not an image of a known format") from None
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise HTTPException(400, f"the image cannot be used: {error}") from None
    future: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
    await waiting.put((image, future))
    return dict(zip(classes, (await future).tolist(), strict=True))
