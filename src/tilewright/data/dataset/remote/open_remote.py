"""Built datasets at addresses, opened for a run: found, checked against what the run wants, brought, and read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewright.core.errors import ConfigError, DataError
from tilewright.data.common.cache_entries import cached
from tilewright.data.common.progress import timed
from tilewright.data.dataset.open_built import check_domains, check_tokenizer
from tilewright.data.dataset.remote.address import Remote, is_address
from tilewright.data.dataset.remote.prepared_shards import PreparedShards, Streaming
from tilewright.data.dataset.remote.remote_dataset import RemoteDataset, bring, check_alike, find_dataset, fingerprint

_FORMAT = 1  # of the cache entry
SHARDS = "shards"
"""Folder of fetched shards, in that of prepared data."""
ADDRESSES = "addresses"
"""Folder of what addresses had when they were last read, there too."""


@dataclass(frozen=True)
class FarData:
    """The data that was found at addresses."""

    datasets: Sequence[RemoteDataset]
    corpus: Path
    """All but the shards."""
    fingerprint: str
    cache: Path
    streaming: Streaming

    def prepared(self, packed: Path) -> PreparedShards:
        """The far data, opened, with rows from this entry."""
        return PreparedShards(self.corpus, packed, self.datasets, self.cache, self.streaming)


def addresses_of(source: str, sources: Mapping[str, str], setting: str = "data.source") -> dict[str, str]:
    """Addresses of far data to open, by domain, one under an empty name; none where data is on this machine.

    Raises:
        ConfigError: some sources are addresses, and some are not.
    """
    given = dict(sources) or {"": source}
    far = {name: text for name, text in given.items() if is_address(text)}
    if far and len(far) < len(given):
        raise ConfigError(
            "Addresses and paths cannot be mixed",
            got=", ".join(f"{name} = {text}" for name, text in given.items()),
            need="addresses of built datasets alone, or paths alone",
            try_="file:///FOLDER for a built dataset on this machine",
            where="data.sources" if sources else setting,
        )
    return far


def check_text(task: str, format: str) -> None:
    """Check far data before it is opened: raise where what is asked for is no text.

    Raises:
        DataError: images, conversations or preferences.
    """
    if format != "text":
        raise DataError(
            "Conversations cannot be read from an address",
            got=f'data.format = "{format}"',
            need="text",
            try_="data.source = the dataset's folder on this machine",
            where="data.source",
        )
    if task == "image_classification":
        raise DataError(
            "Images cannot be read from an address",
            got='model.task = "image_classification"',
            need="text",
            try_="data.source = the dataset's folder on this machine",
            where="data.source",
        )


def far_vocabulary(source: str, streaming: Streaming) -> int:
    """Ids that a model of a dataset at an address tells apart.

    Raises:
        DataError: there is none, or it cannot be reached.
    """
    return find_dataset("", _remote(source, streaming)).content["summary"]["vocab_size"]


def open_far(
    addresses: Mapping[str, str],
    root: Path,
    streaming: Streaming,
    tokenizer: str,
    domains: tuple[str, ...],
    seconds: dict[str, float],
) -> FarData:
    """Open far data: find the datasets and bring what training reads of them besides the shards.

    Args:
        addresses: by domain.
        root: folder of prepared data.
        streaming: how shards are read.
        tokenizer: of loaded weights, or the one that is asked for; "" where none is.
        domains: those that are wanted.
        seconds: get what phases took.

    Raises:
        DataError: no dataset, one that cannot be reached and was never found before, or not what the run wants.
    """
    known = root / ADDRESSES
    datasets = [find_dataset(name, _remote(address, streaming), known) for name, address in addresses.items()]
    check_alike(datasets)
    names = {one.name for one in datasets if one.name}
    check_domains(domains, sorted(names or datasets[0].content["summary"]["domains"]))
    key = fingerprint(datasets)

    corpus = cached(
        root, f"far-{_FORMAT}-{key}", lambda folder: seconds.update(timed("preparing data", bring, folder, datasets))
    )
    check_tokenizer(tokenizer, corpus, datasets[0].remote.address)
    return FarData(datasets, corpus, key, root / SHARDS, streaming)


def _remote(address: str, streaming: Streaming) -> Remote:
    return Remote(address, retries=streaming.retries, backoff_s=streaming.backoff_s)
