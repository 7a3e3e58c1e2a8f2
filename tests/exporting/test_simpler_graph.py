"""What stands for operators that tools lack computes the same, in float64; what looks alike and is not, stays."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from alone import skip_without
from lived import distance, run
from small_transformers import small
from torch import Tensor, nn

import normswap
from normswap.errors import RefusedError, quiet
from normswap.exporting import formats, pt2_file
from normswap.exporting.exported_module import FileContents, Shipped
from normswap.exporting.simpler_graph import or_simpler, simpler, to_layer_norms
from normswap.models.calling import Example


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
    return {node.target._schema.name.removeprefix("aten::") for node in graph.nodes if hasattr(node.target, "_schema")}


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (anchors, {"flatten", "mul"}),
        (looked_up, {"mul"}),
        (scaled, {"mul"}),
        (noisy, {"rand", "add"}),
        (written, {"zeros", "mean", "copy_", "mul"}),
    ],
)
def test_what_depends_on_no_input_is_computed(function: Callable[[Tensor, Tensor], Tensor], left: set[str]) -> None:
    torch.manual_seed(0)
    x, other = torch.randn(2, 1, 4, 3, 9, dtype=torch.float64)
    network = Applied(function)
    made = simpler(exported(network, x))
    assert left <= operators(made.graph)
    if function in (anchors, looked_up, scaled):
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
        (lambda x, _: torch.stack([x.view(HEADS).permute(-2, 0, 2, 1, 4).select(2, i) for i in (-1, 0)]), {"slice"}),
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
    x, network = torch.randn(1, 5, 24, dtype=torch.float64), Applied(function)
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
    """As Ultralytics' heads: what it was called with last it keeps, and makes its grid anew for another."""

    def __init__(self) -> None:
        super().__init__()
        self.shape, self.grid = torch.Size(), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if self.shape != x.shape:
            self.shape, self.grid = x.shape, torch.arange(x.shape[-1])
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


def test_an_rms_norm_becomes_a_layer_norm_only_where_its_input_has_mean_zero() -> None:
    torch.manual_seed(0)
    norms = [nn.RMSNorm(8, eps=1e-3), nn.RMSNorm(8), nn.RMSNorm((5, 8))]
    network = nn.Sequential(nn.Linear(6, 8), norms[0], nn.Linear(8, 8), norms[1], nn.Linear(8, 8), norms[2]).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_()
        for linear in (network[0], network[4]):
            linear.weight -= linear.weight.mean(0)
            linear.bias -= linear.bias.mean()
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    expected = run(network, x)
    to_layer_norms(network, Example((x,)))
    assert [type(network[i]) for i in (1, 3, 5)] == [nn.LayerNorm, nn.RMSNorm, nn.RMSNorm]
    assert distance(expected, run(network, x)) < 1e-14


def test_zeros_do_not_make_a_layer_norm() -> None:
    network, x = nn.Sequential(nn.ReLU(), nn.RMSNorm(8)), torch.ones(1, 8)
    to_layer_norms(network, Example((-x,)))
    assert isinstance(network[1], nn.RMSNorm)


@pytest.mark.slow
@pytest.mark.parametrize("form", formats.names())
def test_rms_norms_are_no_more_operators_than_layer_norms(form: str, tmp_path: Path) -> None:
    skip_without(form)
    source, x = small("vit")
    source, x = source.float(), x.float()
    rms = normswap.convert(source, to="rmsnorm", inputs=x).model
    ending = formats.get(form).ending
    exported = [normswap.export(model, tmp_path / f"{i}{ending}") for i, model in enumerate((source, rms))]
    layer_norms, rms_norms = (sum(each.nodes.values()) for each in exported)
    assert rms_norms <= layer_norms
    if form == "onnx":
        assert (exported[0].nodes["LayerNormalization"], exported[1].nodes["RMSNormalization"]) == (5, 5)
    if formats.get(form).runs_here:
        file = formats.get(form).open(exported[1].file)
        assert distance(run(source, x[:1]), file(x[:1])) < 1e-5
