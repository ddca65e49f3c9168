"""Addresses: `scheme://...`, files that fsspec opens. Object stores need their own packages, which fsspec names.

What fails when a file is read is one of two things: the file is not what it should be (`DamagedFileError`), or nothing
can be read at all (`SourceAwayError`). Which exceptions the second is depends on the package of the scheme: all that
derive from OSError, and those of aiohttp and gcsfs that do not.
"""

import sys
import time
from collections.abc import Callable
from typing import cast

import fsspec
import xxhash

from tilewright.core.errors import DataError, HardwareError

_FOREIGN = (
    ("aiohttp", "ClientError"),
    ("gcsfs.retry", "HttpError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("azure.core.exceptions", "AzureError"),
)
"""Modules and classes of errors that are no OSError; looked at only where the module is loaded, which it is if it
raised one."""
_DAMAGED_TRIES = 2
"""Times that a file is read again whose checksum is wrong: it may have been cut on its way."""
_LONGEST_S = 30.0


class DamagedFileError(Exception):
    """A file that is missing, or is not what its index says, also after it was read again."""


class SourceAwayError(Exception):
    """Nothing can be read from an address, also after the retries."""


def is_address(source: str) -> bool:
    """True if a source is an address of fsspec.

    Example:
        >>> [is_address(source) for source in ("s3://bucket/data", "memory://data", "hf://org/name", "a/b")]
        [True, True, False, False]
    """
    scheme, mark, _ = source.partition("://")
    return bool(mark and scheme) and "/" not in scheme and scheme != "hf"


class Remote:
    """Files below an address (`scheme://...`), read by fsspec.

    Args:
        address: of a folder.
        retries: times that a read is tried again.
        backoff_s: seconds before the first of them; twice as many before each next one, 30 at most.
        sleep: waits; for tests.

    Raises:
        DataError: no such scheme.
        HardwareError: the package of the scheme is not installed.
    """

    def __init__(
        self, address: str, *, retries: int = 5, backoff_s: float = 0.5, sleep: Callable[[float], object] | None = None
    ) -> None:
        self.address, self.retries, self.backoff_s = address.rstrip("/"), retries, backoff_s
        self._sleep = sleep or time.sleep
        self._files, self._root = _opened(self.address, fresh=False)

    def read(self, name: str) -> bytes:
        """Read a whole file at an address, tried once.

        Raises:
            OSError: and those of other packages, see `failures`.
        """
        return cast(bytes, self._files.cat_file(f"{self._root}/{name}"))

    def fetch(self, name: str, size: int | None = None, digest: str | None = None, retries: int | None = None) -> bytes:
        """Fetch a whole file at an address, with retries.

        Args:
            name: below the address.
            size, digest: bytes and xxh3-128 that it must have; None: any.
            retries: in place of the remote's.

        Raises:
            DamagedFileError: it is missing or another one.
            SourceAwayError: nothing could be read.
        """
        damaged, failed, retries = 0, 0, self.retries if retries is None else retries
        while True:
            try:
                content = self.read(name)
                if (problem := wrong(content, size, digest)) is None:
                    return content
            except FileNotFoundError:
                problem = "no such file"
            except failures() as error:
                failed += 1
                if failed > retries:
                    said = f"{type(error).__name__}: {error}".rstrip(": ")
                    raise SourceAwayError(f"{said}, {failed} times") from error
                self._sleep(min(_LONGEST_S, self.backoff_s * 2 ** (failed - 1)))
                if not isinstance(error, (ConnectionError, TimeoutError)):
                    # Credentials may have expired, for which each package has other exceptions: they are read again.
                    self._files, self._root = _opened(self.address, fresh=True)
                continue
            damaged += 1
            if damaged > _DAMAGED_TRIES:
                raise DamagedFileError(f"{problem}, read {damaged} times")
            self._sleep(self.backoff_s)


def wrong(content: bytes, size: int | None, digest: str | None) -> str | None:
    """The damage of a file fetched from an address, or None.

    Example:
        >>> wrong(b"abc", 4, None)
        '3 bytes instead of 4'
    """
    if size is not None and len(content) != size:
        return f"{len(content)} bytes instead of {size}"
    if digest is not None and xxhash.xxh3_128_hexdigest(content) != digest:
        return "a wrong checksum"
    return None


def failures() -> tuple[type[Exception], ...]:
    """Classes of errors that are raised where nothing can be read from an address."""
    loaded = ((sys.modules.get(module), name) for module, name in _FOREIGN)
    return (OSError, EOFError, *(getattr(module, name) for module, name in loaded if hasattr(module, name)))


def _opened(address: str, *, fresh: bool) -> tuple[fsspec.AbstractFileSystem, str]:
    scheme = address.partition("://")[0]
    try:
        files, path = fsspec.core.url_to_fs(address, **({"skip_instance_cache": True} if fresh else {}))
    except ImportError as error:
        raise HardwareError(
            f"Addresses of the scheme {scheme} need a package that is not installed",
            got=f"{address}: {error}",
            need=f"the package of fsspec for {scheme}",
            try_=f"pip install {_PACKAGES.get(scheme, 'the package that is named')}",
            where="data.source",
        ) from error
    except ValueError as error:
        raise DataError(
            "Unknown scheme of an address",
            got=f"{address}: {error}",
            need="a scheme that fsspec knows: file, http, https, memory, s3, gs, az and others",
            try_="data.source = a folder on this machine, or the dataset's address",
            where="data.source",
        ) from error
    return files, str(path).rstrip("/")


_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "adl", "abfss"), "adlfs"),
    **dict.fromkeys(("http", "https"), "aiohttp requests"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
    **dict.fromkeys(("oci", "ocilake"), "ocifs"),
}
