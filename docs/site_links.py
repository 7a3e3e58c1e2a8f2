"""A hook of MkDocs that rewrites each page for the site.

Links to files beside docs/ go to the repository. Fences lose the marks that the tests read.
"""

import re

_BESIDE = re.compile(r"\]\(\.\./([^)]+)\)")
_MARKS = re.compile(r"^(```\w+) [^\n]*$", re.M)


def on_page_markdown(markdown: str, *, config: dict[str, str], **_: object) -> str:
    """Return the page as the site shows it."""
    linked = _BESIDE.sub(rf"]({config['repo_url']}/blob/main/\1)", markdown)
    return _MARKS.sub(r"\1", linked)
