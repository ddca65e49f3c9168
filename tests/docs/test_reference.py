"""The committed reference pages are what the code says."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("write_reference", ROOT / "tools" / "write_reference.py")
assert _spec is not None
assert _spec.loader is not None
writer = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(writer)


@pytest.mark.parametrize("name", writer.PAGES)
def test_page_is_up_to_date(name):
    committed = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert committed == writer.PAGES[name](), "run `make reference`"
