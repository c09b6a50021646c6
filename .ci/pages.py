"""Write the pages of the documentation site into build/pages: those of the repository, and generated ones.

Each page keeps its path, so that relative links stay right. Generated are the reference and the list of results.
"""

import json
import os
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "pages"
PAGES = ("*.md", "docs/**/*", "benchmarks/README*.md", "benchmarks/results/*.json", "examples/*")
# Languages are chosen in the site's header.
LANGUAGE_LINKS = re.compile(r"^(\*\*English\*\*|\[English\]\(.*?\)) · .*\n\n?", re.M)
CSS = """
.md-grid { max-width: 70rem; }
/* The hidden menu of languages would widen the page where it is last: search needs a server and is absent elsewhere. */
.md-header .md-select__inner { left: auto; right: 0; transform: translateY(.3rem); }
.md-header .md-select:is(:hover, :focus-within) .md-select__inner { transform: none; }
.md-header .md-select__inner::after { left: auto; right: .6rem; }
.md-typeset table:not([class]) { font-size: .68rem; }
.md-typeset table:not([class]) :is(th, td) { min-width: 0; }
.md-typeset table:not([class]) th { word-break: keep-all; } /* Chinese, too, between words only */
.md-typeset table:not([class]) td:first-child { min-width: 4.5rem; } /* of Chinese, three characters */
.md-typeset pre > code { font-size: .6rem; }
.md-typeset .flag { white-space: nowrap; }
/* Names stay whole where there is room, and break behind their separators where there is none; tables scroll before
   words and numbers break. */
@media (min-width: 76.25em) {
  /* Lines of 113 characters fit, such as those of epochs. */
  .md-sidebar { width: 10.6rem; }
  .md-typeset pre > code { font-size: .58rem; }
  .md-typeset table:not([class]) td:not(:last-child) code { word-break: normal; }
  .md-typeset table:not([class]) td:not(:last-child) code wbr { display: none; }
}
@media (max-width: 44.98em) {
  .md-typeset table:not([class]) :is(th, td) { padding: .5em .6em; }
  .md-typeset table:not([class]) td:first-child { min-width: 3rem; }
  .md-typeset table:not([class]) td:has(code) { min-width: 4rem; }
  .md-typeset table:not([class]) td:first-child:has(code) { min-width: 5rem; }
  .md-typeset table:not([class]) code { overflow-wrap: normal; word-break: normal; }
  .md-typeset .headerlink { display: none; } /* invisible, it would take a line below a long heading */
  .md-typeset table[data-keys] :is(thead, td:empty) { display: none; }
  .md-typeset table[data-keys] tr { display: flex; flex-wrap: wrap; padding: .4em 0; }
  .md-typeset table[data-keys] tr + tr { border-top: .05rem solid var(--md-default-fg-color--lightest); }
  .md-typeset tr:has(> td:nth-child(4)) > td { min-width: 4.5rem; } /* these scroll */
  /* :is() makes this as specific as the rules above. */
  .md-typeset table[data-keys] td:is(td, :first-child, :nth-child(n)) { border: 0; padding: .1em .6em; min-width: 0; }
  .md-typeset table[data-keys] td:is(:first-child, :last-child) { flex-basis: 100%; }
  .md-typeset table[data-keys] td:first-child { font-weight: 700; }
  .md-typeset table[data-keys] td:nth-child(3)::before { content: "default: "; }
  .md-typeset:lang(zh) table[data-keys] td:nth-child(3)::before { content: "默认值："; }
}
/* Pictures are drawn on white. */
[data-md-color-scheme="slate"] .md-content img[src$=".png"] { background: #fff; }
"""
COLUMNS = "96"  # of the help texts
# The pages that list the results: what stands above the rows.
RESULTS = {
    "index.md": "# Results\n\nEach file has the figures of one script, with date, machine and versions. "
    "[The scripts](../README.md) measure them again.\n\n| file | date | processor | cores | torch |\n",
    "index.zh.md": "# 结果\n\n每个文件是一个脚本的测量结果，附日期、机器和版本。"
    "[这些脚本](../README.md)可以重新测量。\n\n| 文件 | 日期 | 处理器 | 核数 | torch |\n",
}


def main() -> None:
    """Replace build/pages."""
    shutil.rmtree(OUT, ignore_errors=True)
    for pattern in PAGES:
        for path in sorted(path for path in ROOT.glob(pattern) if path.is_file()):
            _copy(path)
    _write("site.css", CSS)
    _write("docs/reference/python.md", _python())
    _write("docs/reference/commands.md", _commands())
    rows = _results()
    for name, begin in RESULTS.items():
        _write(f"benchmarks/results/{name}", begin + rows)


def _copy(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    if path.suffix != ".md":
        (OUT / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, OUT / name)
        return
    text = LANGUAGE_LINKS.sub("", path.read_text(encoding="utf-8"))
    # The site knows a page by one name in all languages, and shows no folders.
    # Links that show the name of a file get the title of its page.
    text = re.sub(r"\[[\w/-]+\.md\]\((?P<target>[^)#]+\.md)(?P<anchor>#[^)]*)?\)", lambda m: _titled(path, m), text)
    text = re.sub(r"\.zh-CN\.md(?=[)#])", ".md", text).replace("benchmarks/results)", "benchmarks/results/index.md)")
    _write(name.replace(".zh-CN.md", ".zh.md"), text)


def _titled(page: Path, link: re.Match[str]) -> str:
    """Return a link with the title of the page that it leads to, in the language of its own page if possible."""
    target = page.parent / link["target"]
    translated = target.with_suffix(".zh-CN.md")
    source = translated if page.name.endswith(".zh-CN.md") and translated.exists() else target
    title = source.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    return f"[{title}]({link['target']}{link['anchor'] or ''})"


def _write(name: str, text: str) -> None:
    path = OUT / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _python() -> str:
    """Return the page of the public names, from their docstrings."""
    import flatout

    first = ["fit", "load", "look", "Run", "Ensemble", "Prediction", "Look", "Recipe"]
    names = [*first, *(name for name in flatout.__all__ if name not in first)]
    return "# Python\n\n" + "\n".join(f"::: flatout.{name}\n" for name in names)


def _commands() -> str:
    """Return the page of the commands, from their help texts."""
    from flatout.cli.flags import COMMANDS, help_of

    os.environ["COLUMNS"] = COLUMNS
    text = f"# Commands\n\n```\n{help_of()}```\n"
    return text + "".join(f"\n## flatout {name}\n\n```\n{help_of(name)}```\n" for name in COMMANDS)


def _results() -> str:
    """Return the rows of the table of results, a file each."""
    rows = ["|---|---|---|---|---|"]
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        first = content[0] if isinstance(content, list) else content
        machine = first.get("machine")
        cpu = machine.get("cpu") if isinstance(machine, dict) else first.get("cpu")
        cores = machine.get("cores") if isinstance(machine, dict) else first.get("cores")
        versions = first.get("versions") or {}
        torch = versions.get("torch", "")
        date = first.get("date", "")[:10].replace("-", "\N{NON-BREAKING HYPHEN}")
        rows.append(f"| [{path.name}]({path.name}) | {date} | {cpu or ''} | {cores or ''} | {torch} |")
    return "\n".join([*rows, ""])


if __name__ == "__main__":
    main()
