"""Self-contained pages from the templates of this folder, which escape all text from data.

The only script, which filters a table, is allowed by its hash.
"""

import base64
import hashlib
import io
import re
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flatout.utils.console import duration
from flatout.utils.files import write_atomically
from flatout.utils.run_files import JsonObject
from flatout.utils.style import shorten

THUMBNAIL_PIXELS = 192  # twice the width of an image on the page, for dense screens
SMOOTH_FROM_PIXELS = 96  # smaller images are enlarged by whole pixels, so that the model's input is visible
FILTER_SCRIPT = """
document.querySelector("input[type=search]").addEventListener("input", event => {
  const wanted = event.target.value.toLowerCase();
  for (const row of document.querySelectorAll("#all-classes tbody tr"))
    row.hidden = !row.textContent.toLowerCase().includes(wanted);
});
"""


def page(template: str, content: JsonObject) -> str:
    """Return a template of this folder, such as `page.html.j2`, filled in."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flatout.report", package_path=""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": duration, "breakable": _breakable, "shorten": shorten}
    digest = base64.b64encode(hashlib.sha256(FILTER_SCRIPT.encode()).digest()).decode()
    environment.globals |= {"script": FILTER_SCRIPT, "script_hash": digest}
    return environment.get_template(template).render(content)


def framed(html: str) -> str:
    """Return a page in a frame, for notebooks: which isolates the page's style."""
    # IPython warns about HTML that begins with a frame; its own IFrame only supports addresses.
    return f'<div><iframe srcdoc="{escape(html)}" style="width:100%;height:50em;border:0"></iframe></div>'


def write_page(path: Path, template: str, content: JsonObject) -> None:
    """Write a page. Raises InputError if it cannot be written."""
    write_atomically(path, page(template, content).encode())


def thumbnail(image_HWC: np.ndarray) -> str:
    """Return a picture of at most `THUMBNAIL_PIXELS` as a data URI: PNG for tiny images, JPEG for photographs."""
    image = Image.fromarray(image_HWC[..., 0] if image_HWC.shape[-1] == 1 else image_HWC)
    buffer = io.BytesIO()
    if max(image.size) < SMOOTH_FROM_PIXELS:
        image.save(buffer, format="png", optimize=True)
        return data_uri("image/png", buffer.getvalue())
    image.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    image.save(buffer, format="jpeg", quality=88)
    return data_uri("image/jpeg", buffer.getvalue())


def data_uri(kind: str, content: bytes) -> str:
    """Return a file as a data URI."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _breakable(text: str) -> Any:
    """Return the text escaped; lines may break after characters that join words, but not within numbers."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"(?<=\S[_/-])(?=\w)|(?<=\.)(?=[^\W\d])", "<wbr>", str(escape(text))))
