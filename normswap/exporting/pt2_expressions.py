"""The expressions in a .pt2: sizes that depend on the input, and guards on the input's sizes.

torch hands both to readers that run Python: sizes to `sympy.sympify`, which evaluates them, guards
to `exec`. Here an expression is parsed, never evaluated, and every part of it must be arithmetic on
symbols and numbers.
"""

import ast
import functools
import re

# The symbol of a size that is free: s77 of an input, u0 of a size that depends on values.
SYMBOL = re.compile(r"[a-z]{1,4}[0-9]{1,6}", re.ASCII)
# What sympy's `srepr`, and torch's printer of guards, write around sizes.
_FUNCTION = re.compile(
    r"Symbol|Integer|Float|Rational|Add|Mul|Pow|Mod|Max|Min|Abs|And|Or|Not|Equality|Eq|Unequality"
    r"|Ne|StrictLessThan|Lt|LessThan|Le|StrictGreaterThan|Gt|GreaterThan|Ge|Piecewise|ExprCondPair"
    r"|FloorDiv|ModularIndexing|Where|PythonMod|CleanDiv|CeilToInt|FloorToInt|CeilDiv|LShift|RShift"
    r"|PowByNatural|FloatPow|FloatTrueDiv|IntTrueDiv|IsNonOverlappingAndDenseIndicator|TruncToFloat"
    r"|TruncToInt|RoundToInt|RoundDecimal|ToFloat|Identity|floor|ceiling"
)
_GUARD_FUNCTION = re.compile(r"Mod|Max|Min|FloorDiv|PythonMod|CleanDiv|min|max|abs|int|float")
_GUARD_FUNCTIONS_OF = {
    "torch": re.compile(r"sym_(max|min|not|int|float|ite|sqrt|sum)"),
    "math": re.compile(r"ceil|floor|trunc|sqrt"),
}
_GUARD_METHODS = frozenset(("size", "stride", "storage_offset", "dim"))
_NAMES = frozenset(("true", "false", "oo", "int_oo"))
# Functions and operators whose result has as many digits as their second argument says.
_GROWING = frozenset(("Pow", "PowByNatural", "FloatPow", "LShift"))
_GROWING_OPERATORS = (ast.Pow, ast.LShift)
_ARITHMETIC = (
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.LShift, ast.RShift),
    *(ast.UAdd, ast.USub, ast.Not, ast.Invert, ast.And, ast.Or, ast.BitAnd, ast.BitOr),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
)
_LONGEST = 20_000
_LARGEST_NUMBER = 2**63
_LARGEST_POWER = 64


class NotAllowedError(ValueError):
    """Raised if a .pt2 file holds something that could run code when torch opens the file.

    The message names it. No file that torch.export.save writes needs such a thing.
    """


def shown(value: object, width: int = 60) -> str:
    """Return a value as a short text for an error message.

    The text is one line in ASCII, so that a hostile file cannot print what it likes.

    Args:
        value: Any value that was read from a file.
        width: The number of characters at which the text is cut. The default suits one line.
    """
    text = ascii(value)
    if len(text) > width:
        return f"{text[:width]}..."
    return text


@functools.lru_cache(maxsize=4096)
def checked_size(text: str) -> str:
    """Check that the expression of a tensor's size is arithmetic on symbols and numbers.

    The expression is parsed, and written anew from what was parsed. It is never evaluated.

    Args:
        text: The expression, such as `Add(Symbol('s77'), Integer(2))`.

    Returns:
        The expression as it was written anew.

    Raises:
        NotAllowedError: Something else stands in the expression.
    """
    tree = _parsed(text)
    _require_size(tree.body, text)
    return ast.unparse(tree)


def require_guard(text: str) -> None:
    """Check that a guard only compares sizes of the inputs.

    A guard is a condition on the inputs that torch.export writes into a .pt2, such as
    `L['x'].size()[2] >= 2`.

    Args:
        text: The guard.

    Raises:
        NotAllowedError: Something else stands in the guard.
    """
    _require_guard(_parsed(text).body, text)


def _parsed(text: str) -> ast.Expression:
    """Return Python's syntax tree of an expression, which is not evaluated.

    Args:
        text: The expression, as the file has it.

    Raises:
        NotAllowedError: The expression is not Python's, or is too long, or has a number or a power
            so large that evaluating it could take hours.
    """
    if not text.isascii() or len(text) > _LONGEST:
        raise NotAllowedError(f"the expression {shown(text)}")

    try:
        tree = ast.parse(text.strip(), mode="eval")
    # Python's parser gives up in several ways on deep or long text.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotAllowedError(f"the expression {shown(text)}") from None

    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and not _is_small(node.value):
            raise NotAllowedError(f"the number {shown(node.value)} in an expression")
        if _grows(node):
            _require_small_power(node, text)
    return tree


def _is_small(value: object) -> bool:
    """Whether a constant in an expression is allowed by its size.

    A text and a bool are. A number is if its absolute value is below `_LARGEST_NUMBER`.

    Args:
        value: The constant.
    """
    if isinstance(value, (bool, str)):
        return True
    return isinstance(value, (int, float)) and abs(value) < _LARGEST_NUMBER


def _grows(node: ast.AST) -> bool:
    """Whether a part of an expression is a power or a left shift, whose result may be huge.

    It may be an operator or a call: 2 ** n, 2 << n or Pow(2, n).

    Args:
        node: The part, as a node of Python's syntax tree.
    """
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, _GROWING_OPERATORS)
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") in _GROWING


def _require_small_power(node: ast.AST, text: str) -> None:
    """Refuse a power that sympy would compute for hours: a large power, or a power of a power.

    Args:
        node: The power or left shift, as a node of Python's syntax tree (`_grows`).
        text: The whole expression, for the error.

    Raises:
        NotAllowedError: The power is refused.
    """
    # 2 ** n has the operands left and right. In Pow(2, n) they are the arguments.
    operands = [node.left, node.right] if isinstance(node, ast.BinOp) else getattr(node, "args", [])
    if len(operands) != 2:
        raise NotAllowedError(f"the expression {shown(text)}")

    base, power = operands
    if any(_grows(inner) for inner in ast.walk(base)) or abs(_number(power)) > _LARGEST_POWER:
        raise NotAllowedError(f"the power in the expression {shown(text)}")


def _number(node: ast.AST) -> float:
    """Return the number that a part of an expression states, such as 2, -2 or Integer(2).

    The result is infinity if the part is no plain number.

    Args:
        node: The part, as a node of Python's syntax tree.
    """
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    # sympy's `srepr` writes a number as a call: Integer(2).
    if isinstance(node, ast.Call) and len(node.args) == 1:
        return _number(node.args[0])
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    return float("inf")


def _require_size(node: ast.AST, text: str) -> None:
    """Raise NotAllowedError unless a part of a size's expression is arithmetic.

    The parts inside of it are checked, too.

    Args:
        node: The part, as a node of Python's syntax tree.
        text: The whole expression, for the error.
    """
    if isinstance(node, ast.Call):
        _require_call(node, text)
    elif isinstance(node, ast.Name):
        if node.id not in _NAMES and not SYMBOL.fullmatch(node.id):
            raise NotAllowedError(f"the name {shown(node.id)} in the expression {shown(text)}")
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            raise NotAllowedError(f"the text {shown(node.value)} in the expression {shown(text)}")
    else:
        for part in _operands(node, text):
            _require_size(part, text)


def _require_call(call: ast.Call, text: str) -> None:
    """Raise NotAllowedError unless a call in a size's expression is one that sympy writes.

    Such calls are Symbol('s77', integer=True) and Add(..., ...). The arguments are checked, too.

    Args:
        call: The call, as a node of Python's syntax tree.
        text: The whole expression, for the error.
    """
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if not _FUNCTION.fullmatch(name):
        raise NotAllowedError(f"a call in the expression {shown(text)}")

    # A keyword, such as integer=True, has a constant that is no text.
    for keyword in call.keywords:
        value = keyword.value
        if not keyword.arg or not isinstance(value, ast.Constant) or isinstance(value.value, str):
            raise NotAllowedError(f"an argument in the expression {shown(text)}")

    for position, argument in enumerate(call.args):
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            # Only the first argument may be text.
            if position or not _is_named_well(name, argument.value):
                raise NotAllowedError(f"the text {shown(argument.value)} in an expression")
        else:
            _require_size(argument, text)


def _is_named_well(function: str, text: str) -> bool:
    """Whether a text may be the first argument of a call in a size's expression.

    It may be the name of a symbol, Symbol('s77'), or the digits of a number, Float('0.5').

    Args:
        function: The name of the function that is called.
        text: The text.
    """
    if function == "Symbol":
        return bool(SYMBOL.fullmatch(text))
    return function == "Float" and bool(re.fullmatch(r"-?[0-9.]{1,40}(e[-+]?[0-9]{1,3})?", text))


def _operands(node: ast.AST, text: str) -> list[ast.expr]:
    """Return the operands of an operator, such as a and b in a + b.

    Args:
        node: The operator, as a node of Python's syntax tree.
        text: The whole expression, for the error.

    Raises:
        NotAllowedError: The node is no operator of arithmetic.
    """
    if isinstance(node, ast.BinOp) and isinstance(node.op, _ARITHMETIC):
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, _ARITHMETIC):
        return [node.operand]
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.Compare) and all(isinstance(op, _ARITHMETIC) for op in node.ops):
        return [node.left, *node.comparators]
    raise NotAllowedError(f"the expression {shown(text)}")


def _require_guard(node: ast.AST, text: str) -> None:
    """Raise NotAllowedError unless a part of a guard is arithmetic on sizes of the inputs.

    A guard is a condition on the sizes of the inputs. The parts inside of this part are checked,
    too.

    Args:
        node: The part, as a node of Python's syntax tree.
        text: The whole guard, for the error.
    """
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            raise NotAllowedError(f"a text in the guard {shown(text)}")
    elif isinstance(node, ast.Subscript):
        _require_subscript(node, text)
    elif isinstance(node, ast.Call):
        _require_guard_call(node, text)
    else:
        for part in _operands(node, text):
            _require_guard(part, text)


def _require_guard_call(call: ast.Call, text: str) -> None:
    """Raise NotAllowedError unless a call in a guard is arithmetic, or asks an input for its size.

    Such calls are Max(..., ...) and L['x'].size(), where L['x'] is an input.

    Args:
        call: The call, as a node of Python's syntax tree.
        text: The whole guard, for the error.
    """
    function = call.func
    if call.keywords:
        raise NotAllowedError(f"a call in the guard {shown(text)}")

    if isinstance(function, ast.Attribute) and function.attr in _GUARD_METHODS and not call.args:
        _require_input(function.value, text)
    elif _is_guard_function(function):
        for argument in call.args:
            _require_guard(argument, text)
    else:
        raise NotAllowedError(f"a call in the guard {shown(text)}")


def _is_guard_function(function: ast.expr) -> bool:
    """Whether a function may be called in a guard: arithmetic such as Max or torch.sym_max.

    Args:
        function: The function's name in the call, as a node of Python's syntax tree.
    """
    if isinstance(function, ast.Name):
        return bool(_GUARD_FUNCTION.fullmatch(function.id))
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        names = _GUARD_FUNCTIONS_OF.get(function.value.id)
        return names is not None and bool(names.fullmatch(function.attr))
    return False


def _require_subscript(node: ast.Subscript, text: str) -> None:
    """Raise NotAllowedError unless square brackets in a guard pick a size, or an input.

    Allowed are L['x'].size()[2], L['x'].shape[2], and an input that is a number itself, L['n'].

    Args:
        node: The expression with the brackets, as a node of Python's syntax tree.
        text: The whole guard, for the error.
    """
    if isinstance(node.value, ast.Call):
        _require_index(node.slice, text)
        _require_guard_call(node.value, text)
    elif isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
        _require_index(node.slice, text)
        _require_input(node.value.value, text)
    else:
        _require_input(node, text)


def _require_input(node: ast.AST, text: str) -> None:
    """Raise NotAllowedError unless a part of a guard names an input of the network.

    A guard writes an input as L['x'], L['args'][0] or L['images']['left'].

    Args:
        node: The part, as a node of Python's syntax tree.
        text: The whole guard, for the error.
    """
    while isinstance(node, ast.Subscript):
        _require_index(node.slice, text)
        node = node.value
    if not isinstance(node, ast.Name) or node.id != "L":
        raise NotAllowedError(f"the guard {shown(text)}")


def _require_index(node: ast.AST, text: str) -> None:
    """Raise NotAllowedError unless what stands in square brackets is a number or a text.

    Allowed are 0, -1 and 'left', for example.

    Args:
        node: The index, as a node of Python's syntax tree.
        text: The whole guard, for the error.
    """
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    if not isinstance(node, ast.Constant) or not isinstance(node.value, (int, str)):
        raise NotAllowedError(f"an index in the guard {shown(text)}")
