"""Weights that are the pages of a file, not copies: the same network, and nothing is written to the file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small import SMALL, small
from torch import Tensor, nn

from normswap import provenance
from normswap.cli import app
from normswap.models import mapped_weights, zoo
from normswap.models.zoo import hash_tensors, open_source
from normswap.storage import checkpoint


@pytest.fixture
def file(tmp_path: Path) -> Path:
    state = {name: t + 0.1 * torch.rand_like(t) if t.is_floating_point() else t for name, t in
             small().state_dict().items()}  # fmt: skip
    save_file(state, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


def test_a_mapped_network_is_the_copied_one(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    with monkeypatch.context() as asked:
        asked.setattr(zoo, "take", lambda *_: pytest.fail("nobody asked for that"))
        copied = open_source(str(file), **SMALL)
    monkeypatch.setattr(zoo, "load_into", lambda *_: pytest.fail("copied after all"))
    mapped = open_source(str(file), **SMALL, mapped=True)
    ours, theirs = mapped.state_dict(), copied.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    kept = [(name, p.requires_grad, type(p)) for name, p in mapped.named_parameters()]
    assert kept == [(name, p.requires_grad, type(p)) for name, p in copied.named_parameters()]
    assert provenance.of(mapped) == provenance.of(copied)


def test_what_is_written_to_a_mapped_network_stays_in_memory(file: Path) -> None:
    before = hashlib.sha256(file.read_bytes()).hexdigest()
    model = open_source(str(file), **SMALL, mapped=True).train()
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert hashlib.sha256(file.read_bytes()).hexdigest() == before
    assert provenance.of(model).sha256 != hash_tensors(model.state_dict())  # type: ignore[union-attr]


def test_a_file_may_be_replaced_while_its_pages_are_used(file: Path) -> None:
    model = open_source(str(file), **SMALL, mapped=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = file.with_name("other.safetensors")
    save_file({name: tensor + 1 for name, tensor in before.items()}, other)
    other.replace(file)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_other_files_are_copied(tmp_path: Path) -> None:
    """The tensors of a pickle may be views of each other."""
    state = small().state_dict()
    flat = torch.randn(sum(tensor.numel() for tensor in state.values()))
    state["bn1.weight"], state["bn1.bias"] = flat[:1].expand(state["bn1.weight"].shape), flat[: len(state["bn1.bias"])]
    torch.save(state, tmp_path / "weights.pth")
    model: Any = open_source(str(tmp_path / "weights.pth"), **SMALL, mapped=True)
    with torch.no_grad():
        model.bn1.weight[0] += 1
    assert torch.equal(model.bn1.bias, state["bn1.bias"])
    assert len(set(model.bn1.weight.tolist())) == 2


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.held = [self.one.weight]

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3) -> (N, 3)"""
        return self.norm(self.two(self.one(x)) @ self.held[0])  # type: ignore[no-any-return]


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.two.weight = self.one.weight


class Renames(Plain):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict[f"{prefix}one.weight"] = 2 * state_dict[f"{prefix}one.weight"]
        super()._load_from_state_dict(state_dict, prefix, *args)


class Hooked(Plain):
    def __init__(self) -> None:
        super().__init__()
        ones = {"one.weight": torch.ones(3, 3)}
        self.register_load_state_dict_pre_hook(lambda _module, state, *_: state.update(ones))


class After(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(lambda module, _: nn.init.zeros_(module.one.weight))


class Saves(Plain):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        return {name: tensor.clone() for name, tensor in found.items()}


CHANGES: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "as it is": lambda state: state,
    "half": lambda state: {name: t.half() if t.is_floating_point() else t for name, t in state.items()},
    "renamed": lambda state: {f"model.{name}": tensor for name, tensor in state.items()},
    "short": lambda state: {name: tensor for name, tensor in state.items() if name != "one.bias"},
}


@pytest.mark.parametrize(
    ("make", "change", "taken"),
    [
        (Plain, "as it is", True), (Tied, "as it is", True), (Renames, "as it is", False), (Hooked, "as it is", False),
        (After, "as it is", False), (Saves, "as it is", False), (Plain, "half", False), (Plain, "renamed", False),
        (Plain, "short", False),
    ],
)  # fmt: skip
def test_tensors_are_taken_only_where_loading_would_copy_them(
    make: Callable[[], Any], change: str, taken: bool
) -> None:
    state = CHANGES[change](dict(Plain().state_dict()))
    model = make()
    model.two.weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert mapped_weights.take(model, state) == taken
    if not taken:
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        return
    usual = make()
    usual.load_state_dict(state)
    x = torch.randn(4, 3)
    assert torch.equal(model(x), usual(x))
    assert model.norm.running_var.data_ptr() == state["norm.running_var"].data_ptr()
    assert (model.one.weight is model.two.weight) == (make is Tied)
    assert not model.two.weight.requires_grad


@pytest.mark.parametrize(("calibrate", "mapped"), [([], True), (["--calibrate", "noise", "--samples", "16"], False)])
def test_the_command_maps_what_it_converts_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: Path, calibrate: list[str], mapped: bool
) -> None:
    seen: list[bool] = []
    usual = checkpoint.open_model

    def watched(*args: Any, **kwargs: Any) -> nn.Module:
        seen.append(kwargs["mapped"])
        return usual(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "open_model", watched)
    given = [str(file), "--arch", "resnet18", "--arch-arg", "channels=8,16,32,64", "--num-classes", "10"]
    given += ["--input-size", "3,48,48"]
    assert app.main(["convert", *given, "--to", "groupnorm", *calibrate, "-o", str(tmp_path / "out")]) == 0
    assert seen == [mapped]
