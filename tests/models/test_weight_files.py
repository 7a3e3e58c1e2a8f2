"""Weight files: whatever wraps them, the tensors come out; nothing in them runs; bad ones say why
in one line.
"""

import argparse
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.model_sources import SMALL, State, same, small

from normswap.errors import SourceError
from normswap.models.weight_files import check_finite, read, with_broken_statistics
from normswap.models.zoo import hash_tensors, open_source


@pytest.fixture
def state() -> State:
    return dict(small().state_dict())


WRAPPERS: dict[str, Callable[[State], Any]] = {
    "plain": lambda state: state,
    "state_dict": lambda state: {
        "epoch": 3,
        "state_dict": state,
        "args": argparse.Namespace(lr=0.1),
    },
    "model": lambda state: {"model": state, "optimizer": {"state": {}}},
    "ddp": lambda state: {"state_dict": {f"module.{key}": value for key, value in state.items()}},
    "both": lambda state: {f"module._orig_mod.{key}": value for key, value in state.items()},
    "ema first": lambda state: {"state_dict": _noise(state), "state_dict_ema": state},
    "model_ema": lambda state: {"model": _noise(state), "model_ema": state},
    "ema": lambda state: {"model": _noise(state), "ema": {"decay": 0.9, "module": state}},
    "no ema": lambda state: {"state_dict": state, "state_dict_ema": None},
    "averaged": lambda state: {
        "n_averaged": torch.tensor(3),
        **{f"module.{k}": v for k, v in state.items()},
    },
    "a name of its own": lambda state: {
        "network": state,
        "optimizer": {"state": {0: {"step": 3}}},
        "epoch": 3,
    },
    "lightning": lambda state: {
        "state_dict": {f"model.{key}": value for key, value in state.items()},
        "epoch": 3,
    },
    "fsdp": lambda state: {
        k.replace("layer1.", "layer1._fsdp_wrapped_module."): v for k, v in state.items()
    },
    "checkpointed": lambda state: {
        k.replace("fc.", "fc._checkpoint_wrapped_module."): v for k, v in state.items()
    },
    "a compiled stage": lambda state: {
        k.replace("layer2.", "layer2._orig_mod."): v for k, v in state.items()
    },
    "old torch": lambda state: {
        k: v for k, v in state.items() if not k.endswith("num_batches_tracked")
    },
}


def _noise(state: State) -> State:
    return {key: value + 1 for key, value in state.items()}


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:.*which was taken")
@pytest.mark.parametrize(
    ("wrapper", "suffix"),
    [
        *((wrapper, ".pth") for wrapper in WRAPPERS),
        *(("ddp", suffix) for suffix in (".pt", ".bin", ".pth.tar")),
    ],
)
def test_torch_file(tmp_path: Path, state: State, wrapper: str, suffix: str) -> None:
    file = tmp_path / f"weights{suffix}"
    torch.save(WRAPPERS[wrapper](state), file)
    assert same(open_source(str(file), **SMALL), state)


class Evil:
    """Makes a directory when unpickled, or does something else with it."""

    def __init__(self, path: str, does: Callable[[str], object] = os.mkdir) -> None:
        self.path = path
        self.does = does

    def __reduce__(self) -> Any:
        return self.does, (self.path,)


def _poison(state: State, name: str, value: float) -> State:
    broken = {key: tensor.clone() for key, tensor in state.items()}
    broken[name].view(-1)[3] = value
    return broken


def _pickled(
    content: Callable[[State, Path], Any], zipped: bool = True
) -> Callable[[State, Path], Path]:
    def write(state: State, folder: Path) -> Path:
        torch.save(content(state, folder), folder / "w.pth", _use_new_zipfile_serialization=zipped)
        return folder / "w.pth"

    return write


def _cut(name: str, share: float) -> Callable[[State, Path], Path]:
    def write(state: State, folder: Path) -> Path:
        file = folder / name
        save_file(state, file) if name.endswith(".safetensors") else torch.save(state, file)
        content = file.read_bytes()
        file.write_bytes(content[: int(share * len(content))])
        return file

    return write


def _raw(name: str, content: bytes) -> Callable[[State, Path], Path]:
    def write(_: State, folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def _without(state: State) -> State:
    return {key: value for key, value in state.items() if not key.startswith("layer1.0.")}


BAD_FILES: dict[str, tuple[Callable[[State, Path], Path], list[str]]] = {
    "missing": (lambda _, folder: folder / "none.safetensors", ["none.safetensors does not exist"]),
    "directory": (lambda _, folder: folder.with_suffix(".pth"), ["does not exist"]),
    "truncated": (_cut("w.safetensors", 0.5), ["not a readable weights file", "truncated"]),
    "empty": (_cut("w.safetensors", 0), ["may be empty"]),
    "html": (_raw("w.pth", b"<!DOCTYPE html><html>not found</html>"), ["a page of text"]),
    "garbage pth": (_raw("w.pth", bytes(range(256))), ["not a readable weights file"]),
    "truncated pth": (_cut("w.pth", 0.5), ["not a readable weights file"]),
    "evil": (_pickled(lambda _, folder: Evil(str(folder / "ran"))), ["never executes", "mkdir"]),
    "evil legacy": (
        _pickled(lambda _, f: Evil(str(f / "ran")), zipped=False),
        ["never executes", "mkdir"],
    ),
    "evil inside": (
        _pickled(lambda s, folder: {**s, "x": Evil(str(folder / "ran"))}),
        ["never executes", "mkdir"],
    ),
    "list": (_pickled(lambda s, _: list(s.values())), ["a list, not a state dict"]),
    "strangers": (_pickled(lambda s, _: {**s, "lr": 0.1}), ["not a state dict", "lr"]),
    "nan": (
        _pickled(lambda s, _: _poison(s, "layer2.0.bn1.bias", float("nan"))),
        ["NaN", "layer2.0.bn1.bias"],
    ),
    "inf": (_pickled(lambda s, _: _poison(s, "fc.weight", float("inf"))), ["inf", "fc.weight"]),
    "missing keys": (
        _pickled(lambda s, _: _without(s)),
        ["15 missing: layer1.0.conv1.weight", "and 12 more"],
    ),
    "fused": (
        _pickled(lambda s, _: {name: s[name] for name in s if "conv" in name}),
        ["was converted or fused", "DIR --weights FILE", "--like ARCH"],
    ),
    "unexpected": (_pickled(lambda s, _: {**s, "head.a": s["fc.bias"]}), ["1 unexpected: head.a"]),
    "pointer of LFS": (
        _raw("w.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
        ["of Git LFS"],
    ),
    "whole numbers": (
        _pickled(lambda s, _: {**s, "fc.weight": s["fc.weight"].to(torch.int8)}),
        ["fc.weight is int8"],
    ),
    "complex": (
        _pickled(lambda s, _: {**s, "fc.bias": s["fc.bias"] * 1j}),
        ["not of real numbers: fc.bias is complex64"],
    ),
    "sparse": (
        _pickled(lambda s, _: {**s, "fc.weight": s["fc.weight"].to_sparse()}),
        ["sparse or quantized tensor: fc.weight"],
    ),
    "twice": (
        _pickled(lambda s, _: {**s, "_orig_mod.fc.bias": s["fc.bias"]}),
        ["holds fc.bias twice"],
    ),
    "shapes": (
        _pickled(lambda s, _: {**s, "fc.bias": s["fc.bias"][:4]}),
        ["fc.bias is (4,)", "(10,) in the network"],
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file(tmp_path: Path, state: State, case: str) -> None:
    write, said = BAD_FILES[case]
    file = write(state, tmp_path)

    with pytest.raises(SourceError) as caught:
        open_source(str(file), **SMALL)
    assert all(word in str(caught.value) for word in said), str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_a_whole_network_is_read_without_its_code(tmp_path: Path) -> None:
    model: Any = small().half()
    model.evil = Evil(str(tmp_path), shutil.rmtree)  # torch refuses os.mkdir by its name
    model.fc.forward = model.fc.extra_repr  # a bound method, as fused detectors have
    model.layer1[0].conv2.weight = model.layer1[0].conv1.weight
    model.fc.register_buffer("transient", torch.ones(2), persistent=False)
    torch.save({"epoch": 3, "ema": None, "model": model}, tmp_path / "w.pt")

    assert same(model, read(tmp_path / "w.pt"))
    assert (tmp_path / "w.pt").exists()


def test_what_lies_beside_the_weights_and_is_no_state_dict_is_passed_over(
    tmp_path: Path, state: State
) -> None:
    numbers = {"loss": torch.tensor(0.5), "epoch": 3}
    torch.save({"network": state, "last": numbers, "history": [numbers]}, tmp_path / "w.pth")

    found = read(tmp_path / "w.pth")

    assert same(small(), dict(found))
    assert found.keys() == state.keys()


@pytest.mark.parametrize(
    ("endings", "said"),
    [
        (("weight", "bias"), "normswap.recalibrate"),
        (("conv1.weight", "conv2.weight", "fc.weight"), "--like ARCH"),
    ],
    ids=["parameters alone", "fused"],
)
def test_the_remedy_tells_why_statistics_are_missing(
    endings: tuple[str, ...], said: str, tmp_path: Path, state: State
) -> None:
    kept = {name: tensor for name, tensor in state.items() if name.endswith(endings)}
    save_file(kept, tmp_path / "w.safetensors")

    with pytest.raises(SourceError) as caught:
        open_source(str(tmp_path / "w.safetensors"), **SMALL)

    assert said in caught.value.remedy


def test_a_directory_is_no_weights_file(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="is a directory"):
        read(tmp_path)


@pytest.mark.parametrize("value", [complex("nan"), complex(0, float("inf"))])
def test_complex_numbers_are_looked_at_too(value: complex) -> None:
    check_finite({"weight": torch.ones(3, dtype=torch.complex64)}, "it")
    with pytest.raises(SourceError, match="NaN or inf in weight"):
        check_finite({"weight": torch.tensor([1, value])}, "it")


def test_broken_statistics_are_taken_while_nothing_else_is_broken(state: State) -> None:
    name = "layer2.0.bn1.running_var"
    nan = float("nan")
    mendable = _poison(state, name, nan)
    with with_broken_statistics():
        check_finite(mendable, "it")
        with pytest.raises(SourceError, match="These weights are broken"):
            check_finite(_poison(mendable, "fc.weight", nan), "it")

    with pytest.raises(SourceError, match="recalibrate"):
        check_finite(mendable, "it")


def by_hand(state: State) -> str:
    digest = hashlib.sha256()
    for name in sorted(state):
        raw = state[name].reshape(-1).view(torch.uint8).numpy().tobytes()
        shape = tuple(state[name].shape)
        digest.update(
            f"{name}|{state[name].dtype}|{shape}|".encode() + hashlib.sha256(raw).digest()
        )
    return digest.hexdigest()


def test_what_was_not_taken_from_a_file_is_said(tmp_path: Path, state: State) -> None:
    torch.save({"state_dict": state, "ema_state_dict": {**state}}, tmp_path / "w.pth")
    with pytest.warns(UserWarning, match="holds ema_state_dict beside state_dict, which was taken"):
        assert read(tmp_path / "w.pth").keys() == state.keys()


def test_hash_tensors() -> None:
    base = {
        "a": torch.arange(4.0),
        "b": torch.ones(2, dtype=torch.bfloat16),
        "n": torch.tensor(3),
        "e": torch.ones(0),
    }
    base["large"] = large = torch.arange(2.0**16)
    base["larger"] = torch.arange(2.0**17)
    digest = hash_tensors(base)

    assert digest == by_hand(base)
    assert digest == hash_tensors(dict(reversed(base.items())))
    assert digest == hash_tensors({**base, "a": torch.arange(4.0).reshape(2, 2).T.T.reshape(4)})

    changed: list[State] = [
        {**base, "a": torch.arange(4.0).reshape(2, 2)},
        {**base, "a": torch.arange(4.0).double()},
        {**base, "b": torch.full((2,), 1.0078125, dtype=torch.bfloat16)},
        {**base, "n": torch.tensor(4)},
        {**base, "large": large.index_fill(0, torch.tensor(7), 0.0)},
        {**base, "large": large.reshape(2, -1)},
        {"c": base["a"], **{key: value for key, value in base.items() if key != "a"}},
    ]

    assert len({digest, *map(hash_tensors, changed)}) == len(changed) + 1
