"""Core ML without coremltools: what its converter, its runtime and its reader are asked."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.stand_in_tools import (
    METADATA,
    Record,
    install,
    noise,
    require_two,
    two_contents,
    two_inputs,
)
from torch import Tensor

from normswap.errors import RefusedError, SourceError
from normswap.exporting import coreml_file

TOOLS_OWN = {"com.github.apple.coremltools.version": "8.0"}
INPUTS = ("view", "other")
OUTPUTS = ("wide", "narrow")


def spec(outputs: tuple[str, ...] = OUTPUTS, **metadata: str) -> Any:
    """The content of a package, as coremltools parses it."""
    description = Record(
        input=[Record(name=name) for name in INPUTS],
        output=[Record(name=name) for name in outputs],
        metadata=Record(userDefined=metadata),
    )
    kinds = ("const", "conv", "relu", "const", "conv")
    block = Record(operations=[Record(type=kind) for kind in kinds])
    main = Record(opset="CoreML5", block_specializations={"CoreML5": block})
    program = Record(functions={"main": main})
    return Record(description=description, mlProgram=program)


class Model:
    """A model of coremltools: what it is told to write, and where."""

    def __init__(self, package: Path, outputs: tuple[str, ...] = OUTPUTS) -> None:
        package.mkdir()
        (package / "weights").touch()
        self.package_path = str(package)
        self.outputs = outputs
        self.user_defined_metadata = {**TOOLS_OWN}
        self.saved: list[tuple[str, dict[str, str]]] = []

    def get_spec(self) -> Any:
        return spec(self.outputs)

    def save(self, file: str) -> None:
        noise()
        self.saved.append((file, {**self.user_defined_metadata}))


class Tool:
    """coremltools' converter: gives a model, and records what it was asked.

    Args:
        model: The model that it gives.
        fails: The message of the error that it raises in place of that.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Any, fails: str = "") -> None:
        self.asked: list[tuple[Any, dict[str, Any]]] = []

        def convert(traced: Any, **options: Any) -> Any:
            noise()
            self.asked.append((traced, options))
            if fails:
                raise RuntimeError(fails)
            return model

        install(
            monkeypatch,
            "coremltools",
            convert=convert,
            TensorType=lambda name, shape=None: (name, shape and tuple(shape)),
            precision=Record(FLOAT16="fp16", FLOAT32="fp32"),
            target=Record(iOS15="iOS 15"),
        )


@pytest.mark.parametrize("half", [False, True])
def test_the_converter_is_given_the_network_with_its_names(
    half: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "coremltools' own"
    model = Model(package)
    tool = Tool(monkeypatch, model)
    file = tmp_path / "net.mlpackage"

    coreml_file.write(two_contents(half=half), file)

    ((traced, options),) = tool.asked
    require_two(traced, half=half)
    assert options == {
        "inputs": [("view", (1, 3, 8, 6)), ("other", (1, 4, 6, 4))],
        "outputs": [("wide", None), ("narrow", None)],
        "convert_to": "mlprogram",
        "compute_precision": "fp16" if half else "fp32",
        "minimum_deployment_target": "iOS 15",
        "skip_model_load": True,
    }
    # The tool's own texts, such as the date, are not in the file.
    assert model.saved == [(str(file), METADATA)]
    assert not package.exists()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("outputs", "lost"),
    [
        (("other name", "narrow"), "wide"),
        (("wide", "other name"), "narrow"),
        (("narrow", "wide"), "wide"),
    ],
)
def test_a_package_with_other_names_is_not_written(
    outputs: tuple[str, ...], lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "coremltools' own"
    model = Model(package, outputs)
    Tool(monkeypatch, model)

    with pytest.raises(RefusedError, match=f" {lost} "):
        coreml_file.write(two_contents(half=False), tmp_path / "net.mlpackage")

    assert not model.saved
    assert not package.exists()


def test_a_file_that_does_not_end_as_a_package_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = Tool(monkeypatch, None)

    with pytest.raises(RefusedError, match=r"net\.file .*mlpackage"):
        coreml_file.write(two_contents(half=False), tmp_path / "net.file")

    assert not tool.asked


@pytest.mark.parametrize(
    ("message", "error"),
    [("[MIL FileWriter]: Unknown error occurred", OSError), ("no op fft", RefusedError)],
)
def test_a_full_disk_is_no_fault_of_the_network(
    message: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = Tool(monkeypatch, None, fails=message)

    with pytest.raises(error, match=message.rpartition("]")[2]):
        coreml_file.write(two_contents(half=False), tmp_path / "net.mlpackage")

    # Of a network that it refuses, it is also asked for the one in simpler operators.
    assert len(tool.asked) == (2 if error is RefusedError else 1)
    for network, _ in tool.asked:
        require_two(network, half=False)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "net.mlpackage"
    folder.mkdir()
    (folder / "Manifest.json").write_text(json.dumps({"itemInfoEntries": {}}), encoding="utf-8")
    return folder


@pytest.mark.parametrize("read", [coreml_file.open, coreml_file.nodes, coreml_file.metadata])
@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        ({"itemInfoEntries": {"x": {"path": "../../secret"}}}, "outside of its folder"),
        ({"itemInfoEntries": ["secret"]}, "Manifest"),
    ],
)
def test_no_reader_is_asked_for_a_package_that_names_files_elsewhere(
    manifest: dict[str, Any],
    said: str,
    read: Callable[[Path], Any],
    package: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The stand-in has no function that reads.
    install(monkeypatch, "coremltools")
    (package / "Manifest.json").write_text(json.dumps(manifest), encoding="utf-8")

    with pytest.raises((SourceError, ValueError), match=said):
        read(package)


def test_the_runtime_is_given_inputs_and_asked_for_outputs_by_name(
    package: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    class Loaded:
        def __init__(self, file: str, *, compute_units: str) -> None:
            noise()
            asked.append((file, compute_units))

        def get_spec(self) -> Any:
            return spec()

        def predict(self, given: dict[str, Any]) -> dict[str, Any]:
            return {"narrow": given["other"] - 1, "wide": given["view"] + 1}

    install(
        monkeypatch,
        "coremltools",
        models=Record(MLModel=Loaded),
        ComputeUnit=Record(CPU_ONLY="the CPU"),
    )
    view, other = two_inputs()

    answers: list[Tensor] = coreml_file.open(package)(view, other)

    assert asked == [(str(package), "the CPU")]
    wide, narrow = answers
    assert torch.equal(wide, view + 1)
    assert torch.equal(narrow, other - 1)
    assert capfd.readouterr() == ("", "")


def test_what_a_package_says_of_itself(
    package: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def load_spec(file: str) -> Any:
        noise()
        assert file == str(package)
        return spec(**METADATA, **TOOLS_OWN)

    install(monkeypatch, "coremltools", utils=Record(load_spec=load_spec))

    assert coreml_file.metadata(package) == METADATA
    assert [*coreml_file.nodes(package).items()] == [("conv", 2), ("relu", 1)]
    assert capfd.readouterr() == ("", "")
