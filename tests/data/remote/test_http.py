"""Datasets at http addresses, by a server of this process that fails on request."""

import functools
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.data.remote.test_far_data import far, run
from tilewright.core.errors import DataError
from tilewright.data.dataset.remote.address import DamagedFileError, Remote, SourceAwayError

pytest.importorskip("aiohttp")


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder; every so many-th answer is an error of the server, or the connection is closed."""

    fail_every = 0
    count = 0

    def do_GET(self):
        Handler.count += 1
        if Handler.fail_every and Handler.count % Handler.fail_every == 0:
            if Handler.count % 2:
                self.send_error(503)
            self.close_connection = True
            return
        super().do_GET()

    def log_message(self, *args):
        """Nothing is printed."""


@pytest.fixture
def address(dataset):
    Handler.fail_every = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(dataset)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(30)


def test_samples_are_those_of_the_folder_also_from_a_server_that_fails(address, dataset, tmp_path):
    expected = run(far(f"file://{dataset}", tmp_path / "near"), 20)
    Handler.fail_every = 5
    prepared = far(address, tmp_path / "far", cache_bytes=20_000)
    assert run(prepared, 20, prefetch=2) == expected
    assert prepared.reader.counts.fetched > 10
    assert not prepared.blank_rows


def test_what_is_missing_and_what_does_not_answer_are_two_things(address, tmp_path):
    remote = Remote(address, retries=1, backoff_s=0)
    with pytest.raises(DamagedFileError, match="no such file"):
        remote.fetch("shards/none.bin")
    Handler.fail_every = 1
    with pytest.raises(SourceAwayError, match="2 times"):
        remote.fetch("dataset.json")
    with pytest.raises(DataError, match="Address of a dataset cannot be read"):
        far(address, tmp_path, retries=1)


def test_a_folder_without_a_dataset_is_an_error(address, tmp_path):
    with pytest.raises(DataError, match="No built dataset at this address"):
        far(f"{address}/shards", tmp_path)
