"""The server: what it answers, whom it refuses, and what happens to folders that change while they are watched."""

import http.client
import json
import os
import shutil
import socket
import time
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.draws import examples
from tests.report.watch.runs import append, make, serving
from tilewright.core.errors import ConfigError
from tilewright.report.page import render
from tilewright.report.run_data.collect_run import collect
from tilewright.report.watch import watched_run
from tilewright.report.watch.server import TRIED_PORTS, WatchServer


@pytest.fixture(autouse=True)
def _always_look(monkeypatch):
    monkeypatch.setattr(watched_run, "_MIN_AGE_S", 0.0)


def ask(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=180)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


def view(server, query=""):
    status, body, _ = ask(server, f"/api/view{query}")
    assert status == 200, body
    return json.loads(body)


@pytest.fixture
def two(tmp_path):
    make(tmp_path / "runs" / "a", [4.0 - 0.01 * i for i in range(100)])
    make(tmp_path / "runs" / "b", [4.5 - 0.01 * i for i in range(60)], lr=0.002, ended=False)
    return tmp_path / "runs"


def test_two_runs(two):
    with serving(two / "a", two / "b") as server:
        found = view(server)
        a, b = found["runs"]
        assert (a["name"], a["status"], a["step"], a["steps"]) == ("a", "finished", 100, "200")
        assert a["curves"]["loss"]["x"] == list(range(1, 101))
        assert a["curves"]["loss"]["y"] == pytest.approx([4.0 - 0.01 * i for i in range(100)], rel=5e-6)  # six figures
        assert b["curves"]["loss"]["last"] == pytest.approx(3.91, rel=5e-6)
        assert [row["name"] for row in found["settings"] if row["differs"]] == ["optim.lr"]
        assert a["events"][0]["kind"] == "done"
        assert a["samples"][0]["text"] == "</script>"
        known = ",".join(f"{run['key']}:{run['version']}" for run in found["runs"])
        assert not any("curves" in run for run in view(server, f"?known={known}")["runs"])
        append(two / "b", step=61, loss=1.5, time_s=61.0)
        again = view(server, f"?known={known}")["runs"]
        assert "curves" not in again[0]
        assert again[1]["curves"]["loss"]["last"] == 1.5


def test_the_page_and_its_parts(two):
    with serving(two / "a") as server:
        kinds = {"/": "text/html", "/pages/watch.css": "text/css", "/pages/chart.js": "text/javascript"}
        for path, kind in kinds.items():
            status, body, headers = ask(server, path)
            assert status == 200
            assert headers["Content-Type"].startswith(kind)
            assert "default-src 'none'" in headers["Content-Security-Policy"]
            assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b""), "nothing from elsewhere"
            assert b"https://" not in body
            assert ask(server, path, "HEAD")[:2] == (200, b"")


OTHERS = ["evil.example", "evil.example:8810", "", "127.0.0.1.evil.example", "[::2]:1", "0.0.0.0", "127.0.0.1:80@x"]


@pytest.mark.parametrize("host", OTHERS)
def test_other_hosts_are_refused(two, host):
    with serving(two / "a") as server:
        for path in ("/", "/api/view", "/report/run0"):
            assert ask(server, path, Host=host)[0] == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost:1234", "127.0.0.1:80"])
def test_this_host_under_any_port_is_served(two, host):
    """A tunnel has another port at its other end."""
    with serving(two / "a") as server:
        assert ask(server, "/api/view", Host=host)[0] == 200


def test_pages_of_other_sites_get_nothing(two):
    with serving(two / "a") as server:
        assert ask(server, "/report/run0", Sec_Fetch_Site="cross-site")[0] == 403
        assert ask(server, "/api/view", Sec_Fetch_Site="same-site")[0] == 403
        assert ask(server, "/", Sec_Fetch_Site="cross-site")[0] == 200, "a link to the page"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_is_written(two, method):
    with serving(two / "a") as server:
        assert ask(server, "/api/view", method)[0] == 501


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.text(max_size=30) | st.sampled_from(["../run.toml", "run0/../../x", "..%2f..%2fetc%2fpasswd", "/[x"]))
@pytest.mark.parametrize("server", ["one"], indirect=True)
def test_no_path_of_a_client_is_opened(server, name):
    for start in ("/pages/", "/report/", "/", "/api/"):
        path = start + quote(name, safe="/%.", errors="replace")
        if path not in ("/", "/api/view"):
            assert ask(server, path)[0] == 404, path


@pytest.fixture
def server(two, request):
    with serving(two / "a") as server:
        yield server


QUERIES = ["x=loss", "points=1", "points=9999999", "points=-3", "from=nan", "to=x", "from=1e999", "file=/etc/passwd"]


@pytest.mark.parametrize("query", [*QUERIES, "runs=" + ",".join("abcdefghi"), "&".join(f"x{i}=1" for i in range(20))])
def test_a_bad_query_is_refused(server, query):
    assert ask(server, f"/api/view?{query}")[0] == 400


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(query=st.text(max_size=40), low=st.floats(), high=st.floats(), points=st.integers(2, 2000))
def test_any_query_gets_an_answer(server, query, low, high, points):
    assert ask(server, f"/api/view?{quote(query, safe='=&', errors='replace')}")[0] in (200, 400)
    for x in ("step", "time", "tokens"):
        assert ask(server, f"/api/view?x={x}&from={low!r}&to={high!r}&points={points}")[0] in (200, 400)


def test_the_report_is_that_of_the_report_command(two):
    with serving(two / "a") as server:
        before = sorted(os.listdir(two / "a"))
        status, body, headers = ask(server, "/report/run0")
        assert status == 200
        assert "attachment" in headers["Content-Disposition"]
        assert body.decode() == render(collect((two / "a").resolve()))
        assert sorted(os.listdir(two / "a")) == before, "nothing is written"
        shutil.rmtree(two / "a")
        status, body, _ = ask(server, "/report/run0")
        assert status == 500
        assert b"cannot be made" in body
        assert ask(server, "/report/run9")[0] == 404


def test_a_run_that_is_deleted_keeps_its_curves_and_others_continue(two):
    with serving(two / "a", two / "b") as server:
        view(server)
        shutil.rmtree(two / "a")
        append(two / "b", step=61, loss=1.5, time_s=61.0)
        a, b = view(server)["runs"]
        assert a["status"] == "deleted"
        assert len(a["curves"]["loss"]["x"]) == 100
        assert b["curves"]["loss"]["last"] == 1.5
        make(two / "a", [9.0, 8.0])  # the same name again
        a, _ = view(server)["runs"]
        assert (a["status"], a["curves"]["loss"]["y"]) == ("finished", [9, 8])


def test_a_run_that_is_being_written_waits(tmp_path):
    run = tmp_path / "runs" / "new"
    run.mkdir(parents=True)
    (run / "run.toml").write_text("[train]\nsteps = 5 # default\n")
    with serving(run) as server:
        (found,) = view(server)["runs"]
        assert (found["status"], found["step"], found["curves"]) == ("no data yet", None, {})
        append(run, step=1, loss=3.0, time_s=1.0)
        (found,) = view(server)["runs"]
        assert (found["status"], found["curves"]["loss"]["y"]) == ("running", [3])


def test_status_of_a_run_that_nothing_ended(two):
    with serving(two / "b") as server:
        assert view(server)["runs"][0]["status"] == "running", "its metrics were written a moment ago"
        old = time.time() - 3600
        os.utime(two / "b" / "metrics.jsonl", (old, old))
        assert view(server)["runs"][0]["status"] == "killed"
        (two / "b" / ".lock").write_text(f"{os.getpid()}\n")
        assert view(server)["runs"][0]["status"] == "running", "the process lives"
        os.utime(two / "b" / ".lock", (1e9, 1e9))
        assert view(server)["runs"][0]["status"] == "killed", "a later process with the same number"
        for text in ("", "x", "-1", "0", str(10**40), "999999999"):
            (two / "b" / ".lock").write_text(text)
            assert view(server)["runs"][0]["status"] == "killed"


def test_a_restart_that_cuts_rows(two):
    with serving(two / "b") as server:
        version = view(server)["runs"][0]["version"]
        lines = (two / "b" / "metrics.jsonl").read_text().splitlines(keepends=True)[:20]
        fresh = two / "b" / "fresh"
        fresh.write_text("".join(lines))
        os.replace(fresh, two / "b" / "metrics.jsonl")
        (found,) = view(server, f"?known=run0:{version}")["runs"]
        assert found["curves"]["loss"]["x"] == list(range(1, 21))
        assert "restart" in found["trouble"][0]


def test_values_that_no_chart_can_show(tmp_path):
    bad = [3.0, float("nan"), float("inf"), None, 10**400, 1e300, -1e300, 1e-320, True, "text"]
    run = make(tmp_path / "runs" / "bad", bad)
    with serving(run) as server:
        curve = view(server)["runs"][0]["curves"]["loss"]
        assert curve["x"] == [1, 2, 3, 4, 5, 6, 7, 8]
        assert curve["y"] == [3, None, None, None, None, 1e300, -1e300, 0]
        assert curve["not_finite"] == 4
        few = view(server, "?points=2")["runs"][0]["curves"]["loss"]
        assert few["high"][-1] == 1e300


def test_runs_of_one_view_are_downsampled_alike(tmp_path):
    long = make(tmp_path / "runs" / "long", [1.0 * i for i in range(1000)])
    short = make(tmp_path / "runs" / "short", [1.0 * i for i in range(300)])
    with serving(long, short) as server:
        a, b = (run["curves"]["loss"] for run in view(server)["runs"])
        assert len(a["x"]) == 250
        assert len(b["x"]) == 75
        (alone,) = view(server, "?runs=run1")["runs"]
        assert len(alone["curves"]["loss"]["x"]) == 300
        both = view(server, f"?runs=run0,run1&known=run1:{alone['version']}")["runs"]
        assert len(both[1]["curves"]["loss"]["x"]) == 75, "another stretch is another version"


def test_new_runs_beside_it_are_offered(two, monkeypatch):
    from tilewright.report.watch import run_set

    monkeypatch.setattr(run_set, "_SCAN_S", 0.0)
    (two / "not-a-run").mkdir()
    os.symlink("b", two / "latest")
    with serving(two / "latest") as server:
        found = view(server)
        assert [run["name"] for run in found["runs"]] == ["b"]
        assert [(run["name"], run["new"]) for run in found["offered"]] == [("a", False)]
        make(two / "c", [1.0])
        offered = {run["name"]: run for run in view(server)["offered"]}
        assert offered["c"]["new"]
        both = view(server, f"?runs=run0,{offered['c']['key']}")["runs"]
        assert [run["name"] for run in both] == ["b", "c"]
        shutil.rmtree(two / "c")
        assert "c" not in {run["name"] for run in view(server)["offered"]}


def test_the_next_free_port(two):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with serving(two / "a", port=port) as server:
            assert port < server.server_port < port + TRIED_PORTS


def test_no_free_port(two):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 65535))
        taken.listen()
        with pytest.raises(ConfigError, match="No free port"):
            WatchServer([two / "a"], 65535)


def test_it_listens_on_this_machine_only(two):
    with serving(two / "a") as server:
        assert server.server_address[0] == "127.0.0.1"
