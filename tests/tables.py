"""What docs/data.md has from the code. `python -m tests.tables` writes it; a test compares."""

import re
from pathlib import Path

from flatout.data.formats.folders import IMAGE_SUFFIXES
from flatout.data.splits import SPLITS, WORDS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "data.md"


def generated(text: str) -> str:
    """Return the page with what comes from the readers: words for splits, suffixes of images."""
    lines = {r"Images are `\.[^`]*`": f"Images are `{' '.join(IMAGE_SUFFIXES)}`"}
    for split in SPLITS:
        words = [f"`{word}`" for word, meaning in WORDS.items() if meaning == split]
        lines[rf"\| {split} \| `\w+`, .*"] = f"| {split} | {', '.join(words)} |"
    for pattern, line in lines.items():
        text, count = re.subn(pattern, line, text)
        assert count == 1, f"{PAGE} has {pattern} {count} times"
    return text


if __name__ == "__main__":
    PAGE.write_text(generated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
