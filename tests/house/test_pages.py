"""Pages that a script makes are what it makes now."""

from __future__ import annotations

from pathlib import Path

import pages
import pytest

MADE = [(name, path) for name, made in pages.all_pages().items() for path in made]


@pytest.mark.parametrize(("name", "path"), MADE, ids=[path.name for _, path in MADE])
def test_a_page_is_up_to_date(name: str, path: Path):
    assert path.read_text(encoding="utf-8") == pages.all_pages()[name][path](), f"run: python docs/{name}.py"


def test_every_script_is_named_where_people_look_for_it():
    text = (pages.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert pages.SCRIPTS
    assert [name for name in pages.SCRIPTS if f"docs/{name}.py" not in text] == []


def test_a_part_that_is_not_there_is_refused(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("<!-- made: one -->\nold\n<!-- end: one -->\nby hand\n", encoding="utf-8")
    assert pages.spliced(page, {"one": lambda: iter(["new"])}) == (
        "<!-- made: one -->\n\nnew\n\n<!-- end: one -->\nby hand\n"
    )
    with pytest.raises(AssertionError, match="made: two"):
        pages.spliced(page, {"two": lambda: iter([])})
