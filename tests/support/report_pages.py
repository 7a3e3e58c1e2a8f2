"""For tests of the report: lived-in networks on disk, and a strict reader of HTML."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file

from support.lived_in_networks import lived_in

NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "v1": ("resnet18", {"channels": [8, 16, 32, 64]}),
    "v2": ("resnetv2_18", {"channels": [8, 16, 32, 64], "stem_chs": 8}),
}


def source(folder: Path, kind: str) -> Path:
    """Write a lived-in network to `folder`, as timm writes it for the hub."""
    name, args = NETWORKS[kind]
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, **args)
    lived_in(model, torch.randn(4, 3, 48, 48)).float()
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    layout = {
        "architecture": name,
        "num_classes": 10,
        "model_args": args,
        "pretrained_cfg": {"input_size": [3, 48, 48]},
    }
    (folder / "config.json").write_text(json.dumps(layout), encoding="utf-8")

    return folder


class Checker(HTMLParser):
    """Reads a page whose tags are balanced, and of which a browser loads nothing else."""

    VOID = {"meta", "link", "br", "img", "hr", "input"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        named = {name: text or "" for name, text in attrs}
        assert tag not in ("script", "iframe", "object", "image", "svg")
        assert not any(name.startswith("on") for name in named)
        assert "url(" not in " ".join(named.values())
        assert named.get("src", "data:").startswith("data:")

        href = named.get("href", "")
        assert (
            not href
            or (tag, href) == ("link", "data:,")
            or (tag == "a" and href.startswith("https://arxiv.org/abs/"))
        )

        if tag == "img":
            assert len(named["alt"]) > 20
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert not checker.open
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    return checker
