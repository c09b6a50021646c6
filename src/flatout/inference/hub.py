"""Runs on the Hugging Face hub: their addresses, their download, and their upload with a model card."""

import fnmatch
import hashlib
import importlib.util
import re
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.config import Recipe, load_recipe
from flatout.models.weights import read_weights, save_tensors
from flatout.tasks import describe_metrics
from flatout.utils.console import Console, duration
from flatout.utils.errors import InputError, causes, first_line
from flatout.utils.files import write_atomically
from flatout.utils.run_files import (
    FOLD,
    KNOWN,
    METRICS,
    PICTURES,
    PREDICTIONS,
    RECIPE,
    REPORT,
    SUMMARY,
    WEIGHTS,
    read_summary,
    write_json,
)

if TYPE_CHECKING:
    from flatout.inference.run import Run

SCHEME = "hf://"
CARD, MODEL = "README.md", "model.onnx"
_URL = re.compile(r"hf://(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?/?")
_TO_READ = (RECIPE, SUMMARY, WEIGHTS, KNOWN)
# The files that an upload writes.
_OWN = (CARD, MODEL, REPORT, *_TO_READ, *PICTURES)
# Files that the hub adds to each new repository.
_OF_THE_HUB = (".gitattributes",)
# Reasons of refusals by HTTP status.
_REFUSALS = {
    401: "access is denied (HTTP 401): check the name; for a private run, run hf auth login or set HF_TOKEN",
    403: "access is denied (HTTP 403): accept the terms on the model's page, or use a token with access",
    404: "there is no such repository or revision; check the name",
}


def is_published(path: str | Path) -> bool:
    """Whether a path is the address of a run on the hub."""
    return str(path).startswith(SCHEME)


def parse_address(url: str) -> tuple[str, str | None]:
    """Return the repository and the revision, if any, of `hf://USER/NAME[@REVISION]`.

    Raises:
        InputError: the address has another form.
    """
    match = _URL.fullmatch(url)
    if match is None or match["repository"].startswith(("datasets/", "spaces/")):
        raise InputError(f"{url}: is not the address of a run; give hf://USER/NAME")
    return match["repository"], match["revision"]


def download_run(url: str) -> Path:
    """Return a folder with the available files of a published run that `load` reads.

    They are downloaded into the Hugging Face cache, by the settings of huggingface_hub (HF_ENDPOINT, HF_TOKEN,
    HF_HUB_OFFLINE, proxies). Offline, or if the hub does not answer, cached files are used.

    Raises:
        InputError: the address is wrong, or the run is neither in the cache nor can be downloaded.
    """
    from huggingface_hub import snapshot_download

    from flatout.models.hub import bars_on_terminals, without_xet

    repository, revision = parse_address(url)
    wanted = [pattern for name in _TO_READ for pattern in (name, f"{FOLD.format('*')}/{name}")]
    try:
        with without_xet(), bars_on_terminals():
            folder = Path(snapshot_download(repository, revision=revision, allow_patterns=wanted))
    except Exception as error:  # huggingface_hub passes on errors of its HTTP library, which differ by version
        raise InputError(f"{url}: {_why_not_downloaded(error)}") from error
    if not (folder / RECIPE).is_file():
        raise InputError(f"{url}: holds no run of flatout: {RECIPE} is missing; publish one with flatout upload")
    return folder


def _why_not_downloaded(error: BaseException) -> str:
    status = _status_of(error)
    if status is not None:
        return _REFUSALS.get(status) or f"the hub answered with HTTP {status}; try again later"
    if any(type(each).__name__ == "OfflineModeIsEnabled" for each in causes(error)):
        return "is not in the Hugging Face cache, and HF_HUB_OFFLINE is set; unset it to download the run"
    return f"could not be downloaded ({first_line(causes(error)[-1])}); check the network and HF_ENDPOINT"


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error, if any."""
    responses = (getattr(each, "response", None) for each in causes(error))
    return next((response.status_code for response in responses if response is not None), None)


# --- upload -----------------------------------------------------------------------------------------------------------


def upload(
    run: "Run", url: str, *, private: bool = False, overwrite: bool = False, pictures: bool = True, console: Console
) -> dict[str, Any]:
    """Publish a run on the Hugging Face hub, with a model card; settings are those of huggingface_hub.

    All files are one commit, so that an interrupted upload changes nothing; the same call continues it.

    Args:
        run: a finished run or cross-validation.
        url: `hf://USER/NAME`; the repository is created if it does not exist.
        private: create a private repository.
        overwrite: replace other content. Files that flatout does not write are kept.
        pictures: include the report and the pictures, which show test images.
        console: shows progress.

    Returns:
        `url`, `page` (its address for browsers), `commit`, `changed`, `bytes` and `files`.

    Raises:
        InputError: the run is not complete, the address is wrong, the repository has other content, or the hub cannot
            be reached or refuses.
    """
    from flatout.models.hub import bars_on_terminals, without_xet

    repository, revision = parse_address(url)
    if revision is not None:
        raise InputError(f"{url}: a revision cannot be given here; uploads go to the main branch")
    if not (run.path / SUMMARY).is_file():
        raise InputError(
            f"{run.path}: the run has not finished; continue it with: flatout train --resume --out {run.path}"
        )
    with tempfile.TemporaryDirectory(prefix="flatout-upload-") as temporary:
        folder = Path(temporary) / run.path.resolve().name
        copy_run(run, folder, pictures=pictures)
        _write_onnx(run, folder / MODEL, console)
        write_atomically(folder / CARD, _card(run, folder, repository).encode())
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        try:
            with without_xet(), bars_on_terminals():
                result = _publish(folder, files, url, repository, private=private, overwrite=overwrite, console=console)
        except InputError:
            raise
        except Exception as error:  # huggingface_hub passes on errors of its HTTP library, which differ by version
            raise InputError(f"{url}: {_why_not_uploaded(error, repository)}") from error
        size = sum((folder / name).stat().st_size for name in files)
    return {"url": url, **result, "bytes": size, "files": files}


def format_upload(result: dict[str, Any]) -> list[str]:
    """Return the result of `upload` as text."""
    files = f"{len(result['files'])} files, {result['bytes'] / 1e6:,.1f} MB"
    did = f"uploaded {files}" if result["changed"] else f"unchanged: the repository already has these {files}"
    return [did, result["page"], f"use it: flatout predict {result['url']} FILE"]


def _write_onnx(run: "Run", path: Path, console: Console) -> None:
    """Write the run as an ONNX file, if the extra is installed and the network can be exported."""
    if importlib.util.find_spec("onnxscript") is None:
        return
    from flatout.inference.export import formats, verify

    try:
        predict = formats.write_onnx(run, path, "fp32")
        verify.check_on_noise(run, predict)
    except InputError as error:
        path.unlink(missing_ok=True)
        console.note(f"uploading without {MODEL}: {first_line(error)}")


def _publish(
    folder: Path, files: list[str], url: str, repository: str, *, private: bool, overwrite: bool, console: Console
) -> dict[str, Any]:
    """Upload the files of a folder; return the commit's fields of `upload`."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise InputError(f"{url}: HF_HUB_OFFLINE is set; unset it to upload")
    if get_token() is None:
        raise InputError(f"{url}: no access token; run hf auth login or set HF_TOKEN to a token with write permission")
    api = HfApi(library_name="flatout")
    existing = _existing(api, repository)
    page = f"{constants.ENDPOINT}/{repository}"
    stale: list[str] = []
    if existing is None:
        api.create_repo(repository, private=private, exist_ok=True)
    else:
        if private and not existing.private:
            raise InputError(f"{url}: exists and is public; make it private on {page}/settings, or choose another name")
        theirs = {one.rfilename: one for one in existing.siblings or () if one.rfilename not in _OF_THE_HUB}
        stale = [name for name in theirs if _is_own(name) and name not in files]
        other = sorted(name for name, one in theirs.items() if name not in files or not _is_same(folder / name, one))
        if theirs.keys() >= set(files) and not stale and not set(other) & set(files):
            return {"page": page, "commit": existing.sha, "changed": False}
        if other and not overwrite:
            names = ", ".join(other[:5]) + (f" and {len(other) - 5} more" if len(other) > 5 else "")
            raise InputError(f"{url}: exists with other content ({names}); give --overwrite, or choose another name")
    console.note(f"uploading {len(files)} files to {page}")
    # One commit: `upload_folder` may make several.
    operations: list[Any] = [CommitOperationAdd(name, str(folder / name)) for name in files]
    operations += [CommitOperationDelete(name) for name in stale]
    # The commit is refused if there has been another in the meantime.
    parent = None if existing is None else existing.sha
    commit = api.create_commit(repository, operations, commit_message="Upload a run with flatout", parent_commit=parent)
    return {"page": page, "commit": commit.oid, "changed": True}


def _existing(api: Any, repository: str) -> Any:
    """Return the repository with its files; None if none is visible to the token."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return api.model_info(repository, files_metadata=True)
    except RepositoryNotFoundError as error:
        # The answer to a wrong token is the same.
        if _status_of(error) == 401:
            raise
        return None


def _is_own(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for own in _OWN for pattern in (own, f"{FOLD.format('*')}/{own}"))


def _is_same(path: Path, theirs: Any) -> bool:
    """Whether a file equals one in a repository, by SHA-256 or git's digest."""
    if not path.is_file():
        return False
    content = path.read_bytes()
    if theirs.lfs is not None:
        return hashlib.sha256(content).hexdigest() == theirs.lfs.sha256
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == theirs.blob_id


def _why_not_uploaded(error: Exception, repository: str) -> str:
    status = _status_of(error)
    if status in (401, 403):
        owner = repository.partition("/")[0]
        return f"access is denied (HTTP {status}): use a token with write permission for {owner} (HF_TOKEN)"
    if status in (409, 412):
        return f"the repository was changed in the meantime (HTTP {status}); run the command again"
    reason = f"HTTP {status}" if status is not None else first_line(causes(error)[-1])
    return f"the upload failed ({reason}); nothing was published, and the same command continues it"


# --- a copy without local paths ---------------------------------------------------------------------------------------

# Characters that end a path within a sentence.
_NAME = r"[^\s/'\"`,;:()<>|\\]+"
# Absolute or home paths; not paths of URLs, fractions, or words joined by a slash.
_LOCAL = re.compile(rf"(?:file:/+|(?<![\w:/.~])(?:~\w*)?/)(?:{_NAME}/)*({_NAME})/?")
_LOGIN, _QUERY = re.compile(r"(\w+://)[^/\s@'\"]+@"), re.compile(r"(\w+://[^\s?#'\"]+)[?#][^\s'\"]*")
# Keys of summary.json whose values are words of the data.
_OF_THE_DATA = ("class", "classes", "actual", "predicted")


def copy_run(run: "Run", folder: Path, *, pictures: bool) -> None:
    """Write the files of a run that are worth publishing into a new folder.

    Checkpoints, logs and predictions are not copied. Local paths keep their last part, URLs lose login and query. The
    report is drawn again from these files.

    Args:
        run: a finished run or cross-validation.
        folder: does not exist yet; its name is that of the report.
        pictures: whether report and pictures, which show test images, are wanted.

    Raises:
        InputError: a file of the run is damaged, or cannot be written.
    """
    data = [run.recipe.data.path] if run.recipe.data.path else []
    places = (run.path.resolve(), *(Path(path).absolute() for path in data if "://" not in path))
    clean = cleaner(run.classes, {Path.home(), Path.cwd(), *(place.parent for place in places)})
    _copy_files(run, folder, clean, pictures=pictures)
    for number, member in enumerate(run.members if len(run.members) > 1 else (), start=1):
        _copy_files(member, folder / FOLD.format(number), clean, pictures=pictures)


def cleaner(words: Iterable[str], folders: Iterable[Path] = ()) -> Callable[[Any], Any]:
    """Return a function that cuts local paths to their last part, in a text or in all texts of lists and dicts.

    Args:
        words: words of the data, such as class names, which are kept even if they look like paths.
        folders: known folders, whose names may have spaces, unlike other paths.
    """
    known = sorted((f"{folder}/" for folder in folders if folder.name), key=len, reverse=True)
    kept = {match[0] for word in words for match in _LOCAL.finditer(word)}

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {clean(key): inner if key in _OF_THE_DATA else clean(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [clean(inner) for inner in value]
        if not isinstance(value, str):
            return value
        for folder in known:
            value = value.replace(folder, "")
        local = _LOCAL.sub(lambda match: match[0] if match[0] in kept else match[1], value)
        return _QUERY.sub(r"\1", _LOGIN.sub(r"\1", local))

    return clean


def _copy_files(run: "Run", folder: Path, clean: Callable[[Any], Any], *, pictures: bool) -> None:
    from flatout.report.page import draw_all

    folder.mkdir(parents=True)
    text = clean((run.path / RECIPE).read_text(encoding="utf-8"))
    tomllib.loads(text)  # cutting paths keeps a recipe valid
    write_atomically(folder / RECIPE, text.encode())
    # The decoded images stay in the cache of the computer that trained.
    write_json(folder / SUMMARY, clean({**run.summary, "pack": None}))
    for name in (WEIGHTS, KNOWN):
        if not (path := run.path / name).is_file():
            continue
        tensors, metadata = read_weights(path)  # which finds damage
        cleaned = {key: value if key == "classes" else clean(value) for key, value in metadata.items()}
        if cleaned == metadata:
            shutil.copyfile(path, folder / name)
        else:
            save_tensors(folder / name, tensors, cleaned)
    if pictures:
        sources = [name for name in (METRICS, PREDICTIONS) if (run.path / name).is_file()]
        for name in sources:
            shutil.copyfile(run.path / name, folder / name)
        _forget_file_names(folder / PREDICTIONS)
        draw_all(folder)
        for name in sources:
            (folder / name).unlink()


def _forget_file_names(path: Path) -> None:
    """Remove the names of images, which may be personal, from predictions."""
    if path.is_file():
        with np.load(path) as arrays:
            kept = {name: array for name, array in arrays.items() if name != "name"}
        np.savez(path, **kept)


# --- the model card ---------------------------------------------------------------------------------------------------

_MAX_ROWS = 100  # classes in the table


def _card(run: "Run", folder: Path, repository: str) -> str:
    """Return the text of README.md for the copy of a run in a folder."""
    from huggingface_hub import ModelCard, ModelCardData

    from flatout import __version__

    recipe, summary = load_recipe(folder / RECIPE), read_summary(folder, {})
    split = next((name for name in ("test", "valid") if summary.get(f"{name}_count")), "")
    words = {"test": "test", "valid": "validation", "": ""}
    result = describe_metrics(split, summary).replace(split, words[split], 1) if split else "it has not been tested"
    if interval := summary.get(f"{split}_accuracy_interval"):
        result += f", 95 % interval {interval[0]:.4f} to {interval[1]:.4f}"
    machine = summary.get("machine") or {}
    images = {name: summary.get(f"{key}_images") for key, name in (("train", "training"), *words.items()) if key}
    facts = {
        "task": run.task.name,
        "network": f"{recipe.model}, {summary.get('parameters') or 0:,} parameters",
        "input": f"{recipe.image_sides[0]} x {recipe.image_sides[1]} pixels, {recipe.channels} channels",
        "data": _source(recipe),
        "images": ", ".join(f"{name} {count:,}" for name, count in images.items() if count),
        "training": f"{summary.get('epochs_trained') or 0} epochs, {duration(summary.get('train_seconds') or 0)}",
        "devices": ", ".join(filter(None, (summary.get("devices"), machine.get("gpu") or machine.get("cpu")))),
        "date": str(summary.get("date") or "")[:10],
    }
    rows, model = summary.get("per_class") or [], recipe.model
    load = "" if model.startswith("timm:") or ":" not in model else ", allow_code=True"
    if model.startswith("python:"):
        load = f", model={model.removeprefix('python:')}()"
    front_matter = ModelCardData(
        library_name="flatout",
        pipeline_tag="image-classification" if run.task.name != "regression" else None,
        tags=["flatout", "pytorch", run.task.name, *(["timm"] if model.startswith("timm:") else ())],
    )
    card = ModelCard.from_template(
        front_matter,
        template_path=str(Path(__file__).with_name("card.md.j2")),
        name=_cell(repository.partition("/")[2]),
        repository=repository,
        files=[path.name for path in folder.iterdir()],
        result=f"{result[0].upper()}{result[1:]}.",
        facts=[(name, _cell(value)) for name, value in facts.items() if value],
        rows=[{**row, "class": _cell(row["class"])} for row in rows[:_MAX_ROWS]],
        left_out=max(0, len(rows) - _MAX_ROWS),
        split=words[split],
        recipe=(folder / RECIPE).read_text(encoding="utf-8").strip(),
        notes=[_cell(note) for note in (*(summary.get("verdict") or ()), *(summary.get("notes") or ()))],
        load=load,
        is_ensemble=len(run.members) > 1,
        pixels=f"uint{recipe.data.bits or 8} [N, height, width, {recipe.channels}]",
        mode={1: "L", 3: "RGB"}.get(recipe.channels) if recipe.data.bits in (0, 8) else None,
        channels=recipe.channels,
        version=__version__,
    )
    return str(card)


def _source(recipe: Recipe) -> str:
    return str(recipe.data.path or recipe.job or "images given in Python")


def _cell(value: object) -> str:
    """Return text as a cell of a Markdown table, without markup of its own."""
    text = " ".join(str(value).split())
    for character in "\\`*_[]<>|":
        text = text.replace(character, f"\\{character}")
    return text
