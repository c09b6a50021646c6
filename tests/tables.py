"""What docs/data.md has from the code. `python -m tests.tables` writes it; a test compares."""

import re
from collections import defaultdict
from pathlib import Path

from flatout.data.formats.folders import IMAGE_SUFFIXES
from flatout.data.splits import WORDS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "data.md"


def generated(text: str) -> str:
    """Return the page with what comes from the readers: words for splits, suffixes of images."""
    words = defaultdict[str, list[str]](list)
    for word, split in WORDS.items():
        words[split].append(f"`{word}`")
    text = _with_table(text, ("split", "words"), [(split, ", ".join(some)) for split, some in words.items()])
    return re.sub(r"Images are `\.[^`]*`", lambda _: f"Images are `{' '.join(IMAGE_SUFFIXES)}`", text)


def _with_table(text: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(cells)} |\n" for cells in [header, *rows]]
    lines.insert(1, f"|{'---|' * len(header)}\n")
    table, count = re.subn(rf"{re.escape(lines[0])}(\|.*\n)+", "".join(lines).replace("\\", r"\\"), text)
    assert count == 1, f"{PAGE} has no table with the columns {', '.join(header)}"
    return table


if __name__ == "__main__":
    PAGE.write_text(generated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
