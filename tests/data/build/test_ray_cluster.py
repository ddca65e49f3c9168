"""Ray on a cluster of two nodes: the same bytes, also where one of them is gone in the middle, and after Ctrl-C."""

import signal
import time

import pytest

from tests.data.build.corpora import build, digest, settings, write_corpus
from tests.data.build.test_kill import start
from tilewright.data.engine.unit_folders import RECEIPT

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.dist]


@pytest.fixture
def cluster(monkeypatch):
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    head = {"num_cpus": 1, "object_store_memory": 100_000_000, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=head)
    monkeypatch.setenv("RAY_ADDRESS", found.address)
    yield found
    found.shutdown()


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


def wait_for_units(out, number, process):
    """Until so many units are finished."""
    while len(list(out.rglob(RECEIPT))) < number:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)


def ended(process):
    said = process.communicate(timeout=120)[1].decode()
    return process.returncode, said


@pytest.mark.parametrize("killed", [False, True])
def test_two_nodes_make_the_bytes_of_one_process(killed, cluster, corpus, tmp_path):
    second = cluster.add_node(num_cpus=1, object_store_memory=100_000_000)
    process = start(corpus, tmp_path / "out", 0, executor="ray")
    if killed:
        wait_for_units(tmp_path / "out", 3, process)
        cluster.remove_node(second, allow_graceful=False)
    code, said = ended(process)
    assert code == 0, said
    build(settings(corpus), tmp_path / "local")
    assert digest(tmp_path / "out") == digest(tmp_path / "local")


@pytest.mark.usefixtures("cluster")
def test_ctrl_c_ends_it_and_the_same_command_goes_on(corpus, tmp_path):
    process = start(corpus, tmp_path / "out", 0, executor="ray")
    wait_for_units(tmp_path / "out", 3, process)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    code, said = ended(process)
    assert (code, "Traceback" in said) == (130, False), said
    assert time.monotonic() - began < 100
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob(RECEIPT)}
    code, said = ended(start(corpus, tmp_path / "out", 0, executor="ray"))
    assert code == 0, said
    assert before == {path: path.stat().st_mtime_ns for path in before}, "a finished unit ran again"
    build(settings(corpus), tmp_path / "local")
    assert digest(tmp_path / "out") == digest(tmp_path / "local")
