"""The report: its figures against those read by other means, its HTML, and its command."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from support.command_line import as_documented
from support.report_pages import NETWORKS, check, source
from support.sampled_tables import quick
from torch import nn

import normswap
from normswap.analysis import summary
from normswap.cli.app import main
from normswap.plan import Arch
from normswap.proof.distance import Error
from normswap.proof.verdict import Report
from normswap.reporting import figures, page, report
from normswap.reporting.report import Facts
from normswap.storage.checkpoint import open_model, read_header

CASES = {
    "v1-skipinit": ("v1", "skipinit", {}),
    "v1-reset": ("v1", "skipinit", {"alpha": 0.5}),
    "v2-folded": ("v2", "folded", {}),
    "v1-tune": ("v1", "tune", {}),
    "v1-groupnorm": ("v1", "groupnorm", {}),
    "v2-nf": ("v2", "nf", {"mean": "keep"}),
}


@dataclass(frozen=True)
class Reported:
    """A conversion with its report.

    Args:
        origin: The directory of the source network.
        folder: The directory of the result.
        facts: What the report says, as data.
        text: The page.
    """

    origin: Path
    folder: Path
    facts: Facts
    text: str


class Made(dict[str, Reported]):
    """The conversion and report of every case, each made when it is first asked for.

    Args:
        home: The folder of all networks.
    """

    def __init__(self, home: Path) -> None:
        super().__init__()
        self.sources = {kind: source(home / kind, kind) for kind in NETWORKS}
        self.home = home

    def __missing__(self, name: str) -> Reported:
        kind, scheme, options = CASES[name]
        origin = self.sources[kind]
        done = normswap.convert(open_model(str(origin)), scheme, **options)
        folder = normswap.save(done, self.home / name)
        facts = report.collect(folder)
        with pytest.MonkeyPatch.context() as patch:
            # Most of the time goes into drawing.
            if name not in ("v1-skipinit", "v2-folded"):
                patch.setattr(figures, "_svg", lambda axes: "data:")
            text = page.render(facts)

        self[name] = Reported(origin, folder, facts, text)
        return self[name]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("report"))


@pytest.fixture(params=quick(CASES, ["v1-skipinit", "v2-folded", "v1-groupnorm"]))
def case(request: pytest.FixtureRequest, made: dict[str, Reported]) -> Reported:
    return made[request.param]


@pytest.mark.slow
def test_alphas_are_those_in_the_file(case: Reported) -> None:
    facts = case.facts
    state = load_file(case.folder / "model.safetensors")
    stored = {
        name.removesuffix(".alpha").removesuffix(".then"): float(value)
        for name, value in state.items()
        if name.endswith(".alpha")
    }

    assert {alpha.path: alpha.value for alpha in facts.alphas} == stored
    assert len(stored) in (0, len(facts.blocks))

    order = [block.path for block in facts.blocks]
    assert [alpha.block for alpha in facts.alphas] == order[: len(stored)]


class LastFirst(nn.Module):
    """Three residual blocks, which are registered in another order than they run in."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("third", "first", "second"):
            self.add_module(name, nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in ("first", "second", "third"):
            x = torch.relu(x + self.get_submodule(name)(x))
        return x


def test_alphas_are_listed_by_the_blocks_that_they_end_in_the_order_of_the_forward() -> None:
    source = LastFirst().eval()
    done = normswap.convert(source, "skipinit", inputs=torch.randn(2, 4, 8, 8), alpha=0.5)
    scalars = {
        name: module for name, module in done.model.named_modules() if hasattr(module, "alpha")
    }
    with torch.no_grad():
        for value, scalar in enumerate(scalars.values()):
            scalar.alpha.fill_(value)

    anatomy = normswap.inspect(source, torch.zeros(1, 4, 8, 8))
    alphas = report._alphas(done.model, anatomy, done.plan)

    # They have values 0, 1 and 2 in the order in which they are registered.
    places = [alpha.path.split(".")[0] for alpha in alphas]
    assert places == ["first", "second", "third"]
    assert {alpha.block: alpha.path for alpha in alphas} == {
        block.path: block.tail for block in anatomy.blocks
    }
    assert [alpha.value for alpha in alphas] == [1, 2, 0]
    assert [alpha.planned for alpha in alphas] == [0.5] * 3


class EndsLinear(nn.Module):
    """Its branch ends in a convolution, behind which the scalar is placed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv2(self.norm(self.conv1(x)).relu())


def test_a_scalar_behind_a_convolution_has_the_value_that_it_began_with() -> None:
    source = nn.Sequential(nn.Conv2d(3, 4, 1), EndsLinear()).eval()
    inputs = torch.randn(2, 3, 8, 8)
    done = normswap.convert(source, "skipinit", inputs=inputs, alpha=0.5)
    anatomy = normswap.inspect(source, inputs)
    (alpha,) = report._alphas(done.model, anatomy, done.plan)
    assert (alpha.block, alpha.value, alpha.planned) == ("1", 0.5, 0.5)
    assert list(summary.of_step(done.plan.steps[-1])["alphas"].values()) == [0.5]


def test_learned_scalars_are_told_from_constants() -> None:
    source = timm.create_model("resnetv2_18", channels=(8, 8, 8, 8)).eval()
    done = normswap.convert(source, "nf", init="reset", input_size=(3, 48, 48))
    with torch.no_grad():
        for module in done.model.modules():
            if getattr(module, "learns", False):
                module.alpha.fill_(0.7)
    anatomy = normswap.inspect(source, torch.zeros(1, 3, 48, 48))
    alphas = report._alphas(done.model, anatomy, done.plan)
    assert [alpha.block for alpha in alphas] == [block.path for block in anatomy.blocks]
    assert {round(alpha.value, 6) for alpha in alphas} == {0.7}
    assert {alpha.planned for alpha in alphas} == {0.0}


@pytest.mark.slow
def test_sites_verdict_and_versions_are_the_stored_ones(case: Reported) -> None:
    facts = case.facts
    text = case.text
    header = read_header(case.folder)
    stored = header.report

    assert stored is not None
    assert facts.report == stored
    assert ("changes the function" in text) is not stored.exact
    assert [error.site for error in stored.sites] == [block.path for block in facts.blocks]
    for error in stored.sites:
        assert f"<code>{error.site}</code>" in text

    assert facts.digest in text
    assert "`" not in text
    for name, version in header.versions.items():
        assert f"{name} {version}" in text


# Each precision has errors of several outputs and sizes; the largest of each has another place.
ERRORS = {"float64": (3e-15, 8e-15, 1e-15), "float32": (2e-7, 1e-7, 9e-7), "bfloat16": (4e-2, 0, 0)}
FACTS = Facts(
    source="resnet18",
    sha256="ab12",
    arch=Arch("resnet18"),
    steps=(),
    digest="cd34",
    versions={"torch": "2"},
    report=None,
    blocks=(),
    others=(),
    alphas=(),
    sizes={"before": {"norms": 20, "parameters": 12_345}, "after": {"norms": 0, "parameters": 999}},
    notes=(),
    signal={},
    signal_inputs="",
    accuracy={},
)


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("exact", [False, True])
def test_the_page_shows_the_largest_error_of_each_precision(exact: bool, turn: int) -> None:
    errors = [
        Error("logits", precision, (number,), values[(number + turn) % 3], 1.0)
        for number in range(3)
        for precision, values in ERRORS.items()
    ]
    stored = Report(exact, True, "noise", tuple(errors), tolerance={"float32": 1e-5})

    found = tiles(page.render(replace(FACTS, report=stored)))

    assert found == {
        "relative L2, float64": ("8e-15", "at the logits"),
        "relative L2, float32": ("9e-07", "allowed: 1e-05" if exact else "at the logits"),
        "relative L2, bfloat16": ("0.04", "at the logits"),
        "norms": ("20 → 0", "normalization layers"),
        "parameters": ("999", "\u221211,346 by the conversion"),
    }


@pytest.mark.parametrize(
    ("accuracy", "expected"),
    [
        (
            {"result": 59.871, "source": 61.234, "agreement": 0.93214, "count": 1421},
            {
                "top-1": ("59.87 %", "1,421 images"),
                "top-1 of the source": ("61.23 %", "1,421 images"),
                "same answers": ("93.21 %", "1,421 images"),
            },
        ),
        ({"result": 59.871, "count": 7}, {"top-1": ("59.87 %", "7 images")}),
        (
            {"relative_l2": 0.01234, "agreement": None, "count": 7},
            {"relative L2": ("1.2e-02", "7 images")},
        ),
    ],
)
def test_the_page_shows_what_was_measured_on_images(
    accuracy: dict[str, Any], expected: dict[str, tuple[str, str]]
) -> None:
    of_all = tiles(page.render(FACTS))

    found = tiles(page.render(replace(FACTS, accuracy=accuracy)))

    assert found == {**of_all, **expected}


def tiles(text: str) -> dict[str, tuple[str, str]]:
    """The boxes at the top of a page: name, value, and the line below."""
    pattern = "<dt>(.*?)</dt><dd>(.*?)<small>(.*?)</small></dd>"
    return {name: (value, below) for name, value, below in re.findall(pattern, text)}


@pytest.mark.one_in(3)
def test_every_norm_has_an_outcome(case: Reported) -> None:
    listed = list(case.facts.others)
    for block in case.facts.blocks:
        listed += block.norms
    source_norms = normswap.inspect(open_model(str(case.origin))).norms
    assert sorted(norm.path for norm in listed) == sorted(norm.path for norm in source_norms)

    modules = dict(normswap.load(case.folder).named_modules())
    layers_by_outcome = {
        "gone": ("Vacant",),
        "scalar": ("Scale", "Chain"),
        "bias": ("ChannelBias",),
        "affine": ("ChannelAffine",),
        "replaced": ("GroupNorm",),
    }
    for norm in listed:
        assert type(modules[norm.path]).__name__ in layers_by_outcome[norm.outcome]
        assert norm.said != "stays as it is"
        # These are words, not the plan's own terms.
        assert re.match(r"(folds|keeps|statistics|scales?) ", norm.said), norm.said


@pytest.mark.slow
def test_signal_of_source_and_result(made: dict[str, Reported]) -> None:
    facts = made["v1-skipinit"].facts
    for before, after in zip(facts.signal["before"], facts.signal["after"], strict=True):
        assert before.block == after.block
        assert after.variance == pytest.approx(before.variance, rel=1e-4)
        assert after.mean_sq == pytest.approx(before.mean_sq, rel=1e-4)
        assert after.added_variance == pytest.approx(before.branch_variance, rel=1e-3)
    changed = made["v1-reset"].facts.signal
    assert changed["after"][-1].variance != pytest.approx(changed["before"][-1].variance, rel=1e-2)


def test_a_lost_source_is_said(made: dict[str, Reported], tmp_path: Path, undrawn: None) -> None:
    gone = tmp_path / "gone"
    shutil.copytree(made["v1-skipinit"].origin, gone)
    folder = normswap.save(normswap.convert(open_model(str(gone)), "skipinit"), tmp_path / "result")
    shutil.rmtree(gone)

    facts = report.collect(folder)

    assert set(facts.signal) == {"after"}
    assert len(facts.notes) == 1
    check(page.render(facts))


def test_a_network_without_report_or_steps(
    made: dict[str, Reported], tmp_path: Path, undrawn: None
) -> None:
    folder = normswap.save(open_model(str(made["v1-skipinit"].origin)), tmp_path / "plain")
    facts = report.collect(folder)
    text = page.render(facts)

    assert "not verified" in text
    assert facts.alphas == ()
    for block in facts.blocks:
        assert {norm.outcome for norm in block.norms} == {"kept"}
    check(text)


@pytest.mark.slow
def test_two_steps(made: dict[str, Reported], tmp_path: Path, undrawn: None) -> None:
    again = normswap.convert(normswap.load(made["v2-folded"].folder), "skipinit")
    facts = report.collect(normswap.save(again, tmp_path / "twice"))
    text = page.render(facts)

    assert [step["scheme"] for step in facts.steps] == ["folded", "skipinit"]
    assert "resnetv2_18 converted to folded, then skipinit" in text
    assert len(facts.alphas) == len(facts.blocks)
    check(text)


@pytest.mark.slow
def test_scalars_that_were_trained(
    made: dict[str, Reported], tmp_path: Path, undrawn: None
) -> None:
    done = normswap.convert(open_model(str(made["v1-skipinit"].origin)), "regularized-skipinit")
    model: Any = normswap.load(normswap.save(done, tmp_path / "before"))
    with torch.no_grad():
        model.layer2[1].bn2.alpha.fill_(0.25)
        model.layer2[1].bn2.bias.fill_(-0.5)

    facts = report.collect(normswap.save(model, tmp_path / "trained"))
    moved = [
        alpha for alpha in facts.alphas if alpha.planned != pytest.approx(alpha.value, rel=1e-6)
    ]
    assert [alpha.block for alpha in moved] == ["layer2.1"]
    (trained,) = moved
    assert trained is facts.alphas[3]
    assert (trained.value, trained.bias) == (0.25, -0.5)

    text = page.render(facts)
    assert f'<td class="n">{trained.planned:.6g}</td>' in text
    assert '<td class="n">-0.5</td>' in text
    check(text)


@pytest.mark.slow
def test_accuracy_on_data(made: dict[str, Reported], tmp_path: Path, undrawn: None) -> None:
    generator = torch.Generator().manual_seed(0)
    for label in range(10):
        (tmp_path / "data" / str(label)).mkdir(parents=True)
        pixels = torch.randint(0, 255, (48, 48, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(tmp_path / "data" / str(label) / "one.png")

    out = tmp_path / "page.html"
    folder = str(made["v1-skipinit"].folder)
    data = ["--data", str(tmp_path / "data"), "--workers", "0"]

    assert main(["report", folder, "-o", str(out), *data]) == 0

    text = out.read_text(encoding="utf-8")
    assert "top-1" in text
    assert "<small>10 images</small>" in text
    assert "the first 10 images" in text


def test_the_command_hands_on_where_and_how_networks_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loader of images reads labels if there are any."""
    given: list[tuple[object, ...]] = []

    def collect(directory: Path, images: Any, *, device: str, trust_factory: bool) -> Facts:
        given.append((directory, device, trust_factory))
        given.append((images.func.__self__.data, images.keywords))
        return FACTS

    monkeypatch.setattr(report, "collect", collect)
    folder = tmp_path / "net"
    folder.mkdir()
    out = tmp_path / "page.html"
    words = ["--device", "auto", "--trust-factory", "--data", "demo", "-o", str(out)]

    assert main(["report", str(folder), *words]) == 0

    assert given == [(folder, "auto", True), ("demo", {"labelled": None})]
    written, command = capsys.readouterr().out.splitlines()
    assert f"written to {out}" in written
    assert command == f"next: normswap push {folder} OWNER/NAME --trust-factory"
    assert out.read_text(encoding="utf-8") == page.render(FACTS)


UNKNOWN = {"scheme": "nobody-has-it", "options": {}}
EXACT = {"scheme": "folded", "options": {}}
FITTED = {"scheme": "groupnorm", "options": {}}


@pytest.mark.parametrize(
    ("claims", "steps", "is_exact"),
    [
        (True, (EXACT,), True),
        (True, (EXACT, UNKNOWN), True),
        (True, (FITTED, EXACT), False),
        (False, (EXACT,), False),
        (False, (UNKNOWN,), False),
        (None, (EXACT,), False),
    ],
)
def test_a_result_is_exact_if_its_report_and_all_steps_that_are_known_say_so(
    claims: bool | None, steps: tuple[dict[str, Any], ...], is_exact: bool
) -> None:
    stored = None if claims is None else Report(claims, True, "noise", ())

    assert replace(FACTS, report=stored, steps=steps).is_exact is is_exact


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), (0.0, "0 %"), (0.98765, "98.77 %"), (1.0, "100 %")]
)
def test_a_share_is_written_in_percent(value: float | None, text: str) -> None:
    assert page.share(value) == text


def test_html_is_balanced_and_loads_nothing(case: Reported) -> None:
    checker = check(case.text)

    assert checker.seen.count("h1") == 1
    assert checker.seen.count("table") == checker.seen.count("caption")
    assert checker.seen.count("img") == 1 + 3 + bool(case.facts.alphas)
    assert not re.search(r"\bnan\b|\binf\b", case.text.lower())


@pytest.mark.parametrize(
    "bad",
    [
        "<p><b></p></b>",
        "<p>",
        '<img src="http://a" alt="a picture of a network">',
        "<script></script>",
        '<a href="http://a">a</a>',
        '<link href="http://a">',
        '<p onclick="a">a</p>',
        '<img src="data:a" alt="short">',
        '<p style="background: url(http://a)">a</p>',
    ],
)
def test_the_checker_notices(bad: str) -> None:
    check("<style></style><p>good</p>")
    with pytest.raises((AssertionError, IndexError)):
        check(f"<style></style>{bad}")


@pytest.mark.slow
def test_names_are_escaped(made: dict[str, Reported]) -> None:
    evil = "<script>alert('&\"1')</script>"
    facts = made["v1-skipinit"].facts
    norms = tuple(replace(norm, path=evil, said=evil) for norm in facts.blocks[0].norms)
    block = replace(facts.blocks[0], path=evil, stage=evil, norms=norms)
    stored = facts.report
    assert stored is not None
    site = replace(stored.sites[0], site=evil)
    facts = replace(
        facts,
        source=evil,
        sha256=evil,
        arch=Arch(evil, {evil: evil}),
        digest=evil,
        versions={evil: evil},
        notes=(evil,),
        steps=({"scheme": evil, "options": {evil: evil}, "summary": evil, "paper": evil},),
        blocks=(block, *facts.blocks[1:]),
        alphas=(replace(facts.alphas[0], block=evil, path=evil), *facts.alphas[1:]),
        report=replace(stored, inputs=evil, remarks=(evil,), sites=(site, *stored.sites[1:])),
        signal_inputs=evil,
        signal={
            name: (replace(points[0], block=evil, stage=evil), *points[1:])
            for name, points in facts.signal.items()
        },
    )

    text = page.render(facts)

    check(text)
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def linear(share: float) -> float:
    """The light of an sRGB channel, from 0 to 1."""
    if share <= 0.04045:
        return share / 12.92
    return ((share + 0.055) / 1.055) ** 2.4


def luminance(colour: str) -> float:
    red, green, blue = (linear(int(colour[start : start + 2], 16) / 255) for start in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_contrast(theme: int) -> None:
    """WCAG 2.1: 4.5 for text, 3 for graphics."""
    css = (Path(normswap.__file__).parent / "reporting/report.css").read_text(encoding="utf-8")
    variables = re.findall(r":root \{(.*?)\}", css, re.DOTALL)[theme]
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", variables))

    def contrast(ink: str, ground: str) -> float:
        low, high = sorted((luminance(colours[ink]), luminance(colours[ground])))
        return (high + 0.05) / (low + 0.05)

    for ground in ("paper", "card", "band"):
        assert all(contrast(text, ground) >= 4.5 for text in ("ink", "quiet", "link"))
        assert all(contrast(f"c{number}", ground) >= 3 for number in range(1, 6))
    for text, ground in (("good", "good-paper"), ("bad", "bad-paper"), ("ink", "note-paper")):
        assert contrast(text, ground) >= 4.5


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The axes of every figure that a test draws."""
    all_axes: list[Any] = []

    def keep(axes: Any) -> str:
        all_axes.append(axes)
        return ""

    monkeypatch.setattr(figures, "_svg", keep)
    return all_axes


def test_points_are_the_measured_values(made: dict[str, Reported], drawn: list[Any]) -> None:
    facts = made["v1-skipinit"].facts
    assert facts.report is not None

    # The report itself draws, if no test before this one has made it.
    drawn.clear()
    figures.sites(facts, facts.report)
    errors, allowed = drawn[0].get_lines()
    assert list(errors.get_ydata()) == [error.relative_l2 for error in facts.report.sites]
    assert set(allowed.get_ydata()) == {facts.report.tolerance["float32"]}
    assert drawn[0].get_yscale() == "log"
    assert len([*figures.signal(facts)]) == 3

    for axes, name in zip(drawn[1:], ("variance", "mean_sq", "added_variance"), strict=True):
        for line, network in zip(axes.get_lines(), ("before", "after"), strict=True):
            measured = [getattr(point, name) for point in facts.signal[network]]
            assert list(line.get_ydata()) == measured

    figures.alphas(facts)
    assert list(drawn[-1].get_lines()[0].get_ydata()) == [alpha.value for alpha in facts.alphas]


@pytest.mark.slow
def test_command(
    made: dict[str, Reported], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = str(made["v1-skipinit"].folder)
    assert main(["report", folder]) == 0

    written = tmp_path / "v1-skipinit.html"
    assert written.read_text(encoding="utf-8") == made["v1-skipinit"].text
    assert capsys.readouterr().out.startswith("written to v1-skipinit.html: ")

    monkeypatch.setattr(figures, "_svg", lambda axes: "data:")
    assert main(["report", folder]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["report", folder, "--force", "--json"]) == 0

    body = as_documented(capsys.readouterr().out, "report")
    assert body["digest"] == made["v1-skipinit"].facts.digest
    assert [path.name for path in tmp_path.iterdir()] == ["v1-skipinit.html"]


def test_bad_input_is_one_line(
    made: dict[str, Reported], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made["v1-skipinit"].folder
    precious = tmp_path / "notes.txt"
    precious.write_text("precious", encoding="utf-8")
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    (damaged / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])

    out = str(tmp_path / "out.html")
    for argv in (
        [str(tmp_path / "none"), "-o", out],
        [str(tmp_path), "-o", out],
        [str(damaged), "-o", out],
        [str(made["v1-skipinit"].origin), "-o", out],
        [str(folder), "-o", str(tmp_path)],
        [str(folder), "-o", str(precious), "--force"],
        [str(folder), "-o", str(tmp_path / "no" / "out.html")],
        [str(folder), "-o", out, "--data", str(tmp_path / "none")],
    ):
        assert main(["report", *argv]) == 2

        captured = capsys.readouterr()
        assert captured.out == ""
        assert len(captured.err.splitlines()) == 1
        assert "Traceback" not in captured.err

    assert precious.read_text(encoding="utf-8") == "precious"
    assert not Path(out).exists()


DRAWING = {"normswap.reporting.figures", "normswap.reporting.page"}
BLOCK = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("matplotlib", "jinja2"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import importlib.util
real = importlib.util.find_spec
def find_spec(name, *rest):
    return None if name in ("matplotlib", "jinja2") else real(name, *rest)
importlib.util.find_spec = find_spec
"""


def without(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process in which neither package can be imported."""
    return subprocess.run(
        [sys.executable, "-c", BLOCK + code],
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )


@pytest.mark.slow
def test_the_core_imports_neither(tmp_path: Path) -> None:
    home = Path(normswap.__file__).parent
    names = {
        "normswap." + ".".join(file.relative_to(home).with_suffix("").parts)
        for file in home.rglob("*.py")
    }
    others = {name for name in names if not name.endswith("__init__")} - DRAWING
    done = without(
        f"import importlib\nfor name in {sorted(others)}: importlib.import_module(name)", tmp_path
    )

    assert done.returncode == 0, done.stderr
    # The list says no more than is so.
    for name in ("figures", "page"):
        assert "No module named" in without(f"import normswap.reporting.{name}", tmp_path).stderr


@pytest.mark.parametrize(
    ("command", "drawing"),
    [
        pytest.param("report folded -o a.html", "the report", marks=pytest.mark.slow),
        ("spp demo -o a.png", "a picture (a.png)"),
    ],
)
def test_commands_that_draw_say_what_is_missing(command: str, drawing: str, tmp_path: Path) -> None:
    words = command.split()
    if "folded" in words:
        words[1] = str(tmp_path / "folded")
        assert main(["convert", "demo", "--to", "folded", "-o", words[1]]) == 0

    done = without(f"from normswap.cli.app import main; sys.exit(main({words}))", tmp_path)

    assert done.returncode == 2
    assert done.stderr == (
        f"error: {drawing} needs the package matplotlib: it is not installed. "
        "In the clone of normswap: pip install -e '.[plots]'\n"
    )
    assert done.stdout == ""
    assert not (tmp_path / command.split()[-1]).exists()


@pytest.mark.slow
def test_the_rest_works(tmp_path: Path) -> None:
    words = [
        ["convert", "demo", "--to", "folded", "-o", "folded"],
        ["verify", "folded"],
        ["spp", "folded"],
    ]
    done = without(
        f"from normswap.cli.app import main; sys.exit(max(main(one) for one in {words}))", tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_the_error_of_a_single_block_stands_beside_what_its_precision_allows(
    drawn: list[Any],
) -> None:
    block = Error("layer1", "float32", (2, 3, 8, 8), 3e-6, 1.0)
    tolerance = {"float64": 1e-12, "float32": 1e-5}

    figures.sites(FACTS, Report(True, True, "noise", (), sites=(block,), tolerance=tolerance))

    measured, allowed = drawn[0].get_lines()
    assert (list(measured.get_xdata()), list(measured.get_ydata())) == ([1], [3e-6])
    assert set(allowed.get_ydata()) == {1e-5}
