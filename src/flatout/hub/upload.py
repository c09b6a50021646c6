"""A run as a repository of the Hugging Face hub: one commit with everything, or nothing."""

import hashlib
import tempfile
from pathlib import Path
from typing import Any

from flatout.console import Console
from flatout.errors import InputError, causes, first_line
from flatout.files import write_atomically
from flatout.hub.card import card_of
from flatout.hub.portable import copy_run, is_of_a_run
from flatout.models.hub import bars_on_terminals, without_xet
from flatout.report.run_files import SUMMARY
from flatout.run.folder import load
from flatout.run.published import parse_address, status_of

CARD = "README.md"
# What the hub puts into each new repository.
_OF_THE_HUB = (".gitattributes",)


def upload(
    path: str | Path,
    url: str,
    *,
    private: bool = False,
    overwrite: bool = False,
    pictures: bool = True,
    console: Console | None = None,
) -> dict[str, Any]:
    """Publish a run on the Hugging Face hub, with a model card; settings are those of huggingface_hub.

    All files are one commit, so an interruption leaves nothing half; the same call continues it.

    Args:
        path: the folder of a finished run or cross-validation.
        url: `hf://USER/NAME`; the repository is created if there is none.
        private: create it for its owner alone.
        overwrite: replace another content. Files that flatout does not write stay.
        pictures: include the report and the pictures, which show test images.

    Returns:
        `url`, `page` (its address for browsers), `commit`, `changed`, `bytes` and `files`.

    Raises:
        InputError: the run is not complete, the address is wrong, the repository has other content, or the hub cannot
            be reached or refuses.
    """
    console = console or Console()
    repository, revision = parse_address(url)
    if revision is not None:
        raise InputError(f"{url}: a revision cannot be given here; uploads go to the main branch")
    run = load(path)
    if not (run.path / SUMMARY).is_file():
        raise InputError(f"{path}: the run has not finished; continue it with: flatout train --resume --out {path}")
    with tempfile.TemporaryDirectory(prefix="flatout-upload-") as temporary:
        folder = Path(temporary) / run.path.resolve().name
        files = copy_run(run, folder, pictures=pictures)
        write_atomically(folder / CARD, card_of(load(folder), repository, files).encode())
        files = [CARD, *files]
        try:
            with without_xet(), bars_on_terminals():
                result = _publish(folder, files, url, repository, private=private, overwrite=overwrite, console=console)
        except InputError:
            raise
        except Exception as error:  # huggingface_hub passes on what its HTTP library raises, which differs by version
            raise InputError(f"{url}: {_failure(error, repository)}") from error
        size = sum((folder / name).stat().st_size for name in files)
    return {"url": url, **result, "bytes": size, "files": files}


def lines_of(result: dict[str, Any]) -> list[str]:
    """Return the result as text."""
    files = f"{len(result['files'])} files, {result['bytes'] / 1e6:,.1f} MB"
    did = f"uploaded {files}" if result["changed"] else f"unchanged: the repository already has these {files}"
    return [did, result["page"], f"use it: flatout predict {result['url']} FILE"]


def _publish(
    folder: Path, files: list[str], url: str, repository: str, *, private: bool, overwrite: bool, console: Console
) -> dict[str, Any]:
    """Send the files of a folder; return what `upload` does of the commit."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise InputError(f"{url}: HF_HUB_OFFLINE is set; unset it to upload")
    if get_token() is None:
        raise InputError(f"{url}: no access token; run hf auth login or set HF_TOKEN to a token with write permission")
    api = HfApi(library_name="flatout")
    existing = _existing(api, repository)
    page = f"{constants.ENDPOINT}/{repository}"
    if existing is not None:
        if private and not existing.private:
            raise InputError(f"{url}: exists and is public; make it private on {page}/settings, or choose another name")
        theirs = {one.rfilename: one for one in existing.siblings or () if one.rfilename not in _OF_THE_HUB}
        ours = [name for name in theirs if name == CARD or is_of_a_run(name)]
        other = sorted(name for name, one in theirs.items() if name not in files or not _is_same(folder / name, one))
        if theirs.keys() >= set(files) and not (set(ours) - set(files)) and not set(other) & set(files):
            return {"page": page, "commit": existing.sha, "changed": False}
        if other and not overwrite:
            names = ", ".join(other[:5]) + (f" and {len(other) - 5} more" if len(other) > 5 else "")
            raise InputError(f"{url}: exists with other content ({names}); give --overwrite, or choose another name")
    else:
        api.create_repo(repository, private=private, exist_ok=True)
        ours = []
    console.note(f"uploading {len(files)} files to {page}")
    operations: list[Any] = [CommitOperationAdd(name, str(folder / name)) for name in files]
    operations += [CommitOperationDelete(name) for name in ours if name not in files]
    # The commit is refused if somebody else has made one meanwhile.
    parent = existing.sha if existing is not None else None
    commit = api.create_commit(repository, operations, commit_message="Upload a run with flatout", parent_commit=parent)
    return {"page": page, "commit": commit.oid, "changed": True}


def _existing(api: Any, repository: str) -> Any:
    """Return the repository with its files; None where there is none that the token may see."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return api.model_info(repository, files_metadata=True)
    except RepositoryNotFoundError as error:
        # A wrong token, too, is answered in this way.
        if status_of(error) == 401:
            raise
        return None


def _is_same(path: Path, theirs: Any) -> bool:
    """Return whether a file has the content of one in a repository, by SHA-256 or by git's digest."""
    if not path.is_file():
        return False
    content = path.read_bytes()
    if theirs.lfs is not None:
        return hashlib.sha256(content).hexdigest() == theirs.lfs.sha256
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == theirs.blob_id


def _failure(error: Exception, repository: str) -> str:
    """Return why an upload has failed, and the fix."""
    status = status_of(error)
    if status in (401, 403):
        owner = repository.partition("/")[0]
        return f"access is denied (HTTP {status}): use a token with write permission for {owner} (HF_TOKEN)"
    if status in (409, 412):
        return f"the repository was changed meanwhile (HTTP {status}); run the command again"
    reason = f"HTTP {status}" if status is not None else first_line(causes(error)[-1])
    return f"the upload failed ({reason}); nothing was published, and the same command continues it"
