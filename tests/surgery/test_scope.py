"""Law of scope: what `only` and `skip` leave out stays to the last bit; what they take gets the
whole plan's edits.

Then conversions of a part: loading, patterns that cannot be, where norms stood.
"""

import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import timm
import torch
from support.hand_written_networks import Net, PostAct
from support.lived_in_networks import batchnorms, distance, lived_in, run, step
from support.narrow_networks import norm_free, source as lived
from support.sampled_tables import crossed, dice, one_in, quick
from support.scheme_rows import ROWS, Row
from support.six_networks import BRANCHLESS, MORE_SUMS, SIX, fits, images, trained
from timm.layers import ScaledStdConv2d
from torch import nn

import normswap
from normswap import schemes
from normswap.errors import NormswapError, OptionError, RefusedError
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph import inspection
from normswap.graph.anatomy import matches, naming, restrict
from normswap.graph.inspection import Anatomy, inspect
from normswap.plan import Step
from normswap.surgery.network import Network

FITTED = (
    Row("groupnorm"),
    Row("dyt"),
    Row("nf"),
    Row("nf", {"stem": "fit"}),
    Row("centered-weightnorm"),
)


# Two rules whose factors of the sums go into the branches behind, and so depend on which sums are
# scaled.
SUMS_TOO = ("balduzzi", "rescale")


def choices() -> Iterator[Row]:
    """A row for each word that an option of a scheme may be, but for what needs images to say where
    norms go.
    """
    for scheme in {row.scheme for row in ROWS} - {"batchnorm"}:
        # The default rule is one of these two.
        beside = {"rule": "szegedy"} if scheme == "residual-scale" else {}
        for option in schemes.get(scheme).options:
            for word in option.choices:
                if word not in SUMS_TOO:
                    yield Row(scheme, beside | {option.name: word})


PLANNED = sorted({str(row): row for row in choices()}.items())
CASES = [(name, row) for name in SIX for row in (*ROWS, *FITTED) if fits(name, row.scheme)]
CASES += [(name, row) for name in SIX for _, row in PLANNED if fits(name, row.scheme)]


@functools.cache
def anatomy(name: str) -> Anatomy:
    return inspection.inspect(trained(name), images(2))


@functools.cache
def whole(name: str, row: str) -> Step:
    rows = [*ROWS, *FITTED, *(each for _, each in PLANNED)]
    scheme = next(each for each in rows if str(each) == row)
    planned, builder = step(anatomy(name), scheme.scheme, **scheme.options)
    assert not builder.refusals
    return planned


def units(name: str) -> list[tuple[str, ...]]:
    """What is taken together: a residual block, or a layer and the norm after it."""
    if name in BRANCHLESS:
        return [("stem", "bn1"), ("down", "bn2", "up", "bn3")]

    # The second sum of a module has the module's path, and a number.
    paths = {block.path.partition("+")[0]: None for block in anatomy(name).blocks}
    outermost: list[tuple[str, ...]] = []
    for path in paths:
        if not any(path.startswith(f"{other}.") for other in paths):
            outermost.append((path,))
    return outermost


def scope_of(name: str, row: Row) -> dict[str, list[str]]:
    """`only` with some of the units, or `skip` with some, but not all."""
    every = units(name)
    generator = dice(name, row)
    some = generator.sample(every, generator.randint(1, len(every) - 1))
    return {generator.choice(["only", "skip"]): [path for unit in some for path in unit]}


def takes_part(path: str, only: list[str] = [], skip: list[str] = []) -> bool:  # noqa: B006
    named = any(path == pattern or path.startswith(f"{pattern}.") for pattern in only + skip)
    return named is bool(only)


def assert_outside_stays(before: nn.Module, after: nn.Module, scope: dict[str, list[str]]) -> None:
    """Every layer that takes no part has its class, its settings, its tensors and their flags."""
    now = dict(after.named_modules())
    for path, layer in before.named_modules():
        if takes_part(path, **scope) or any(True for _ in layer.children()):
            continue

        same = now[path]
        state = layer.state_dict()
        assert (type(same), same.extra_repr(), same.training) == (
            type(layer),
            layer.extra_repr(),
            layer.training,
        ), path
        assert same.state_dict().keys() == state.keys(), path
        assert all(tensor.equal(state[key]) for key, tensor in same.state_dict().items()), path
        assert [p.requires_grad for p in same.parameters()] == [
            p.requires_grad for p in layer.parameters()
        ], path


@pytest.mark.parametrize(("name", "row"), CASES, ids=str)
@pytest.mark.one_in(4)
def test_a_part_gets_the_edits_of_the_whole(name: str, row: Row) -> None:
    # A start of a fresh network needs blocks that the paper knows.
    if row.options.get("init") == "reset" and is_refused(name, row):
        return
    hold_part(name, row)


SUMS = {
    f"{name}: {row}": (name, row)
    for name in MORE_SUMS
    for row in (*ROWS, *FITTED)
    if fits(name, row.scheme)
}


# A scalar stands at the end of each branch, and a module may have two of them.
QUICK_SUMS = {*one_in([*SUMS], 6), "two sums: skipinit"}


@pytest.mark.parametrize("case", quick(SUMS, QUICK_SUMS, pytest.mark.long))
def test_every_sum_of_a_module_belongs_to_its_part(case: str) -> None:
    name, row = SUMS[case]
    # A scheme may refuse what is called twice; then no part of it is of interest.
    if is_refused(name, row):
        assert name == "shared", row
        return

    hold_part(name, row)


def is_refused(name: str, row: Row) -> bool:
    """Whether the whole network cannot be converted."""
    try:
        _, builder = step(anatomy(name), row.scheme, **row.options)
    except RefusedError:
        return True
    return bool(builder.refusals)


def hold_part(name: str, row: Row) -> None:
    """A part has the edits of the whole, and everything else stays to the last bit."""
    scope = scope_of(name, row)
    part, builder = step(restrict(anatomy(name), **scope), row.scheme, **row.options)
    assert not builder.refusals

    norms = {path for path in batchnorms(trained(name)) if takes_part(path, **scope)}
    assert norms == builder.outcomes.keys()

    of_the_whole = {
        edit.path: edit for edit in whole(name, str(row)).edits if takes_part(edit.path, **scope)
    }

    assert {edit.path: edit for edit in part.edits} == of_the_whole

    if row in ROWS:
        done = normswap.convert(trained(name), row.scheme, inputs=images(2), **scope, **row.options)
        assert done.plan.steps[-1].edits == part.edits
        assert_outside_stays(trained(name), done.model, scope)
        error = distance(run(trained(name), images(3, 7)), run(done.model, images(3, 7)))
        assert error <= 1e-11 if row.exact else 0 < error < float("inf")


@crossed("name, row", SIX, FITTED, mark=pytest.mark.slow)
@pytest.mark.one_in(2)
def test_a_fit_changes_nothing_outside(name: str, row: Row) -> None:
    scope = scope_of(name, row)
    batches = [images(24, 1), images(24, 2)]
    source = trained(name)
    done = normswap.convert(
        source, row.scheme, inputs=images(2), calibrate=batches, **scope, **row.options
    )
    assert_outside_stays(source, done.model, scope)


# Every row of a scheme that fits values or resets weights.
SETS_VALUES = [*FITTED, *(row for _, row in PLANNED if row.options.get("init", "keep") != "keep")]


@pytest.mark.parametrize("row", SETS_VALUES, ids=str)
def test_a_block_and_the_classifier_that_are_skipped_keep_their_values(row: Row) -> None:
    scope: dict[str, Any] = {"skip": ["blocks.1", "head"]}
    source = trained("pre" if row.scheme == "nf" else "post")
    options = dict(row.options)
    told: list[tuple[int, int]] = []
    if row in FITTED:
        options["calibrate"] = [images(6, 1), images(6, 2)]
        options["progress"] = lambda *at: told.append(at)

    done = normswap.convert(source, row.scheme, inputs=images(2), **scope, **options)

    assert_outside_stays(source, done.model, scope)
    assert distance(run(source, images(3, 7)), run(done.model, images(3, 7))) > 1e-6
    # Layers are counted one by one, up to their number.
    if row in FITTED:
        total = told[-1][1]
        assert told == [(number, total) for number in range(1, total + 1)]


SIZE = (3, 33, 33)


def test_half_a_normalizer_free_network() -> None:
    model, x = norm_free("nf_resnet26")
    done = normswap.convert(model, "folded", inputs=x, skip="stages.2")
    assert distance(run(model, x), run(done.model, x)) <= 1e-12
    left = [
        path for path, module in done.model.named_modules() if isinstance(module, ScaledStdConv2d)
    ]
    assert left
    assert all(path.startswith("stages.2.") for path in left)


def test_what_cannot_be_read_can_be_left() -> None:
    """A norm that would be refused is no obstacle where it is outside."""
    torch.manual_seed(0)
    net = timm.create_model("resnet18", channels=(8, 8, 8, 8), num_classes=5).eval()
    net.get_submodule("layer2.0").bn1 = nn.BatchNorm2d(8, track_running_stats=False)
    with pytest.raises(RefusedError, match=r"layer2\.0\.bn1.*no running statistics"):
        normswap.convert(net, "folded", input_size=SIZE)
    done = normswap.convert(net, "folded", input_size=SIZE, skip="layer2.0.bn1")
    assert batchnorms(done.model) == ["layer2.0.bn1"]


@pytest.mark.parametrize(
    ("to", "options", "kind", "message"),
    [
        ("folded", {"only": ["layer9"]}, OptionError, 'only="layer9" names no norm.*layer'),
        (
            "folded",
            {"only": ["layer1", "nothing"]},
            OptionError,
            '"nothing".*`normswap inspect` lists their paths',
        ),
        (
            "folded",
            {"only": "fc"},
            RefusedError,
            "nothing to convert to folded: no norm was recognized among the modules to convert",
        ),
        ("skipinit", {"only": ["*.bn2"]}, RefusedError, "no residual block is chosen.*layer1.0"),
        (
            "residual-scale",
            {"rule": "rescale", "only": "layer3.1"},
            RefusedError,
            "layer3.1: a scale cannot pass",
        ),
        ("unfold", {"only": "layer1"}, OptionError, "no option only"),
        (
            "folded",
            {"skip": ["layer1", "layr3.1"]},
            OptionError,
            '"layr3.1" names no.*Did you mean layer3.1 or layer',
        ),
    ],
)
def test_patterns_that_cannot_be(
    to: str, options: dict[str, Any], kind: type[NormswapError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        normswap.convert(lived("resnet18")[0], to, input_size=SIZE, **options)


def test_patterns() -> None:
    yes = [
        ("layer3", "layer3"),
        ("layer3", "layer3.0.bn1"),
        ("layer3.*", "layer3.0"),
        ("*.bn2", "layer3.0.bn2"),
        ("*.down*", "layer2.0.downsample.1"),
        ("layer[12]", "layer2.0"),
        ("*", "x"),
    ]

    no = [
        ("layer3", "layer30"),
        ("layer3", "a.layer3"),
        ("bn1", "layer1.0.bn1"),
        ("layer3.*", "layer3"),
    ]

    assert all(matches(*pair) for pair in yes)
    assert not any(matches(*pair) for pair in no)


def test_parts_of_a_chain_are_at_the_site_of_the_norm() -> None:
    model, x, _ = lived("resnet18")
    anatomy = inspect(normswap.convert(model, "folded", inputs=x).model, x)
    for path in ("bn1", "layer1.0.bn2"):
        assert {
            anatomy.original_path(f"{path}{end}") for end in ("", ".inner", ".then", ".inner.then")
        } == {path}
    assert anatomy.original_path("inner") == ""


def test_a_path_is_removed_when_the_plan_says_so() -> None:
    model, x, _ = lived("resnet18")
    builder = PlanBuilder(inspect(model, x))
    builder.replace("bn1", "WeightNorm")
    builder.remove("layer1.0.bn1")
    assert [builder.removes(path) for path in ("bn1", "layer1.0.bn1", "layer1.0.bn2")] == [
        False,
        True,
        False,
    ]


def test_what_was_never_known_is_none() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)).eval()
    assert Network(net).anatomy.kept_moments("1") is None


@pytest.mark.parametrize(
    ("paths", "others", "expected"),
    [
        # What is inside of a named module is named with it, and forbids no wider pattern.
        (["a.0.mixer", "b.1.mixer"], ["a.0.mixer.conv", "a.0.mlp", "b.1.mlp"], ["*.mixer"]),
        (["a.0.mixer", "a.1.mixer"], ["a.0.mixer.conv", "b.0"], ["a"]),
        (["a.0.mixer", "b.1.mixer"], ["c.mixer", "a.1", "b.0"], ["a.0", "b.1"]),
        (["a.0.mixer", "b.1.mixer"], ["c.mixer", "a.0.mlp", "b.1.mlp"], ["a.0.mixer", "b.1.mixer"]),
    ],
)
def test_paths_are_named_by_the_widest_patterns(
    paths: list[str], others: list[str], expected: list[str]
) -> None:
    assert naming(paths, others) == expected


class Bending(PostAct):
    """A residual block whose branch ends in a function, where no scalar can stand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return torch.relu(x + branch.tanh())


def test_the_parts_that_a_refusal_says_to_skip_are_all_that_must_be_skipped() -> None:
    torch.manual_seed(0)
    source: Any = Net(PostAct).double()
    source.blocks[1] = Bending(6).double()
    source = lived_in(source, images(8)).eval()
    with pytest.raises(RefusedError) as refused:
        normswap.convert(source, "skipinit", inputs=images(2))

    (pattern,) = re.findall(r"skip=\['(.*?)'\]", str(refused.value))
    done = normswap.convert(source, "skipinit", inputs=images(2), skip=[pattern])

    assert done.report.passed
    assert batchnorms(done.model) == ["blocks.1.bn1", "blocks.1.bn2"]
