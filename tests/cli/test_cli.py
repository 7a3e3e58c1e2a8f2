"""The command line: what it prints, and what it writes.

Every bad input gives one line on stderr, and leaves nothing written.
"""

import dataclasses
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.command_line import DEMO, FEW, MODEL, Capture, files, refused, run_json
from support.model_sources import rewrite
from torch import Tensor, nn

from normswap import shipped
from normswap.cli import commands, progress, tables
from normswap.cli.app import load, main
from normswap.cli.commands import recalibrate_command, schemes_command
from normswap.cli.commands.export_command import Written
from normswap.cli.options import ImageOpening, Opening, last_part, parse
from normswap.errors import OptionError
from normswap.exporting.settings import FileSettings
from normswap.storage import checkpoint
from normswap.training import recipe_files
from normswap.training.engine import TrainingProgress

COMMANDS = tuple(commands.SUMMARIES)
IMAGES = str(shipped.FOLDER / "images.tar")
SMALL = (
    "resnet18",
    "--weights",
    "random",
    "--arch-arg",
    "channels=8,8,16,16",
    "--num-classes",
    "5",
)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's network, converted by the command line."""
    folder = tmp_path_factory.mktemp("converted")
    for scheme in ("folded", "skipinit"):
        assert main(["convert", MODEL, "--to", scheme, "-o", str(folder / scheme)]) == 0
    return folder


def test_no_help_imports_anything_heavy() -> None:
    """Imports are counted, as a limit in seconds would depend on the machine.

    `normswap --help` loads no command at all.
    """
    code = f"""
import sys
from normswap.cli.app import main

main(["--help"])
loaded = [name for name in sys.modules if name.startswith("normswap.cli.commands.")]
for command in {COMMANDS}:
    main([command, "--help"])
heavy = {{"torch", "timm", "numpy", "pydantic", "matplotlib"}} & sys.modules.keys()
sys.exit(str([loaded, list(heavy)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.stderr.strip() == "[[], []]"


def test_help_lists_the_commands_in_order(capfd: Capture) -> None:
    assert main(["--help"]) == 0

    listed = capfd.readouterr().out.partition("Commands")[2]
    words = [line.split()[1] for line in listed.splitlines() if "  " in line]

    assert tuple(word for word in words if word in COMMANDS) == COMMANDS
    assert main([]) == main(["--version"]) == 0

    begin, _, version = capfd.readouterr().out.rpartition("normswap 0.")

    assert "Begin with `normswap demo`" in " ".join(begin.split())
    assert version.strip().replace(".", "").isdecimal()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command: str, capfd: Capture) -> None:
    """The page begins with the summary of the list of commands.

    It ends with examples, which the command's own parser takes, and with the keys of --json.
    """
    assert main([command, "--help"]) == 0

    page = " ".join(capfd.readouterr().out.split())
    module = importlib.import_module(f"normswap.cli.commands.{command}_command")

    assert module.run.__doc__.startswith(commands.SUMMARIES[command].rpartition(": ")[0])
    assert commands.SUMMARIES[command][:60] in page
    assert "Keys of --json: " in page
    assert len(module.EXAMPLES) >= 2

    for example in module.EXAMPLES:
        name, *words = shlex.split(example)
        assert name == command
        with load(command).make_context(name, words) as context:
            assert context.params is not None
        recipes = [word for word in words if re.fullmatch(r"(cifar10|finetune|imagenet)_\w+", word)]
        assert {*recipes} <= {*recipe_files.names()}


def test_options_stand_in_the_panel_of_their_record(capfd: Capture) -> None:
    assert main(["convert", "--help"]) == 0
    panels = re.split(r"╭─ (.*?) ─*╮", capfd.readouterr().out)
    inside = dict(zip(panels[1::2], panels[2::2], strict=True))

    assert "--arch " in inside["How MODEL is opened"]
    assert "--to " in inside["Options"]
    assert "[default: ./NAME-SCHEME]" in inside["Options"]  # rich would take it for markup
    assert "--image-mean " in inside["How its images are prepared, where it does not say so"]


@pytest.mark.parametrize("words", [("--to", "groupnorm"), ("--to=groupnorm",)])
def test_help_shows_the_options_of_the_scheme_that_is_named(
    words: tuple[str, ...], capfd: Capture
) -> None:
    assert main(["convert", "--help"]) == 0
    page = capfd.readouterr().out
    assert main(["convert", *words, "--help"]) == 0
    page_of_groupnorm = capfd.readouterr().out

    assert "Options of the schemes" not in page
    assert "normswap convert --to SCHEME --help" in " ".join(re.findall(r"[^\s│]+", page))
    assert "--relative-eps" in page_of_groupnorm
    assert "--alpha" not in page_of_groupnorm
    # The next command line knows all options again.
    skipinit = ["convert", MODEL, "--to", "skipinit", "--alpha", "0", "--dry-run"]
    assert main(skipinit) == 0


def test_all_kinds_of_models_are_listed_once() -> None:
    pages = {
        command: str(load(command).params[0].help) for command in COMMANDS if load(command).params
    }

    assert [command for command, text in pages.items() if "torchvision:NAME" in text] == ["inspect"]


def test_inspect_resnet50(capfd: Capture) -> None:
    body = run_json(capfd, "inspect", "resnet50", "--weights", "random")

    assert body["roles"] == {"stem": 1, "last": 16, "down": 4, "other": 32, "head": 0}
    assert [block["skip"] for block in body["blocks"]].count("projection") == 4
    assert len(body["sites"]) == 53
    assert all(
        site["folding"].startswith("folds into") and site["refused"] is None
        for site in body["sites"]
    )


def test_inspect_shows_counts_and_blocks_within_100_columns(capfd: Capture) -> None:
    assert main(["inspect", *SMALL]) == 0
    out = capfd.readouterr().out

    assert "1 stem, 8 last, 4 down, 8 other" in out
    assert "4 projection, 4 identity" in out
    assert max(map(len, out.splitlines())) <= 100
    assert main(["inspect", MODEL]) == 0
    assert "layer1.0 .. layer1.1" in capfd.readouterr().out


def test_inspect_says_why_a_norm_is_refused(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.GroupNorm(2, 4)
    )
    monkeypatch.setattr(checkpoint, "open_model", lambda *args, **kwargs: model)
    batch, group = run_json(capfd, "inspect", "mine")["sites"]

    assert "no running statistics" in batch["refused"]
    assert "per sample" in group["refused"]


def test_convert_says_what_it_did_and_writes_there(capfd: Capture, here: Path) -> None:
    assert main(["convert", MODEL, "--to", "skipinit"]) == 0
    out, err = capfd.readouterr()

    assert err == ""
    assert "22 folded into the layer before" in out
    assert "layer4.1.bn2" in out
    assert "float64" in out
    assert "too far" not in out
    assert "written to demo_data-skipinit" in out
    assert {p.name for p in here.iterdir()} == {"demo_data-skipinit"}


def test_dry_run_writes_nothing(capfd: Capture, here: Path) -> None:
    arguments = ["convert", MODEL, "--to", "skipinit", "--dry-run"]
    (step,) = run_json(capfd, *arguments)["steps"]

    assert {edit["layer"] for edit in step["edits"]} == {"Folded", "Scale", "Vacant"}
    assert step["report"] is None
    assert main(arguments) == 0
    assert "layer1.0.conv1" in capfd.readouterr().out
    assert not files(here)


@pytest.mark.slow
def test_plan_edit_from_plan(capfd: Capture, here: Path) -> None:
    convert = ["convert", MODEL]

    assert main([*convert, "--to", "skipinit", "--dry-run", "--plan", "plan.json"]) == 0
    assert set(files(here)) == {"plan.json"}

    plan = json.loads(Path("plan.json").read_text(encoding="utf-8"))
    (step,) = plan["steps"]
    step["options"]["alpha"] = 0.25  # not a match any more: a reset
    next(edit for edit in step["edits"] if edit["path"] == "layer2.0.bn2")["args"]["alpha"] = 0.25
    Path("plan.json").write_text(json.dumps(plan), encoding="utf-8")
    (done,) = run_json(capfd, *convert, "--from-plan", "plan.json", "-o", "edited")["steps"]

    assert not done["report"]["exact"]
    assert load_file("edited/model.safetensors")["layer2.0.bn2.alpha"].item() == 0.25


def test_a_plan_file_that_exists_is_replaced_by_force_alone(here: Path) -> None:
    words = ["convert", MODEL, "--to", "skipinit", "--dry-run", "--plan", "plan.json"]
    Path("plan.json").write_text("mine", encoding="utf-8")

    assert main(words) == 2
    assert Path("plan.json").read_text(encoding="utf-8") == "mine"

    assert main([*words, "--force"]) == 0
    assert json.loads(Path("plan.json").read_text(encoding="utf-8"))["steps"]


@pytest.mark.slow
def test_norms_are_counted_by_the_edits_that_are_left(capfd: Capture, here: Path) -> None:
    words = ["convert", MODEL, "--only", "layer1", "--dry-run", "--plan", "plan.json"]
    run_json(capfd, *words, "--to", "groupnorm")
    plan = json.loads(Path("plan.json").read_text(encoding="utf-8"))
    edits = plan["steps"][0]["edits"]
    assert edits[1]["path"] == "layer1.0.bn1"
    plan["steps"][0]["edits"] = edits[2:]
    Path("plan.json").write_text(json.dumps(plan), encoding="utf-8")

    body = run_json(capfd, "convert", MODEL, "--from-plan", "plan.json", "-o", "out")

    assert body["steps"][0]["outcomes"] == {"stay as they are": 1, "became GroupNorm": 3}
    assert "no edit" in body["steps"][0]["verdicts"]["layer1.0.bn1"]


def test_a_plan_knows_what_it_was_made_for(capfd: Capture, here: Path) -> None:
    assert main(["convert", "demo", "--to", "skipinit", "--dry-run", "--plan", "plan.json"]) == 0
    assert json.loads(Path("plan.json").read_text(encoding="utf-8"))["made_for"] == "demo"
    capfd.readouterr()

    other = ["convert", "resnet18", "--weights", "random", "--from-plan", "plan.json"]
    assert main([*other, "-o", "out"]) == 2

    note, error = capfd.readouterr().err.splitlines()
    assert note == "note: plan.json was made for demo; this is resnet18"
    assert "conv1.0" in error
    assert error.endswith("plan.json was made for demo; this is resnet18")


def test_a_scope_is_shown_without_brackets(capfd: Capture) -> None:
    words = ["convert", MODEL, "--to", "folded", "--only", "layer1", "--only", "layer2"]
    assert main([*words, "--dry-run"]) == 0
    assert "to folded (only layer1 layer2)" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("0.5", 0.5),
        ("true", True),
        ("False", False),
        ("none", None),
        ("relu", "relu"),
        ("16,32, 64", [16, 32, 64]),
        ("1,0.5,a", [1, 0.5, "a"]),
        ("8,", [8]),
        ("{[]}", "{[]}"),
        ("{{}:1}", "{{}:1}"),
    ],
)
def test_values_of_arch_arg(text: str, value: Any) -> None:
    assert parse(text) == value


def test_a_damaged_network_is_opened_on_the_device_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[tuple[str, str]] = []

    def opened(_: Opening, name: str, *, device: str) -> nn.Module:
        given.append((name, device))
        return nn.Identity()

    monkeypatch.setattr(ImageOpening, "open", opened)

    ImageOpening().open_damaged("net", device="cuda")

    assert given == [("net", "cuda")]


@pytest.mark.parametrize("text", ["channels", "=3", "1st=3", "two words=3"])
def test_an_arch_arg_that_names_no_argument_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=f"--arch-arg '{text}' is not KEY=VALUE"):
        Opening(arch_arg=["a=1", text]).arch_args()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("resnet50.a1_in1k", "resnet50.a1_in1k"),
        ("hf-hub:org/name@main", "name"),
        ("local-dir:a/b", "b"),
        ("some/where/", "where"),
        ("x/file.safetensors", "file"),
        (".", "here"),
    ],
)
def test_default_output_is_named_after_the_source(
    source: str, name: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "here" / "x").mkdir(parents=True)
    (here / "here" / "x" / "file.safetensors").touch()
    monkeypatch.chdir(here / "here")
    assert last_part(source) == name


@pytest.mark.slow
def test_too_few_images_to_measure_on_are_said(capfd: Capture, here: Path) -> None:
    fit = ("--to", "groupnorm", "--relative-eps", "0", "--calibrate", IMAGES, "--samples", "2")

    assert main(["convert", MODEL, *fit, "-o", "out"]) == 0
    out = capfd.readouterr().out

    assert "not known: too few calibration images" in out
    assert "give --calibrate" not in out
    assert "was not measured: too few calibration images" in (here / "out" / "README.md").read_text(
        encoding="utf-8"
    )


@pytest.mark.slow
def test_verify(capfd: Capture, converted: Path) -> None:
    data = ("--data", IMAGES, "--samples", "100", "--workers", "0")
    body = run_json(capfd, "verify", str(converted / "folded"), *data)

    assert body["passed"]
    assert body["source_unchanged"] is True
    assert body["data"]["agreement"] == 1
    assert body["data"]["source"] == body["data"]["result"] > 60
    assert body["data"]["count"] == 100


def test_verify_against_another(capfd: Capture, converted: Path) -> None:
    folded = str(converted / "folded")
    other = str(converted / "skipinit")
    assert main(["verify", folded, "--against", other]) == 0
    *_, verdict, then = capfd.readouterr().out.splitlines()
    assert (verdict, then) == ("PROVED", f"next: normswap export {folded} -o folded.onnx")


@pytest.mark.slow
def test_verify_opens_the_other_network_as_it_is_told_to(capfd: Capture, converted: Path) -> None:
    file = shipped.FOLDER / "model.safetensors"
    shaped: list[str] = []
    for argument in ("channels=32,64,80,96", "stem_type=deep", "stem_width=16"):
        shaped += ["--arch-arg", argument]
    how = ("--arch", "resnet18", *shaped, "--num-classes", "10", "--input-size", "3,64,64")

    assert run_json(capfd, "verify", str(converted / "folded"), "--against", str(file), *how)[
        "passed"
    ]

    random = ("--against", "resnet18", *shaped, "--num-classes", "10", "--weights", "random")

    assert not run_json(capfd, "verify", str(converted / "folded"), *random, code=1)["passed"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("path", ["layer2.0.conv1", "layer3.0.downsample.0"])
def test_verify_names_the_layer_that_was_changed(
    path: str, capfd: Capture, converted: Path, here: Path
) -> None:
    model = checkpoint.load(converted / "folded")
    with torch.no_grad():
        model.get_parameter(f"{path}.weight").mul_(1.01)
    checkpoint.save(model, here / "tuned")
    assert main(["verify", "tuned"]) == 1
    assert f"WRONG: they differ, first at {path} (" in capfd.readouterr().out


@pytest.mark.slow
def test_verify_says_how_far_training_went_and_gives_no_verdict(
    capfd: Capture, converted: Path, here: Path
) -> None:
    """In a run's folder, the network is not what the plan says, and is not meant to be."""
    model = checkpoint.load(converted / "folded")
    with torch.no_grad():
        model.get_parameter("layer2.0.conv1.weight").mul_(1.5)
    for name in ("recipe.yaml", "metrics.csv"):
        (here / "run").mkdir(exist_ok=True)
        (here / "run" / name).touch()
    checkpoint.save(model, here / "run" / "best")

    body = run_json(capfd, "verify", "run/best")
    assert (body["passed"], body["trained"], body["apart"]) == (True, True, None)
    assert body["report"]["logits"][-1]["relative_l2"] > 0.01

    assert main(["verify", "run/best"]) == 0
    printed = capfd.readouterr().out
    assert "TRAINED" in printed
    assert "FAILED" not in printed
    assert main(["verify", "run/best", "--data", "demo", *FEW, "--min-kept", "1"]) == 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("changed", ["layer2.0.conv1.weight", "layer3.0.bn2.bias"])
def test_verify_names_what_was_not_saved(changed: str, capfd: Capture, here: Path) -> None:
    """The values of this network were fitted, and no plan tells them."""
    assert main(["convert", MODEL, "--to", "groupnorm", "-o", "out"]) == 0

    rewrite(
        here / "out",
        tensors={changed: -1.5 * load_file(here / "out" / "model.safetensors")[changed]},
    )

    refused(
        ("verify", "out"),
        ("are not those that were saved", f": {changed}: ", "changed=True"),
        here,
        capfd,
    )


@pytest.mark.slow
def test_verify_says_that_the_source_changed_or_is_gone(capfd: Capture, here: Path) -> None:
    shutil.copytree(shipped.FOLDER, here / "source")

    assert main(["convert", "source", "--to", "folded", "-o", "out"]) == 0

    state = load_file(here / "source" / "model.safetensors")
    save_file(
        {name: t * 1.1 if name == "fc.weight" else t for name, t in state.items()},
        "source/model.safetensors",
    )
    body = run_json(capfd, "verify", "out", code=1)

    assert (body["passed"], body["source_unchanged"]) == (False, False)
    assert main(["verify", "out"]) == 1
    assert "warning: the source is not what it was" in capfd.readouterr().out

    # A network that is named takes the place of the recorded one, whatever became of that.
    assert main(["verify", "out", "--against", MODEL]) == 0
    assert "warning" not in capfd.readouterr().out

    shutil.rmtree(here / "source")

    refused(("verify", "out"), ("the source cannot be opened", "--against MODEL"), here, capfd)


@pytest.mark.slow
def test_as_much_as_is_asked_for_must_be_kept(capfd: Capture, converted: Path, here: Path) -> None:
    assert main(["convert", MODEL, "--to", "groupnorm", "--relative-eps", "0", "-o", "other"]) == 0

    command = ("verify", "other", "--data", IMAGES, "--samples", "40", "--workers", "0")
    share = run_json(capfd, *command)["data"]["agreement"]

    assert main([*command, "--min-kept", str(share)]) == 0
    assert "MEASURED: it is not exact" in capfd.readouterr().out
    assert main([*command, "--min-kept", str(share + 0.01)]) == 1
    refused(
        ("verify", "other", "--min-kept", "0.5"),
        ("no agreement was measured", "--data IMAGES"),
        here,
        capfd,
    )


def test_schemes(capfd: Capture) -> None:
    bodies = {body["name"]: body for body in run_json(capfd, "schemes")}

    assert {"folded", "skipinit", "regularized-skipinit", "unfold"} <= set(bodies)
    assert bodies["skipinit"]["exact_only_with"] == ["alpha"]
    assert bodies["folded"]["exact_only_with"] == []
    assert "arXiv" in bodies["skipinit"]["paper"]
    assert main(["schemes"]) == 0
    assert "--alpha (default match)" in capfd.readouterr().out
    assert run_json(capfd, "schemes", "unfold", "skipinit") == [
        bodies["unfold"],
        bodies["skipinit"],
    ]
    assert main(["schemes", "skip-init"]) == 2
    assert "skipinit" in capfd.readouterr().err


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 5:
            raise ValueError("it takes pairs of images")
        return self.norm(self.conv(x[:, 0] - x[:, 1]))


def test_an_existing_output_is_refused_before_the_work(
    here: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "demo_data-folded").mkdir()
    (here / "demo_data-folded" / "mine").touch()
    monkeypatch.setattr(checkpoint, "open_model", lambda *args, **kwargs: pytest.fail("too late"))
    refused((*DEMO, "folded"), ("demo_data-folded exists",), here, capfd)


@pytest.mark.parametrize("command", [("inspect", "x"), ("convert", "x", "--to", "folded")])
def test_untraceable_model(
    command: tuple[str, ...], here: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "open_model", lambda *args, **kwargs: Untraceable())
    refused(command, ("Untraceable", Path(__file__).name), here, capfd)


@pytest.mark.parametrize(
    "option", [("--arch", "resnet18"), ("--num-classes", "3"), ("--weights", "random")]
)
def test_a_converted_network_knows_its_architecture(
    option: tuple[str, str], converted: Path, here: Path, capfd: Capture
) -> None:
    refused(
        ("inspect", str(converted / "folded"), *option),
        ("was written by normswap", option[0]),
        here,
        capfd,
    )


def test_random_weights_cannot_be_verified_against(here: Path, capfd: Capture) -> None:
    assert main(["convert", *SMALL, "--to", "folded", "-o", "out"]) == 0
    refused(("verify", "out"), ("random weights", "--against MODEL"), here, capfd)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(28, "No space left on device"), 2, "error: No space left on device"),
        (PermissionError(13, "Permission denied", "/x"), 2, "error: /x: Permission denied"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_the_system_throws(
    error: BaseException, code: int, said: str, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> None:
        raise error

    monkeypatch.setattr(schemes_command, "show", fail)

    assert main(["schemes"]) == code
    out, err = capfd.readouterr()

    assert (out, err.strip("\n")) == ("", said)  # older typer ends the line that ^C stands on


def test_a_bug_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(schemes_command, "show", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["schemes"])


def test_debug_shows_where_an_error_comes_from(capfd: Capture) -> None:
    assert main(["inspect", "nonsense", "--debug"]) == 2
    trace, _, line = capfd.readouterr().err.strip().rpartition("\n")
    assert "in _check_known" in trace
    assert main(["inspect", "nonsense"]) == 2
    assert capfd.readouterr().err.strip() == line


def test_a_shell_completes_commands_and_their_options(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_NORMSWAP_COMPLETE", "complete_bash")
    for typed, completed in (
        ("normswap reca", "recalibrate"),
        ("normswap convert x --relative", "--relative-eps"),
        ("normswap convert x --to skip", "skipinit"),
        ("normswap convert x --to ", "unfold"),
        ("normswap convert x --for op", "opacus"),
        ("normswap convert x --alpha ", "inv-sqrt-depth"),
        ("normswap finetune x --recipe recover_un", "recover_unlabelled"),
        ("normswap sweep finetune_", "finetune_imagenet_skipinit"),
        ("normswap export x --precision ", "int8"),
        ("normswap export x --format on", "onnx"),
        ("normswap evaluate x --device ", "cuda"),
    ):
        monkeypatch.setenv("COMP_WORDS", typed)
        monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))
        with pytest.raises(SystemExit):
            main([])
        assert completed in capfd.readouterr().out.split()


def test_warnings_and_logs_stay_quiet(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    import logging
    import warnings

    def noisy(*given: Any) -> None:
        warnings.warn("a warning")
        logging.getLogger("timm").error("a log line")

    monkeypatch.setattr(schemes_command, "show", noisy)

    assert main(["schemes"]) == 0
    assert capfd.readouterr() == ("", "")
    assert logging.root.manager.disable == 0


def test_half_precision_that_becomes_float32_is_said(here: Path, capfd: Capture) -> None:
    torch.save(checkpoint.open_model("demo").half().state_dict(), "half.pth")
    assert main(["inspect", MODEL, "--weights", "half.pth"]) == 0
    assert "note: half.pth is in float16, and becomes float32" in capfd.readouterr().err


def test_module_runs_as_the_command(here: Path) -> None:
    """A process of its own has the exit code and the streams of `main`.

    The command is one that does not import torch, so that the test is quick.
    """
    words = ["recipes", "nowhere"]
    done = subprocess.run(
        [sys.executable, "-m", "normswap", *words], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: no recipe is called 'nowhere'")


def test_a_log_has_a_line_for_each_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.training_bar() as (report, _):
        for update in range(1, 9):
            moment = TrainingProgress(
                update=update,
                updates=8,
                epoch=update / 4,
                epochs=2.0,
                images_per_s=10.0,
                lr=0.1,
                loss=1.0,
                top1=None,
            )
            report(moment)
    said = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in said] == ["1.00/2", "2.00/2"]


def test_facts_begin_at_the_margin(capsys: pytest.CaptureFixture[str]) -> None:
    tables.facts(("name", "value"), ("longer name", "another"))
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "name         value",
        "longer name  another",
    ]


def test_what_is_said_of_many_paths_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    dead = [f"layer{i}: it is dead" for i in range(5)]
    tables.listing("note", [*dead[:4], "a.b: it lives: yes", "run this", "run that", dead[4]])

    assert capsys.readouterr().out.splitlines() == [
        "note: layer0, layer1, layer2, 2 more: it is dead",
        "note: a.b: it lives: yes",
        "note: run this",
        "note: run that",
    ]


def test_the_command_has_the_defaults_of_the_function() -> None:
    asked = Written(output=Path("net.onnx"))
    default = FileSettings()
    shared = {field.name for field in dataclasses.fields(Written)} & {
        field.name for field in dataclasses.fields(FileSettings)
    }

    assert shared >= {"format", "dtype", "dynamic_batch", "normalize", "softmax"}
    assert {name: getattr(asked, name) for name in shared} == {
        name: getattr(default, name) for name in shared
    }


def test_recalibrating_wants_images_of_the_part_that_is_trained_on() -> None:
    """Other commands take the images that are evaluated on, if any."""
    fields = {field.name: field for field in dataclasses.fields(recalibrate_command.Domain)}
    assert fields["data"].default is dataclasses.MISSING
    assert fields["split"].default == "train"
    assert dataclasses.fields(recalibrate_command.Before)


@pytest.mark.parametrize(("dry", "words"), [(True, "would convert"), (False, "converted")])
def test_what_was_not_done_is_not_said_to_be(
    dry: bool, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    step = {
        "scheme": "folded",
        "options": {},
        "edits": [],
        "report": None,
        "outcomes": {},
        "left": {},
        "alphas": {},
        "notes": [],
        "renames": [],
    }
    tables.print_step("demo", step, dry=dry)

    assert capsys.readouterr().out.startswith(f"{words}  demo to folded")


@pytest.mark.parametrize(
    ("values", "text"),
    [([1], "1"), ([1, 2, 3, 4], "1 2 3 4"), ([1, 2, 3, 4, 5], "1 2 3 4 ... (5 in all)"), ([], "")],
)
def test_of_many_values_the_first_are_shown(values: list[int], text: str) -> None:
    assert tables.few(values) == text


@pytest.mark.slow
def test_spp_before_and_after_a_conversion(here: Path, capfd: Capture) -> None:
    assert main(["convert", MODEL, "--to", "skipinit", "-o", "after"]) == 0

    body = run_json(
        capfd,
        "spp",
        MODEL,
        "after",
        "-o",
        "a.png",
        "--data",
        IMAGES,
        "--samples",
        "8",
        "--workers",
        "0",
    )
    before, after = body["curves"].values()

    assert list(body["curves"]) == [shipped.FOLDER.name, "after"]
    assert set(before[0]) == {
        "block",
        "stage",
        "depth",
        "mean_sq",
        "variance",
        "branch_variance",
        "added_variance",
    }

    for one, other in zip(before, after, strict=True):
        assert other["variance"] == pytest.approx(one["variance"], rel=1e-3)
        assert other["mean_sq"] == pytest.approx(one["mean_sq"], rel=1e-3, abs=1e-6)

    assert body["files"] == ["a.png"]
    assert set(body["inputs"].values()) == {f"8 images of {IMAGES}"}
    assert (here / "a.png").read_bytes().startswith(b"\x89PNG")


def test_spp_prints_tables_and_is_reproducible(capfd: Capture) -> None:
    size = ("--input-size", "3,32,32")
    channels = SMALL[3:5]
    small = ("spp", *SMALL[:5], *size, "--samples", "2")

    assert main([*small]) == 0

    out, err = capfd.readouterr()

    assert err == ""
    assert "layer4.1" in out
    assert out.endswith(f"next: normswap advise {shlex.join([*SMALL[:3], *size, *channels])}\n")

    first = run_json(capfd, *small)
    again = run_json(capfd, *small)

    assert first == again
    assert run_json(capfd, *small, "--seed", "1") != first


def test_decay_says_who_and_why(capfd: Capture) -> None:
    body = run_json(capfd, "decay", "resnet50")
    roles = {row["role"]: (row["decay"], row["tensors"]) for row in body["roles"]}

    assert roles == {
        "weight": (True, 54),
        "gamma_last": (True, 16),
        "gamma_down": (False, 4),
        "gamma_0": (False, 1),
        "gamma_other": (True, 32),
        "beta": (False, 53),
        "bias": (False, 1),
    }
    assert sum(row["values"] for row in body["roles"]) == 25557032
    assert len(body["parameters"]) == 161
    assert main(["decay", *SMALL[:5]]) == 0
    assert "gamma_down" in (out := capfd.readouterr().out)
    assert out.endswith(
        f"next: normswap finetune {shlex.join(SMALL[:5])} --recipe RECIPE --data IMAGES\n"
    )
