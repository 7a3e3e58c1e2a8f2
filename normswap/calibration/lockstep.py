"""Several networks run over the same images, in lockstep, from one layer to the next.

At each stop the values that later nodes read are stored, batch by batch. The next stop continues
from them.
"""

import copy
import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from normswap.calibration.checked_batches import checked, misfit, parts, remedy_for, run
from normswap.errors import SourceError, TraceError, VerificationError
from normswap.graph.recording import record, record_once
from normswap.graph.tracing import Traced, apply
from normswap.models.calling import Example

Values: TypeAlias = dict[str, Any]
# Under this name the values hold the key of the record that the images follow.
SIZE = ""
# Tensors of at least so many bytes are stored in mapped files.
LARGE = 2**20


class Interpreter:
    """One network that is run node by node.

    It has a record of its operations for each size of its input, or for each input where the values
    decide which operations run.
    """

    def __init__(self, model: nn.Module, example: Example) -> None:
        # The number of images in a list decides which operations run, so a list is not shortened.
        self.traced = (
            record_once(model, example) if example.listed else record(model, example.first(2))
        )
        self.nodes = self.traced.nodes
        self.records: dict[str, Traced] = {}
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.last: dict[fx.Node, int] = {}
        for i, node in enumerate(self.nodes):
            self.last.update(dict.fromkeys(node.all_input_nodes, i))

    def start(self, example: Example) -> Values:
        """The values before the first node: the inputs, and the key of the record."""
        key = f"{len(self.records)}: {example}" if self.traced.branches else str(example)
        if key not in self.records:
            record = record_once(self.traced.modules[""], example)
            ways = [
                [(node.name, str(node.target)) for node in nodes]
                for nodes in (record.nodes, self.nodes)
            ]

            if ways[0] != ways[1]:
                why = "the way depends on how many there are, too" * example.listed
                raise SourceError(
                    f"images of size {example} take another way through the network", why
                )

            self.records[key] = record

        entries = (node.name for node in self.nodes if node.op == "placeholder")
        return {**dict(zip(entries, example.tensors(), strict=True)), SIZE: key}

    def run(self, values: Values, begin: int, end: int) -> Values:
        """Return the values after the nodes from `begin` up to, but not including, `end`.

        Values that no later node reads are dropped.
        """
        record = self.records[values[SIZE]]
        for i in range(begin, end):
            node = record.nodes[i]
            if node.op == "output":
                break
            if node.name not in values:
                values[node.name] = self._compute(record, node, values)

        alive = {node.name for node in self.nodes[:end] if self.last.get(node, -1) >= end}
        for name in values.keys() - alive - {SIZE}:
            del values[name]

        return values

    def _compute(self, record: Traced, node: fx.Node, values: Values) -> object:
        if node.op == "get_attr":
            return record.fetch(str(node.target))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: values[source.name])
        return apply(record, node, args, kwargs)


class Lockstep:
    """Networks in eval mode that advance together, and each batch's values where they stopped.

    The networks are recorded on the first batch (`checked`). The first `mirrored` images are
    followed by their mirror images.

    Raises:
        SourceError: The batches do not fit the networks, or hold fewer than two images.
    """

    @torch.no_grad()
    def __init__(
        self, models: Sequence[nn.Module], batches: Iterable[object], *, mirrored: int = 0
    ) -> None:
        self.batches: list[list[Values]] = []
        # Images, and rows of the stored batches: mirror images count here.
        self.images = self.rows = 0
        examples = checked(models[0], batches)
        first = next(examples, None)
        if first is None:
            raise SourceError("0 calibration images", "at least 2 are needed")

        self.first = first
        try:
            self.interpreters = [Interpreter(model, first) for model in models]
        except TraceError as error:
            raise SourceError(
                "the calibration images do not fit the network",
                error.why or error.what,
                remedy_for(first),
            ) from None
        # A forward that fixes its number of images runs on the whole batch only.
        whole = not all(_takes_one(model, first) for model in models)

        for model in models:
            run(model, (first if whole else first.first(1)).map(torch.clone))
        self.device = first.images.device
        self.reached = [0] * len(models)

        for batch in itertools.chain([first], examples):
            for example in [batch] if whole else parts(batch, self.device):
                self._store(example)
                if self.images < mirrored and example.mirrors:
                    self._store(example.map(lambda images: images.flip(-1)))
                self.images += example.count

        if self.images < 2:
            raise SourceError(f"{self.images} calibration images", "at least 2 are needed")

    def _store(self, example: Example) -> None:
        self.rows += example.count
        # Each network gets a copy: the first layer may write in place.
        starts = [interpreter.start(example.map(torch.clone)) for interpreter in self.interpreters]
        self.batches.append([_stored(values, {}) for values in starts])

    @torch.no_grad()
    def run_to(self, nodes: list[fx.Node]) -> Iterator[list[Values]]:
        """Run each network up to its node in `nodes`, and yield each batch's values there.

        The node itself is not run.
        The caller may add the value of that node.

        Raises:
            VerificationError: After the last batch, if a value was NaN or infinite.
        """
        ends = [
            interpreter.index[node]
            for interpreter, node in zip(self.interpreters, nodes, strict=True)
        ]
        advances = all(end >= begin for begin, end in zip(self.reached, ends, strict=True))

        finite: list[Tensor] = []
        for i, stored in enumerate(self.batches):
            batch = [_loaded(values, self.device) for values in stored]
            if not advances:
                # The next stop starts from the stored values, so this one must not write into them.
                batch = copy.deepcopy(batch)

            try:
                for interpreter, values, begin, end in zip(
                    self.interpreters, batch, self.reached, ends, strict=True
                ):
                    interpreter.run(values, begin, end)
            # The recorded operations are the user's, and may raise anything for other images.
            except Exception as error:
                what = "these images take another way through the network than the first"
                raise misfit(error, what, self.first) from None

            for values, before in zip(batch, stored, strict=True):
                finite += _finite(values[name] for name in values.keys() - before.keys())
            yield batch

            if advances:
                self.batches[i] = [
                    _stored(values, before) for values, before in zip(batch, stored, strict=True)
                ]

        # One question for all batches, as a device is waited for.
        if finite and not bool(torch.stack(finite).all()):
            raise VerificationError(
                "the network gives values that are not finite on the calibration images"
            )

        if advances:
            self.reached = ends


def _stored(values: Values, before: Values) -> Values:
    # Views of one memory stay in it: a network may write into one and read the other.
    sharing = Counter(
        value.untyped_storage().data_ptr() for value in values.values() if isinstance(value, Tensor)
    )
    stored: Values = {}
    for name, value in values.items():
        stored[name] = before.get(name, value)
        large = isinstance(value, Tensor) and value.nbytes >= LARGE and value.is_contiguous()
        if large and name not in before and sharing[value.untyped_storage().data_ptr()] == 1:
            stored[name] = _mapped(value)
    return stored


def _mapped(value: Tensor) -> Tensor:
    """Return a copy in a mapped temporary file.

    The system can write it to disk where memory is short.
    """
    # On a full disk, writing to a mapped file ends the process.
    if shutil.disk_usage(tempfile.gettempdir()).free < 2 * value.nbytes:
        return value
    with tempfile.NamedTemporaryFile(prefix="normswap-") as file:
        mapped = torch.from_file(file.name, shared=True, size=value.numel(), dtype=value.dtype)
    return mapped.view(value.shape).copy_(value)


def _loaded(values: Values, device: torch.device) -> Values:
    loaded = dict(values)
    for name, value in values.items():
        if (
            isinstance(value, Tensor)
            and value.device.type == "cpu"
            and value.untyped_storage().filename is not None
        ):
            loaded[name] = value.to(device)
    return loaded


def _finite(values: Iterable[object]) -> Iterator[Tensor]:
    """Yield whether each floating-point tensor is finite throughout: a bool () on its device."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            least, most = value.aminmax()
            yield least.isfinite() & most.isfinite()


def _takes_one(model: nn.Module, batch: Example) -> bool:
    """Whether the network runs on the first image of a batch alone."""
    # A user's forward may raise anything.
    try:
        batch.first(1).map(torch.clone).call(model)
    except Exception:
        return False
    return True
