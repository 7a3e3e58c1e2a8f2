"""Law: every keyword of `push` reaches the hub's client, alone and beside each other one.

The rows are the keywords themselves, so that a new one that does nothing fails by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.handed_on import told
from support.small_trainings import network

import normswap
from normswap.storage import checkpoint, publishing
from normswap.storage.model_card import Accuracy

# Two values of each keyword, neither of them its default.
VALUES: dict[str, tuple[object, object]] = {
    "repo": ("me/one", "me/two"),
    "license": ("mit", "apache-2.0"),
    "private": (False, True),
    "message": ("one", "two"),
    "trust_factory": (False, True),
    "accuracy": (
        Accuracy(top1=71.5, count=40, images="photos"),
        Accuracy(top1=72.5, count=50, images="ILSVRC/imagenet-1k", dataset="ILSVRC/imagenet-1k"),
    ),
}
NEEDED: dict[str, Any] = {"repo": "me/net", "license": "other"}

Reached = Callable[[dict[str, Any]], str]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    converted = normswap.convert(network(), "skipinit", input_size=(3, 32, 32))
    return normswap.save(converted, tmp_path_factory.mktemp("pushed") / "net")


@pytest.fixture
def reached(saved: Path, monkeypatch: pytest.MonkeyPatch) -> Reached:
    """A function of the keywords of a push: all that the client, and the loader, are asked."""
    asked: list[object] = []
    model = checkpoint.load(saved)

    class Client:
        """Records what it is asked; every repository is there, and private."""

        def repo_info(self, *args: Any) -> Any:
            asked.append(("repo_info", told(args)))
            return SimpleNamespace(private=True)

        def create_repo(self, *args: Any, **keywords: Any) -> None:
            asked.append(("create_repo", told((args, keywords))))

        def create_commit(self, repo: str, operations: list[Any], commit_message: str) -> Any:
            contents = {each.path_in_repo: told(each.path_or_fileobj) for each in operations}
            asked.append(("create_commit", repo, contents, commit_message))
            return SimpleNamespace(commit_url="url")

    def load(*args: Any, **keywords: Any) -> Any:
        asked.append(("load", told((args, keywords))))
        return model

    monkeypatch.setenv("HF_TOKEN", "hf_x")
    monkeypatch.setattr(publishing.client, "HfApi", Client)
    monkeypatch.setattr(publishing.checkpoint, "load", load)
    # Whether timm alone builds the network hangs on no keyword, and takes long.
    monkeypatch.setattr(publishing, "_arguments_for_timm", lambda *_: None)
    monkeypatch.setattr(publishing, "_code_by_timm", lambda *_: None)

    def push(keywords: dict[str, Any]) -> str:
        asked.clear()
        normswap.push(saved, **{**NEEDED, **keywords})
        return repr(asked)

    return push


def test_every_keyword_has_a_row() -> None:
    assert {*inspect.signature(normswap.push).parameters} - {"directory"} == {*VALUES}


@pytest.mark.parametrize("name", VALUES)
def test_a_keyword_reaches_the_hub(name: str, reached: Reached) -> None:
    one, other = VALUES[name]

    for beside, values in VALUES.items():
        words = {} if beside == name else {beside: values[1]}
        assert reached({**words, name: one}) != reached({**words, name: other}), beside


@pytest.mark.parametrize("private", [False, True])
def test_the_client_is_asked_for_this_and_no_more(private: bool, reached: Reached) -> None:
    asked = reached({"repo": "me/one", "private": private, "message": "first"})

    made = ("create_repo", told((("me/one",), {"private": private, "exist_ok": True})))
    assert asked.count("create_repo") == 1
    assert repr(made) in asked
    # A repository that must be private is looked at before it is made.
    assert ("repo_info" in asked) is private
    assert "'create_commit', 'me/one'" in asked
    assert asked.endswith("'first')]")
    for name in ("model.safetensors", "config.json", "README.md", "norms.safetensors"):
        assert asked.count(f"'{name}'") == 1
