"""docs/benchmarks.md and the tables of README.md hold what the committed results say, all of it, and nothing else."""

import hashlib
import json
import re
from collections import Counter

import pytest

from benchmarks import pages
from benchmarks.common import RESULTS
from benchmarks.rows.claim_rows import REMOVED, read
from benchmarks.rows.claims import SECTIONS, UNUSED, groups
from benchmarks.rows.verdict import MISS, NOT_RUN, PASS, UNDECIDED

FOUND = groups()
ROWS = [row for group in FOUND for row in group.rows]


def test_the_pages_are_what_the_results_say():
    assert pages.PAGE.read_text(encoding="utf-8") == pages.page(FOUND), f"run `{pages.COMMAND}`"
    text = pages.README.read_text(encoding="utf-8")
    assert text == pages.readme(text, FOUND), f"run `{pages.COMMAND}`"
    for page, name, lines in (
        (pages.DEFAULT_JOB, "ladder", pages.default_job()),
        (pages.SECONDS, "shares", pages.share_table()),
    ):
        text = page.read_text(encoding="utf-8")
        assert text == pages.with_section(text, name, lines, pages.COMMAND), f"run `{pages.COMMAND}`"


def test_a_changed_number_is_found():
    text = pages.README.read_text(encoding="utf-8")
    changed = text.replace("429 (", "430 (")
    assert changed != text
    assert pages.readme(changed, FOUND) == text


def test_every_result_file_has_a_row_or_a_reason():
    used = {row.result.name for row in ROWS if row.result}
    assert used | set(UNUSED) == {path.stem for path in RESULTS.glob("*.json")}
    assert not used & set(UNUSED)


def test_every_result_has_its_command_commit_and_date():
    for path in RESULTS.glob("*.json"):
        record = json.loads(path.read_text())
        assert record["command"].startswith("python -m benchmarks."), path.name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"]), path.name
        assert record["commit"], path.name


def test_each_program_of_a_result_is_here_or_its_last_commit_is_named():
    folder = RESULTS.parent
    here = {name for name in REMOVED if (folder / f"{name.replace('.', '/')}.py").exists()}
    assert not here, f"removed.toml names programs that are here: {here}"
    for path in RESULTS.glob("*.json"):
        result = read(path.stem)
        assert result.program in REMOVED or (folder / f"{result.program.replace('.', '/')}.py").exists(), path.name


STUDIES = [study for section in SECTIONS for study in section.get("study", ())]


def test_rows_that_are_written_down_are_of_studies_that_have_left_and_of_these_results():
    """Rows of a program that is here are made from what it measures, each time."""
    assert len(STUDIES) > 50
    for study in STUDIES:
        assert read(study["result"]).program in REMOVED, study["result"]
        digest = hashlib.sha256((RESULTS / f"{study['result']}.json").read_bytes()).hexdigest()
        assert study["digest"] == digest[:16], study["result"]


NUMBER = r"([-+]?\d[\d,.]*(?:e-?\d+)?)( ?[^\s,;(]*)"
"""And its unit."""


def test_a_status_that_is_written_down_fits_its_number_and_target():
    judged = 0
    for metric, target, measured, status, *why in (row for study in STUDIES for row in study["rows"]):
        assert status in pages.STATUSES
        assert (status == UNDECIDED) == bool(why), metric
        bound, number = re.match(f"at (most|least) {NUMBER}", target), re.match(NUMBER, measured)
        alike = bound and number and bound[3] == number[2]  # else the number is a count, or the median of several
        if alike and status in (PASS, MISS) and "each" not in target:
            limit, value = (float(text.replace(",", "")) for text in (bound[2], number[1]))
            assert (value <= limit if bound[1] == "most" else value >= limit) == (status == PASS), metric
            judged += 1
    assert judged > 40


def test_commands_of_the_docs_are_modules_that_are_there():
    """The log is left out: it names what a study was called when it ran."""
    root = pages.README.parent
    texts = {
        path: path.read_text("utf-8")
        for path in [pages.README, *(root / "docs").rglob("*.md")]
        if path.name != "log.md"
    }
    named = {
        (path.name, found)
        for path, text in texts.items()
        for found in re.findall(r"python -m benchmarks\.([\w.-]*\w)", text)
    }
    assert len(named) > 50
    assert not [
        (page, name)
        for page, name in sorted(named)
        if not (root / "benchmarks" / f"{name.replace('.', '/')}.py").exists()
        and not (page == pages.PAGE.name and name in REMOVED)
    ]


def test_rows_have_different_keys_and_texts():
    assert not [key for key, count in Counter(row.key for row in ROWS).items() if count > 1]
    told = Counter((row.metric, row.where, row.target) for row in ROWS)
    assert not [row for row, count in told.items() if count > 1]


def test_what_was_not_run_says_so_and_nothing_else_does():
    for row in ROWS:
        assert (row.result is None) == (row.verdict.status == NOT_RUN), row.key
        assert row.hardware != "NVIDIA H200" or row.verdict.status == NOT_RUN, row.key


def test_what_is_undecided_says_why():
    assert not [row.key for row in ROWS if (row.verdict.status == UNDECIDED) != bool(row.verdict.why)]


def test_the_page_names_every_miss_and_readme_counts_them():
    page, line = pages.page(FOUND), pages.headlines(FOUND)[-1]
    for group in FOUND:
        misses = [row.metric for row in group.rows if row.verdict.status == MISS]
        assert all(f"\n- {group.title}: {metric}\n" in page for metric in misses), group.title
        assert (f"[{group.title}](" in line) == bool(misses)
        assert not misses or f") {len(misses)}" in line.split(f"[{group.title}](")[1].split(",")[0]


@pytest.mark.parametrize("key", [key for key, _ in pages.HEADLINES])
def test_headlines_name_rows(key):
    assert key in {row.key for row in ROWS}
