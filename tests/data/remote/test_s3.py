"""Datasets in an object store: s3fs against a server of this process that speaks what s3fs reads with of S3.

s3fs is not in the extra `dev`: botocore wants python-dateutil below 3, and others the newest. These run where it is
installed in a folder on PYTHONPATH: pip install --no-deps --target FOLDER s3fs aiobotocore aioitertools jmespath wrapt,
and a botocore that aiobotocore takes.
"""

import functools
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.data.remote.test_far_data import far, run
from tilewright.core.errors import DataError
from tilewright.data.dataset.remote.address import Remote, SourceAwayError

pytest.importorskip("s3fs")
EMPTY = b'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><KeyCount>0</KeyCount></ListBucketResult>'


class Bucket(SimpleHTTPRequestHandler):
    """Serves a folder as the bucket `data`, to who signs with the key that is valid."""

    key = "first"
    left = 10**9
    """Requests until another key is valid, which the file of credentials then has."""
    fail_every = 0
    count = 0
    rotate = staticmethod(lambda: None)

    def do_GET(self):
        if self._allowed():
            if "list-type=2" in self.path:
                self._answer(200, EMPTY)
            else:
                super().do_GET()

    def do_HEAD(self):
        if self._allowed():
            super().do_HEAD()

    def _allowed(self):
        Bucket.count += 1
        Bucket.left -= 1
        if Bucket.left == 0:
            Bucket.key = "second"
            Bucket.rotate()
        if f"Credential={Bucket.key}/" not in self.headers.get("Authorization", ""):
            self._error(400, "ExpiredToken")
            return False
        if Bucket.fail_every and Bucket.count % Bucket.fail_every == 0:
            self._error(503, "SlowDown")
            return False
        return True

    def send_error(self, code, message=None, explain=None):
        self._error(code, "NoSuchKey" if code == 404 else "InternalError")

    def _error(self, status, code):
        self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def _answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":  # whose errors have no body, so s3fs knows their status alone
            self.wfile.write(body)

    def translate_path(self, path):
        return super().translate_path(path.removeprefix("/data"))

    def log_message(self, *args):
        """Nothing is printed."""


@pytest.fixture
def address(dataset, tmp_path, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Bucket, directory=str(dataset)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    credentials = tmp_path / "credentials"

    def signing_with(key):
        credentials.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n")

    Bucket.key, Bucket.left, Bucket.fail_every, Bucket.count = "first", 10**9, 0, 0
    Bucket.rotate = staticmethod(lambda: signing_with("second"))
    signing_with("first")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()  # of the test before, whose server is gone
    yield "s3://data"
    s3fs.S3FileSystem.clear_instance_cache()
    server.shutdown()
    server.server_close()
    thread.join(30)


def test_samples_are_those_of_the_folder_while_credentials_expire_and_requests_fail(address, dataset, tmp_path):
    expected = run(far(f"file://{dataset}", tmp_path / "near"), 20)
    Bucket.left, Bucket.fail_every = 60, 23
    prepared = far(address, tmp_path / "far", cache_bytes=20_000)
    assert run(prepared, 20, prefetch=2) == expected
    assert Bucket.key == "second"
    assert prepared.reader.counts.fetched > 10
    assert not prepared.blank_rows
    assert not prepared.reader.away


@pytest.mark.parametrize("left", [1, 2])
def test_credentials_expire_at_the_size_of_a_file_or_at_its_content(address, left):
    """s3fs asks for the size first, by a HEAD."""
    remote = Remote(address, retries=1, backoff_s=0)
    content = remote.fetch("dataset.json")
    Bucket.left = left
    assert remote.fetch("dataset.json") == content
    assert Bucket.key == "second"


def test_credentials_that_stay_refused_are_a_source_that_is_away(address):
    remote = Remote(address, retries=2, backoff_s=0)
    Bucket.key = "another"
    with pytest.raises(SourceAwayError, match="3 times"):
        remote.fetch("dataset.json")


def test_a_bucket_without_a_dataset_says_so(address, tmp_path):
    with pytest.raises(DataError, match="No built dataset at this address"):
        far(f"{address}/nothing/here", tmp_path)
