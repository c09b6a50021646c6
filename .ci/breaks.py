"""Lets names in the tables of the site break behind dots, underscores and the like, where a browser breaks none."""

import re
from typing import Any

TABLE = re.compile(r"<table>.*?</table>", re.S)
CODE = re.compile(r"(?<=<code>).*?(?=</code>)", re.S)
SEPARATOR = re.compile(r"(?<=\w)[-._/:=(,](?=[A-Za-z_\"'\[(])")


def on_page_content(html: str, **_: Any) -> str:
    """Return the content of a page; mkdocs calls this for each."""

    def broken(code: re.Match[str]) -> str:
        return SEPARATOR.sub(r"\g<0><wbr>", code[0])

    return TABLE.sub(lambda table: CODE.sub(broken, table[0]), html)
