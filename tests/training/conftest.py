"""One thread, and one small corpus for all training tests."""

import pytest
import torch

from tests.training.tiny import write_text


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Folder with `text/` and a cache beside it."""
    folder = tmp_path_factory.mktemp("data")
    write_text(folder / "text")
    return folder
