"""What a published run says: no local paths, and code that builds its network."""

from collections import OrderedDict

import pytest
import torch

from flatout.hub.portable import cleaner
from flatout.hub.torch_code import expression
from tests.nets import build


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("/home/ann/photos", "photos"),
        ("/home/ann/my photos/a.jpg: truncated", "my photos/a.jpg: truncated"),
        ("~ann/photos and ~/x/y.csv", "photos and y.csv"),
        ("file:///home/ann/photos/", "photos"),
        ("https://host.test/a/b.zip", "https://host.test/a/b.zip"),
        ("s3://bucket/a?X-Amz-Signature=1", "s3://bucket/a"),
        ("3/4 of actual / predicted, images/s, ../photos", "3/4 of actual / predicted, images/s, ../photos"),
        ({"classes": ["/m/0k4j"], "note": "/m/0k4j in /data/x"}, {"classes": ["/m/0k4j"], "note": "/m/0k4j in x"}),
    ],
)
def test_local_paths_keep_their_last_part(text: object, clean: object) -> None:
    assert cleaner(["/m/0k4j"])(text) == clean


@pytest.mark.parametrize("name", ["vgg16", "fashion-cnn", "cats-dogs-cnn", "parallel-cnn", "keras-cnn", "caltech-cnn"])
def test_the_code_of_a_card_builds_each_of_our_sequences(name: str) -> None:
    with torch.device("meta"):
        model = build(name, num_classes=5, image_size=48, channels=3, seed=1)
        copy = eval(expression(model), {"nn": torch.nn, "OrderedDict": OrderedDict})
    assert {k: v.shape for k, v in copy.state_dict().items()} == {k: v.shape for k, v in model.state_dict().items()}
    assert [repr(part) for part in copy.modules()][1:] == [repr(part) for part in model.modules()][1:]
