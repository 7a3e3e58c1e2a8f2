"""A small Hugging Face hub on localhost: huggingface_hub can download and upload a model there.

    with hub_server({"timm/resnet18.a1_in1k": folder}) as url:
        ...  # HF_ENDPOINT=url in a subprocess

Modes:

- "ok".
- "404": every repository is missing, as the hub says it; "plain-404": as a web server says it.
- "500": every request fails.
- "stall": half a file comes, and resuming brings nothing more.
- "garbage": weights come in the right length, all zeros.
- "read-only", "no-token": nothing can be uploaded.
"""

import contextlib
import hashlib
import json
import re
import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, file_download

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODES = ("ok", "404", "plain-404", "stall", "500", "garbage", "read-only", "no-token")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    repos: dict[str, Path]
    mode: str
    seen: list[str]
    store: Path
    private: set[str]
    collection: dict[str, Any]

    def log_message(self, *_: Any) -> None:
        """Stay quiet."""

    def do_HEAD(self) -> None:
        self._serve(body=False)

    def do_GET(self) -> None:
        self._serve(body=True)

    def do_POST(self) -> None:
        self.seen.append(f"{self.command} {self.path}")
        content = self._request_body()
        refusals = {"no-token": 401, "read-only": 403, "500": 500}
        if self.mode in refusals:
            return self._refuse(refusals[self.mode], "")
        if self.path == "/api/validate-yaml":
            return self._send_json({"errors": [], "warnings": []})
        if self.path == "/api/repos/create":
            return self._create(json.loads(content))
        if self.path.startswith("/api/collections"):
            return self._collect(json.loads(content))

        path, _, _ = self.path.partition("?")
        upload = re.fullmatch(r"/api/models/(.+?)/(preupload|commit)/main", path)
        if upload is None or upload[1] not in self.repos:
            return self._refuse(404, "RepoNotFound")
        repo, step = upload.groups()
        if step == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for file in json.loads(content)["files"]
            ]
            return self._send_json({"files": files})
        return self._commit(repo, content)

    @property
    def _address(self) -> str:
        return f"http://{self.headers['Host']}"

    def _create(self, request: dict[str, Any]) -> None:
        """Make a repository, or answer 409 if there is one."""
        repo = request["name"]
        if request.get("organization"):
            repo = f"{request['organization']}/{repo}"
        is_there = repo in self.repos

        (self.store / repo).mkdir(parents=True, exist_ok=True)
        # Newer clients write visibility in place of private.
        if not is_there and (request.get("private") or request.get("visibility") == "private"):
            self.private.add(repo)
        self.repos.setdefault(repo, self.store / repo)
        self._send_json({"url": f"{self._address}/{repo}"}, status=409 if is_there else 200)

    def _collect(self, request: dict[str, Any]) -> None:
        """Make the collection, or put a repository into it; 409 if it is there already."""
        is_there = bool(self.collection)
        if "title" in request:
            self.collection.setdefault("title", request["title"])
        else:
            items = self.collection.setdefault("items", [])
            is_there = request["item"]["id"] in items
            if not is_there:
                items.append(request["item"]["id"])

        body = {
            "slug": "me/collection",
            "title": self.collection["title"],
            "owner": {"name": "me"},
            "items": [],
            "lastUpdated": "2026-01-01T00:00:00.000Z",
            "position": 0,
            "private": False,
            "theme": "blue",
            "upvotes": 0,
        }
        self._send_json(body, status=409 if is_there else 200)

    def _commit(self, repo: str, content: bytes) -> None:
        """Write the files of a commit, whose lines are JSON."""
        for line in content.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                file = self.repos[repo] / entry["value"]["path"]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(b64decode(entry["value"]["content"]))

        url = f"{self._address}/{repo}/commit/{COMMIT}"
        self._send_json({"commitUrl": url, "commitOid": COMMIT, "pullRequestUrl": None})

    def _send_json(self, body: dict[str, Any], *, status: int = 200) -> None:
        self._send(json.dumps(body).encode(), "application/json", True, status=status)

    def _request_body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _serve(self, body: bool) -> None:
        self.seen.append(f"{self.command} {self.path}")
        path, _, _ = self.path.partition("?")
        resolved = re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path)
        listed = re.fullmatch(r"/api/models/(.+?)(?:/(?:revision|tree)/.+)?", path)
        match = resolved or listed
        repo = match[1] if match else ""
        if self.mode == "500":
            return self._refuse(500, "")
        if self.mode == "plain-404":
            return self._refuse(404, "")
        if repo not in self.repos or self.mode == "404":
            return self._refuse(404, "RepoNotFound")
        if listed and not resolved:
            return self._send(json.dumps(self._info(repo)).encode(), "application/json", body)

        assert resolved is not None

        if resolved[2] not in ("main", COMMIT):
            return self._refuse(404, "RevisionNotFound")

        file = self.repos[repo] / resolved[3]
        if not file.is_file():
            return self._refuse(404, "EntryNotFound")

        return self._file(file, body)

    def _info(self, repo: str) -> dict[str, Any]:
        folder = self.repos[repo]
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        files = [{"rfilename": path.relative_to(folder).as_posix()} for path in paths]
        return {
            "id": repo,
            "modelId": repo,
            "sha": COMMIT,
            "private": repo in self.private,
            "siblings": files,
            "tags": ["timm"],
        }

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
            self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, content: bytes, kind: str, body: bool, *, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _file(self, file: Path, body: bool) -> None:
        content = file.read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        are_weights = file.suffix == ".safetensors"
        if self.mode == "garbage" and are_weights:
            content = bytes(len(content))
        size = len(content)

        start = 0
        byte_range = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if byte_range is not None:
            start = int(byte_range[1])
        self.send_response(206 if start else 200)
        headers = {
            "ETag": f'"{etag}"',
            "X-Repo-Commit": COMMIT,
            "X-Linked-ETag": f'"{etag}"',
            "X-Linked-Size": str(size),
            "Accept-Ranges": "bytes",
            "Content-Length": str(size - start),
            "Content-Type": "application/octet-stream",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        self.end_headers()

        breaks_off = are_weights and self.mode == "stall"
        self.close_connection = body and breaks_off
        if body:
            end = size // 2 if breaks_off else size
            # The client may have given up.
            with contextlib.suppress(ConnectionError):
                self.wfile.write(content[start:end])


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, home: Path) -> None:
    """Let huggingface_hub in this process talk to `url`, with its cache under `home`.

    It reads the environment only once, when it is imported.
    """
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    # Older clients keep a copy of the template.
    for module in (constants, file_download):
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setenv("HF_TOKEN", "hf_x")


@contextmanager
def hub_server(
    repos: dict[str, Path],
    mode: str = "ok",
    seen: list[str] | None = None,
    store: Path = Path(),
    collection: dict[str, Any] | None = None,
) -> Iterator[str]:
    """Serve folders as hub repositories; yields the address for HF_ENDPOINT.

    Args:
        repos: The folder of each repository, by the repository's name.
        mode: One of `MODES`.
        seen: A list to which "METHOD path" of every request is added, if given.
        store: The folder in which new repositories are made.
        collection: Receives the title and the items of the one collection, if given.
    """
    assert mode in MODES, mode

    own = {
        "repos": repos,
        "mode": mode,
        "seen": [] if seen is None else seen,
        "store": store,
        "private": set(),
        "collection": {} if collection is None else collection,
    }
    handler = type("Handler", (_Handler,), own)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
