"""Photos as a short script classifies them: timm's features and scikit-learn's logistic regression. No flatout.

    python benchmarks/timm_photos.py --data FOLDER [--network lite0] [--weights-dir DIR]

There is no time limit. The last line printed is JSON.
"""

import json
import time

BEGAN = time.perf_counter()

import torch  # noqa: E402
from PIL import Image  # noqa: E402
from sklearn.linear_model import LogisticRegression  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from timm.data.config import resolve_model_data_config  # noqa: E402
from torchvision import transforms  # noqa: E402

from photo_files import Split, arguments, create_network, read_photos  # noqa: E402


def main() -> None:
    args = arguments(__doc__, minutes=False).parse_args()
    train, test, _ = read_photos(args.data)

    net = create_network(args.network, args.weights_dir).eval().to(memory_format=torch.channels_last)
    config = resolve_model_data_config(net)
    size = config["input_size"][1:]
    transform = transforms.Compose(
        [transforms.Resize(size), transforms.ToTensor(), transforms.Normalize(config["mean"], config["std"])]
    )

    @torch.inference_mode()
    def features(split: Split):
        rows: list[torch.Tensor] = []
        for start in range(0, len(split), 32):
            images = [transform(Image.open(file).convert("RGB")) for file, _ in split[start : start + 32]]
            x = torch.stack(images)  # pyright: ignore[reportArgumentType]
            x = x.contiguous(memory_format=torch.channels_last)
            rows.append(net.forward_head(net.forward_features(x), pre_logits=True))
        return torch.cat(rows).numpy(), [label for _, label in split]

    head = make_pipeline(StandardScaler(), LogisticRegression(C=0.001, max_iter=1000))
    head.fit(*features(train))
    accuracy = head.score(*features(test))

    seconds = time.perf_counter() - BEGAN
    print(json.dumps({"accuracy": accuracy, "seconds": seconds, "image_size": size[0]}))


if __name__ == "__main__":
    main()
