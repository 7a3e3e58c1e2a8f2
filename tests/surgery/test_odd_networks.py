"""The law of state: what goes into a conversion, a save and a load comes out as it was.

For every odd network that is drawn, every scheme and scope: a true refusal, or a result that is
right by a forward of its own in float64; whatever was not converted has the class, settings, dtype,
device, mode, hooks, attributes, extra state and `requires_grad` that it had; what is saved is
loaded with a skeleton and without one; the source is untouched.

    NORMSWAP_ODD=2000 NORMSWAP_ODD_SHARD=0/4 pytest tests/surgery/test_odd_networks.py -k law

draws a quarter of 2,000 networks anew, and exports some of them.
"""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed as seeded_by, settings
from support.odd_networks import FEATURES, Draw, draws
from support.scheme_rows import ROWS, Row
from torch import Tensor, nn
from torch.nn.utils import parametrize

import normswap
from normswap.copying import tree
from normswap.errors import NormswapError, WrongResultError
from normswap.models.calling import named_tensors
from normswap.plan import Arch
from normswap.surgery.carrying_out import Conversion

ASKED = int(os.environ.get("NORMSWAP_ODD", "0"))
PART, _, PARTS = os.environ.get("NORMSWAP_ODD_SHARD", "0/1").partition("/")
EXAMPLES = max(ASKED // int(PARTS), 1) if ASKED else 26
# How far an exact result may be from its source in float64: its weights are rounded to their dtype.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 8e-2}
# What each feature alone is refused for, if it is refused.
REFUSED: dict[str, str] = {}


def outputs(model: nn.Module, inputs: Any) -> list[Tensor]:
    """Every tensor that a network gives, in float64."""
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    with torch.no_grad():
        given = model(*args)
    return [tensor.double() for _, tensor in named_tensors(given)]


def in_double(inputs: Any) -> Any:
    if isinstance(inputs, tuple):
        return tuple(map(in_double, inputs))
    return inputs.double() if inputs.is_floating_point() else inputs


def doubled(model: nn.Module) -> nn.Module:
    """The network itself in float64, with the tensors that are no parameters or buffers."""
    for module in tree(model.double()).values():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                vars(module)[name] = value.double()
    return model


def apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    assert [each.shape for each in ours] == [each.shape for each in theirs]
    pairs = zip(ours, theirs, strict=True)
    return max(float((one - two).norm() / two.norm().clamp_min(1e-12)) for one, two in pairs)


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and plain tensors of a module itself, by name."""
    named = {**module._parameters, **module._buffers, **vars(module)}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def facts(module: nn.Module) -> dict[str, Any]:
    """What a module is and has, beside the values of its tensors."""
    hooks = {
        name: list(value.values()) for name, value in vars(module).items() if name.endswith("hooks")
    }
    attributes = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, Tensor | dict)
    }
    return {
        "class": type(module),
        "mode": module.training,
        "hooks": {name: [getattr(h, "hook", h) for h in each] for name, each in hooks.items()},
        "attributes": {name: value for name, value in attributes.items() if name != "lock"},
        "names": sorted(name for name in vars(module) if not name.startswith("_normswap")),
        "tensors": {
            name: (tensor.dtype, tensor.device, tensor.requires_grad, tuple(tensor.shape))
            for name, tensor in own_tensors(module).items()
        },
        "empty": [name for name, value in module._parameters.items() if value is None],
        "unsaved": set(module._non_persistent_buffers_set),
        "children": sorted(module._modules),
    }


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Everything of a network, with the values of its tensors."""
    seen: dict[str, Any] = {}
    for path, module in tree(model).items():
        seen[path] = facts(module)
        seen[path]["values"] = {name: t.clone() for name, t in own_tensors(module).items()}
    return seen


def assert_same(now: Any, before: Any, where: str) -> None:
    """Compare nested facts; tensors are compared bit by bit."""
    if isinstance(before, dict):
        assert now.keys() == before.keys(), (where, sorted(now), sorted(before))
        for key, value in before.items():
            assert_same(now[key], value, f"{where}.{key}")
    elif isinstance(before, Tensor):
        assert now.dtype == before.dtype, where
        assert torch.equal(now, before), where
    else:
        assert now == before, where


def edited_paths(done: Conversion) -> set[str]:
    steps = done.plan.steps[-done.steps :]
    return {edit.path for step in steps for edit in step.edits}


def untouched(done: Conversion, source: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield path, module of the source and of the result, for what no edit names or holds."""
    edited = edited_paths(done)
    now = tree(done.model)
    for path, module in tree(source).items():
        is_inside = any(path == edit or path.startswith(f"{edit}.") for edit in edited)
        if not is_inside:
            yield path, module, now[path]


def check_left_alone(done: Conversion, source: nn.Module, draw: Draw) -> None:
    """What was not converted is what it was, to the last bit; what a scope leaves out, too."""
    edited = edited_paths(done)
    for path, before, after in untouched(done, source):
        theirs = facts(before)
        ours = facts(after)
        # The root holds normswap's record, and parents hold the new layers.
        if any(edit.rpartition(".")[0] == path for edit in edited) or not path:
            theirs.pop("children")
            ours.pop("children")
        for part in (theirs, ours):
            part["names"] = [name for name in part["names"] if name not in ("grids",)]
        assert_same(ours, theirs, path)

        values = own_tensors(before)
        now = own_tensors(after)
        for name, value in values.items():
            assert torch.equal(now[name], value), f"{path}.{name}"

    for option, pattern in draw.scope:
        for path, before in tree(source).items():
            named = path == pattern or path.startswith(f"{pattern}.")
            # A parent is changed where its children are.
            is_left_out = named is (option == "skip") and not before._modules
            if is_left_out and path:
                after = tree(done.model)[path]
                assert_same(facts(after), facts(before), path)
                for name, value in own_tensors(before).items():
                    assert torch.equal(own_tensors(after)[name], value), f"{path}.{name}"


def check_learning(done: Conversion, source: nn.Module) -> None:
    """What stands for frozen tensors is frozen, and a bias goes on learning."""
    now = tree(done.model)
    for path, module in tree(source).items():
        flags = [parameter.requires_grad for parameter in nn.Module.parameters(module)]
        after = now.get(path)
        if not flags or after is None:
            continue

        parameters = dict(nn.Module.named_parameters(after))
        if not any(flags) and not is_carrying(done, source, path):
            learning = [name for name, p in parameters.items() if p.requires_grad]
            assert not learning, f"frozen {path} learns: {learning}"
        bias = module._parameters.get("bias")
        if bias is not None and bias.requires_grad and done.plan.steps[-1].scheme != "frozen-bn":
            for name, parameter in parameters.items():
                own = name.replace("inner.", "").replace("then.", "") == "bias"
                assert parameter.requires_grad or not own, f"{path}.{name} learned"


def is_carrying(done: Conversion, source: nn.Module, path: str) -> bool:
    """Whether a frozen layer now carries something that learned: a beta, or a gamma, of others."""
    modules = tree(source)
    for step in done.plan.steps[-done.steps :]:
        for edit in step.edits:
            inside = edit.path == path or edit.path.startswith(f"{path}.")
            others = [read for read in edit.reads if read in modules]
            learned = any(
                p.requires_grad for read in others for p in nn.Module.parameters(modules[read])
            )
            if inside and learned:
                return True
    return False


def check_dtypes(done: Conversion, source: nn.Module) -> None:
    """No layer changes the dtypes around it."""
    now = tree(done.model)
    for path in edited_paths(done):
        before = tree(source).get(path)
        after = now.get(path)
        if before is None or after is None:
            continue
        theirs = {t.dtype for t in nn.Module.parameters(before) if t.is_floating_point()}
        theirs |= {t.dtype for t in nn.Module.buffers(before) if t.is_floating_point()}
        ours = {t.dtype for t in nn.Module.parameters(after) if t.is_floating_point()}
        assert not theirs or ours <= theirs, (path, ours, theirs)


def check_right(done: Conversion, draw: Draw) -> None:
    """The result computes what its source does, by forwards of both in float64."""
    if not draw.row.exact:
        return
    source = doubled(draw.build()).train(False)
    theirs = outputs(source, in_double(draw.inputs))
    result = doubled(draw_copy(done.model, draw)).train(False)
    ours = outputs(result, in_double(draw.inputs))

    dtype = torch.float64 if draw.double else torch.float32
    if "mixed dtypes" in draw.features:
        dtype = torch.bfloat16
    assert apart(ours, theirs) <= TOLERANCE[dtype]


def draw_copy(model: nn.Module, draw: Draw) -> nn.Module:
    """A copy by Python alone, but for a lock or a Python module, which nothing copies."""
    shared = [value for name, value in vars(model).items() if name in ("lock", "config")]
    return copy.deepcopy(model, {id(value): value for value in shared})


def check_saved(done: Conversion, draw: Draw, folder: Path) -> None:
    """What is saved comes back: with a skeleton, without one, and by its state dict."""
    kwargs = {"features": list(draw.features), "seed": draw.seed, "double": draw.double}
    arch = Arch("support.odd_networks:build", kwargs, "factory")
    place = normswap.save(done, folder / "net", arch=arch)
    before = done.model.train(False)
    theirs = outputs(before, draw.inputs)

    skeleton = draw.build()
    seen = fingerprint(skeleton)
    for number, again in enumerate(
        (normswap.load(place, skeleton=skeleton), normswap.load(place, trust_factory=True))
    ):
        check_loaded(again, before, number)
        assert all(map(torch.equal, outputs(again, draw.inputs), theirs)), "loaded"
        # What is loaded is saved and loaded once more.
        if not number:
            second = normswap.load(
                normswap.save(again, folder / "second", arch=arch), skeleton=skeleton
            )
            assert all(map(torch.equal, outputs(second, draw.inputs), theirs)), "twice"
    assert_same(without_grids(fingerprint(skeleton)), without_grids(seen), "skeleton")

    twin = normswap.load(place, skeleton=draw.build())
    twin.load_state_dict(before.state_dict())
    assert all(map(torch.equal, outputs(twin, draw.inputs), theirs)), "state dict"


def without_grids(seen: dict[str, Any]) -> dict[str, Any]:
    return {
        path: {name: value for name, value in each.items() if name != "names"}
        for path, each in seen.items()
    }


def check_loaded(again: nn.Module, before: nn.Module, number: int) -> None:
    """A loaded network has the tensors, dtypes, extra state and attributes that it had."""
    ours = tree(again)
    for path, module in tree(before).items():
        for name, value in own_tensors(module).items():
            if name not in module._parameters and name not in module._buffers:
                continue
            loaded = own_tensors(ours[path])[name]
            assert loaded.dtype == value.dtype, f"{number} {path}.{name}: {loaded.dtype}"
            assert torch.equal(loaded, value), f"{number} {path}.{name}"
        # torch makes a class of its own for each parametrized layer.
        kind = parametrize.type_before_parametrizations
        assert kind(ours[path]) is kind(module), path
        assert not ours[path].training, path
        for name in ("momentum", "eps", "factor", "inplace", "p"):
            if name in vars(module):
                assert vars(ours[path])[name] == vars(module)[name], f"{path}.{name}"


def check_exported(done: Conversion, draw: Draw, folder: Path) -> None:
    """ONNX takes the result where it takes the source. A file takes one sample at a time."""
    inputs = draw.inputs if isinstance(draw.inputs, tuple) else (draw.inputs,)
    args = tuple(each[:1] for each in inputs)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.export.export(draw.build().float().train(False), args)
    # torch says in many ways that it cannot express a network.
    except Exception:
        return
    normswap.export(done, folder / "net.onnx", inputs=draw.inputs)


def hold(draw: Draw, *, exports: bool = False) -> str:
    """Hold one draw to the law, and return the refusal; empty where it was converted."""
    source = draw.build()
    before = fingerprint(source)
    options: dict[str, Any] = {**draw.row.options, **dict(draw.scope)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            done = normswap.convert(source, draw.row.scheme, inputs=draw.inputs, **options)
        except WrongResultError:
            raise
        except NormswapError as error:
            assert_same(fingerprint(source), before, "source")
            return str(error)

        assert_same(fingerprint(source), before, "source")
        check_left_alone(done, source, draw)
        check_learning(done, source)
        check_dtypes(done, source)
        check_right(done, draw)
        with tempfile.TemporaryDirectory() as folder:
            if exports:
                check_exported(done, draw, Path(folder))
            check_saved(done, draw, Path(folder))
    return ""


@pytest.mark.filterwarnings("ignore")
@seeded_by(int(PART))
@settings(
    max_examples=EXAMPLES,
    derandomize=not ASKED,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    # Shrinking takes minutes, and a draw has four features at most.
    phases=[Phase.generate],
)
@given(draws())
def test_law_of_state(draw: Draw) -> None:
    exports = bool(ASKED) and draw.seed == 0 and draw.row.scheme in ("folded", "affine")
    hold(draw, exports=exports)


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_alone(feature: str) -> None:
    """A feature is refused by the layer that it concerns, or converted."""
    refusal = hold(Draw((feature,), 1, False, Row("folded")))
    assert bool(refusal) is (feature in REFUSED), refusal
    assert REFUSED.get(feature, "") in refusal


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_plain_network(row: Row) -> None:
    """The law refuses nothing that has no odd feature."""
    assert not hold(Draw((), 1, False, row))
