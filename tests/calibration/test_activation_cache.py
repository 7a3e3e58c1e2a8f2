"""Values in files that are used again: what is read is what was put, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from normswap.calibration.activation_cache import ActivationCache, TensorFiles


@pytest.fixture
def store() -> Iterator[TensorFiles]:
    store = TensorFiles()
    yield store
    store.close()
    assert not Path(store.folder.name).exists()


def files(store: TensorFiles) -> list[Path]:
    return sorted(Path(store.folder.name).iterdir())


TENSORS = [
    torch.randn(2, 3, 4),
    torch.randn(5, 2).double().t(),
    torch.randn(3).bfloat16(),
    torch.tensor(7),
    torch.tensor([True, False]),
    torch.empty(0, 3),
    torch.tensor([float("nan"), float("-inf"), -0.0]),
]


def same(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


def test_tensors_come_back(store: TensorFiles) -> None:
    found = store.read(store.put(TENSORS))
    assert all(map(same, TENSORS, found))


def test_a_file_is_written_over_and_what_it_held_before_is_never_read(store: TensorFiles) -> None:
    long, short = torch.arange(100.0), torch.full((10,), -1.0)
    entry, other = store.put([long]), store.put([short])
    store.free(entry)
    store.free(other)
    again = [store.put([short + 1]), store.put([short + 2])]
    assert len(files(store)) == 2
    assert [store.read(one)[0][0].item() for one in again] == [0.0, 1.0]
    assert all(len(store.read(one)[0]) == 10 for one in again)
    store.free(again[0])
    assert torch.equal(store.read(store.put([torch.arange(1000.0)]))[0], torch.arange(1000.0))
    assert torch.equal(store.read(again[1])[0], short + 2)


def test_a_cache_reads_what_is_asked_for_and_writes_what_is_new(store: TensorFiles) -> None:
    base = torch.arange(6.0)
    cache = ActivationCache(store, {})
    cache.update(
        {"plain": torch.ones(4), "whole": base, "part": base[2:4], "size": (2, 3), "turned": torch.rand(2, 3).t()}
    )
    turned = cache["turned"]
    entries = cache.keep({})
    assert entries.keys() == {"plain", "whole", "part", "size", "turned"}
    assert entries["whole"] is entries["part"]
    later = ActivationCache(store, entries)
    assert not later.held
    assert later["size"] == (2, 3)
    assert torch.equal(later["turned"], turned)
    later["part"].fill_(9)
    assert later["whole"].tolist() == [0, 1, 9, 9, 4, 5]  # one memory still
    del later["plain"]
    later["new"] = torch.zeros(4)
    now = later.keep(entries)
    assert now.keys() == {"whole", "part", "size", "turned", "new"}
    assert now["whole"] is entries["whole"]  # it lies there; what is done to it in memory is not kept
    assert len(files(store)) == len({*now.values()})  # "new" lies where "plain" lay
    half = ActivationCache(store, now)
    del half["part"]
    assert half["whole"].tolist() == [0, 1, 2, 3, 4, 5]
    assert "part" not in half
    last = ActivationCache(store, now)
    assert "plain" not in last
    assert len(last) == 5
    assert torch.equal(last["new"], torch.zeros(4))
    last["view"] = last["new"][:2]
    shared = last.keep(now)
    assert shared["new"] is shared["view"]  # it is written again, and does not lie where it lay
    assert now["new"].file in store.spare
    last = ActivationCache(store, shared)
    for name in [*last]:
        del last[name]
    assert last.keep(shared) == {}
    assert len(store.spare) == len(files(store)) == 1  # plain tensors' files wait, the others are gone
