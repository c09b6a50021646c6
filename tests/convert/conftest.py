"""What tests of weights share."""

import pytest
from flatout.convert import keras_arrays


@pytest.fixture
def keras_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read files of Keras here: a process for each would take most of the time."""
    monkeypatch.setattr(
        "flatout.convert.keras_files.read_apart", lambda path: b"".join(map(bytes, keras_arrays.encoded(path)))
    )
