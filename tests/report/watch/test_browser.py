"""The page in a real browser: what is drawn, what the pointer shows, the zoom, and that it lives without a reload."""

import shutil
import time

import pytest

from tests.report.watch.runs import append, make, serving
from tools.browser import browser, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

LOSS = "document.querySelector('figure[data-metric=loss]')"
TICKS = f"[...{LOSS}.querySelectorAll('.xtick')].map(t => t.textContent)"
WAIT_S = 60.0
"""The machine of the tests may be busy; what is waited for comes within two seconds."""


@pytest.fixture(scope="module")
def page():
    with browser() as page:
        page.size(1200, 1000)
        yield page


@pytest.fixture
def watched(page, tmp_path):
    runs = tmp_path / "runs"
    make(runs / "a", [4.0 - 0.01 * i for i in range(100)])
    make(runs / "b", [4.5 - 0.01 * i for i in range(60)], lr=0.002, ended=False)
    page.errors.clear()
    with serving(runs / "a", runs / "b") as server:
        page.open(server.url)
        page.wait("document.querySelectorAll('figure[data-metric=loss] path.line').length == 2", WAIT_S)
        yield runs
        page.run("document.title")  # what the console still has to say
        assert page.errors == []
        page.open("about:blank")
        page.wait("location.href == 'about:blank'", WAIT_S)
        page.errors.clear()  # a question that was on its way


def plot(page):
    """Left, top, width, height of the plot in the window."""
    return page.run(f"(b => [b.left, b.top, b.width, b.height])({LOSS}.querySelector('svg').getBoundingClientRect())")


def place_of(page, step, width_of_margins=(58, 14)):
    """The place of a step in the loss chart, from its x axis of steps 1 to 100."""
    left, top, width, height = plot(page)
    first, last = width_of_margins
    return left + first + (step - 1) / 99 * (width - first - last), top + height / 2


def test_two_runs_are_drawn_with_a_legend(page, watched):
    names = page.run(f"[...{LOSS}.querySelectorAll('.legend li')].map(l => l.textContent)")
    assert names == ["a 3.01", "b 3.91"]
    colours = page.run(f"[...{LOSS}.querySelectorAll('path.line')].map(p => getComputedStyle(p).stroke)")
    assert len(set(colours)) == 2
    lengths = page.run(f"[...{LOSS}.querySelectorAll('path.line')].map(p => p.getTotalLength())")
    assert min(lengths) > 300
    metrics = page.run("[...document.querySelectorAll('#charts figure')].map(f => f.dataset.metric)")
    assert {"loss", "tokens_per_s", "grad_norm", "memory_bytes", "lr"} <= set(metrics)
    assert page.run("[...document.querySelectorAll('.run')].map(r => r.dataset.status)") == ["finished", "running"]
    assert page.run("document.querySelectorAll('.system > div').length") >= 3


def test_the_pointer_shows_the_values(page, watched):
    page.mouse("mouseMoved", *place_of(page, 31))
    page.wait(f"!{LOSS}.querySelector('.tip-box').hidden", WAIT_S)
    lines = page.run(f"[...{LOSS}.querySelectorAll('.tip-box p')].map(p => p.textContent)")
    assert lines == ["step 31", "a 3.7", "b 4.2"]
    other = "document.querySelector('figure[data-metric=grad_norm] .cursor line')"
    assert page.run(f"{other} !== null"), "the same step is marked in other charts"
    page.mouse("mouseMoved", *place_of(page, 90))
    lines = page.run(f"[...{LOSS}.querySelectorAll('.tip-box p')].map(p => p.textContent)")
    assert lines == ["step 90", "a 3.11"], "b has 60 steps"


def test_dragging_zooms_and_a_double_click_resets(page, watched):
    before = page.run(TICKS)
    page.drag(place_of(page, 20), place_of(page, 40))
    page.wait(f"JSON.stringify({TICKS}) != {str(before)!r}.replaceAll(\"'\", '\"').replaceAll(', ', ',')", WAIT_S)
    inside = [int(text) for text in page.run(TICKS)]
    assert min(inside) >= 20
    assert max(inside) <= 40
    other = "[...document.querySelectorAll('figure[data-metric=lr] .xtick')].map(t => Number(t.textContent))"
    assert all(20 <= step <= 40 for step in page.run(other)), "all charts have the same axis"
    page.click(*place_of(page, 50), count=2)
    page.wait(f"JSON.stringify({TICKS}) == JSON.stringify({before})", WAIT_S)


def test_other_axes(page, watched):
    page.run("document.querySelector('[data-x=tokens]').click()")
    page.wait(f"{TICKS}.some(t => t == '4k')", WAIT_S)
    page.run("document.querySelector('[data-x=time]').click()")
    page.wait(f"{TICKS}.some(t => t.includes('s'))", WAIT_S)
    page.run("document.querySelector('[data-x=step]').click()")
    page.wait(f"{TICKS}.every(t => /^[0-9]+$/.test(t))", WAIT_S)


def test_the_setting_that_differs_is_highlighted(page, watched):
    rows = page.run("[...document.querySelectorAll('#differing tbody tr')].map(r => r.innerText.split(/\\s+/))")
    assert rows == [["optim.lr", "0.001", "0.002"]]
    marked = "[...document.querySelectorAll('#all-settings tr.differs')].map(r => r.dataset.setting)"
    assert page.run(marked) == ["optim.lr"]
    colour = "getComputedStyle(document.querySelector('#differing tr.differs td')).backgroundColor"
    assert page.run(colour) not in ("", "rgba(0, 0, 0, 0)", "transparent")


def test_a_new_step_appears_without_a_reload(page, watched):
    page.run("window.stays = true")
    append(watched / "b", step=61, loss=1.25, time_s=61.0)
    page.wait(f"{LOSS}.querySelector('.legend').textContent.includes('b 1.25')", WAIT_S)
    assert page.run("window.stays") is True


def test_a_deleted_run_is_said_and_the_other_continues(page, watched):
    shutil.rmtree(watched / "a")
    page.wait("document.querySelector('.run[data-status=deleted]')?.textContent.includes('was deleted')", WAIT_S)
    assert page.run(f"{LOSS}.querySelectorAll('path.line').length") == 2
    append(watched / "b", step=61, loss=1.25, time_s=61.0)
    page.wait(f"{LOSS}.querySelector('.legend').textContent.includes('b 1.25')", WAIT_S)


def test_a_run_is_offered_added_and_hidden(page, watched):
    make(watched / "c", [5.0, 4.0, 3.0])
    page.wait("document.querySelector('.chip.new')?.textContent.includes('c')", WAIT_S)
    page.run("document.querySelector('.chip.new').click()")
    page.wait(f"{LOSS}.querySelectorAll('path.line').length == 3", WAIT_S)
    page.run("document.querySelector('.run[data-run=run0] button').click()")
    page.wait(f"{LOSS}.querySelectorAll('path.line').length == 2", WAIT_S)
    names = page.run("[...document.querySelectorAll('.run-name b')].map(b => b.textContent)")
    assert names == ["b", "c"]


def test_text_of_a_run_is_text(page, watched):
    assert page.run("document.querySelector('#sample-texts pre').textContent") == "<b></script>"


def test_a_gap_where_a_value_is_not_finite(page, watched):
    for step, loss in ((61, None), (62, 3.0), (63, float("nan")), (64, 3.0), (65, 3.1)):
        append(watched / "b", step=step, loss=loss, time_s=float(step))
    page.wait(f"{LOSS}.querySelector('.chart-note').textContent.includes('2 values are not finite')", WAIT_S)
    assert page.run(f"{LOSS}.querySelectorAll('path.line')[1].getAttribute('d').match(/M/g).length") == 3


def test_a_page_that_waits_for_its_first_step(page, tmp_path):
    run = tmp_path / "runs" / "new"
    run.mkdir(parents=True)
    (run / "run.toml").write_text("[train]\nsteps = 5 # default\n")
    with serving(run) as server:
        page.open(server.url)
        page.wait("document.querySelector('#waiting')?.textContent.includes('No metrics yet')", WAIT_S)
        append(run, step=1, loss=3.0, time_s=1.0)
        append(run, step=2, loss=2.5, time_s=2.0)
        page.wait("document.querySelectorAll('figure[data-metric=loss] path.line').length == 1", WAIT_S)
        assert page.run("document.querySelector('#waiting').hidden")
    assert page.errors == []


def test_a_server_that_stops_is_said(page, tmp_path):
    make(tmp_path / "a", [3.0, 2.0])
    with serving(tmp_path / "a") as server:
        page.open(server.url)
        page.wait("document.querySelectorAll('figure[data-metric=loss] path.line').length == 1", WAIT_S)
    page.wait("!document.getElementById('lost').hidden", WAIT_S)
    assert "does not answer" in page.run("document.getElementById('lost').textContent")
    page.open("about:blank")
    time.sleep(0.2)
    page.errors.clear()


@pytest.mark.parametrize("width", [360, 760, 1600])
def test_the_page_has_no_sideways_scrolling(page, watched, width):
    page.size(width, 800)
    try:
        page.wait(f"Math.abs({LOSS}.getBoundingClientRect().width - {min(width, 1080)}) < 100", WAIT_S)
        assert page.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    finally:
        page.size(1200, 1000)
