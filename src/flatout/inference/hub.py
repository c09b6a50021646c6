"""Runs on the Hugging Face hub: their addresses, their download, and their upload with a model card."""

import fnmatch
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub

from flatout import __version__
from flatout.config import load_recipe
from flatout.models.hub import hub_transfers
from flatout.models.weights import read_weights, save_tensors
from flatout.tasks import describe_metrics
from flatout.utils import run_files
from flatout.utils.console import Console, counted, duration
from flatout.utils.errors import InputError, causes, first_line
from flatout.utils.files import write_atomically
from flatout.utils.run_files import FOLD, KNOWN, PICTURES, RECIPE, REPORT, SUMMARY, WEIGHTS, JsonObject

if TYPE_CHECKING:
    from flatout.inference.run import Run

SCHEME = "hf://"
CARD, MODEL = "README.md", "model.onnx"
_URL = re.compile(r"hf://(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?/?")
_TO_READ = (RECIPE, SUMMARY, WEIGHTS, KNOWN)
# The files that an upload writes, or did in earlier versions.
_OWN = (CARD, MODEL, REPORT, *_TO_READ, *PICTURES)
# A file that the hub adds to each new repository.
_OF_THE_HUB = ".gitattributes"


def parse_address(url: str) -> tuple[str, str | None]:
    """Return the repository and the revision, if any, of `hf://USER/NAME[@REVISION]`."""
    match = _URL.fullmatch(url)
    if match is None or match["repository"].startswith(("datasets/", "spaces/")):
        raise InputError(f"{url}: is not the address of a run; give hf://USER/NAME")
    return match["repository"], match["revision"]


def download_run(url: str) -> Path:
    """Return a folder in the Hugging Face cache with those files of a published run that `load` reads.

    If the hub does not answer, cached files are used.
    """
    repository, revision = parse_address(url)
    wanted = [pattern for name in _TO_READ for pattern in (name, f"{FOLD.format('*')}/{name}")]
    try:
        with hub_transfers():
            folder = Path(huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=wanted))
    except Exception as error:  # huggingface_hub passes on errors of its HTTP library, which differ by version
        raise InputError(f"{url}: {_reason(error)}") from error
    if not (folder / RECIPE).is_file():
        raise InputError(f"{url}: holds no run of flatout: {RECIPE} is missing; publish one with flatout upload")
    return folder


def _reason(error: BaseException) -> str:
    if any(type(each).__name__ == "OfflineModeIsEnabled" for each in causes(error)):
        return "HF_HUB_OFFLINE is set, so that only runs in the Hugging Face cache can be used; unset it"
    responses = (getattr(each, "response", None) for each in causes(error))
    status = next((response.status_code for response in responses if response is not None), None)
    if status in (401, 403):
        return (
            f"access is denied (HTTP {status}): check the name, and run hf auth login or set HF_TOKEN to a token with "
            "access (for uploads with write permission)"
        )
    if status == 404:
        return "there is no such repository or revision; check the name"
    if status in (409, 412):
        return f"the repository was changed in the meantime (HTTP {status}); run the command again"
    return (
        f"the hub did not answer ({first_line(causes(error)[-1])}); check the network and HF_ENDPOINT, and run the "
        "command again"
    )


# --- upload -----------------------------------------------------------------------------------------------------------


def upload(run: "Run", url: str, *, private: bool = False, overwrite: bool = False, console: Console) -> JsonObject:
    """Publish a finished run or cross-validation on the Hugging Face hub, with a model card.

    All files are one commit, so that an interrupted upload changes nothing. With `overwrite`, a repository that has
    files is changed; those that flatout does not write are kept.

    Returns:
        `url`, `page` (its address for browsers), `commit`, `bytes` and `files`.
    """
    repository, revision = parse_address(url)
    if revision is not None:
        raise InputError(f"{url}: a revision cannot be given here; uploads go to the main branch")
    if not (run.path / SUMMARY).is_file():
        resume = f"flatout train --resume --out {run.path}"
        raise InputError(f"{run.path}: the run has not finished; continue it with: {resume}")
    with tempfile.TemporaryDirectory(prefix="flatout-upload-") as temporary:
        folder = Path(temporary) / run.path.resolve().name
        copy_run(run, folder)
        _write_onnx(run, folder / MODEL, console)
        write_atomically(folder / CARD, _card(run, folder, repository).encode())
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        try:
            with hub_transfers():
                result = _publish(folder, files, url, repository, private=private, overwrite=overwrite, console=console)
        except InputError:
            raise
        except Exception as error:  # huggingface_hub passes on errors of its HTTP library, which differ by version
            raise InputError(f"{url}: nothing was published: {_reason(error)}") from error
        size = sum((folder / name).stat().st_size for name in files)
    return {"url": url, **result, "bytes": size, "files": files}


def format_upload(result: JsonObject) -> list[str]:
    """Return the result of `upload` as text."""
    files = f"{counted(len(result['files']), 'file')}, {result['bytes'] / 1e6:,.1f} MB"
    return [f"uploaded {files}", result["page"], f"use it: flatout predict {result['url']} FILE"]


def _write_onnx(run: "Run", path: Path, console: Console) -> None:
    """Write the run as an ONNX file, if the network can be exported."""
    from flatout.inference import export

    try:
        export.check_on_noise(run, export.write_onnx(run, path))
    except InputError as error:
        path.unlink(missing_ok=True)
        console.note(f"uploading without {MODEL}: {first_line(error)}")


def _publish(
    folder: Path, files: list[str], url: str, repository: str, *, private: bool, overwrite: bool, console: Console
) -> dict[str, str]:
    """Upload the files of a folder; return `page` and `commit`."""
    api = huggingface_hub.HfApi(library_name="flatout")
    page = f"{huggingface_hub.constants.ENDPOINT}/{repository}"
    api.create_repo(repository, private=private, exist_ok=True)
    existing = api.model_info(repository)
    if private and not existing.private:
        raise InputError(f"{url}: exists and is public; make it private on {page}/settings, or choose another name")
    theirs = sorted(one.rfilename for one in existing.siblings or () if one.rfilename != _OF_THE_HUB)
    if theirs and not overwrite:
        names = ", ".join(theirs[:5]) + (f" and {len(theirs) - 5} more" if len(theirs) > 5 else "")
        raise InputError(f"{url}: exists and has files ({names}); give --overwrite, or choose another name")
    console.note(f"uploading {counted(len(files), 'file')} to {page}")
    # One commit: `upload_folder` may make several.
    operations: list[Any] = [huggingface_hub.CommitOperationAdd(name, str(folder / name)) for name in files]
    operations += [
        huggingface_hub.CommitOperationDelete(name) for name in theirs if _is_own(name) and name not in files
    ]
    commit = api.create_commit(
        repository,
        operations,
        commit_message="Upload a run with flatout",
        parent_commit=existing.sha,  # the commit is refused if there has been another since then
    )
    return {"page": page, "commit": commit.oid}


def _is_own(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for own in _OWN for pattern in (own, f"{FOLD.format('*')}/{own}"))


# --- a copy without local paths ---------------------------------------------------------------------------------------

# Characters that end a path within a sentence.
_NAME = r"[^\s/'\"`,;:()<>|\\]+"
# Absolute or home paths; not paths of URLs, fractions, or words joined by a slash.
_LOCAL = re.compile(rf"(?:file:/+|(?<![\w:/.~])(?:~\w*)?/)(?:{_NAME}/)*({_NAME})/?")
_LOGIN, _QUERY = re.compile(r"(\w+://)[^/\s@'\"]+@"), re.compile(r"(\w+://[^\s?#'\"]+)[?#][^\s'\"]*")
# Keys of summary.json whose values are words of the data.
_OF_THE_DATA = ("class", "classes", "actual", "predicted")


def copy_run(run: "Run", folder: Path) -> None:
    """Write the files of a finished run that are worth publishing into a new folder; none shows an image.

    Local paths keep their last part, URLs lose login and query.
    """
    places = (run.path.resolve(), Path(run.recipe.data.path or run.path).absolute())
    clean = cleaner(run.classes, {Path.home(), Path.cwd(), *(place.parent for place in places)})
    members = run.members if len(run.members) > 1 else ()
    parts = {folder: run} | {folder / FOLD.format(number): one for number, one in enumerate(members, start=1)}
    for to, part in parts.items():
        to.mkdir(parents=True)
        write_atomically(to / RECIPE, clean((part.path / RECIPE).read_text(encoding="utf-8")).encode())
        # The decoded images stay in the cache of the computer that trained.
        run_files.write_json(to / SUMMARY, clean({**part.summary, "pack": None}))
        for name in (WEIGHTS, KNOWN):
            if (part.path / name).is_file():
                tensors, metadata = read_weights(part.path / name)  # which finds damage
                cleaned = {key: value if key == "classes" else clean(value) for key, value in metadata.items()}
                save_tensors(to / name, tensors, cleaned)
        for name in PICTURES[1:]:  # curves and confusion, without images
            if (part.path / name).is_file():
                shutil.copyfile(part.path / name, to / name)


def cleaner(words: Iterable[str], folders: Iterable[Path] = ()) -> Callable[[Any], Any]:
    """Return a function that cuts local paths to their last part, in a text or in all texts of lists and dicts.

    `words` of the data, such as class names, are kept even if they look like paths. The names of `folders` may have
    spaces, unlike other paths.
    """
    known = sorted((f"{folder}/" for folder in folders if folder.name), key=len, reverse=True)
    kept = {match[0] for word in words for match in _LOCAL.finditer(word)}

    def clean(value: object) -> Any:
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


# --- the model card ---------------------------------------------------------------------------------------------------


def _card(run: "Run", folder: Path, repository: str) -> str:
    """Return the text of README.md for the copy of a run in a folder."""
    recipe, summary = load_recipe(folder / RECIPE), run_files.read_summary(folder, {})
    metric = run.task.metric_names[0]
    split = next((name for name in ("test", "valid") if summary.get(f"{name}_{metric}") is not None), "")
    result = describe_metrics(split, summary).replace("valid ", "validation ", 1) if split else "it has not been tested"
    model = recipe.model
    load = "" if model.startswith("timm:") or ":" not in model else ", allow_code=True"
    if model.startswith("python:"):
        load = f", model={model.removeprefix('python:')}()"
    front_matter = huggingface_hub.ModelCardData(
        library_name="flatout",
        pipeline_tag="image-classification" if run.task.name != "regression" else None,
        tags=["flatout", "pytorch", run.task.name, *(["timm"] if model.startswith("timm:") else ())],
    )
    card = huggingface_hub.ModelCard.from_template(
        front_matter,
        template_path=str(Path(__file__).with_name("card.md.j2")),
        cell=_cell,
        counted=counted,
        duration=duration,
        repository=repository,
        files=[path.name for path in folder.iterdir()],
        result=f"{result[0].upper()}{result[1:]}.",
        split="held-out" if len(run.members) > 1 else {"valid": "validation"}.get(split, split),
        recipe=recipe,
        recipe_text=(folder / RECIPE).read_text(encoding="utf-8").strip(),
        summary=summary,
        load=load,
        is_ensemble=len(run.members) > 1,
        version=__version__,
    )
    return str(card)


def _cell(value: object) -> str:
    """Return text as a cell of a Markdown table, without markup of its own."""
    return re.sub(r"[\\`*_\[\]<>|]", r"\\\g<0>", " ".join(str(value).split()))
