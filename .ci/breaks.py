"""Lets names on the site break where they may and nowhere else, and shows bars in tables as GitHub does."""

import re
from typing import Any

TABLE = re.compile(r"<table>.*?</table>", re.S)
CODE = re.compile(r"(?<=<code>).*?(?=</code>)", re.S)
# In tables, behind these; a browser breaks behind none of them.
SEPARATOR = re.compile(r"(?<=[A-Za-z0-9])(?:[-._:=(,](?=[A-Za-z\"'\[(])|/(?=\w))")
# A browser breaks behind the hyphens of a flag; "-" at the end of a line reads as another flag.
FLAG = re.compile(r"(?<![\w-])--?[A-Za-z]\w*")


def on_page_content(html: str, **_: Any) -> str:
    """Return the content of a page; mkdocs calls this for each."""
    html = TABLE.sub(lambda table: CODE.sub(lambda code: _broken(code[0]), table[0]), html)
    return CODE.sub(lambda code: FLAG.sub(r'<span class="flag">\g<0></span>', code[0]), html)


def _broken(code: str) -> str:
    """Return a name with places to break; a bar is escaped in the tables of Markdown."""
    return SEPARATOR.sub(r"\g<0><wbr>", code.replace(r"\|", "|"))
