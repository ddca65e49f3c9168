"""A free port, where ranks of a test meet."""

import socket

import pytest


@pytest.fixture
def port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
