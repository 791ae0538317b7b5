"""Sentences of pages, help and errors, for the tests of how they are written."""

import re

from package_source import ROOT

#: Pages that people read from top to bottom; generated pages, the format and quotations are not among them.
READ = sorted(
    page
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if not {"reference", "format"} & set(page.relative_to(ROOT).parts)
)


def prose(text):
    """Return Markdown without code, tables, headings, links and images."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    text = re.sub(r"^(\||#|!\[|<!--).*$", "", text, flags=re.M)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "X", text, flags=re.S)
    return re.sub(r"\*\*|\*|<[^>]*>", "", text)


def sentences(text):
    """Split prose at ends of sentences, list items and paragraphs."""
    found = []
    for paragraph in re.split(r"\n\s*\n|^\s*(?:-|\d+\.) ", prose(text), flags=re.M):
        found += re.split(r"(?<=[.!?:])\s+", " ".join(paragraph.split()))
    return [sentence for sentence in found if words(sentence)]


def words(text):
    return re.findall(r"[A-Za-z][A-Za-z'-]*|\d[\d.,]*", text)


def per_thousand(word, text):
    counted = words(text)
    return 1000 * sum(other.lower() == word for other in counted) / max(len(counted), 1)
