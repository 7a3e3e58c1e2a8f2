"""Every place of the works below that is cited is a row of tests/lab/seeds.md, which was read
against their texts.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "tests" / "lab" / "seeds.md"
FOLDERS = ("normswap", "recipes", "docs", "tests")
WORKS = {
    "De & Smith": "De & Smith|2002.10444",
    "Ioffe & Szegedy": "Ioffe & Szegedy|1502.03167",
    "Kim et al.": "Kim et al|Kim's|2205.07260",
    "blog post": "blog post",
    "not read": "Brock et al|2101.08692|2102.06171|Zhang et al|Zhang, Dauphin|1901.09321",
}
# Names of these works, and of any other that a place may belong to.
NAMED = re.compile(r"blog post|\b[A-Z]\w+(?:, [A-Z]\w+)* (?:& [A-Z]\w+|et al)|Kim's|arXiv:\d+\.\d+")
PLACED = re.compile(
    r"(?i)\b(section|equation|table|figure|appendix|algorithm|guideline)s? (\d[\d.]*|[A-G]\b)(?:"
    r" and (\d[\d.]*))?"
)


def cited(text: str) -> set[tuple[str, str]]:
    """(work, place) of every place whose nearest name, within a thousand characters before it, is
    one of the works.
    """
    text, found = re.sub(r"\s+(?:#\s+)?", " ", text), set()
    for place in PLACED.finditer(text):
        names = NAMED.findall(text, max(place.start() - 1000, 0), place.start())
        works = [work for work, pattern in WORKS.items() if names and re.search(pattern, names[-1])]
        numbers = [number.rstrip(".") for number in place.groups()[1:] if number]
        found |= {(work, f"{place[1].lower()} {number}") for work in works for number in numbers}
    return found


def test_every_cited_place_is_a_row() -> None:
    files = [
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path not in (LIST, Path(__file__))
    ]

    texts = [
        path
        for path in (*files, *ROOT.glob("*.md"))
        if path.suffix in (".py", ".md", ".yaml", ".jinja", ".ipynb")
    ]

    found = {
        (str(path.relative_to(ROOT)), *place)
        for path in texts
        for place in cited(path.read_text("utf-8"))
    }
    rows = re.findall(r"^\| `(.+)` \| (.+), (.+) \| .+ \|$", LIST.read_text("utf-8"), re.MULTILINE)

    assert sorted(found) == sorted(rows)


def test_places_of_other_works_are_not_these() -> None:
    text = (
        "De & Smith 2020,\n# arXiv:2002.10444, section 2.2 and\nappendix F; He et al. 2016, table"
        " 1; Kim's Figure 5"
    )
    assert cited(text) == {
        ("De & Smith", "section 2.2"),
        ("De & Smith", "appendix F"),
        ("Kim et al.", "figure 5"),
    }
