"""Every cited place of the works below is a row of tests/lab/seeds.md.

Those rows were read against the texts of the works.
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
ANY_WORK = re.compile(re.sub(" ", r"[\\s#]+", "|".join(WORKS.values())))
# Names of these works, and of any other that a place may belong to.
NAMED = re.compile(r"blog post|\b[A-Z]\w+(?:, [A-Z]\w+)* (?:& [A-Z]\w+|et al)|Kim's|arXiv:\d+\.\d+")
PLACED = re.compile(
    r"(?i)\b(section|equation|table|figure|appendix|algorithm|guideline)s? (\d[\d.]*|[A-G]\b)(?:"
    r" and (\d[\d.]*))?"
)


def cited(text: str) -> set[tuple[str, str]]:
    """(work, place) of every cited place of the works.

    A place belongs to the nearest name within a thousand characters before it.
    """
    text = re.sub(r"\s+(?:#\s+)?", " ", text)
    found: set[tuple[str, str]] = set()
    for place in PLACED.finditer(text):
        names = NAMED.findall(text, max(place.start() - 1000, 0), place.start())
        if not names:
            continue
        works = [work for work, pattern in WORKS.items() if re.search(pattern, names[-1])]
        kind, *numbers = place.groups()
        for work in works:
            found.update((work, f"{kind.lower()} {each.rstrip('.')}") for each in numbers if each)
    return found


def test_every_cited_place_is_a_row() -> None:
    files = [*ROOT.glob("*.md")]
    for folder in FOLDERS:
        files += (ROOT / folder).rglob("*")

    found: set[tuple[str, ...]] = set()
    for path in files:
        is_text = path.suffix in (".py", ".md", ".yaml", ".jinja", ".ipynb")
        if is_text and path not in (LIST, Path(__file__)):
            text = path.read_text(encoding="utf-8")
            # Most files name none of the works, and need no closer look.
            if ANY_WORK.search(text):
                name = str(path.relative_to(ROOT))
                found.update((name, *place) for place in cited(text))

    rows = re.findall(
        r"^\| `(.+)` \| (.+), (.+) \| .+ \|$", LIST.read_text(encoding="utf-8"), re.MULTILINE
    )

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
