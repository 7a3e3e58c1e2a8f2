"""A hook of MkDocs: links to files beside docs/ go to the repository; fences lose the marks of the tests."""

import re

_BESIDE = re.compile(r"\]\(\.\./([^)]+)\)")
_MARKS = re.compile(r"^(```\w+) [^\n]*$", re.M)


def on_page_markdown(markdown: str, *, config: dict[str, str], **_: object) -> str:
    """Rewrite one page."""
    return _MARKS.sub(r"\1", _BESIDE.sub(rf"]({config['repo_url']}/blob/main/\1)", markdown))
