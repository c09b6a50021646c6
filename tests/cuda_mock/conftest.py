import pytest

from tests.cuda_mock.build import CannotBuild, build


@pytest.fixture(scope="session")
def mock() -> None:
    """The stand-in for a GPU, where it can be built."""
    try:
        build()
    except CannotBuild as error:
        pytest.skip(f"the stand-in for a GPU {error}")
