"""A .pt2 that somebody prepared runs nothing: each command refuses it by one line.

Every prepared file would create the file RAN if any code in it ran.
"""

import base64
import functools
import io
import json
import os
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from support.command_line import Capture
from support.sampled_tables import crossed
from torch import Tensor, nn

import normswap
from normswap.cli.app import main
from normswap.errors import SourceError
from normswap.exporting import coreml_file, onnx_file, pt2_file, pt2_program
from normswap.exporting.pt2_expressions import NotAllowedError, checked_size, require_guard
from normswap.exporting.pt2_program import require_operator
from normswap.storage import checkpoint

MARK = Path(tempfile.gettempdir()) / f"normswap-ran-{os.getpid()}"
TOUCH = f"touch {MARK}"
CODE = f"__import__('os').system('{TOUCH}')"

Entries: TypeAlias = dict[str, bytes]
Program: TypeAlias = dict[str, Any]

PROGRAM = "models/model.json"
SAMPLES = "data/sample_inputs/model.pt"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"
COMMANDS = {
    "inspect": ("inspect", "FILE"),
    "evaluate": ("evaluate", "FILE", "--data", "demo", "--samples", "4", "--workers", "0"),
    "verify": ("verify", "FILE", "--against", "demo"),
    "bench": ("bench", "demo", "FILE", "--seconds", "0.01", "--batch-size", "1"),
}


class Evil:
    """An object whose pickle runs a command when it is read."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (TOUCH,)


@pytest.fixture(autouse=True)
def nothing_ran() -> Iterator[None]:
    MARK.unlink(missing_ok=True)
    yield
    ran = MARK.exists()
    MARK.unlink(missing_ok=True)
    assert not ran


@functools.cache
def exported() -> Path:
    """The file of the demo's network, with its sidecar beside it."""
    file = Path(tempfile.mkdtemp()) / "a.pt2"
    normswap.export(checkpoint.open_model("demo"), file, dynamic_batch=True)
    return file


def entries_of(file: Path) -> Entries:
    with zipfile.ZipFile(file) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def write_archive(entries: Entries, file: Path) -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in entries.items():
            archive.writestr(f"a/{name}", content)
    beside = exported().with_name("a.pt2.preprocess.json")
    shutil.copyfile(beside, file.with_name(f"{file.name}.preprocess.json"))
    return file


def pickled(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def name_of(row: str | Callable[..., None]) -> str:
    return row if isinstance(row, str) else row.__name__


def refuse(file: Path, command: str, capfd: Capture) -> str:
    """Run a command on the file; return the one line by which it refuses."""
    arguments = [str(file) if word == "FILE" else word for word in COMMANDS[command]]
    capfd.readouterr()
    code = main(arguments)
    out, err = capfd.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ")
    assert "Traceback" not in err
    return err


# Changes of the archive's entries.


def pickle_in_samples(entries: Entries) -> None:
    entries[SAMPLES] = pickled(((Evil(),), {}))


def pickle_in_samples_as_stream(entries: Entries) -> None:
    buffer = io.BytesIO()
    torch.save(Evil(), buffer, _use_new_zipfile_serialization=False)
    entries[SAMPLES] = buffer.getvalue()


def script_in_samples(entries: Entries) -> None:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Identity()), buffer)
    entries[SAMPLES] = buffer.getvalue()


def pickle_of_all_weights(entries: Entries) -> None:
    entries["data/weights/model.pt"] = pickled({"weight": Evil()})


def pickle_of_all_constants(entries: Entries) -> None:
    entries["data/constants/model.pt"] = pickled({"constant": Evil()})


def pickled_weight(entries: Entries) -> None:
    table = json.loads(entries[WEIGHTS])
    payload = next(iter(table["config"].values()))
    payload["use_pickle"] = True
    entries[f"data/weights/{payload['path_name']}"] = pickled(Evil())
    entries[WEIGHTS] = json.dumps(table).encode()


def _constant(entries: Entries, path_name: str, content: bytes, **changes: object) -> None:
    meta = next(iter(json.loads(entries[WEIGHTS])["config"].values()))["tensor_meta"]
    payload = {"path_name": path_name, "is_param": False, "use_pickle": True, "tensor_meta": meta}
    entries[CONSTANTS] = json.dumps({"config": {"c": payload | changes}}).encode()
    entries[f"data/constants/{path_name}"] = content


def pickled_constant(entries: Entries) -> None:
    _constant(entries, "tensor_0", pickled(Evil()))


def opaque_constant(entries: Entries) -> None:
    import pickle

    _constant(entries, "opaque_obj_0", pickle.dumps(Evil()))


def custom_object(entries: Entries) -> None:
    _constant(entries, "custom_obj_0", pickled(Evil()), tensor_meta=None)


def library(entries: Entries) -> None:
    entries["data/aotinductor/model/evil.so"] = b"\x7fELF"


def source_file(entries: Entries) -> None:
    entries["data/aotinductor/model/wrapper.cpp"] = b"int main() {}"


def path_out_of_the_archive(entries: Entries) -> None:
    entries["extra/../../evil"] = b"x"


def other_program(entries: Entries) -> None:
    entries["models/other.json"] = entries[PROGRAM]


def deep_records(entries: Entries) -> None:
    entries[PROGRAM] = b'{"graph_module":' * 100_000 + b"0" + b"}" * 100_000


def weight_without_numbers(entries: Entries) -> None:
    table = json.loads(entries[WEIGHTS])
    payload = next(iter(table["config"].values()))
    payload["tensor_meta"]["sizes"] = [{"as_int": 2**31}]
    entries[f"data/weights/{payload['path_name']}"] = b""
    entries[WEIGHTS] = json.dumps(table).encode()


def weight_without_end(entries: Entries) -> None:
    table = json.loads(entries[WEIGHTS])
    meta = next(iter(table["config"].values()))["tensor_meta"]
    meta |= {"sizes": [{"as_int": 10**12}], "strides": [{"as_int": 0}]}
    entries[WEIGHTS] = json.dumps(table).encode()


def weight_of_another_name(entries: Entries) -> None:
    table = json.loads(entries[WEIGHTS])
    payload = next(iter(table["config"].values()))
    table["config"][f'x").{CODE}("'] = payload
    entries[WEIGHTS] = json.dumps(table).encode()


ENTRIES = [
    pickle_in_samples,
    pickle_in_samples_as_stream,
    script_in_samples,
    pickle_of_all_weights,
    pickle_of_all_constants,
    pickled_weight,
    pickled_constant,
    opaque_constant,
    custom_object,
    library,
    source_file,
    path_out_of_the_archive,
    other_program,
    deep_records,
    weight_without_numbers,
    weight_without_end,
    weight_of_another_name,
]


# Changes of the program's JSON.


def graph_of(program: Program) -> Program:
    graph: Program = program["graph_module"]["graph"]
    return graph


def call_of(program: Program) -> Program:
    signature: Program = program["graph_module"]["module_call_graph"][0]["signature"]
    return signature


def _set_expression(value: object, text: str) -> None:
    """Write one expression in the place of every other."""
    if isinstance(value, dict):
        if "expr_str" in value:
            value["expr_str"] = text
        for inner in value.values():
            _set_expression(inner, text)
    elif isinstance(value, list):
        for inner in value:
            _set_expression(inner, text)


def expression(program: Program) -> None:
    _set_expression(program, CODE)


def expression_in_a_symbol(program: Program) -> None:
    _set_expression(program, f'Add(Symbol("s34"), "{CODE}")')


def expression_by_attributes(program: Program) -> None:
    _set_expression(program, "Symbol('s34').__class__.__init__.__globals__")


def expression_in_a_lambda(program: Program) -> None:
    _set_expression(program, f"(lambda: {CODE})()")


def guards(program: Program) -> None:
    program["guards_code"] = [f"{CODE} == 0"]


def guard_on_an_input(program: Program) -> None:
    program["guards_code"] = [f"L['images'].size()[{CODE}] == 3"]


def guard_by_attributes(program: Program) -> None:
    program["guards_code"] = ["L['images'].__class__.__init__.__globals__['os'] != 1"]


def torch_function(program: Program) -> None:
    call = {"name": "", "arg": {"as_string": TOUCH}, "kind": 1}
    outputs = [{"as_none": True}]
    node = {"target": "torch.os.system", "inputs": [call], "outputs": outputs, "metadata": {}}
    graph_of(program)["nodes"].insert(0, node)


def _replace_operator(program: Program, target: str) -> None:
    graph_of(program)["nodes"][-1]["target"] = target


def operator_of_a_library(program: Program) -> None:
    _replace_operator(program, "torch.ops.evil.run.default")


def operator_that_loads_a_library(program: Program) -> None:
    _replace_operator(program, "torch.ops.load_library")


def operator_that_maps_a_file(program: Program) -> None:
    _replace_operator(program, "torch.ops.aten.from_file.default")


def operator_of_the_interpreter(program: Program) -> None:
    _replace_operator(program, "torch.ops.aten.save.default")


def operator_on_raw_memory(program: Program) -> None:
    _replace_operator(program, "torch.ops.aten._reshape_alias.default")


def operator_that_reads_a_file(program: Program) -> None:
    _replace_operator(program, "torch.ops.torchvision.read_file.default")


def operator_of_python(program: Program) -> None:
    _replace_operator(program, "_operator.methodcaller")


def operator_of_an_extension(program: Program) -> None:
    _replace_operator(program, "#evil:run")


def operator_on_scripts(program: Program) -> None:
    _replace_operator(program, "torch.ops.higher_order.call_torchbind")


def operator_as_an_argument(program: Program) -> None:
    graph_of(program)["nodes"][-1]["inputs"][0]["arg"] = {"as_operator": "torch.os.system"}


def object_as_an_argument(program: Program) -> None:
    custom = {"name": "x", "class_fqn": "__torch__.torch.classes.evil"}
    graph_of(program)["nodes"][-1]["inputs"][0]["arg"] = {"as_custom_obj": custom}


def code_in_a_name(program: Program) -> None:
    name = f"x = {CODE}"
    node = graph_of(program)["nodes"][-1]
    node["name"] = node["outputs"][0]["as_tensor"]["name"] = name
    graph_of(program)["outputs"] = [{"as_tensor": {"name": name}}]


def code_in_an_input(program: Program) -> None:
    call_of(program)["forward_arg_names"] = [f"images={CODE}"]


def code_in_a_parameter(program: Program) -> None:
    for spec in program["graph_module"]["signature"]["input_specs"]:
        if "parameter" in spec:
            spec["parameter"]["parameter_name"] = f'-", {CODE}) or ("'
            return


def code_in_a_keyword(program: Program) -> None:
    leaf = {"type": None, "context": None, "children_spec": []}
    keys = json.dumps([f"a={CODE}"])
    named = {"type": "builtins.dict", "context": keys, "children_spec": [leaf]}
    empty = {"type": "builtins.tuple", "context": "null", "children_spec": []}
    tree = {"type": "builtins.tuple", "context": "null", "children_spec": [empty, named]}
    call_of(program).update(in_spec=json.dumps([1, tree]), forward_arg_names=None)


def _outputs(program: Program, kind: str, context: str) -> None:
    leaf = {"type": None, "context": None, "children_spec": []}
    tree = {"type": kind, "context": context, "children_spec": [leaf]}
    call_of(program)["out_spec"] = json.dumps([1, tree])


def import_by_an_enumeration(program: Program) -> None:
    name = {"__enum__": True, "fqn": "antigravity:Evil", "name": "x"}
    _outputs(program, "builtins.dict", json.dumps([name]))


def import_by_a_default(program: Program) -> None:
    context: Any = {"default_factory_module": "antigravity", "default_factory_name": "x"}
    leaf = {"type": None, "context": None, "children_spec": []}
    tree = {
        "type": "collections.defaultdict",
        "context": context | {"dict_context": ["x"]},
        "children_spec": [leaf],
    }
    call_of(program)["out_spec"] = json.dumps([1, tree])


def outputs_of_a_foreign_type(program: Program) -> None:
    _outputs(program, "evil.Record", "null")


def text_among_the_inputs(program: Program) -> None:
    constant = {"name": "mode", "value": {"as_string": f"' + {CODE} + '"}}
    program["graph_module"]["signature"]["input_specs"].append({"constant_input": constant})


def power_without_end(program: Program) -> None:
    _set_expression(program, "Pow(Integer(9), Pow(Integer(9), Integer(999999999)))")


def many_free_symbols(program: Program) -> None:
    program["range_constraints"] = {"u9999999999999": {"min_val": 0, "max_val": None}}


def number_without_end(program: Program) -> None:
    graph_of(program)["nodes"][-1]["inputs"][0]["arg"] = {"as_int": 10**30}


def unknown_field(program: Program) -> None:
    program["on_load"] = CODE


def unknown_device(program: Program) -> None:
    for meta in graph_of(program)["tensor_values"].values():
        meta["device"]["type"] = "evil"


PROGRAMS = [
    expression,
    expression_in_a_symbol,
    expression_by_attributes,
    expression_in_a_lambda,
    guards,
    guard_on_an_input,
    guard_by_attributes,
    torch_function,
    operator_of_a_library,
    operator_that_loads_a_library,
    operator_that_maps_a_file,
    operator_of_the_interpreter,
    operator_on_raw_memory,
    operator_that_reads_a_file,
    operator_of_python,
    operator_of_an_extension,
    operator_on_scripts,
    operator_as_an_argument,
    object_as_an_argument,
    code_in_a_name,
    code_in_an_input,
    code_in_a_parameter,
    code_in_a_keyword,
    import_by_an_enumeration,
    import_by_a_default,
    outputs_of_a_foreign_type,
    text_among_the_inputs,
    power_without_end,
    many_free_symbols,
    number_without_end,
    unknown_field,
    unknown_device,
]


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
@crossed("change, command", ENTRIES, COMMANDS, ids=name_of)
def test_an_archive_with_prepared_entries_is_refused(
    change: Callable[[Entries], None], command: str, tmp_path: Path, capfd: Capture
) -> None:
    entries = entries_of(exported())
    change(entries)
    file = write_archive(entries, tmp_path / "b.pt2")

    message = refuse(file, command, capfd)

    assert str(file) in message


@pytest.mark.one_in(3)
@crossed("change, command", PROGRAMS, COMMANDS, ids=name_of)
def test_a_prepared_graph_is_refused(
    change: Callable[[Program], None], command: str, tmp_path: Path, capfd: Capture
) -> None:
    entries = entries_of(exported())
    program = json.loads(entries[PROGRAM])
    change(program)
    entries[PROGRAM] = json.dumps(program).encode()
    file = write_archive(entries, tmp_path / "b.pt2")

    message = refuse(file, command, capfd)

    assert str(file) in message
    assert "normswap does not open" in message


# Changes of the archive itself.


def second_entry(archive: zipfile.ZipFile) -> None:
    archive.writestr(f"a/{SAMPLES}", pickled(Evil()))


def second_entry_in_capitals(archive: zipfile.ZipFile) -> None:
    archive.writestr(f"a/{SAMPLES.upper()}", pickled(Evil()))


def entry_outside(archive: zipfile.ZipFile) -> None:
    archive.writestr("b/models/model.json", b"{}")


def compressed_entry(archive: zipfile.ZipFile) -> None:
    archive.writestr("a/extra/bomb", b"0" * 10**7, zipfile.ZIP_DEFLATED)


def link(archive: zipfile.ZipFile) -> None:
    info = zipfile.ZipInfo("a/extra/link")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    archive.writestr(info, b"/etc/passwd")


@pytest.mark.filterwarnings("ignore:Duplicate name")
@crossed(
    "add, command",
    [second_entry, second_entry_in_capitals, entry_outside, compressed_entry, link],
    COMMANDS,
    ids=name_of,
)
def test_an_archive_with_two_meanings_is_refused(
    add: Callable[[zipfile.ZipFile], None], command: str, tmp_path: Path, capfd: Capture
) -> None:
    file = write_archive(entries_of(exported()), tmp_path / "b.pt2")
    with zipfile.ZipFile(file, "a") as archive:
        add(archive)

    message = refuse(file, command, capfd)

    assert str(file) in message
    assert "normswap does not open" in message


def test_what_reaches_torch_was_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []
    load = torch.export.load

    def watched(stream: io.BytesIO) -> object:
        given.append(stream.getvalue())
        return load(stream)

    monkeypatch.setattr(torch.export, "load", watched)
    pt2_file.load(exported())

    (content,) = given
    assert isinstance(content, bytes)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = archive.namelist()
        program = json.loads(archive.read(f"model/{PROGRAM}"))
        samples = archive.read(f"model/{SAMPLES}")
    assert samples == b""
    assert program["guards_code"] == []
    assert all(node["metadata"] == {} for node in graph_of(program)["nodes"])
    assert not [name for name in names if "extra" in name]


# What users write by torch.export.save opens as before.


class Nested(nn.Module):
    """A network with inputs in a dict and by name, and outputs of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.register_buffer("ones", torch.ones(1).expand(4), persistent=False)
        self.scale = torch.tensor([1.0, 2.0])

    def forward(self, images: dict[str, Tensor], *, others: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            first = self.stem(images["first image"])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            second = self.stem(others)
        side = others.shape[2] // 2
        small = nn.functional.interpolate(first, size=(side, side + 1), mode="bilinear")
        return {"small": small * self.scale[1], "list": [second.float(), self.ones], "side": side}


class Branching(nn.Module):
    """A network with a condition, an equation, and as many rows as the values say."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
        rows = x.nonzero()
        torch._check(rows.shape[0] >= 2)
        return y, torch.einsum("bchw,bdhw->bcd", x, y), rows


def _normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU()).eval()


def _free_sides() -> dict[int, Any]:
    return {0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}


X = torch.randn(2, 3, 16, 16)
PROGRAMS_OF_USERS: dict[str, Callable[[], torch.export.ExportedProgram]] = {
    "plain": lambda: torch.export.export(_normed(), (X,)),
    "guarded": lambda: torch.export.export(_normed(), (X,), dynamic_shapes=(_free_sides(),)),
    "decomposed": lambda: torch.export.export(_normed(), (X,)).run_decompositions(),
    "double": lambda: torch.export.export(_normed().double(), (X.double(),)),
    "nested": lambda: torch.export.export(Nested(), ({"first image": X},), {"others": X}),
    "branching": lambda: torch.export.export(Branching(), (X,)),
}


def same(one: object, two: object) -> bool:
    leaves = torch.utils._pytree.tree_leaves
    pairs = zip(leaves(one), leaves(two), strict=True)
    return all(torch.equal(torch.as_tensor(left), torch.as_tensor(right)) for left, right in pairs)


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:No complete tensor found")
@pytest.mark.parametrize("name", PROGRAMS_OF_USERS)
def test_a_file_of_torch_opens_as_before(name: str, tmp_path: Path) -> None:
    file = tmp_path / "a.pt2"
    program = PROGRAMS_OF_USERS[name]()
    torch.export.save(program, file, extra_files={"note.txt": "hello"})
    arguments, keywords = program.example_inputs

    found = pt2_file._module(pt2_file.load(file))(*arguments, **keywords)

    assert same(found, program.module()(*arguments, **keywords))
    assert pt2_file.metadata(file) == {"note.txt": "hello"}
    assert pt2_file.nodes(file)


def test_a_file_with_the_weights_in_one_pickle_opens(tmp_path: Path) -> None:
    program = PROGRAMS_OF_USERS["plain"]()
    plain = tmp_path / "plain.pt2"
    torch.export.save(program, plain)
    entries = entries_of(plain)
    del entries[WEIGHTS]
    entries["data/weights/model.pt"] = pickled(dict(program.state_dict))
    file = write_archive(entries, tmp_path / "a.pt2")

    found = pt2_file.open(file)(X)

    assert same(found, program.module()(X))


def old_layout(program: torch.export.ExportedProgram, **changes: bytes) -> Entries:
    """The entries of a file of torch 2.7 and before."""
    from torch._export.serde.serialize import SCHEMA_VERSION, serialize

    artifact = serialize(program)
    return {
        "version": ".".join(map(str, SCHEMA_VERSION)).encode(),
        "serialized_exported_program.json": artifact.exported_program,
        "serialized_state_dict.pt": artifact.state_dict,
        "serialized_constants.pt": artifact.constants,
        "serialized_example_inputs.pt": artifact.example_inputs,
        "extra_files/note.txt": b"hello",
    } | changes


def write_old(entries: Entries, file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


def test_a_file_of_an_older_torch_opens(tmp_path: Path) -> None:
    program = PROGRAMS_OF_USERS["guarded"]()
    file = tmp_path / "a.pt2"
    write_old(old_layout(program), file)

    found = pt2_file.open(file)(X)

    assert same(found, program.module()(X))
    assert pt2_file.metadata(file) == {"note.txt": "hello"}


@pytest.mark.parametrize("entry", ["state_dict", "constants", "example_inputs"])
def test_a_pickle_in_a_file_of_an_older_torch_is_refused(
    entry: str, tmp_path: Path, capfd: Capture
) -> None:
    name = f"serialized_{entry}.pt"
    entries = old_layout(PROGRAMS_OF_USERS["plain"]())
    entries[name] = pickled({"x": Evil()})
    file = tmp_path / "a.pt2"
    write_old(entries, file)

    assert name in refuse(file, "inspect", capfd)
    with pytest.raises(SourceError, match=name):
        pt2_file.load(file)


SIZES = (
    "Symbol('s77', positive=True, integer=True)",
    "Mul(Integer(9), Symbol('s77', positive=True, integer=True))",
    "Add(FloorDiv(Add(Symbol('s0', integer=True), Integer(-1)), Integer(8)), Integer(1))",
    "Pow(Symbol('s0', integer=True), Integer(2))",
    "Max(1, (s0 - 1)//2 + 1)",
    "2*s0 + 1",
    "Eq(Mod(s0, 4), 0)",
    "GreaterThan(Symbol('u0', integer=True), Integer(2))",
    "FloatTrueDiv(ToFloat(Symbol('s0')), Float('2.5', precision=53))",
)
NO_SIZES = (
    "print(1)",
    "Symbol('x')",
    "Symbol('__import__')",
    "Integer('1')",
    "Symbol(name='s0')",
    "Symbol(*'s0')",
    "s0.free_symbols",
    "s0[0]",
    "[s0 for s0 in (1,)]",
    "(lambda: 1)()",
    "f'{s0}'",
    "s0 if s0 else s0",
    "(s0 := 1)",
    "eval",
    "Function('f')(1)",
    "Add.__class__",
    "9**9**9",
    "Pow(Pow(2, 60), 60)",
    "LShift(1, 10000000000)",
    "s0 +",
    "é",
    "(" * 500 + ")" * 500,
)


@pytest.mark.parametrize("text", SIZES)
def test_the_expressions_that_torch_writes_are_sizes(text: str) -> None:
    checked_size(text)


@pytest.mark.parametrize("text", NO_SIZES)
def test_other_expressions_are_no_sizes(text: str) -> None:
    with pytest.raises(NotAllowedError):
        checked_size(text)


@pytest.mark.parametrize(
    "text",
    [
        "(1 + (((-1) + L['x'].size()[3]) // 2)) != 1",
        "L['args'][0].size()[2] == L['images']['left'].size()[1]",
        "2 <= L['x'].shape[0] and L['n'] <= 64",
        "torch.sym_max(1, L['x'].size()[2] // 2) != 1",
        "Mod(L['x'].stride()[0], 8) == 0",
    ],
)
def test_the_guards_that_torch_writes_are_known(text: str) -> None:
    require_guard(text)


@pytest.mark.parametrize(
    "text",
    [
        CODE,
        "L['x'].size()[0] == print(1)",
        "L['x'].tolist()[0] == 1",
        "torch.hub.load('x') == 1",
        "torch.load(L['x']) == 1",
        "L['x'].size(print(1))[0] == 1",
        "L['x'].__class__ == 1",
        "L[print(1)] == 1",
        "M['x'] == 1",
        "'text' == 1",
        "math.inf == 1",
    ],
    # The code names a file of this process, and workers have to collect the same names.
    ids=lambda text: "code" if text == CODE else text,
)
def test_other_guards_are_refused(text: str) -> None:
    with pytest.raises(NotAllowedError):
        require_guard(text)


@pytest.mark.parametrize(
    "target",
    [
        "torch.ops.aten.conv2d.default",
        "torch.ops.aten.conv2d.padding",
        "torch.ops.aten.gelu.default",
        "torch.ops.aten.add_.Tensor",
        "torch.ops.aten.scatter_reduce.two",
        "torch.ops.aten.einsum.default",
        "torch.ops.aten.sym_size.int",
        "torch.ops.aten.scaled_dot_product_attention.default",
        "torch.ops.prims.convert_element_type.default",
        "torch.ops.torchvision.nms.default",
        "torch.ops.higher_order.cond",
        "_operator.mul",
        "torch.sym_max",
        "math.trunc",
    ],
)
def test_operators_on_tensors_and_sizes_are_known(target: str) -> None:
    require_operator(target)


@pytest.mark.parametrize("target", [5, None, ["torch.ops.aten.relu.default"], {}])
def test_an_operator_without_a_name_is_refused(target: object) -> None:
    program = json.loads(entries_of(exported())[PROGRAM])
    graph_of(program)["nodes"][0]["target"] = target

    with pytest.raises(NotAllowedError):
        pt2_program.checked_program(program)


# Files of other formats read nothing outside of their folder.


def external_weight(file: Path, location: str) -> None:
    """Write an ONNX file whose weight lies in another file, at this path."""
    import onnx

    weight = onnx.TensorProto(name="w", data_type=1, dims=[4], data_location=1)
    weight.external_data.add(key="location", value=location)
    inner = onnx.helper.make_node("Constant", [], ["c"], value=weight)
    body = onnx.helper.make_graph([inner], "body", [], [])
    node = onnx.helper.make_node("If", ["x"], ["y"], then_branch=body, else_branch=body)
    graph = onnx.helper.make_graph([node], "graph", [], [])
    onnx.save(onnx.helper.make_model(graph), file)


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "link", "a/../../secret"])
def test_an_onnx_file_takes_no_weight_from_outside(
    location: str, tmp_path: Path, capfd: Capture
) -> None:
    (tmp_path / "secret").write_bytes(bytes(16))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    file = folder / "a.onnx"
    external_weight(file, location)

    message = refuse(file, "inspect", capfd)

    assert location in message
    assert "outside of its folder" in message


def test_an_onnx_file_takes_weights_from_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "a.onnx"
    external_weight(file, "weights.bin")

    assert onnx_file.nodes(file) == {"If": 1}


@pytest.mark.parametrize("path", ["../../secret", "/etc/passwd", "link/model.mlmodel"])
def test_a_core_ml_package_names_no_file_outside(path: str, tmp_path: Path) -> None:
    package = tmp_path / "a.mlpackage"
    (package / "Data").mkdir(parents=True)
    if path.startswith("link"):
        (package / "Data" / "link").symlink_to(tmp_path)
    (package / "Manifest.json").write_text(
        json.dumps({"itemInfoEntries": {"x": {"path": path}}}), encoding="utf-8"
    )

    with pytest.raises(SourceError, match="outside of its folder"):
        coreml_file.require_own_files(package)


def test_a_core_ml_package_names_its_own_files(tmp_path: Path) -> None:
    package = tmp_path / "a.mlpackage"
    (package / "Data" / "model").mkdir(parents=True)
    (package / "Data" / "model" / "model.mlmodel").write_bytes(b"")
    entries = {"x": {"path": "model/model.mlmodel"}}
    (package / "Manifest.json").write_text(
        json.dumps({"itemInfoEntries": entries}), encoding="utf-8"
    )

    coreml_file.require_own_files(package)


def test_a_long_value_is_quoted_in_one_short_line(tmp_path: Path, capfd: Capture) -> None:
    noise = base64.b64encode(bytes(600)).decode()
    entries = entries_of(exported())
    program = json.loads(entries[PROGRAM])
    _replace_operator(program, f"torch.\x1b[31m\n{noise}")
    entries[PROGRAM] = json.dumps(program).encode()
    file = write_archive(entries, tmp_path / "b.pt2")

    message = refuse(file, "inspect", capfd)

    assert "\x1b" not in message
    assert noise not in message


@pytest.mark.parametrize(
    ("sides", "is_allowed"),
    [([], True), ([0, 3], True), ([2**16, 2**16], True), ([-1, 3], False), ([2**32, 2], False)],
)
def test_a_weight_has_sides_that_a_tensor_can_have(sides: list[int], is_allowed: bool) -> None:
    meta = {
        "dtype": 7,
        "sizes": [{"as_int": side} for side in sides],
        "requires_grad": False,
        "device": {"type": "cpu", "index": None},
        "strides": [{"as_int": 1} for _ in sides],
        "storage_offset": {"as_int": 0},
        "layout": 7,
    }
    with nullcontext() if is_allowed else pytest.raises(NotAllowedError, match="a weight"):
        assert pt2_program._plain_tensor(meta) == meta
