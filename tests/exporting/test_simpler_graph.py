"""What stands for operators that tools lack computes the same, in float64; what looks alike and is
not, stays.
"""

from collections.abc import Callable

import pytest
import torch
from support.lived_in_networks import distance, run
from torch import Tensor, nn

from normswap.errors import RefusedError, quiet
from normswap.exporting import pt2_file
from normswap.exporting.exported_module import FileContents, Shipped
from normswap.exporting.simpler_graph import or_simpler, simpler


class Applied(nn.Module):
    """A function of an image's 4 channels, or of tokens (N, 5, 24), and of a parameter."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.table = nn.Parameter(torch.randn(9, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.table)


def anchors(x: Tensor, _table: Tensor) -> Tensor:
    """As detectors make them: the places of a map, and how many pixels apart they are."""
    height, width = x.shape[2:]
    rows, columns = (torch.arange(end).type_as(x) + 0.5 for end in (height, width))
    grid = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).view(-1, 2)
    apart = x.new_full((len(grid), 1), torch.tensor(8.0).item())
    return x.flatten(2) * torch.cat([grid, grid * apart], 1).t()


def looked_up(x: Tensor, table: Tensor) -> Tensor:
    """As Swin's biases, by a parameter."""
    return x * torch.softmax(table[torch.arange(x.shape[3]) % 9].t(), 0)[None, :, None]


def typed(x: Tensor, table: Tensor) -> Tensor:
    """As transformers' token types: zeros of the type of what they stand beside are indices."""
    numbers = (x[0, 0, 0] > 0).long()
    return x * table[torch.zeros_like(numbers)].t()[None, :, None]


def scaled(x: Tensor, table: Tensor) -> Tensor:
    return x * table.max().item()


def noisy(x: Tensor, _table: Tensor) -> Tensor:
    return x + torch.rand(x.shape[3])


def written(x: Tensor, _table: Tensor) -> Tensor:
    """A constant that takes what comes in."""
    held = torch.zeros(4, dtype=x.dtype)
    held[1] = x.mean()
    return x * held[None, :, None, None]


def exported(network: nn.Module, x: Tensor) -> FileContents:
    return FileContents(Shipped(network), (x,))


def operators(graph: torch.fx.Graph) -> set[str]:
    return {
        node.target._schema.name.removeprefix("aten::")
        for node in graph.nodes
        if hasattr(node.target, "_schema")
    }


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (anchors, {"flatten", "mul"}),
        (looked_up, {"mul"}),
        (typed, {"mul"}),
        (scaled, {"mul"}),
        (noisy, {"rand", "add"}),
        (written, {"zeros", "mean", "copy_", "mul"}),
    ],
)
def test_what_depends_on_no_input_is_computed(
    function: Callable[[Tensor, Tensor], Tensor], left: set[str]
) -> None:
    torch.manual_seed(0)
    x, other = torch.randn(2, 1, 4, 3, 9, dtype=torch.float64)
    network = Applied(function)
    made = simpler(exported(network, x))

    assert left <= operators(made.graph)

    if function in (anchors, looked_up, typed, scaled):
        assert operators(made.graph) == left

    if function is noisy:
        assert not torch.equal(made(x), made(x))
    else:
        assert distance(run(network, other), made(other)) < 1e-14
        assert distance(run(network, x), made(x)) < 1e-14


HEADS = (1, 5, 3, 2, 4)


@pytest.mark.parametrize(
    ("function", "taken_apart_by"),
    [
        (lambda x, _: torch.stack(x.reshape(HEADS).permute(2, 0, 3, 1, 4).unbind(0)), {"slice"}),
        (lambda x, _: torch.stack(x.unflatten(-1, HEADS[2:]).unbind(2)), {"slice"}),
        (
            lambda x, _: torch.stack(
                [x.view(HEADS).permute(-2, 0, 2, 1, 4).select(2, i) for i in (-1, 0)]
            ),
            {"slice"},
        ),
        (lambda x, _: torch.stack(x.view(HEADS).unbind(3)), {"unbind"}),
        (lambda x, _: torch.stack(x.view(1, 15, 2, 4).unbind(1)), {"unbind"}),
        (lambda x, _: torch.stack(x.unbind(1)), {"unbind"}),
    ],
    ids=["timm's", "unflattened", "by number", "not the first", "two dimensions", "no reshape"],
)
def test_parts_of_the_last_dimension_are_slices(
    function: Callable[[Tensor, Tensor], Tensor], taken_apart_by: set[str]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 5, 24, dtype=torch.float64)
    network = Applied(function)
    made = simpler(exported(network, x))
    assert operators(made.graph) & {"slice", "unbind", "select"} == taken_apart_by
    assert distance(run(network, x), made(x)) == 0


def test_the_network_as_it_is_comes_first_and_its_refusal_is_the_one_that_is_told() -> None:
    asked: list[nn.Module] = []

    def refuse(network: nn.Module) -> None:
        asked.append(network)
        raise RefusedError(f"refused {len(asked)}")

    contents = exported(nn.Conv2d(3, 4, 3), torch.zeros(1, 3, 8, 8))
    with pytest.raises(RefusedError, match="refused 1"):
        or_simpler(contents, refuse)
    assert [isinstance(one, torch.fx.GraphModule) for one in asked] == [False, True]
    assert or_simpler(contents, type) is Shipped


class Kept(nn.Module):
    """As Ultralytics' heads: what it was called with last it keeps, and makes its grid anew for
    another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shape = torch.Size()
        self.grid = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if self.shape != x.shape:
            self.shape = x.shape
            self.grid = torch.arange(x.shape[-1])
        return x * self.grid


def test_what_tracing_leaves_in_a_network_is_not_in_the_simpler_one() -> None:
    def convert(network: nn.Module) -> nn.Module:
        with quiet():
            torch.jit.trace(network, (x,), check_trace=False)
        if isinstance(network, torch.fx.GraphModule):
            return network
        raise RefusedError("refused")

    x = torch.rand(1, 3, 4, 5)
    contents = exported(Kept(), x)
    assert torch.equal(or_simpler(contents, convert)(x), Kept()(x))


def test_what_torch_cannot_export_is_refused_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = exported(nn.Conv2d(3, 4, 3), torch.zeros(1, 3, 8, 8))

    def refuse(*asked: object) -> None:
        raise RefusedError("by the tool" if len(asked) == 1 else "by torch")

    monkeypatch.setattr(pt2_file, "traced", refuse)
    with pytest.raises(RefusedError, match="by the tool"):
        or_simpler(contents, refuse)
