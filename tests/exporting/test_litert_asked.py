"""LiteRT without its packages: what converter, quantizer and runtime are asked, and what stands in
the file.
"""

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
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

from normswap.errors import SourceError
from normswap.exporting import litert_file
from normswap.exporting.settings import Quantization

KINDS = {"ADD": 0, "CONV_2D": 3, "RELU": 19, "STABLEHLO_ADD": 150, "CUSTOM": 32}
BEGIN = b"\0\0\0\0TFL3"
FAR = b"far behind them"


@dataclass
class Named:
    """A tensor, or an entry of a signature, in a file."""

    name: Any
    tensorIndex: int = 0


@dataclass
class Buffer:
    """Bytes in a file: its own, or those at an offset behind the records."""

    data: Any = None
    offset: int = 0
    size: int = 0

    def Pack(self, builder: "Builder") -> int:
        builder.packed.append(
            (self.offset, self.size, None if self.data is None else bytes(self.data))
        )
        return len(builder.packed)


@dataclass
class Entry:
    """An entry of the metadata."""

    name: Any
    buffer: int


@dataclass
class Model:
    """The records of a file, in place of those of LiteRT's schema."""

    subgraphs: list[Any]
    signatureDefs: list[Any]
    buffers: list[Buffer]
    metadata: list[Entry] | None = None
    operatorCodes: list[Any] = field(default_factory=list)
    externalBufferGroups: list[Any] = field(default_factory=list)

    def Pack(self, builder: "Builder") -> "Model":
        for buffer in self.buffers:
            buffer.Pack(builder)
        # In a file, all names are bytes.
        ends = (each for side in self.signatureDefs for each in (*side.inputs, *side.outputs))
        for named in (*ends, *self.subgraphs[0].tensors, *(self.metadata or [])):
            if isinstance(named.name, str):
                named.name = named.name.encode()
        self.buffers = [Buffer(*packed[2:], *packed[:2]) for packed in builder.packed]
        return self

    @staticmethod
    def parsed(content: bytearray) -> "Model":
        model: Model = pickle.loads(bytes(content[len(BEGIN) + len(FAR) :]))
        return model


class Builder:
    """The writer of a file: what is packed, and how it was aligned."""

    def __init__(self, size: int) -> None:
        assert size > 0
        self.packed: list[tuple[int, int, bytes | None]] = []
        self.aligned: list[tuple[int, int]] = []
        self.content = b""
        WRITERS.append(self)

    def Prep(self, size: int, additional: int) -> None:
        self.aligned.append((size, additional))

    def Finish(self, model: Model, *, file_identifier: bytes) -> None:
        self.content = b"\0\0\0\0" + file_identifier + FAR + pickle.dumps(model)

    def Output(self) -> bytearray:
        return bytearray(self.content)


WRITERS: list[Builder] = []


def converted() -> bytes:
    """A file as the converter writes it: its names end in numbers, and stand in another order."""
    tensors = [Named(b"t0"), Named(b"t1"), Named(b"t2"), Named(b"t3"), Named(b"t4")]
    graph = Record(tensors=tensors, inputs=[3, 1], outputs=[4, 0])
    signature = Record(
        inputs=[Named(b"args_1", 3), Named(b"args_0", 1)],
        outputs=[Named(b"output_1", 4), Named(b"output_0", 0)],
    )
    buffers = [
        Buffer(),
        Buffer(np.frombuffer(b"own bytes", np.uint8)),
        Buffer(offset=len(BEGIN), size=len(FAR)),
    ]
    return BEGIN + FAR + pickle.dumps(Model([graph], [signature], buffers, [Entry(b"version", 1)]))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the converter and the quantizer are asked, with stand-ins of all packages."""
    calls: list[Any] = []
    WRITERS.clear()

    def convert(network: Any, example: Any) -> Any:
        noise()
        calls.append((network, example))
        return Record(model_content=lambda: bytearray(converted()))

    def quantizer(content: bytearray) -> Any:
        noise()
        calls.append(bytes(content))
        return Record(
            update_quantization_recipe=lambda *words, **options: calls.append((words, options)),
            add_static_config=lambda *words, **options: calls.append((words, options)),
            calibrate=calibrate,
            quantize=quantize,
        )

    def calibrate(given: dict[str, list[dict[str, np.ndarray]]]) -> dict[str, dict[str, Any]]:
        (images,) = given["serving_default"]
        values = images["args_0"]
        return {"x": {"min": values.min(keepdims=True), "max": values.max(keepdims=True), "n": 1}}

    def quantize(*ranges: Any) -> Any:
        calls.append(ranges)
        return Record(quantized_model=bytearray(converted()))

    names = ("CONV_2D", "DEPTHWISE_CONV_2D", "CONV_2D_TRANSPOSE", "FULLY_CONNECTED")
    kinds = {name: name for name in (*names, "INPUT", "OUTPUT")}

    class Kinds(dict):  # type: ignore[type-arg]
        ALL_SUPPORTED = "all"

    types = Record(
        TensorQuantizationConfig=lambda **options: options,
        OpQuantizationConfig=lambda **options: options,
        TensorDataType=Record(FLOAT="float"),
        ComputePrecision=Record(FLOAT="float"),
        TFLOperationName=Kinds(kinds),
    )
    install(monkeypatch, "litert_torch", convert=convert)
    install(
        monkeypatch,
        "ai_edge_quantizer",
        qtyping=types,
        quantizer=Record(Quantizer=quantizer),
    )
    install_schema(monkeypatch)
    return calls


def install_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = Record(
        ModelT=Record(InitFromPackedBuf=Model.parsed),
        MetadataT=Entry,
        BufferT=Buffer,
        BuiltinOperator=type("BuiltinOperator", (), {**KINDS, "__doc__": "kinds"}),
    )
    install(monkeypatch, "ai_edge_litert", schema_py_generated=schema)
    install(monkeypatch, "flatbuffers", Builder=Builder)


def require_file(file: Path) -> None:
    """A file must have our names, all of its bytes at multiples of 16, and the metadata."""
    content = file.read_bytes()
    assert content.startswith(BEGIN)
    model = Model.parsed(bytearray(content))
    (graph,) = model.subgraphs
    (signature,) = model.signatureDefs
    assert (graph.inputs, graph.outputs) == ([1, 3], [0, 4])
    assert [tensor.name for tensor in graph.tensors] == [
        b"wide",
        b"view",
        b"t2",
        b"other",
        b"narrow",
    ]
    assert signature.inputs == [Named(b"view", 1), Named(b"other", 3)]
    assert signature.outputs == [Named(b"wide", 0), Named(b"narrow", 4)]

    assert model.metadata is not None
    assert [entry.name for entry in model.metadata] == [b"version", b"normswap"]
    *before, last = model.buffers
    assert before == [Buffer(), Buffer(b"own bytes"), Buffer(FAR)]
    assert (last.offset, last.size) == (0, 0)
    (writer,) = WRITERS
    assert writer.aligned == [(16, len(b.data)) for b in model.buffers if b.data is not None]
    assert litert_file.metadata(file) == METADATA


@pytest.mark.parametrize("half", [False, True])
def test_the_network_goes_to_the_converter_and_in_fp16_to_the_quantizer(
    half: bool, asked: list[Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "net.tflite"

    litert_file.write(two_contents(half=half), file)

    (network, example), *halving = asked
    require_two(network, half=half)
    assert all(map(torch.equal, example, two_inputs()))
    if half:
        how = {
            "weight_tensor_config": {"num_bits": 16, "dtype": "float"},
            "compute_precision": "float",
            "explicit_dequantize": True,
        }
        kinds = ("CONV_2D", "DEPTHWISE_CONV_2D", "CONV_2D_TRANSPOSE", "FULLY_CONNECTED")
        recipe = [((".*", kind, how), {"algorithm_key": "float_casting"}) for kind in kinds]
        assert halving == [converted(), *recipe, ()]
    else:
        assert halving == []
    require_file(file)
    assert capfd.readouterr() == ("", "")


def test_int8_has_bytes_inside_and_ranges_over_all_images(
    asked: list[Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "net.tflite"
    images = torch.tensor([[-1.0, 2.0], [-5.0, 1.0], [0.0, 7.0]]).split(1)

    litert_file.write_int8(two_contents(half=False), file, Quantization(images, weight_bits=8))

    (network, _), content, *recipe, (ranges,) = asked
    require_two(network, half=False)
    assert content == converted()
    assert recipe == [
        ((".*", "all"), {"activation_num_bits": 8, "weight_num_bits": 8}),
        ((".*", "INPUT"), {"algorithm_key": "no_quantize"}),
        ((".*", "OUTPUT"), {"algorithm_key": "no_quantize"}),
    ]
    assert ranges == {"x": {"min": [[-5.0]], "max": [[7.0]], "n": 1}}
    require_file(file)
    assert capfd.readouterr() == ("", "")


def file_of(tmp_path: Path, **changes: Any) -> Path:
    """A file of another program, with these records changed."""
    model = Model.parsed(bytearray(converted()))
    for name, value in changes.items():
        setattr(model, name, value)
    file = tmp_path / "net.tflite"
    file.write_bytes(BEGIN + FAR + pickle.dumps(model))
    return file


@pytest.mark.parametrize("others", [None, [Entry(b"somebody's", 1)]])
def test_what_a_file_says_of_itself(
    others: list[Entry] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_schema(monkeypatch)
    # The table of kinds: one as old files name it, two as new ones do, and one of somebody's own.
    table = [
        Record(customCode=None, builtinCode=0, deprecatedBuiltinCode=3),
        Record(customCode=None, builtinCode=150, deprecatedBuiltinCode=127),
        Record(customCode=None, builtinCode=19, deprecatedBuiltinCode=19),
        Record(customCode=b"Own", builtinCode=32, deprecatedBuiltinCode=32),
    ]
    graphs = [
        Record(operators=[Record(opcodeIndex=index) for index in (3, 0, 2)]),
        Record(operators=[Record(opcodeIndex=index) for index in (1, 0, 0, 2)]),
    ]

    file = file_of(tmp_path, operatorCodes=table, subgraphs=graphs, metadata=others)

    counts = {"CONV_2D": 3, "RELU": 2, "Own": 1, "STABLEHLO_ADD": 1}
    assert [*litert_file.nodes(file).items()] == [*counts.items()]
    assert litert_file.metadata(file) == {}


@pytest.mark.parametrize("read", [litert_file.nodes, litert_file.metadata, litert_file.open])
def test_no_file_is_read_that_is_none_or_takes_weights_from_others(
    read: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_schema(monkeypatch)
    file = file_of(tmp_path, externalBufferGroups=["weights.bin"])

    with pytest.raises(SourceError, match=r"net\.tflite takes its weights from .*Put them into it"):
        read(file)

    file.write_bytes(b"TFL3 here is too early")
    with pytest.raises(ValueError, match="does not begin"):
        read(file)


@pytest.mark.parametrize("inside", [False, True])
def test_the_runtime_gives_real_numbers(
    inside: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A tensor in int8 is 0.5 (value - 3)."""
    install_schema(monkeypatch)
    asked: list[Any] = []
    held = {
        4: np.zeros((1, 2), np.float32),
        2: np.zeros((1, 3), np.float32),
        7: np.array([[5, -128]], np.int8),
        9: np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4),
    }
    details = {
        index: {"index": index, "quantization": (0.5, 3) if index == 7 else (0.0, 0)}
        for index in held
    }

    def interpreter(file: str, **options: Any) -> Any:
        noise()
        asked.append((file, options))
        return Record(
            allocate_tensors=lambda: asked.append("allocated"),
            get_input_details=lambda: [details[4], details[2]],
            get_output_details=lambda: [details[7], details[4], details[9]],
            get_tensor_details=lambda: [*details.values()],
            set_tensor=held.__setitem__,
            get_tensor=held.__getitem__,
            invoke=lambda: asked.append("run"),
        )

    resolvers = Record(AUTO="all", BUILTIN_WITHOUT_DEFAULT_DELEGATES="LiteRT's own")
    install(
        monkeypatch,
        "ai_edge_litert.interpreter",
        Interpreter=interpreter,
        OpResolverType=resolvers,
    )
    file = file_of(tmp_path)
    one = torch.rand(1, 2)
    other = torch.rand(1, 3)

    asked_inside = {"inside": True} if inside else {}
    answers = litert_file.open(file, **asked_inside)(one, other)

    options = {
        "num_threads": torch.get_num_threads(),
        "experimental_op_resolver_type": "LiteRT's own" if inside else "all",
        "experimental_preserve_all_tensors": inside,
    }
    assert asked == [(str(file), options), "allocated", "run"]
    rounded = torch.tensor([[1.0, -65.5]])
    map_last = torch.arange(24.0).reshape(1, 2, 3, 4)
    wanted = [rounded, one, map_last]
    if inside:
        # A map is also given with its channels second, as PyTorch has them.
        wanted = [one, other, rounded, map_last, map_last.permute(0, 3, 1, 2)]
    assert len(answers) == len(wanted)
    for answer, right in zip(answers, wanted, strict=True):
        assert torch.equal(answer, right)
    assert capfd.readouterr() == ("", "")
