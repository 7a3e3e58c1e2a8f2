"""What a record must not hide: branches, views, values that leave, calls by the back door.

Each network is folded exactly, or refused.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import timm
import torch
import torch.nn.functional as F
from support import needs
from support.graph_cases import BACK, EXACT, KEPT, REFUSED, Case, build, outputs
from support.lived_in_networks import batchnorms, distance, lived_in, run, step
from support.tiny_modules import ONE, C, bn, conv, net
from torch import Tensor, fx, nn

import normswap
from normswap.errors import TraceError
from normswap.graph import inspection, recording
from normswap.graph.recorder import Widening
from normswap.graph.spelling import after
from normswap.graph.tracing import inputs
from normswap.sites import affine, known_norms
from normswap.surgery import applying

TWO = {**ONE, "conv2": conv, "bn2": bn}


def _by_size(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.bn(y) if x.shape[-1] == x.shape[-2] else y + m.bn(y)


def _by_size_elsewhere(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    return y if x.shape[-1] == x.shape[-2] else m.bn2(m.conv2(y))


def _by_size_in_parts(m: Any, x: Tensor) -> Any:
    y = m.one(x)
    z = m.two(y)
    return z if x.shape[-1] == x.shape[-2] else (y, z)


def _by_value(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    return m.bn2(m.conv2(y)) if x.mean() < 100 else y


def _view_written_after(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    view = y[:, :2]
    z = m.bn(y)
    view.mul_(2)
    return z + y


def _view_written_before(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    y.view(-1).relu_()
    return m.bn(y)


def _part_added_to(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x)).clone()
    y[:, :2] += x[:, 2:]
    return m.bn2(m.conv2(y))


def _part_of_conv_added_to(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    y[:, :2] += x[:, 2:]
    return m.bn(y)


def _into_zeros(m: Any, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, ::2] = m.bn(m.conv(x))[:, ::2]
    return m.bn2(m.conv2(out))


def _item(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.bn(y) * y.abs().max().item()


def _detached(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.bn(y) + y.detach()


def _made_here(m: Any, x: Tensor) -> Tensor:
    return nn.AvgPool2d(2)(nn.ReLU(inplace=True)(m.bn(m.conv(x))))


def _in_lists(m: Any, x: Tensor) -> Any:
    parts = list(m.bn(m.conv(x)).chunk(2, 1))
    found = {"parts": [part * 2 for part in parts], "whole": torch.cat(parts[::-1], 1)}
    return found["whole"], *found["parts"]


def _buffers(m: Any, x: Tensor) -> Tensor:
    norm = m.bn
    return F.batch_norm(
        m.conv(x), norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.1, norm.eps
    )


def _unpacked(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    total = torch.zeros_like(x[0])
    for sample in m.bn(y):
        total = total + sample
    return total[None]


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


CASES = [
    Case("branch on the size", net(_by_size, **ONE), {"bn": KEPT}),
    Case(
        "branch on the size, elsewhere", net(_by_size_elsewhere, **TWO), {"bn": BACK, "bn2": BACK}
    ),
    Case(
        "branch on the size, numbered by where a function is called",
        net(
            _by_size_in_parts,
            one=net(lambda m, x: F.avg_pool2d(m.conv(x), 2), conv=conv),
            two=net(lambda m, x: F.avg_pool2d(m.bn(x), 2), bn=bn),
        ),
        {"two.bn": KEPT},
    ),
    Case("branch on a value", net(_by_value, **TWO), {"bn": BACK, "bn2": BACK}),
    Case("view written after", net(_view_written_after, **ONE), {"bn": KEPT}),
    Case("view written before", net(_view_written_before, **ONE), {"bn": KEPT}),
    Case("part added to", net(_part_added_to, **TWO), {"bn": BACK, "bn2": BACK}),
    Case("part of the conv added to", net(_part_of_conv_added_to, **ONE), {"bn": KEPT}),
    Case("written into zeros", net(_into_zeros, **TWO), {"bn": BACK, "bn2": BACK}),
    Case("a value leaves", net(_item, **ONE), {"bn": KEPT}),
    Case("detached", net(_detached, **ONE), {"bn": KEPT}),
    Case("modules made in forward", net(_made_here, **ONE), {"bn": BACK}),
    Case("lists and dictionaries", net(_in_lists, **ONE), {"bn": BACK}),
    Case("a loop over samples", net(_unpacked, **ONE), {"bn": BACK}),
    Case("buffers used directly", net(_buffers, **ONE), {"bn": REFUSED + "does not call"}),
    Case(
        "norm's forward",
        net(lambda m, x: m.bn.forward(m.conv(x)), **ONE),
        {"bn": REFUSED + "does not call"},
    ),
    Case("conv's forward", net(lambda m, x: m.bn(m.conv.forward(x)), **ONE), {"bn": KEPT}),
    Case(
        "norm's forward, and called",
        net(lambda m, x: m.bn(m.conv(x)) + m.bn.forward(x), **ONE),
        {"bn": REFUSED + "read in forward"},
    ),
    Case(
        "a record of tensors",
        net(lambda m, x: torch.cat(Pair(m.bn(m.conv(x)), x), 1), **ONE),
        {"bn": BACK},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fold_is_exact_or_refused(case: Case) -> None:
    model, x = build(case)
    planned, builder = step(model, "folded")
    for path, pattern in case.expect.items():
        if pattern.startswith(REFUSED):
            sentence = builder.refusals.pop(path)
        else:
            sentence = str(builder.outcomes[path])
        assert re.search(pattern.removeprefix(REFUSED), sentence), sentence

    assert builder.refusals == {}

    result = applying.apply_step(model, planned)
    for value in (
        x,
        torch.randn(2, C, 9, 9, dtype=torch.float64),
        torch.randn(1, C, 6, 8, dtype=torch.float64),
    ):
        assert distance(outputs(model, value), outputs(result, value)) <= EXACT


@pytest.mark.parametrize(
    "passing", [nn.Identity(), nn.Dropout(0.5).eval()], ids=lambda m: type(m).__name__
)
def test_what_passes_a_tensor_on_did_not_make_it(passing: nn.Module) -> None:
    """It returns the tensor that it was given: who reads that elsewhere reads what made it."""
    model = net(lambda m, x: m.passing(y := m.conv(x)) + m.bn(y), **ONE, passing=passing)().eval()
    graph = inspection.inspect(model, torch.randn(2, C, 7, 7)).traced.graph
    reads = {str(node.target): list(map(str, node.all_input_nodes)) for node in graph.nodes}
    assert reads["bn"] == ["conv"]
    assert reads["passing"] == ["conv"]


def test_a_tensor_that_is_overwritten_is_one_value_under_all_its_names() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x)
        same = y.mul_(2)
        same.add_(1)
        return y

    traced = inspection.inspect(net(body, conv=conv)()).traced

    # No node is added for a value that `same` has and `y` lacks.
    _, convolved, product, total, output = traced.nodes
    assert inputs(product) == [convolved]
    assert inputs(total) == [product]
    assert inputs(output) == [total]


def test_what_a_record_does_not_show_is_said() -> None:
    model, _ = build(next(case for case in CASES if case.name == "buffers used directly"))
    assert inspection.inspect(model).refusals == (
        ("", "forward calls batch_norm itself, not a module"),
    )
    model, _ = build(CASES[0])
    assert any("takes another way" in remark for remark in inspection.inspect(model).traced.remarks)


def test_rearranging_by_name() -> None:
    einops: Any = needs.package("einops")

    def body(m: Any, x: Tensor) -> Tensor:
        return m.bn(
            einops.rearrange(
                einops.rearrange(m.conv(x), "n c h w -> n (h w) c"),
                "n (h w) c -> n c h w",
                h=x.shape[2],
            )
        )

    model, x = build(Case("einops", net(body, **ONE), {}))
    planned, builder = step(model, "folded")
    assert str(builder.outcomes["bn"]) == "folds into conv"
    assert distance(run(model, x), run(applying.apply_step(model, planned), x)) <= EXACT


class Odd(nn.Module):
    """Cannot be copied, keeps tensors with a history, and uses the name `modules` otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv()
        self.bn = bn()
        self.lock = threading.Lock()
        self.library = torch
        self.modules: Any = [self.conv]
        self.kept = {"weight": self.conv.weight * 2, "lock": self.lock}

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            self.kept["last"] = x
            return self.library.relu(self.bn(self.modules[0](x)))


def test_what_cannot_be_copied_is_converted_and_keeps_no_trace() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, C, 8, 8, dtype=torch.float64)
    model: Any = Odd().double().eval()
    model.bn.running_mean.normal_()
    inspection.inspect(model)
    assert set(model.kept) == {"weight", "lock"}
    done: Any = normswap.convert(model, "folded", inputs=x)
    assert {path: str(outcome) for path, outcome in done.outcomes.items()} == {
        "bn": "folds into conv"
    }
    assert done.model.conv is done.model.modules[0]
    assert distance(run(model, x), run(done.model, x)) <= EXACT


@pytest.mark.slow
def test_a_levit_that_has_been_used() -> None:
    torch.manual_seed(0)
    model = lived_in(
        timm.create_model("levit_128s"), torch.randn(4, 3, 224, 224, dtype=torch.float64)
    )
    model(torch.randn(1, 3, 224, 224, dtype=torch.float64)).sum().backward()
    caches = [m.attention_bias_cache for m in model.modules() if hasattr(m, "attention_bias_cache")]
    assert any(caches)
    done = normswap.convert(model, "folded")
    assert batchnorms(done.model) == []
    assert done.report.passed


def _doubled(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_what_passes_by_is_refused() -> None:
    unseen = torch.jit.script(_doubled)
    with pytest.raises(TraceError, match="cannot be followed"):
        inspection.inspect(net(lambda m, x: m.bn(m.conv(unseen(x))), **ONE)())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_scripted_parts_are_refused_by_path() -> None:
    inner = torch.jit.script(nn.Sequential(conv(), bn()))
    seen = inspection.inspect(nn.Sequential(conv(), bn(), inner))
    assert [path for path, _ in seen.refusals] == ["2"]
    _, builder = step(nn.Sequential(conv(), bn(), inner).double(), "folded")
    assert str(builder.outcomes["1"]) == "folds into 0"
    assert set(builder.outcomes) == {"1"}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_part_whose_name_begins_like_a_scripted_ones_is_not_inside_of_it() -> None:
    scripted = torch.jit.script(nn.Sequential(conv(), bn()))
    parts = OrderedDict(part1=scripted, part10=nn.Sequential(conv(), bn()))

    seen = inspection.inspect(nn.Sequential(parts))

    assert [path for path, _ in seen.refusals] == ["part1"]
    norm = seen.traced.site("part10.1")
    assert norm.called
    assert norm.hidden is None


def _single(m: Any, x: Tensor) -> Tensor:
    ramp = torch.linspace(0, 1, x.shape[-1], dtype=torch.float32).expand_as(x).float()
    return m.bn(m.conv(ramp + x.float()))


def test_a_forward_that_makes_float32() -> None:
    torch.manual_seed(0)
    model: Any = net(_single, **ONE)().eval()
    model.bn.running_mean.normal_()
    done = normswap.convert(model, "folded")
    assert done.report.logits[0].precision == "float64"
    assert done.report.passed


@pytest.mark.parametrize(
    "cast",
    [Tensor.float, Tensor.half, lambda x: x.to(torch.bfloat16), lambda x: x.type(torch.half)],
)
def test_what_is_cast_to_less_is_neither_rounded_nor_shared(
    cast: Callable[[Tensor], Tensor],
) -> None:
    x = torch.full((3,), 1 / 3, dtype=torch.float64)
    with Widening():
        y = cast(x)
        assert torch.equal(y, x)
        y += 1
        assert x.dtype == y.dtype == cast(torch.ones(2, dtype=torch.float32)).dtype == torch.float64
    assert torch.equal(x, torch.full((3,), 1 / 3, dtype=torch.float64))


def _reuses(m: Any, x: Tensor) -> Tensor:
    """Write to a tensor and delete it, so that the next one may get its memory."""
    y = m.conv(x)
    for position in range(16):
        written = y * 2
        written.add_(1)
        del written
        table = torch.zeros(16)
        table[position] = 1
        y = y * table.sum()
    return y


def _of_a_table(m: Any, x: Tensor) -> Tensor:
    table = torch.zeros(C)
    table[1] = 2
    return m.bn(m.conv(x)) * table.sum()


def test_of_what_forward_makes_by_itself_only_what_is_read_is_recorded() -> None:
    traced = inspection.inspect(net(_of_a_table, **ONE)(), torch.randn(2, C, 8, 8)).traced
    assert [node.op for node in traced.nodes] == [
        "placeholder",
        "call_module",
        "call_module",
        "get_attr",
        "call_function",
        "output",
    ]
    assert [float(value) for value in traced.constants.values()] == [2.0]


def test_memory_that_is_used_again_is_not_taken_for_what_was_written_there() -> None:
    traced = inspection.inspect(net(_reuses, conv=conv)(), torch.randn(2, C, 8, 8)).traced
    assert not [node for node in traced.nodes if node.target is after]


def test_one_sample_is_recorded_and_two_on_the_way_of_another_size() -> None:
    traced = inspection.inspect(net(_by_size, **ONE)(), torch.randn(3, C, 8, 8)).traced
    assert [size.split("x")[0] for size in traced.recorded] == ["1", "2"]


@pytest.mark.parametrize(("takes", "flexible"), [((8,), False), ((8, 40), True)])
def test_sizes_that_a_network_takes_are_known(takes: tuple[int, ...], flexible: bool) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        assert x.shape[-2] in takes
        return m.bn(m.conv(x))

    traced = inspection.inspect(net(body, **ONE)(), torch.randn(3, C, 8, 8)).traced
    assert traced.flexible is flexible
    assert any("one size only" in remark for remark in traced.remarks) is not flexible


class Frozen(nn.Module):
    """As DETR, RT-DETR and detectron2 write it, or with a twist."""

    def __init__(self, twist: Callable[[Tensor], Tensor] = lambda y: y, eps: float = 1e-5) -> None:
        super().__init__()
        for name, value in (
            ("weight", 1.5),
            ("bias", 0.3),
            ("running_mean", 0.2),
            ("running_var", 2.0),
        ):
            self.register_buffer(name, value + 0.1 * torch.randn(C))
        self.twist = twist
        self.own = eps

    def forward(self, x: Any) -> Tensor:
        weight, bias, mean, var = (
            getattr(self, name).reshape(1, -1, 1, 1)
            for name in ("weight", "bias", "running_mean", "running_var")
        )
        scale = weight * (var + self.own).rsqrt()
        return self.twist(x * scale + (bias - mean * scale))


@pytest.mark.parametrize("eps", [1e-5, 1e-3, 1e-6, 1e-4, 1e-12, 0.0])
def test_frozen_norms_of_any_library(eps: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(conv(), Frozen(eps=eps), nn.ReLU(), conv(1), Frozen(eps=eps)).double()
    done = normswap.convert(model, "folded")
    assert set(done.outcomes) == {"1", "4"}
    assert not any(affine.is_batchnorm(module) for module in done.model.modules())


@pytest.mark.parametrize("to", ["batchnorm", "tune", "affine", "groupnorm"])
def test_frozen_norms_that_do_not_name_their_eps_become_norms_that_do(to: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(conv(), Frozen(eps=1e-3), nn.ReLU(), conv()).double()
    options = {"relative_eps": 0} if to == "groupnorm" else {}
    done = normswap.convert(
        model, to, inputs=torch.randn(3, C, 8, 8, dtype=torch.float64), **options
    )

    assert done.report.passed
    assert not any(isinstance(module, Frozen) for module in done.model.modules())

    if to != "affine":
        modules = list(done.model.modules())
        named_eps = {getattr(module, "eps", None) for module in modules}
        named_eps |= {getattr(module, "norm_eps", None) for module in modules}
        assert 1e-3 in named_eps


def test_a_tensor_of_another_length_is_no_norms() -> None:
    norm = Frozen()
    assert known_norms.has_the_tensors(norm)
    norm.running_var = torch.ones(C + 1)
    assert not known_norms.has_the_tensors(norm)
    assert known_norms.measured_eps(norm) is None


@pytest.mark.parametrize("twist", [F.relu, lambda y: y + 1e-3, lambda y: y * (1 + 1e-6)])
def test_what_only_looks_like_a_norm_is_refused(twist: Any) -> None:
    norm = Frozen(twist)
    assert affine.is_batchnorm(norm)
    assert known_norms.measured_eps(norm) is None

    _, builder = step(nn.Sequential(conv(), norm).double(), "folded")
    assert "not that of a BatchNorm" in builder.refusals["1"]


class Recurrent(nn.Module):
    """A norm reads the last hidden state of an LSTM, which lies two steps deep in what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 4, num_layers=2, batch_first=True)
        self.head = nn.Linear(4, 5)
        self.bn = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(x)
        return self.bn(self.head(hidden[-1]))


def test_results_in_results_are_fetched_step_by_step() -> None:
    """The record, run by torch.fx, gives what the network gives; and the norm folds."""
    torch.manual_seed(0)
    model = lived_in(Recurrent(), torch.randn(8, 7, 6, dtype=torch.float64))
    x = torch.randn(3, 7, 6, dtype=torch.float64)
    traced = recording.record(model, x)
    graph = fx.Graph()
    result = graph.graph_copy(traced.graph, {})
    graph.output(result or next(node for node in reversed(graph.nodes) if node.op != "output"))

    assert torch.equal(fx.GraphModule(model, graph)(x), run(model, x))

    done = normswap.convert(model, "folded", inputs=x)
    assert not batchnorms(done.model)
    assert distance(run(model, x), run(done.model, x)) <= EXACT


class OfTwo(nn.Module):
    """Two inputs whose names end in digits."""

    def forward(self, image1: Tensor, image2: Tensor) -> Tensor:
        return image1 + image2


def test_inputs_are_recorded_under_the_names_of_their_arguments() -> None:
    x = torch.randn(2, 3, 4, 4)
    for given, names in (
        ({"image1": x, "image2": x}, ["image1", "image2"]),
        ((x, x), ["x0", "x1"]),
    ):
        seen = inspection.inspect(OfTwo(), given)
        assert [node.target for node in seen.traced.nodes if node.op == "placeholder"] == names


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda x, y: x + y,
    "take away": lambda x, y: x - y,
    "take from a number": lambda x, y: 2 - x,
    "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x / y,
    "divide a number": lambda x, y: 2 / x,
    "matrix product": lambda x, y: x @ y.mT,
    "negate": lambda x, y: -x,
    "index": lambda x, y: x[:, 0],
    "one of several parts": lambda x, y: x.chunk(2, 1)[1] + 1,
    "a method": lambda x, y: x.flatten(1),
    "a method with a keyword": lambda x, y: x.mean(1, keepdim=True),
    "add with a factor": lambda x, y: x.add(y, alpha=2),
    "a function": lambda x, y: torch.cat([x, y], 1),
    "what passes on a tensor as it is": lambda x, y: x.contiguous() + x,
    "what is written in place": lambda x, y: x.clone().clamp_(min=0) + y,
}


class Operation(nn.Module):
    def __init__(self, operation: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.operation(x, y)


def numbered(graph: fx.Graph) -> list[tuple[str, Any, str, str]]:
    """(kind, target, args, kwargs) of every node but inputs and output; nodes are numbered."""
    nodes = list(graph.nodes)
    numbers = {node: f"#{i}" for i, node in enumerate(nodes)}
    found = []
    for node in nodes:
        if node.op not in ("placeholder", "output"):
            args, kwargs = fx.map_arg((node.args, node.kwargs), numbers.__getitem__)
            found.append((node.op, node.target, repr(args), repr(kwargs)))
    return found


@pytest.mark.parametrize("name", OPERATIONS)
def test_as_the_symbolic_trace(name: str) -> None:
    module = Operation(OPERATIONS[name])
    x = torch.randn(2, 2, 3, 3)
    y = torch.randn(2, 2, 3, 3)
    assert numbered(recording.record(module, (x, y)).graph) == numbered(
        fx.symbolic_trace(module).graph
    )
