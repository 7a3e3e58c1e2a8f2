"""Errors planted in functions of the algebra, the proof and storage: do the tests that must notice
them fail?

    python tests/lab/mutation/planted.py -o tests/lab/mutation/planted.md [--only PART_OF_A_NAME]

An error names a function and what is done to it while tests run: its result is changed, it answers
something else, or it does nothing. Its tests, which have to pass without it first, run in a process
of their own, in which this file is a plugin of pytest that plants the error before any test is
collected.
"""

import argparse
import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
NAME = "NORMSWAP_PLANTED"  # the environment variable that names the error
Function = Callable[..., Any]


def gives(change: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """The function's result is changed."""
    return lambda function: lambda *args, **options: change(function(*args, **options))


def answers(value: object) -> Callable[[Function], Function]:
    """The function is not run, and answers this."""
    return lambda function: lambda *args, **options: value


NOTHING = answers(None)
FOLDING = ("tests/folding/test_canonical_form.py", "tests/folding/test_propagation.py")
PROGRAMS = ("tests/folding/test_random_programs.py",)
BRANCHES = ("tests/folding/test_branches.py",)
FACTORS = ("tests/folding/test_channel_factors.py",)
EXACT = ("tests/schemes/test_exact_schemes.py",)
PAPERS = ("tests/schemes/test_paper_constants.py",)
REGRESSION = ("tests/calibration/test_least_squares.py",)
WRONG = ("tests/proof/test_wrong_results.py",)
COMPARED = ("tests/proof/test_comparison.py",)
WRITTEN = ("tests/storage/test_atomic_write.py",)
STORED = ("tests/storage/test_checkpoint.py", "tests/storage/test_broken_records.py")
WEIGHTS = ("tests/models/test_weight_files.py",)
LAW = ("tests/surgery/test_odd_networks.py",)
LEARNING = ("tests/surgery/test_learning.py",)
STATE = ("tests/storage/test_layer_state.py",)


@dataclass(frozen=True)
class Planted:
    """One error.

    Args:
        name: What is wrong once the error is planted.
        where: The function, as module:name within the package.
        how: Makes the wrong function from the right one.
        tests: Files of tests, of which one test must fail.
    """

    name: str
    where: str
    how: Callable[[Function], Function]
    tests: tuple[str, ...]


ALGEBRA = (
    Planted(
        "a norm's scale is 1 % larger",
        "sites.affine:read_map",
        gives(lambda st: (1.01 * st[0], st[1])),
        FOLDING,
    ),
    Planted(
        "a norm's shift is negative",
        "sites.affine:read_map",
        gives(lambda st: (st[0], -st[1])),
        FOLDING,
    ),
    Planted(
        "a norm's shift is forgotten",
        "sites.affine:read_map",
        gives(lambda st: (st[0], 0 * st[1])),
        FOLDING,
    ),
    Planted(
        "variances are 1 % larger",
        "sites.affine:statistics",
        gives(lambda mv: (mv[0], 1.01 * mv[1])),
        FOLDING,
    ),
    Planted("every eps is 1e-5", "sites.affine:epsilon", answers(1e-5), FOLDING),
    Planted("any norm can be read", "sites.affine:refusal", NOTHING, FOLDING),
    Planted(
        "a bias that takes up a norm is 1 % larger",
        "layers.folded:_absorb",
        gives(lambda b: 1.01 * b),
        FOLDING,
    ),
    Planted(
        "a weight's groups are mixed up",
        "layers.folded:_by_group",
        gives(lambda got: (got[0].flip(0), got[1])),
        FOLDING,
    ),
    Planted(
        "a scale and shift forgets the shift",
        "layers.channelwise:ChannelAffine.as_affine",
        gives(lambda st: (st[0], 0 * st[1])),
        EXACT + FOLDING,
    ),
    Planted(
        "a branch's scalar is read as 1",
        "layers.scalars:Scale.as_affine",
        gives(lambda st: (torch.ones_like(st[0]), st[1])),
        EXACT,
    ),
    Planted(
        "a dead filter has no direction",
        "layers.weight_norm:_direction",
        lambda f: lambda old, w, *rest: w,
        PAPERS,
    ),
    Planted(
        "a group's variance is the mean of its channels'",
        "layers.per_sample:group_moments",
        lambda f: lambda mean, var, groups: (f(mean, var, groups)[0], var.view(groups, -1).mean(1)),
        ("tests/sites/test_known_norms.py",),
    ),
    Planted(
        "a filter's sign is left out",
        "layers.per_sample:per_filter",
        gives(torch.abs),
        ("tests/calibration/test_per_sample_rescaling.py",),
    ),
    Planted(
        "a moved norm stays where it was",
        "layers.per_sample:follow_rescaling",
        NOTHING,
        (
            "tests/calibration/test_per_sample_rescaling.py",
            "tests/calibration/test_sequential_fit.py",
        ),
    ),
    Planted(
        "ghost batches are one batch",
        "layers.site_norm:SiteNorm.ghost_sizes",
        lambda f: lambda self, count: [count],
        ("tests/sites/test_known_norms.py",),
    ),
    Planted(
        "means are zero",
        "calibration.least_squares:Moments.means",
        gives(lambda means: (0 * means[0], 0 * means[1])),
        REGRESSION,
    ),
    Planted(
        "a fit has no bias",
        "calibration.least_squares:_bias",
        gives(lambda bias: 0 * bias),
        REGRESSION,
    ),
    Planted(
        "the ridge is always 1", "calibration.least_squares:_best_ridge", answers(1.0), REGRESSION
    ),
    Planted(
        "a scale passes through anything",
        "folding.propagation:propagates_scale",
        answers(True),
        FOLDING + PROGRAMS,
    ),
    Planted(
        "any layer takes up a norm", "folding.propagation:check_linear", NOTHING, FOLDING + PROGRAMS
    ),
    Planted(
        "convolutions of any stride and size join",
        "folding.branches:_fits",
        answers(True),
        BRANCHES,
    ),
    Planted(
        "branches that are read elsewhere join",
        "folding.branches:_may_join",
        answers(True),
        BRANCHES + PROGRAMS,
    ),
    Planted(
        "nothing is written in place", "folding.overwriting:overwrites", answers(False), PROGRAMS
    ),
    Planted(
        "no two names share memory", "folding.overwriting:aliasing_conflicts", answers({}), PROGRAMS
    ),
    Planted(
        "what is before a norm needs no proof",
        "folding.canonical_form:_check_axis",
        NOTHING,
        FOLDING + PROGRAMS,
    ),
    Planted(
        "a value that others read takes up a norm",
        "folding.canonical_form:_check_only_user",
        NOTHING,
        FOLDING + PROGRAMS,
    ),
    Planted(
        "factors of channels are not applied", "folding.channel_factors:scale", NOTHING, FACTORS
    ),
    Planted(
        "no scale leaves its branch",
        "folding.propagation:_reaches_output",
        answers(False),
        FOLDING + PROGRAMS,
    ),
    Planted(
        "channels are always in dimension 1",
        "graph.channel_axes:_axis",
        gives(lambda axis: type(axis)(axis.size, 1, True, True)),
        ("tests/graph/test_channel_axes.py", *PROGRAMS),
    ),
)
PROOF = (
    Planted(
        "every comparison passes",
        "proof.verdict:judge",
        answers(SimpleNamespace(passed=True, reason=None)),
        WRONG,
    ),
    Planted(
        "a source may answer otherwise each time",
        "proof.comparison:_require_repeatable",
        NOTHING,
        ("tests/surgery/test_no_network.py",),
    ),
    Planted(
        "a source in half precision is taken as exact",
        "proof.allowance:cost_of_half",
        answers(0.0),
        COMPARED + WRONG,
    ),
    Planted(
        "any source strays without end",
        "proof.comparison:_Comparison._change_by_rounding",
        answers(float("inf")),
        WRONG + COMPARED,
    ),
    Planted("nothing is compared in float64", "proof.doubles:compare_double", NOTHING, WRONG),
    Planted("no value is ever off", "proof.distance:Distance.relative_l2", answers(0.0), WRONG),
    Planted(
        "outputs are taken to show errors, whatever they are",
        "proof.comparison:_Comparison._moving_outputs",
        lambda f: lambda self, example, outputs: set(outputs),
        ("tests/proof/test_planted_results.py",),
    ),
    Planted("a proof always says something", "proof.comparison:_remarks", answers([]), COMPARED),
    Planted(
        "answers always agree",
        "proof.distance:OutputDistances.least_agreement",
        answers((1.0, "")),
        WRONG,
    ),
    Planted("a result that failed is handed out", "proof.verdict:require_passed", NOTHING, WRONG),
    Planted(
        "float64 is float32",
        "proof.running:outputs_double",
        gives(lambda outputs: {name: value.float().double() for name, value in outputs.items()}),
        WRONG,
    ),
    Planted("any two networks agree", "images.accuracy:agreement", answers(1.0), WRONG),
    Planted("files agree with their source", "proof.distance:Agreement.share", answers(1.0), WRONG),
    Planted(
        "files may be off by anything",
        "exporting.checks:_Compared._allowed",
        answers(float("inf")),
        WRONG,
    ),
)
STORAGE = (
    Planted("a folder is not exchanged", "storage.atomic_write:_exchange", NOTHING, WRITTEN),
    Planted(
        "anything may be written over",
        "storage.atomic_write:check_writable",
        NOTHING,
        WRITTEN + STORED,
    ),
    Planted(
        "weights that were changed are taken", "storage.checkpoint:_check_the_same", NOTHING, STORED
    ),
    Planted(
        "weights of another dtype are as the record says",
        "storage.checkpoint:_take_dtypes",
        NOTHING,
        STORED,
    ),
    Planted(
        "a hash is of names alone",
        "models.weight_files:_hash_of_values",
        answers(b""),
        STORED + WEIGHTS,
    ),
    Planted(
        "weights that are not finite are taken",
        "models.weight_files:check_finite",
        NOTHING,
        WEIGHTS + STORED,
    ),
    Planted("any weights fit", "models.weight_files:_fits", answers(True), WEIGHTS),
    Planted(
        "a head of another size is not remade",
        "models.weight_files:_rehead",
        lambda f: lambda old, *rest: old,
        (*WEIGHTS, "tests/models/test_zoo.py"),
    ),
)


def without(attribute: str, value: object) -> Callable[[Function], Function]:
    """The function loses what it notes on the tensors of a file, its second argument."""

    def plant(function: Function) -> Function:
        def wrong(model: object, state: object, *rest: object) -> None:
            function(model, state, *rest)
            setattr(state, attribute, value)

        return wrong

    return plant


SURVIVING = (
    Planted("what is placed learns", "surgery.learning:follow", NOTHING, LEARNING),
    Planted("a bias carries no beta's flag", "surgery.learning:_beta_flags", answers(()), LEARNING),
    Planted("any weight learns", "surgery.learning:_weight_learns", answers(True), LEARNING),
    Planted("gammas stop unsaid", "surgery.learning:notes", answers([]), LEARNING),
    Planted(
        "the network decides for what has no parameters",
        "surgery.learning:_module_that_decides",
        lambda f: lambda model, path: model,
        LEARNING,
    ),
    Planted("modes are lost", "surgery.learning:_follow_modes", NOTHING, LEARNING),
    Planted(
        "what a scope leaves out takes part",
        "graph.anatomy:Anatomy.takes_part",
        answers(True),
        LAW,
    ),
    Planted(
        "a pattern names one module, and nothing inside",
        "graph.anatomy:matches",
        lambda f: lambda pattern, path: pattern == path,
        ("tests/surgery/test_scope.py",),
    ),
    Planted(
        "a placed layer is in float32",
        "surgery.applying:_like",
        gives(lambda like: like if like.dtype == torch.float64 else like.float()),
        LAW,
    ),
    Planted(
        "a dtype is that of the network",
        "storage.checkpoint:_take_dtypes",
        lambda f: lambda model, state, unsaved: model.to(next(iter(state.values())).dtype),
        LAW,
    ),
    Planted("dtypes of other buffers are lost", "storage.layer_state:_unsaved", answers({}), STATE),
    Planted(
        "versions of layers are lost",
        "storage.layer_state:restore",
        without("_metadata", None),
        STATE,
    ),
    Planted("extra state is lost", "storage.layer_state:restore", without("extras", {}), STATE),
    Planted(
        "extra state is saved as it can be",
        "storage.layer_state:_as_json",
        lambda f: lambda name, value: json.dumps(value, default=str, skipkeys=True),
        STATE,
    ),
    Planted("any tensor is saved", "storage.layer_state:_check_tensor", NOTHING, STATE),
    Planted(
        "a skeleton has values",
        "storage.checkpoint:_with_values",
        lambda f: lambda skeleton: skeleton,
        STATE,
    ),
    Planted(
        "a header may be changed",
        "storage.header:_check_digests",
        NOTHING,
        ("tests/storage/test_small_bombs.py",),
    ),
)
ERRORS = (*ALGEBRA, *PROOF, *STORAGE, *SURVIVING)


def function_of(where: str) -> tuple[Any, str, Any]:
    """The module or class that has a function, the function's name there, and the function.

    In a class it may be wrapped, as a property or a static method.
    """
    module_name, _, path = where.partition(":")
    holder: Any = importlib.import_module(f"normswap.{module_name}")
    *outer, name = path.split(".")
    for part in outer:
        holder = getattr(holder, part)
    return holder, name, inspect.getattr_static(holder, name)


def plant(error: Planted) -> None:
    """Replace the right function by the wrong one, also where a module imported it by name."""
    holder, name, right = function_of(error.where)
    if isinstance(right, classmethod | staticmethod):
        setattr(holder, name, type(right)(error.how(right.__func__)))
        return
    if isinstance(right, property | functools.cached_property):
        getter: Any = right.fget if isinstance(right, property) else right.func
        setattr(holder, name, property(error.how(getter)))
        return

    wrong = functools.wraps(right)(error.how(right))
    setattr(holder, name, wrong)
    modules = [module for key, module in sys.modules.items() if key.startswith("normswap")]
    for module in modules:
        names = [key for key, value in vars(module).items() if value is right]
        for imported_name in names:
            setattr(module, imported_name, wrong)


def pytest_configure() -> None:
    """As a plugin: plant the error that the environment names."""
    for error in ERRORS:
        if error.name == os.environ.get(NAME):
            plant(error)


def first_to_fail(tests: tuple[str, ...], name: str = "") -> str:
    """The first test that fails with this error planted; empty where all pass."""
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    environment = {**os.environ, NAME: name, "PYTHONPATH": paths, "COLUMNS": "300"}
    words = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "planted"]
    command = [sys.executable, "-m", "pytest", *words, *tests]
    run = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )
    if run.returncode == 0:
        return ""
    failed = [
        line.split(" ")[1]
        for line in run.stdout.splitlines()
        if line.startswith(("FAILED", "ERROR"))
    ]
    if not failed:
        raise SystemExit(f"{name}: {run.stdout[-500:]}{run.stderr[-500:]}")
    return failed[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="errors whose name has this in it")
    parser.add_argument("-o", "--output", type=Path, help="write the table to this file")
    args = parser.parse_args()
    chosen = [error for error in ERRORS if args.only in error.name]
    files: set[str] = set()
    for error in chosen:
        files.update(error.tests)
    failed = first_to_fail(tuple(sorted(files)))
    if failed:
        raise SystemExit(f"{failed} fails without any error")
    rows = []
    survived = 0
    for error in chosen:
        failed = first_to_fail(error.tests, error.name)
        survived += not failed
        outcome = f"`{failed}`" if failed else "**none: it survived**"
        rows.append(f"| {error.name} | `{error.where}` | {outcome} |")
        print(rows[-1], flush=True)
    if args.output:
        sys.path.insert(0, str(ROOT / "tests" / "lab" / "benchmarks"))
        from kept import markdown_head, write_table

        count = f"{len(rows) - survived} of {len(rows)} were noticed by the tests that must notice them."
        lines = [count, "", markdown_head("error", "function", "first test to fail"), *rows]
        write_table(args.output, "Planted errors", f"mutation/planted.py -o {args.output}", lines)


if __name__ == "__main__":
    main()
