"""The documents say what the code does: every key with its default, every job, no broken link."""

import re
import shlex
import shutil
import tomllib
import typing
from pathlib import Path

import pytest

from flatout import config as recipe
from flatout.analysis.throughput import split_specs
from flatout.analysis.tpu import parse_topologies
from flatout.cli import flags
from flatout.cli.commands import COMMANDS
from flatout.cli.flags import parse
from flatout.cli.main import main
from flatout.config.jobs import builtin_jobs, load_job
from flatout.config.settings import parse_setting
from flatout.train import callbacks
from tests import tables
from tests.system.conftest import leave_out_pictures
from tests.system.run_files import write_class_folders

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]
RECIPES = ROOT / "docs" / "recipes.md"
REQUIRED = {"model": "fashion-cnn", "image_size": 28, "epochs": 1, "batch_size": 1}
KEY_ROW = re.compile(r"^\| `(?P<key>[a-z_.]+)` \| (?P<type>[^|]+) \| (?P<default>`[^`]+`|required) \| .+ \|$", re.M)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def field_type(key: str) -> typing.Any:
    cls: typing.Any = recipe.Recipe
    for part in key.split("."):
        cls = typing.get_type_hints(cls)[part]
    return cls


def test_the_tables_have_every_recipe_key_once_with_its_default_and_its_choices() -> None:
    rows = list(KEY_ROW.finditer(text_of(RECIPES)))
    assert sorted(row["key"] for row in rows) == sorted(recipe.known_keys())
    for row in rows:
        if (key := row["key"]) in REQUIRED:
            assert row["default"] == "required", key
            continue
        value = recipe.from_dict(REQUIRED).flat()[key]
        stated = tomllib.loads(f"value = {row['default'].strip('`')}")["value"]
        expected = list(value) if isinstance(value, tuple) else value
        assert (type(stated), stated) == (type(expected), expected), key
        if typing.get_origin(hint := field_type(key)) is typing.Literal:
            stated_choices = [tomllib.loads(f"v = {c}")["v"] for c in re.findall(r"`([^`]+)`", row["type"])]
            assert stated_choices == list(typing.get_args(hint)), key


def test_the_recipes_shown_are_recipes() -> None:
    shown = re.findall(r"^```toml\n(.*?)^```", text_of(RECIPES), re.M | re.S)
    assert shown
    for text in shown:
        recipe.from_dict(tomllib.loads(text))


def commands_in(path: Path) -> list[str]:
    """Return the commands of flatout in the code blocks of a page, as they are written but for what starts them."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text_of(path), re.M | re.S)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    starts = re.compile(r"(?:(?:\w+=\S+ )*flatout|(?:srun|torchrun) .*-m flatout) (?P<rest>[a-z].*)")
    return [match["rest"] for line in lines if (match := starts.fullmatch(line))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_can_be_given(path: Path) -> None:
    """The parser takes it; its job, devices, topologies and recipe keys exist."""
    for command in commands_in(path):
        args = parse(shlex.split(command, comments=True))
        job = getattr(args, "job", None)
        assert job in (None, "JOB", *builtin_jobs()) or "/" in job or job.endswith(".toml"), command
        for setting in getattr(args, "set", ()):
            load_job("digits").override(dict([parse_setting(setting)]))
        for spec in split_specs(getattr(args, "devices", None) or "auto"):
            assert re.fullmatch(r"auto|(\d+x)?(cpu|cuda|mps|tpu)(:\d+(,\d+)*)?", spec), command
        if getattr(args, "topology", None):
            parse_topologies(args.topology)


def test_the_tables_of_data_are_those_of_the_readers() -> None:
    """If they differ: `python -m tests.tables`."""
    text = text_of(tables.PAGE)
    assert text == tables.generated(text)


@pytest.mark.slow
def test_the_commands_of_the_first_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a few small pictures in place of photos, and a single epoch."""
    monkeypatch.chdir(tmp_path)
    # On a busy machine, the report may be all of a short budget. Tutorials have runs with reports.
    monkeypatch.setattr("flatout.train.budget.REPORT_SECONDS", 0.0)
    leave_out_pictures(monkeypatch)
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    # A coverage of 95 % needs 19 validation images.
    write_class_folders(tmp_path / "my-photos", per_class=100, size=36)
    write_class_folders(tmp_path / "new-photos", per_class=5, size=36)
    shown = [shlex.split(command, comments=True) for command in commands_in(ROOT / "README.md")]
    named = [words for words in shown if {"my-photos/", "runs/first"} & set(words)]
    # Finding wrong labels trains several times, publishing needs a hub: they have slow tests of their own.
    run = [words for words in named if "--labels" not in words and words[0] != "upload"]
    assert {words[0] for words in run} == {"check", "look", "train", "predict", "compare"}
    for words in run:
        if any(words == other[: len(words)] for other in run if other != words):
            continue  # the same with more flags follows
        if words[0] == "compare":
            shutil.copytree("runs/first", "runs/second")
        short = ["--minutes", "0.15"] if "--minutes" in words else ["--epochs", "1"]
        assert main([*words, *([*short, "--devices", "cpu"] if words[0] == "train" else [])]) == 0, words


def test_the_examples_of_the_help_can_be_given() -> None:
    assert all(parse(shlex.split(command.example)).command == name for name, command in COMMANDS.items())


def test_the_help_names_every_tracker() -> None:
    assert set(flags.TRACKERS) == set(callbacks.TRACKERS)


def test_every_builtin_job_is_in_the_readme() -> None:
    listed = re.findall(r"^\| `([a-z0-9-]+)` \|", text_of(ROOT / "README.md"), re.M)
    assert set(builtin_jobs()) <= set(listed)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_to_files(path: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", text_of(path))
    relative = {t.partition("#")[0] for t in targets if not re.match(r"[a-z]+:|#", t)}
    assert sorted(t for t in relative if not (path.parent / t).exists()) == []


TRANSLATED = sorted(path for folder in ("", "benchmarks/", "docs/**/") for path in ROOT.glob(f"{folder}*.zh-CN.md"))


def test_the_chinese_pages_are_there() -> None:
    """A page says so below its title if it has one; the first page, tutorials and guides for others' users do."""
    english = [*(ROOT / "docs").rglob("[!.]*.md"), ROOT / "benchmarks" / "README.md", ROOT / "README.md"]
    twins = {path.with_suffix(".zh-CN.md"): path for path in english if not path.name.endswith(".zh-CN.md")}
    stated = {twin for twin, path in twins.items() if f"\n**English** · [简体中文]({twin.name})\n" in text_of(path)}
    assert stated == set(TRANSLATED)
    folders = {ROOT / "docs" / "from", ROOT / "docs" / "tutorials", ROOT}
    assert {twin for twin in twins if twin.parent in folders or twin.name == "convert.zh-CN.md"} <= stated


@pytest.mark.parametrize("path", TRANSLATED, ids=lambda path: str(path.relative_to(ROOT)))
def test_translations_have_the_same_content(path: Path) -> None:
    """Headings, rows of tables, points, links and figures; code without its comments."""

    def content(text: str) -> dict[str, typing.Any]:
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
        prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        return {
            "code": [(kind, re.sub(r" +# .*|<[^>\n]+>", "", code)) for kind, code in blocks],
            "headings": re.findall(r"^#+(?= )", prose, re.M),
            "rows": [line.count("|") for line in prose.splitlines() if line.startswith("|")],
            "points": len(re.findall(r"^- ", prose, re.M)),
            "links": sorted({link.replace(".zh-CN", "") for link in re.findall(r"\]\(([^)#\s]+)", prose)} - names),
        }

    original = path.with_name(path.name.replace(".zh-CN", ""))
    names = {original.name}
    assert content(text_of(path)) == content(text_of(original))


def test_the_navigation_of_the_site_has_each_page() -> None:
    """Building the site warns of none: pages outside the folders that are copied would be missing from it."""
    nav = text_of(ROOT / "mkdocs.yml").partition("\nnav:")[2]
    shown = {str(path.relative_to(ROOT)) for path in PAGES if not path.name.endswith(".zh-CN.md")}
    assert shown <= set(re.findall(r"\S+\.md", nav))
