import re
import tomllib

import pytest
from page_blocks import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def prose(text):
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def links(page):
    found = _LINK.findall(prose(page.read_text("utf-8")))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_resolve(page):
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_of_docs_can_be_reached_from_its_index():
    waiting, seen = [ROOT / "docs" / "index.md"], set()
    while waiting:
        page = waiting.pop().resolve()
        if page in seen or not page.exists():
            continue
        seen.add(page)
        if page.is_dir():
            waiting += page.glob("*.md")
        elif page.suffix == ".md":
            waiting += [page.parent / link.partition("#")[0] for link in links(page)]
    assert [page for page in PAGES if "docs" in page.parts and page.resolve() not in seen] == []


def test_the_site_lists_every_page_once():
    settings = tomllib.loads((ROOT / "zensical.toml").read_text("utf-8"))["project"]
    listed = [page for part in settings["nav"] for pages in part.values() for page in pages]
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES if "docs" in page.parts]
    assert sorted(listed) == [page for page in pages if not re.match(r"adr/\d", page)]
