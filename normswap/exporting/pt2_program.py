"""The graph of a .pt2, its JSON held to a grammar before torch reads it.

torch's reader makes Python source of names, looks operators up with `getattr` and imports what a
tree of outputs names. So every text has a rule here: names are identifiers, operators come from
known namespaces and take tensors and numbers, trees are of tuples, lists and dicts. What has no
rule is refused. Stack traces and other notes, which no computation needs, are left out.

A rule takes a value of the file and returns what torch is given in its place. It raises
NotAllowedError where the file could run code by that value.
"""

import json
import keyword
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from normswap.exporting.pt2_expressions import (
    SYMBOL,
    NotAllowedError,
    checked_size,
    require_guard,
    shown,
)

Rule: TypeAlias = Callable[[object], object]

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,500}", re.ASCII)
# Parameters may be called by any text without what ends a string of Python source.
_PATH = re.compile(r"[^\"'\\{}\x00-\x1f\x7f]{0,500}")
_KEY = re.compile(r"[\w.\- ]{0,200}", re.ASCII)
_VERSION = re.compile(r"[\w.+<=>\- ]{0,100}", re.ASCII)
_LARGEST_INTEGER = 2**64

_DEVICES = ("cpu", "cuda", "mps", "xpu", "meta")
_DIALECTS = ("", "ATEN", "TRAINING")
# The number by which torch.export's files name the layout of dense tensors (torch.strided).
_STRIDED = 7

# The allowed operators of each namespace. None allows all that pass the other checks of
# `require_operator`. torchvision's other operators read files.
_NAMESPACES: Mapping[str, frozenset[str] | None] = {
    "aten": None,
    "prims": None,
    "quantized_decomposed": None,
    "torchvision": frozenset(
        ("nms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
    ),
}
_OPERATOR = re.compile(r"torch\.ops\.([a-z_]+)\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)", re.ASCII)
# Operators on raw memory. They trust the sizes and indices that the file states.
_RAW_MEMORY = re.compile(
    r"set_|set_data|data|shallow_copy_data_|record_stream|_reshape_alias(_copy)?|_?resize_.*|resize.*"
    r"|.*(sparse|nested|csr|csc|bsr|bsc|cslt|semi_structured|fbgemm|mkldnn|prepacked).*|_test_.*"
)
# Arguments that are a choice among a few words, or the text of an error.
_WORD_ARGUMENT = re.compile(
    r"UPLO|activation|approximate|assert_msg|driver|equation|indexing|interpolation|mode|norm|ord|p"
    r"|pad_mode|padding|padding_mode|padding_side|reduce|rounding_mode|side"
)
_PLAIN_ARGUMENT = re.compile(
    r"(Optional\[|List\[)*(Tensor|int|float|bool|number|complex|Device|Generator)\]*"
)
# Operators that hold graphs of their own, which are held to this grammar as well.
_WITH_GRAPHS = re.compile(
    r"torch\.ops\.higher_order\.(cond|map_impl|while_loop|scan|associative_scan"
    r"|wrap_with_set_grad_enabled|wrap_with_autocast)"
)
# Arithmetic on sizes, which is no operator on tensors.
_ON_SIZES = re.compile(
    r"_operator\.(eq|ne|le|ge|lt|gt|neg|pos|mul|add|sub|floordiv|mod|pow|truediv|and_|or_|lshift"
    r"|rshift)|torch\.sym_(not|int|float|ite|max|min|sqrt)|math\.trunc"
)

_TREE_TYPES = ("builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict")
# Records of answers of Hugging Face networks, which transformers makes known to torch.
_ANSWER_TYPE = re.compile(r"transformers(\.\w+)+", re.ASCII)


def checked_program(record: object) -> dict[str, object]:
    """Return the program of a .pt2, after every part of it has been checked.

    The program is the network's graph, with the names of its inputs, outputs and weights.

    Args:
        record: The parsed JSON of the program. It comes from the file, so it is not trusted.

    Returns:
        The program without its notes, such as stack traces.

    Raises:
        NotAllowedError: Something in the program could run code, or is not known here.
    """
    program = _PROGRAM(record)
    assert isinstance(program, dict)
    return program


def checked_payloads(record: object) -> dict[str, object]:
    """Return the table of weights or constants of a .pt2, after every part of it has been checked.

    It says for each tensor where in the file its bytes are, and its shape and type.

    Args:
        record: The table, as parsed JSON. It comes from the file, so it is not trusted.

    Raises:
        NotAllowedError: A weight or constant is pickled, or is no plain tensor.
    """
    table = _PAYLOADS(record)
    assert isinstance(table, dict)
    return table


def require_operator(target: str) -> None:
    """Check that a node's operator computes tensors from tensors and numbers.

    Args:
        target: The operator as the file names it, such as torch.ops.aten.relu.default.

    Raises:
        NotAllowedError: The operator could do something else, or is not known here.
    """
    # Arithmetic on sizes is harmless. The graphs inside of operators such as `cond` are checked by
    # the rule of an argument.
    if _ON_SIZES.fullmatch(target) or _WITH_GRAPHS.fullmatch(target):
        return

    named = _OPERATOR.fullmatch(target)
    if named is None:
        raise NotAllowedError(f"the operator {shown(target)}")

    # None stands for all operators of a namespace. An unknown namespace has no allowed operators.
    namespace, name, overload = named.groups()
    allowed = _NAMESPACES.get(namespace, frozenset())
    if (allowed is not None and name not in allowed) or _RAW_MEMORY.fullmatch(name):
        raise NotAllowedError(f"the operator {shown(target)}")
    _require_schema(namespace, name, overload, target)


def _require_schema(namespace: str, name: str, overload: str, target: str) -> None:
    """Check that no argument of an operator can be a file name or raw storage.

    The arguments' types are those that the installed PyTorch states for the operator.

    Args:
        namespace: The first part of the operator's name, such as aten.
        name: The second part, such as relu.
        overload: The third part, such as default.
        target: The whole name, for the error.

    Raises:
        NotAllowedError: The operator is refused.
    """
    # Look up torch.ops.NAMESPACE.NAME.OVERLOAD.
    operator = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
    if not isinstance(operator, torch._ops.OpOverload):
        raise NotAllowedError(f"the operator {shown(target)}, which PyTorch does not know here")

    # The interpreter of TorchScript has further operators, some of which write files.
    full_name = operator._schema.name
    if operator._schema.overload_name:
        full_name = f"{full_name}.{operator._schema.overload_name}"
    if not torch._C._dispatch_has_kernel(full_name):
        raise NotAllowedError(f"the operator {shown(target)}")

    for argument in operator._schema.arguments:
        type_name = str(argument.type)
        # A text could name a file, so it is allowed only for the arguments of `_WORD_ARGUMENT`.
        is_plain = _PLAIN_ARGUMENT.fullmatch(type_name) is not None
        is_text = type_name in ("str", "Optional[str]")
        if not is_plain and not (is_text and _WORD_ARGUMENT.fullmatch(argument.name)):
            raise NotAllowedError(f"the operator {shown(target)}, which takes {argument.name}")


def _text(pattern: re.Pattern[str], what: str) -> Rule:
    """Return a rule that accepts a text if it matches a pattern from beginning to end.

    A rule is a function that returns a value of the file, or raises NotAllowedError.

    Args:
        pattern: The pattern.
        what: What the error calls the text.
    """

    def checked(value: object) -> object:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise NotAllowedError(f"the {what} {shown(value)}")
        return value

    return checked


def _one_of(values: Sequence[object], what: str) -> Rule:
    """Return a rule that accepts one of a few values.

    A rule is a function that returns a value of the file, or raises NotAllowedError.

    Args:
        values: The allowed values.
        what: What the error calls the value.
    """

    def checked(value: object) -> object:
        if value not in values:
            raise NotAllowedError(f"the {what} {shown(value)}")
        return value

    return checked


def _identifier(value: object) -> object:
    """Return a value of the file if it is a name that may stand in Python source.

    Raises:
        NotAllowedError: It is something else.
    """
    if isinstance(value, str) and _IDENTIFIER.fullmatch(value) and not keyword.iskeyword(value):
        return value
    raise NotAllowedError(f"the name {shown(value)}")


def _argument_name(value: object) -> object:
    """Return a value of the file if it may be the name of an operator's argument.

    It may be empty, and it may be a keyword of Python such as `from`.

    Raises:
        NotAllowedError: It is something else.
    """
    if isinstance(value, str) and (not value or _IDENTIFIER.fullmatch(value)):
        return value
    raise NotAllowedError(f"the argument {shown(value)}")


def _boolean(value: object) -> object:
    """Return a value of the file if it is true or false.

    Raises:
        NotAllowedError: It is something else.
    """
    if not isinstance(value, bool):
        raise NotAllowedError(f"{shown(value)} where true or false stands")
    return value


def _integer(value: object) -> object:
    """Return a value of the file if it is a whole number of at most 64 bits.

    Raises:
        NotAllowedError: It is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= _LARGEST_INTEGER:
        raise NotAllowedError(f"{shown(value)} where a whole number stands")
    return value


def _number(value: object) -> object:
    """Return a value of the file if it is a number.

    The texts Infinity, -Infinity and NaN, which torch writes for such numbers, are allowed, too.

    Raises:
        NotAllowedError: It is something else.
    """
    if isinstance(value, float) or value in ("Infinity", "-Infinity", "NaN"):
        return value
    return _integer(value)


def _message(value: object) -> object:
    """Return a value of the file if it is a short printable text.

    Operators take such texts as arguments, for example a mode or the message of an error.

    Raises:
        NotAllowedError: It is something else.
    """
    if not isinstance(value, str) or len(value) > 10_000 or not value.isprintable():
        raise NotAllowedError(f"the text {shown(value)}")
    return value


def _target(value: object) -> object:
    """Return a value of the file if it is the name of an operator that is allowed.

    Raises:
        NotAllowedError: It is something else, or an operator that could run code.
    """
    if not isinstance(value, str):
        raise NotAllowedError(f"the operator {shown(value)}")
    require_operator(value)
    return value


def _left_out(value: object) -> object:
    """Return an empty dict in place of notes in the file, such as the stack trace of a node.

    torch needs none of them, so they are not looked at.
    """
    return {}


def _guards(value: object) -> object:
    """Check the guards of the file, and return an empty list in their place.

    A guard is a condition on the sizes of inputs, written as Python source. torch would execute it.
    torch checks the sizes of inputs without guards, too.

    Raises:
        NotAllowedError: A guard does something else than compare sizes.
    """
    for guard in _items(value):
        if not isinstance(guard, str):
            raise NotAllowedError(f"the guard {shown(guard)}")
        require_guard(guard)
    return []


def _size_expression(value: object) -> object:
    """Return a value of the file if it is an expression of a tensor's size, such as 2*s77.

    Raises:
        NotAllowedError: It is something else than arithmetic on symbols and numbers.
    """
    if not isinstance(value, str):
        raise NotAllowedError(f"the expression {shown(value)}")
    return checked_size(value)


def _items(value: object) -> list[object]:
    """Return a value of the file if it is a list. Its items are not checked here.

    Raises:
        NotAllowedError: It is something else.
    """
    if not isinstance(value, list):
        raise NotAllowedError(f"{shown(value)} where a list stands")
    return value


def _optional(rule: Rule) -> Rule:
    """Return a rule that accepts null, and what another rule accepts.

    A rule is a function that returns a value of the file, or raises NotAllowedError.

    Args:
        rule: The other rule.
    """

    def checked(value: object) -> object:
        return None if value is None else rule(value)

    return checked


def _list(rule: Rule) -> Rule:
    """Return a rule that accepts a list if another rule accepts each of its items.

    A rule is a function that returns a value of the file, or raises NotAllowedError.

    Args:
        rule: The rule for the items.
    """
    return lambda value: [rule(item) for item in _items(value)]


def _table(key_rule: Rule, rule: Rule) -> Rule:
    """Return a rule that accepts a dict with any keys and values that two other rules accept.

    A rule is a function that returns a value of the file, or raises NotAllowedError.

    Args:
        key_rule: The rule for the keys.
        rule: The rule for the values.
    """

    def checked(value: object) -> object:
        if not isinstance(value, dict):
            raise NotAllowedError(f"{shown(value)} where a table stands")
        return {key_rule(key): rule(item) for key, item in value.items()}

    return checked


def _record(name: str, fields: Mapping[str, Rule]) -> Rule:
    """Return a rule that accepts a dict with known fields, each with a rule of its own.

    A rule is a function that returns a value of the file, or raises NotAllowedError.
    A field may be missing. A field that is not known must have an empty value and is left out.

    Args:
        name: What the error calls such a dict.
        fields: The rule for the value of each field, by the field's name.
    """

    def checked(value: object) -> object:
        if not isinstance(value, dict):
            raise NotAllowedError(f"{shown(value)} where a {name} stands")
        for key in value.keys() - fields.keys():
            if value[key] not in (None, [], {}, ""):
                raise NotAllowedError(f"the field {shown(key)} of a {name}")
        return {key: rule(value[key]) for key, rule in fields.items() if key in value}

    return checked


def _union(name: str, kinds: Mapping[str, Rule]) -> Rule:
    """Return a rule that accepts a dict with one entry, whose key says the kind of its value.

    An example is {"as_int": 3}. A rule is a function that returns a value of the file, or raises
    NotAllowedError.

    Args:
        name: What the error calls such a value.
        kinds: The rule for the value of each kind, by the kind's name.
    """

    def checked(value: object) -> object:
        if not isinstance(value, dict) or len(value) != 1:
            raise NotAllowedError(f"{shown(value)} where a {name} stands")
        ((kind, content),) = value.items()
        if kind not in kinds:
            raise NotAllowedError(f"the kind {shown(kind)} of a {name}")
        return {kind: kinds[kind](content)}

    return checked


def _tree(value: object) -> object:
    """Check the text that says how a network's inputs or outputs are nested, and write it anew.

    The text is JSON. For a tuple of one tensor, it is `[1, {"type": "builtins.tuple", "context":
    "null", "children_spec": [{"type": null, "context": null, "children_spec": []}]}]`, where 1 is
    the version of the notation.

    Raises:
        NotAllowedError: The value is something else.
    """
    if not isinstance(value, str):
        raise NotAllowedError(f"the tree {shown(value)}")
    try:
        protocol, spec = json.loads(value)
    except (ValueError, TypeError, RecursionError):
        raise NotAllowedError(f"the tree {shown(value)}") from None
    return json.dumps([_integer(protocol), _branch(spec)])


def _branch(spec: object) -> dict[str, object]:
    """Check one level of the nesting of a network's inputs or outputs, and those inside of it.

    It is a dict that stands for a tensor, or for a tuple, list, dict or output object of
    transformers. The levels inside are its `children_spec`.

    Returns:
        The same dict, made of checked parts only.

    Raises:
        NotAllowedError: The value is something else.
    """
    if not isinstance(spec, dict) or set(spec) != {"type", "context", "children_spec"}:
        raise NotAllowedError(f"the tree {shown(spec)}")

    # A tensor has the type null.
    kind = spec["type"]
    context = spec["context"]
    is_known = kind is None or kind in _TREE_TYPES
    if not is_known and not (isinstance(kind, str) and _ANSWER_TYPE.fullmatch(kind)):
        raise NotAllowedError(f"the type {shown(kind)} among its inputs and outputs")

    # The context of a dict is JSON in the JSON: the text of a list of its keys.
    if context is not None:
        context = json.dumps(_keys(context))

    children = [_branch(child) for child in _items(spec["children_spec"])]
    return {"type": kind, "context": context, "children_spec": children}


def _keys(context: object) -> object:
    """Return the keys of a dict of inputs or outputs, after each has been checked.

    Args:
        context: The keys as JSON text, such as `["image", "mask"]`. For a tuple or list, which has
            no keys, it is `null`, and the result is None.

    Raises:
        NotAllowedError: A key is no plain text or number.
    """
    try:
        keys = json.loads(str(context))
    except (ValueError, RecursionError):
        raise NotAllowedError(f"the tree {shown(context)}") from None
    if keys is None:
        return None

    for key in _items(keys):
        if not isinstance(key, (str, int)) or not _KEY.fullmatch(str(key)):
            raise NotAllowedError(f"the key {shown(key)} of inputs or outputs")
    return keys


def _call_tree(value: object) -> object:
    """Check the text that says how all inputs of a network are nested, and write it anew (`_tree`).

    Raises:
        NotAllowedError: The value is something else, or the name of a keyword argument is no name
            in Python.
    """
    tree = _tree(value)
    _, spec = json.loads(str(tree))
    # The first branch holds the positional arguments. The next one is the dict of the keyword
    # arguments. Its context is the JSON of their names, or null.
    for keyword_arguments in spec["children_spec"][1:]:
        for name in json.loads(keyword_arguments["context"] or "[]") or []:
            _identifier(name)
    return tree


def _plain_tensor(value: object) -> object:
    """Return the description of a weight or constant, with its shape and type, after checking it.

    The sides of the shape must be numbers, not expressions. The tensor may have at most 2^32
    values.

    Raises:
        NotAllowedError: The value is something else.
    """
    meta = _TENSOR_META(value)
    assert isinstance(meta, dict)
    # A side that is an expression has no "as_int", so it becomes None here.
    sides = [side.get("as_int") for side in meta["sizes"]]
    if not all(isinstance(side, int) and side >= 0 for side in sides):
        raise NotAllowedError(f"a weight of the shape {shown(meta['sizes'])}")
    if math.prod(side for side in sides if isinstance(side, int)) > 2**32:
        raise NotAllowedError(f"a weight of the shape {shown(sides)}")
    return meta


def _unpickled(value: object) -> object:
    """Return False if the field `use_pickle` of a weight is False.

    False says that the weight is stored as its bytes. True would have torch load a pickle, which
    can run code.

    Raises:
        NotAllowedError: The field is something else.
    """
    if value is not False:
        raise NotAllowedError("a pickled weight")
    return False


def _nested_graph(value: object) -> object:
    """Return the graph inside an operator such as `cond`, after every part of it was checked.

    The function looks up `_GRAPH`, the rule for graphs, when it is called. The rule for arguments
    uses it, and `_GRAPH` is made of that rule.
    """
    return _GRAPH(value)


_SYMBOL_NAME = _text(SYMBOL, "symbol")
_TENSOR_PATH = _text(_PATH, "path of a tensor")
_NAMED = _record("tensor", {"name": _identifier})

_DEVICE = _record("device", {"type": _one_of(_DEVICES, "device"), "index": _optional(_integer)})
_HINT = _union("hint", {"as_int": _integer, "as_bool": _boolean, "as_float": _number})
_EXPRESSION = _record("expression", {"expr_str": _size_expression, "hint": _optional(_HINT)})
_SIZE = _union("size", {"as_expr": _EXPRESSION, "as_int": _integer})
_FLOAT_SIZE = _union("number", {"as_expr": _EXPRESSION, "as_float": _number})
_CONDITION = _union("condition", {"as_expr": _EXPRESSION, "as_bool": _boolean})
_TENSOR_META = _record(
    "tensor",
    {
        "dtype": _integer,
        "sizes": _list(_SIZE),
        "requires_grad": _boolean,
        "device": _DEVICE,
        "strides": _list(_SIZE),
        "storage_offset": _SIZE,
        "layout": _one_of((_STRIDED,), "layout"),
    },
)

_SIZE_ARGUMENT = _union("size", {"as_name": _identifier, "as_int": _integer})
_FLOAT_ARGUMENT = _union("number", {"as_name": _identifier, "as_float": _number})
_BOOL_ARGUMENT = _union("condition", {"as_name": _identifier, "as_bool": _boolean})
_OPTIONAL_TENSOR = _union("tensor", {"as_tensor": _NAMED, "as_none": _boolean})
_ARGUMENT = _union(
    "argument",
    {
        "as_none": _boolean,
        "as_tensor": _NAMED,
        "as_tensors": _list(_NAMED),
        "as_optional_tensor": _OPTIONAL_TENSOR,
        "as_optional_tensors": _list(_OPTIONAL_TENSOR),
        "as_nested_tensors": _list(_list(_NAMED)),
        "as_int": _integer,
        "as_ints": _list(_integer),
        "as_int_lists": _list(_list(_integer)),
        "as_float": _number,
        "as_floats": _list(_number),
        "as_float_lists": _list(_list(_number)),
        "as_complex": _record("complex number", {"real": _number, "imag": _number}),
        "as_bool": _boolean,
        "as_bools": _list(_boolean),
        "as_string": _message,
        "as_strings": _list(_message),
        "as_sym_int": _SIZE_ARGUMENT,
        "as_sym_ints": _list(_SIZE_ARGUMENT),
        "as_sym_float": _FLOAT_ARGUMENT,
        "as_sym_floats": _list(_FLOAT_ARGUMENT),
        "as_sym_bool": _BOOL_ARGUMENT,
        "as_sym_bools": _list(_BOOL_ARGUMENT),
        "as_scalar_type": _integer,
        "as_memory_format": _integer,
        "as_layout": _integer,
        "as_device": _DEVICE,
        "as_graph": _record("graph", {"name": _identifier, "graph": _nested_graph}),
    },
)
_NODE = _record(
    "node",
    {
        "target": _target,
        "inputs": _list(
            _record(
                "argument",
                {"name": _argument_name, "arg": _ARGUMENT, "kind": _optional(_integer)},
            )
        ),
        "outputs": _list(_ARGUMENT),
        "metadata": _left_out,
        "is_hop_single_tensor_return": _optional(_boolean),
        "name": _optional(_identifier),
    },
)
_GRAPH = _record(
    "graph",
    {
        "inputs": _list(_ARGUMENT),
        "outputs": _list(_ARGUMENT),
        "nodes": _list(_NODE),
        "tensor_values": _table(_identifier, _TENSOR_META),
        "sym_int_values": _table(_identifier, _SIZE),
        "sym_bool_values": _table(_identifier, _CONDITION),
        "sym_float_values": _table(_identifier, _FLOAT_SIZE),
        "is_single_tensor_return": _boolean,
    },
)

# A text among the inputs is an argument that the network was exported with.
_CONSTANT = _union(
    "constant",
    {
        "as_none": _boolean,
        "as_int": _integer,
        "as_float": _number,
        "as_string": _text(_KEY, "text"),
        "as_bool": _boolean,
    },
)
_INPUT = _union(
    "input",
    {
        "user_input": _record("input", {"arg": _ARGUMENT}),
        "parameter": _record("parameter", {"arg": _NAMED, "parameter_name": _TENSOR_PATH}),
        "buffer": _record(
            "buffer", {"arg": _NAMED, "buffer_name": _TENSOR_PATH, "persistent": _boolean}
        ),
        "tensor_constant": _record(
            "constant", {"arg": _NAMED, "tensor_constant_name": _TENSOR_PATH}
        ),
        "constant_input": _record("constant", {"name": _identifier, "value": _CONSTANT}),
    },
)
_OUTPUT = _union(
    "output",
    {
        "user_output": _record("output", {"arg": _ARGUMENT}),
        "loss_output": _record("output", {"arg": _NAMED}),
        "buffer_mutation": _record("buffer", {"arg": _NAMED, "buffer_name": _TENSOR_PATH}),
        "parameter_mutation": _record("parameter", {"arg": _NAMED, "parameter_name": _TENSOR_PATH}),
        "gradient_to_parameter": _record(
            "gradient", {"arg": _NAMED, "parameter_name": _TENSOR_PATH}
        ),
        "gradient_to_user_input": _record(
            "gradient", {"arg": _NAMED, "user_input_name": _identifier}
        ),
        "user_input_mutation": _record("input", {"arg": _NAMED, "user_input_name": _identifier}),
    },
)
_SIGNATURE = _record("signature", {"input_specs": _list(_INPUT), "output_specs": _list(_OUTPUT)})
_CALL = _record(
    "call",
    {
        "inputs": _list(_ARGUMENT),
        "outputs": _list(_ARGUMENT),
        "in_spec": _call_tree,
        "out_spec": _tree,
        "forward_arg_names": _optional(_list(_identifier)),
    },
)
_PROGRAM = _record(
    "program",
    {
        "graph_module": _record(
            "graph",
            {
                "graph": _GRAPH,
                "signature": _SIGNATURE,
                "module_call_graph": _list(
                    _record("call", {"fqn": _TENSOR_PATH, "signature": _optional(_CALL)})
                ),
                "metadata": _left_out,
            },
        ),
        "opset_version": _table(_text(_KEY, "opset"), _integer),
        "range_constraints": _table(
            _SYMBOL_NAME,
            _record("range", {"min_val": _optional(_integer), "max_val": _optional(_integer)}),
        ),
        "schema_version": _record("version", {"major": _integer, "minor": _integer}),
        "verifiers": _list(_one_of(_DIALECTS, "dialect")),
        "torch_version": _text(_VERSION, "version"),
        "guards_code": _guards,
    },
)
_PAYLOAD = _record(
    "weight",
    {
        "path_name": _text(re.compile(r"(weight|tensor)_[0-9]{1,6}", re.ASCII), "stored object"),
        "is_param": _boolean,
        "use_pickle": _unpickled,
        "tensor_meta": _plain_tensor,
    },
)
_PAYLOADS = _record("table of weights", {"config": _table(_TENSOR_PATH, _PAYLOAD)})
