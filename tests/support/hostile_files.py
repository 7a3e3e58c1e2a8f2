"""Ways to damage a file, and a watch that stops whatever a damaged file must never start."""

from __future__ import annotations

import copy
import json
import signal
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

# The repository, directory and package that dangerous values name. Nothing may reach them.
EVIL = "evil"
JUNK: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    7,
    10**6,
    2**31,
    10**30,
    1.5,
    -1e-12,
    1e300,
    float("nan"),
    float("inf"),
    "",
    "x",
    "conv1",
    "a b\nc",
    "\ud800",
    "\x1b[2J",
    "x" * 100_000,
    "../evil",
    "evil",
    "evil/tracker",
    "hf-hub:evil/tracker",
    "local-dir:evil",
    "evil:factory",
    "__class__",
    "__class__.dump_patches",
    [],
    [1],
    ["x"],
    [None],
    [-1, 10**9],
    [3, 10**9, 10**9],
    ["x"] * 1000,
    {},
    {"x": 1},
    {"model_type": "timm_backbone", "backbone": "evil/tracker"},
)
KEYS: dict[str, Any] = {
    "pretrained": True,
    "pretrained_cfg": {"hf_hub_id": "evil/tracker", "file": "evil/x.pth"},
    "pretrained_cfg_overlay": {"url": "http://evil/x.pth"},
    "checkpoint_path": "evil/x.pth",
    "cache_dir": "evil",
    "backbone": "evil/tracker",
    "use_pretrained_backbone": True,
    "use_timm_backbone": True,
    "architecture": "hf-hub:evil/tracker",
    "attn_implementation": "evil/kernel",
    "quantization_config": {"quant_method": "bitsandbytes"},
    "auto_map": {"AutoConfig": "evil/tracker--module.Class"},
    "_name_or_path": "evil/tracker",
    "adapter": "evil/tracker",
    "depth": 10**6,
    "layers": [10**6] * 4,
    "num_classes": 10**9,
}


class StartedError(BaseException):
    """Something has begun that no file may begin. Nobody catches it."""


_FORBIDDEN_EVENTS = frozenset(
    {
        "socket.connect",
        "socket.getaddrinfo",
        "subprocess.Popen",
        "os.system",
        "os.exec",
        "os.posix_spawn",
    }
)
_watching = False


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _watching:
        return
    if event in _FORBIDDEN_EVENTS:
        raise StartedError(f"{event}{args!r:.200}")
    if event in ("open", "import") and args and EVIL in str(args[0]).split("/"):
        raise StartedError(f"{event} {args[0]!r:.200}")


sys.addaudithook(_hook)


@contextmanager
def watched(seconds: float = 30) -> Iterator[None]:
    """Raise StartedError for a socket, a process, anything of EVIL, or too much time.

    Args:
        seconds: The processor time that may pass, which a busy machine does not lengthen. Five
            times as much may pass on the clock, where something waits.
    """
    global _watching

    def expired(_signal: int, _frame: object) -> None:
        raise StartedError(f"it takes more than {seconds} seconds")

    timers = {signal.ITIMER_PROF: signal.SIGPROF, signal.ITIMER_REAL: signal.SIGALRM}
    before = {number: signal.signal(number, expired) for number in timers.values()}
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 5 * seconds)
    _watching = True
    try:
        yield
    finally:
        _watching = False
        for timer in timers:
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def places(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where there is anything in a tree of plain data."""
    inner: Any = ()
    if isinstance(tree, dict):
        inner = tree.items()
    elif isinstance(tree, list):
        inner = enumerate(tree)
    for key, value in inner:
        yield (*above, key)
        yield from places(value, (*above, key))


@st.composite
def mutated(draw: st.DrawFn, tree: Any, junk: Sequence[Any] = JUNK) -> Any:
    """A tree with one thing missing, replaced, repeated, renamed, or beside a dangerous key.

    Args:
        tree: Plain data, of which a copy is changed.
        junk: What may stand in the place of a value.
    """
    tree = copy.deepcopy(tree)
    found = list(places(tree))
    *above, key = found[draw(st.integers(0, len(found) - 1))]
    holder = tree
    for step in above:
        holder = holder[step]

    change = draw(st.sampled_from(["junk", "junk", "junk", "missing", "twice", "renamed", "added"]))
    if change == "junk":
        holder[key] = copy.deepcopy(draw(st.sampled_from(junk)))
    elif change == "missing":
        del holder[key]
    elif change == "added" and isinstance(holder, dict):
        name = draw(st.sampled_from(sorted(KEYS)))
        holder[name] = copy.deepcopy(KEYS[name])
    elif isinstance(holder, list):
        holder.extend([copy.deepcopy(holder[key])] * draw(st.sampled_from([1, 3, 2000])))
    else:
        holder[f"{key}_"] = holder[key] if change == "twice" else holder.pop(key)
    return tree


@st.composite
def json_texts(draw: st.DrawFn, tree: Any) -> bytes:
    """The JSON of a tree, mutated as data, or as text, or as bytes."""
    kind = draw(st.sampled_from(["data", "data", "data", "data", "text", "bytes"]))
    if kind == "data":
        return json.dumps(draw(mutated(tree))).encode()
    text = json.dumps(tree)
    if kind == "bytes":
        return draw(byte_strings(text.encode()))

    # A value of the text becomes what `json.dumps` never writes.
    value = draw(
        st.sampled_from(
            ["9" * 400, "9" * 5000, "-1e999", "[" * 5000, '{"a":' * 500, '{"a":1,"a":2}', "NaN", ""]
        )
    )
    at = [i for i, letter in enumerate(text) if letter == ":"]
    if not at:
        return value.encode()
    i = at[draw(st.integers(0, len(at) - 1))]
    return f"{text[: i + 1]} {value}{text[i + 1 :]}".encode()


@st.composite
def byte_strings(draw: st.DrawFn, content: bytes) -> bytes:
    """The content with some bytes changed, cut off, put in or repeated."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, min(len(changed), 4000) - 1)))
        change = draw(st.sampled_from(["flip", "flip", "cut", "insert", "repeat"]))
        if change == "flip" and changed:
            changed[at] ^= 1 << draw(st.integers(0, 7))
        elif change == "cut":
            del changed[at:]
        elif change == "insert":
            changed[at:at] = draw(st.binary(min_size=1, max_size=8))
        else:
            changed[at:at] = changed[at : at + draw(st.integers(1, 64))]
    return bytes(changed)


def split_safetensors(file: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and the bytes of its tensors."""
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def joined_safetensors(header: bytes, tensors: bytes) -> bytes:
    """The safetensors file of a header and the bytes of its tensors."""
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + tensors


Opening = Callable[[], object]
