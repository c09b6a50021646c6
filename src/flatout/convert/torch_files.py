"""torch's checkpoints, Lightning's among them, read by torch itself with `weights_only=True`."""

import pickle
import re
import warnings
import zipfile
from pathlib import Path

from flatout.convert.foreign import NESTED_KEYS, Foreign
from flatout.errors import InputError, one_line

# What torch raises where a file holds code.
_OF_CODE = (pickle.UnpicklingError, RuntimeError)
# Frequent among the settings that Lightning keeps beside the weights. They are not needed, and nothing is made of them.
_IGNORED = ("pathlib.PosixPath", "pathlib.WindowsPath", "pathlib._local.PosixPath", "pathlib._local.WindowsPath")
_IGNORED += ("argparse.Namespace",)


class _Ignored:
    def __new__(cls, *_: object) -> "_Ignored":
        return super().__new__(cls)


def read(path: Path) -> Foreign:
    """Return the state dict of a checkpoint.

    Raises:
        InputError: the file is damaged, holds code besides tensors, or no state dict.
    """
    import torch

    _refuse_bomb(path)
    try:
        ignored = torch.serialization.safe_globals([(_Ignored, name) for name in _IGNORED])
        with warnings.catch_warnings(), ignored:
            warnings.simplefilter("ignore")  # what it cannot read ends in an error
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # on damaged files, it raises whatever the parts of torch find first
        code = re.search(r"GLOBAL ([\w.]+)|TorchScript", str(error)) if isinstance(error, _OF_CODE) else None
        # torch's own text advises to load without the protection, so it is not passed on.
        reason = f"cannot be read as a torch checkpoint ({type(error).__name__}); it is damaged, or not one"
        if code:
            name = one_line(code[1] or code[0])[:120]
            reason = (
                f"holds code ({name}) besides tensors, and loading it would execute that, so it is "
                "refused; save the tensors alone, as safetensors or with torch.save(model.state_dict(), FILE)"
            )
        raise InputError(f"{path}: {reason}") from None
    nested = (content[key] for key in NESTED_KEYS if isinstance(content, dict) and isinstance(content.get(key), dict))
    state = next(nested, content)
    if not isinstance(state, dict) or not state or not all(isinstance(t, torch.Tensor) for t in state.values()):
        found = f"the keys {list(state)[:6]}" if isinstance(state, dict) else f"a {type(state).__name__}"
        raise InputError(f"{path}: holds no state dict (names with tensors), but {one_line(found)}")
    # Strides of 0 make a tensor of any size out of one number.
    if sum(t.numel() * t.element_size() for t in state.values()) > 2 * path.stat().st_size + 1024:
        raise InputError(f"{path}: its tensors have more numbers than the file; it is damaged or hostile")
    return Foreign("torch", {str(name): tensor for name, tensor in state.items()})


def _refuse_bomb(path: Path) -> None:
    """Raise InputError if the members of a zip file unpack to more than the file; torch compresses none."""
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(info.file_size for info in archive.infolist())
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError, EOFError):
        return  # another form, or damaged, which torch finds
    if unpacked > path.stat().st_size:
        raise InputError(f"{path}: its members are compressed or overlap, which torch never writes; it is not read")
