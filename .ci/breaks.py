"""Lets names and figures on the site break where they may and nowhere else, and shows tables as GitHub does.

Tables of keys get an attribute, by which phones show the meaning of a key below it instead of in a fourth column.
"""

import re
from typing import Any

TABLE = re.compile(r"(<table>.*?</table>)", re.S)
CODE = re.compile(r"(?<=<code>).*?(?=</code>)", re.S)
VERBATIM = re.compile(r"(<pre.*?</pre>|<code>.*?</code>)", re.S)
# In tables, behind these; a browser breaks behind none of them.
SEPARATOR = re.compile(r"(?<=[A-Za-z0-9])(?:[-._:=(,](?=[A-Za-z\"'\[(])|/(?=\w))")
# A browser breaks behind the hyphens of a flag, and "-" at the end of a line reads as another flag. In tables, which
# are narrow, the first word stays with its hyphens.
FLAG = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")
FLAG_IN_TABLE = re.compile(r"(?<![\w-])--?[A-Za-z]\w*")
UNIT = re.compile(r"(?<=\d) (?=(?:%|[nµm]?s|[kMG]B)(?!\w))")
OF_KEYS = re.compile(r"<table>(?=\s*<thead>\s*<tr>\s*<th>(?:key|键)</th>(?:\s*<th>[^<]*</th>){3}\s*</tr>)")


def on_page_content(html: str, **_: Any) -> str:
    """Return the content of a page; mkdocs calls this for each."""
    parts = TABLE.split(html)
    parts[::2] = [CODE.sub(lambda code: _whole(FLAG, code[0]), part) for part in parts[::2]]
    parts[1::2] = [CODE.sub(lambda code: _broken(code[0]), table) for table in parts[1::2]]
    parts = VERBATIM.split(OF_KEYS.sub("<table data-keys>", "".join(parts)))
    parts[::2] = [UNIT.sub("\N{NO-BREAK SPACE}", part) for part in parts[::2]]
    return "".join(parts)


def _whole(flag: re.Pattern[str], code: str) -> str:
    return flag.sub(r'<span class="flag">\g<0></span>', code)


def _broken(code: str) -> str:
    """Return a name in a table with places to break; bars are escaped in the tables of Markdown."""
    return _whole(FLAG_IN_TABLE, SEPARATOR.sub(r"\g<0><wbr>", code.replace(r"\|", "|")))
