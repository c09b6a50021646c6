"""What a published run says: no local paths."""

import pytest

from flatout.inference.hub import cleaner


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
