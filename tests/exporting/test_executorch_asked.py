"""ExecuTorch without its package: what its compiler, quantizer and runtime are asked.

torchao's quantizer, which writes pt2 files too, is asked here as well.
"""

import json
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
)
from torch import Tensor, nn

from normswap.exporting import executorch_file, pt2_file
from normswap.exporting.settings import Quantization


class Compiler:
    """ExecuTorch's compiler, which records what it is asked and gives these bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[Any, dict[str, Any]]] = []

        def lower(program: Any, **options: Any) -> Any:
            noise()
            self.asked.append((program, options))
            return Record(to_executorch=lambda: Record(buffer=bytearray(b"a program")))

        install(monkeypatch, "executorch.exir", to_edge_transform_and_lower=lower)
        install(
            monkeypatch,
            "executorch.backends.xnnpack.partition.xnnpack_partitioner",
            XnnpackPartitioner=lambda: "what XNNPACK has",
        )


def require_asked(compiler: Compiler) -> None:
    ((program, options),) = compiler.asked
    require_two(lambda *inputs: [*program.module()(*inputs)], half=False)
    texts = json.loads(options["constant_methods"].pop("normswap"))
    assert texts == METADATA
    assert options == {"partitioner": ["what XNNPACK has"], "constant_methods": {}}


def test_the_compiler_is_given_the_network_and_its_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    compiler = Compiler(monkeypatch)

    executorch_file.write(two_contents(half=False), tmp_path / "net.pte")

    require_asked(compiler)
    assert (tmp_path / "net.pte").read_bytes() == b"a program"
    assert capfd.readouterr() == ("", "")


class Watched(nn.Module):
    """A network that torchao prepared: it is run on the images, which set the ranges."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.images: list[tuple[Tensor, ...]] = []

    def forward(self, *images: Tensor) -> None:
        self.images.append(images)


class Quantizing:
    """torchao's two steps, which record what they are asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prepared: list[tuple[Watched, object]] = []

        def prepare(network: nn.Module, quantizer: object) -> Watched:
            watched = Watched(network)
            self.prepared.append((watched, quantizer))
            return watched

        def convert(watched: Watched) -> nn.Module:
            return watched.network

        install(
            monkeypatch,
            "torchao.quantization.pt2e",
            MinMaxObserver="least and largest",
            PerChannelMinMaxObserver=Record(with_args=lambda **options: options),
        )
        install(
            monkeypatch,
            "torchao.quantization.pt2e.quantizer",
            QuantizationSpec=lambda dtype, observer, **options: (dtype, observer, options),
            QuantizationConfig=lambda *of_each: of_each,
        )
        install(
            monkeypatch,
            "torchao.quantization.pt2e.quantize_pt2e",
            prepare_pt2e=prepare,
            convert_pt2e=convert,
        )


def test_the_quantizer_is_run_on_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    quantizing = Quantizing(monkeypatch)
    network = nn.Linear(2, 3)
    images = torch.rand(7, 2).split(3)

    rounded: nn.Module = pt2_file.calibrated(network, "a quantizer", images)

    ((watched, quantizer),) = quantizing.prepared
    assert rounded is watched.network is network
    assert quantizer == "a quantizer"
    assert [batch for (batch,) in watched.images] == [*images]


@pytest.mark.parametrize(("bits", "levels"), [(7, 64), (8, 127)])
@pytest.mark.parametrize(
    ("activations", "limits"), [(torch.int8, (-128, 127)), (torch.uint8, (0, 255))]
)
def test_activations_take_the_whole_byte_and_weights_as_many_steps_as_their_bits_have(
    activations: torch.dtype,
    limits: tuple[int, int],
    bits: int,
    levels: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Quantizing(monkeypatch)

    config: Any = pt2_file.quantization_config(activations, Quantization([], bits).levels)

    of_activations = {
        "quant_min": limits[0],
        "quant_max": limits[1],
        "qscheme": torch.per_tensor_affine,
    }
    of_weights = {
        "quant_min": -levels,
        "quant_max": levels,
        "qscheme": torch.per_channel_symmetric,
        "ch_axis": 0,
    }
    activation = (activations, "least and largest", of_activations)
    # The step of a channel may be as small as float32 has it.
    weight = (torch.int8, {"eps": torch.finfo(torch.float32).tiny}, of_weights)
    assert config == (activation, activation, weight, None)


def test_the_compiler_is_given_the_network_in_int8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    compiler = Compiler(monkeypatch)
    quantizing = Quantizing(monkeypatch)
    install(
        monkeypatch,
        "executorch.backends.xnnpack.quantizer.xnnpack_quantizer",
        XNNPACKQuantizer=lambda: Record(set_global=lambda config: ("XNNPACK", noise(), config)),
    )
    images = torch.rand(3, 2).split(1)

    executorch_file.write_int8(
        two_contents(half=False), tmp_path / "net.pte", Quantization(images, weight_bits=8)
    )

    require_asked(compiler)
    ((watched, (name, _, config)),) = quantizing.prepared  # type: ignore[misc]
    assert [batch for (batch,) in watched.images] == [*images]
    assert (name, config) == ("XNNPACK", pt2_file.quantization_config(torch.int8, 127))
    assert (tmp_path / "net.pte").read_bytes() == b"a program"
    assert capfd.readouterr() == ("", "")


def test_the_runtime_gives_outputs_that_the_next_run_leaves_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []
    memory = torch.zeros(2, 3, 4, 5)

    def execute(inputs: list[Tensor]) -> list[Tensor]:
        assert all(tensor.is_contiguous() for tensor in inputs)
        memory[0] = inputs[0]
        memory[1] = inputs[1]
        return [memory[0], memory[1]]

    def load_method(name: str) -> Any:
        asked.append(name)
        return Record(execute=execute)

    def load_program(file: Path) -> Any:
        noise()
        asked.append(file)
        return Record(load_method=load_method)

    install(
        monkeypatch,
        "executorch.runtime",
        Runtime=Record(get=lambda: Record(load_program=load_program)),
    )
    one, other = torch.rand(2, 3, 5, 4).transpose(2, 3)

    runs = executorch_file.open(tmp_path / "net.pte")
    first = runs(one, other)
    second = runs(other, one)

    assert asked == [tmp_path / "net.pte", "forward"]
    for found, wanted in zip((*first, *second), (one, other, other, one), strict=True):
        assert torch.equal(found, wanted)
    assert capfd.readouterr() == ("", "")


def operator(index: int) -> Any:
    return Record(instr_args=Record(op_index=index))


def delegate(index: int) -> Any:
    return Record(instr_args=Record(delegate_index=index))


PLAN = Record(
    name="forward",
    chains=[
        Record(instructions=[delegate(1), operator(0), Record(instr_args=Record(jump=3))]),
        Record(instructions=[operator(1), delegate(1), delegate(1)]),
    ],
    delegates=[Record(id="Other"), Record(id="Xnnpack")],
    operators=[Record(name="aten::relu"), Record(name="aten::add")],
)
TEXTS = Record(
    name="normswap",
    chains=None,
    values=[
        Record(val=Record(string_val=json.dumps({**METADATA, "count": 3}))),
        Record(val=Record(string_val="{}")),
    ],
)


@pytest.mark.parametrize(
    ("plans", "metadata"), [([PLAN], {}), ([PLAN, TEXTS], {**METADATA, "count": "3"})]
)
def test_what_a_program_says_of_itself(
    plans: list[Any],
    metadata: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "net.pte"
    file.write_bytes(b"a program")

    def parse(content: bytes) -> Any:
        noise()
        assert content == b"a program"
        return Record(program=Record(execution_plan=plans))

    install(monkeypatch, "executorch.exir._serialize._program", deserialize_pte_binary=parse)

    assert executorch_file.metadata(file) == metadata
    counts = {"Xnnpack": 3, "relu": 1, "add": 1}
    assert [*executorch_file.nodes(file).items()] == [*counts.items()]
    assert capfd.readouterr() == ("", "")
