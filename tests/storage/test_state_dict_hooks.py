"""Law: a network with hooks of its own comes back as it was saved, or it is not saved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normswap
from normswap.errors import NormswapError, SourceError

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
State = dict[str, Any]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def translates(module: nn.Module, state: State, prefix: str, *rest: object) -> None:
    """As networks do that read the names of their older files."""
    for name in [name for name in state if name.startswith(f"{prefix}bn.")]:
        state[name.replace("bn.", "norm.")] = state.pop(name)


def asks_for_the_norm(module: nn.Module, state: State, prefix: str, *rest: object) -> None:
    state[f"{prefix}norm.num_batches_tracked"] += 0


def reads_the_norm(module: Any, state: State, prefix: str, *rest: object) -> None:
    assert module.norm.weight.shape == state[f"{prefix}norm.weight"].shape


def adds_what_old_files_lack(module: nn.Module, state: State, prefix: str, *rest: object) -> None:
    state.setdefault(f"{prefix}norm.num_batches_tracked", torch.tensor(0))


def doubles(module: nn.Module, state: State, prefix: str, *rest: object) -> None:
    state[f"{prefix}head.weight"] = state[f"{prefix}head.weight"] * 2


def doubles_in_place(module: nn.Module, state: State, prefix: str, *rest: object) -> None:
    state[f"{prefix}head.weight"].mul_(2)


def halves(module: nn.Module, state: State, prefix: str, *rest: object) -> None:
    state[f"{prefix}head.weight"] = state[f"{prefix}head.weight"] / 2


def leaves_out_counts(module: nn.Module, state: State, prefix: str, *rest: object) -> None:
    state.pop(f"{prefix}norm.num_batches_tracked", None)


def renames(module: nn.Module, state: State, prefix: str, *rest: object) -> None:
    state["inner"] = state.pop("head.weight")


def puts_back(module: nn.Module, state: State, prefix: str, *rest: object) -> None:
    if "inner" in state:
        state["head.weight"] = state.pop("inner")


def touches_the_norm(module: Any, *rest: object) -> None:
    module.norm.weight.data.mul_(1)


SAVING, SAVED = "register_state_dict_pre_hook", "register_state_dict_post_hook"
LOADING, LOADED = "register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"
# The hooks, and whether the converted network can be saved with them.
HOOKS: dict[str, tuple[dict[str, Callable[..., None]], bool]] = {
    "none": ({}, True),
    "translates": ({LOADING: translates}, True),
    "leaves out": ({SAVED: leaves_out_counts}, True),
    "there and back": ({SAVED: doubles, LOADING: halves}, True),
    "renamed and back": ({SAVED: renames, LOADING: puts_back}, True),
    "asks when loading": ({LOADING: asks_for_the_norm}, False),
    "reads when loading": ({LOADING: reads_the_norm}, False),
    "adds when loading": ({LOADING: adds_what_old_files_lack}, False),
    "touches when loaded": ({LOADED: touches_the_norm}, False),
    "touches when saving": ({SAVING: touches_the_norm}, False),
    "asks when saved": ({SAVED: asks_for_the_norm}, False),
    "doubles when loading": ({LOADING: doubles}, False),
    "doubles in place when loading": ({LOADING: doubles_in_place}, False),
    "doubles when saved": ({SAVED: doubles}, False),
    "renames when saved": ({SAVED: renames}, False),
}


def network(hooks: dict[str, Callable[..., None]]) -> nn.Module:
    model = Network().eval()
    for register, hook in hooks.items():
        getattr(model, register)(hook)
    return model


@pytest.mark.parametrize("name", HOOKS)
def test_it_comes_back_as_it_was_or_is_not_saved(name: str, tmp_path: Path) -> None:
    hooks, can_be_saved = HOOKS[name]
    done = normswap.convert(network(hooks), "folded", inputs=IMAGES)
    with torch.no_grad():
        expected = done.model(IMAGES)

    if can_be_saved:
        place = normswap.save(done, tmp_path / "network")
        loaded = normswap.load(place, skeleton=network(hooks))
        assert torch.equal(loaded(IMAGES), expected)
    else:
        with pytest.raises(NormswapError, match="hook"):
            normswap.save(done, tmp_path / "network")
        assert not list(tmp_path.iterdir())
    # Saving changes nothing in the network itself.
    assert torch.equal(done.model(IMAGES), expected)


@pytest.mark.parametrize("hook", [asks_for_the_norm, reads_the_norm])
def test_a_hook_of_the_skeleton_that_asks_for_a_norm_that_is_gone(
    hook: Callable[..., None], tmp_path: Path
) -> None:
    place = normswap.save(normswap.convert(network({}), "folded", inputs=IMAGES), tmp_path / "net")

    for register in (LOADING, SAVED):
        with pytest.raises(SourceError, match=r"norm.* remove the hook|weight.* remove the hook"):
            normswap.load(place, skeleton=network({register: hook}))
