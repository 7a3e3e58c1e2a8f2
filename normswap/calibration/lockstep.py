"""Several networks run over the same images, in lockstep, from one layer to the next.

A network is run by the nodes of its recorded graph. Wherever the caller stops the networks, the
values that later nodes read are stored, batch by batch. The run to the next stop continues from
these values, so a layer may be changed before the layers behind it run.
"""

import copy
import itertools
import math
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
from normswap.models import network_input
from normswap.models.calling import Example

# The values of a network's nodes for one batch, by the node's name.
Values: TypeAlias = dict[str, Any]
# The entry of this name in `Values` is no node's value, but a key of `Interpreter.records`. It
# tells which recorded forward computes the batch.
SIZE = ""
# Tensors of at least so many bytes are stored in mapped files.
LARGE = 2**20


def _operations(nodes: Iterable[fx.Node]) -> list[tuple[str, str]]:
    """Return the name and the target of every node, to compare two recorded forwards by."""
    return [(node.name, str(node.target)) for node in nodes]


class Interpreter:
    """Runs one network node by node.

    The interpreter records the network's operations for each size of the input. If the values of an
    input decide which operations run, it makes a record for each input.

    Args:
        model: The network.
        example: The first call, on which the network is recorded.

    Attributes:
        records: The recorded forwards, by a key that `start` makes.
        index: The position of each node in the first record.
        last: For each node, the position of the last node that reads its value.
    """

    def __init__(self, model: nn.Module, example: Example) -> None:
        # Two images show which operations run, and cost less than the batch. But the number of
        # images in a list decides which operations run, so a list is not shortened.
        self.traced = (
            record_once(model, example) if example.listed else record(model, example.first(2))
        )
        self.nodes = self.traced.nodes
        self.records: dict[str, Traced] = {}
        self.index = {node: i for i, node in enumerate(self.nodes)}

        # The index of the last node that reads each value.
        self.last: dict[fx.Node, int] = {}
        for i, node in enumerate(self.nodes):
            self.last.update(dict.fromkeys(node.all_input_nodes, i))

    def start(self, example: Example) -> Values:
        """Return the values before the first node, by name: the inputs and a key of `records`.

        The key is under the name `SIZE`. It says which recorded forward runs on these inputs, as
        each size of the input has a record of its own.

        Args:
            example: The call whose inputs are taken. It is recorded if its size is new and may lead
                another way through the network.

        Raises:
            SourceError: The network runs other operations for this call than for the first.
        """
        # The key is the input's size, as text. If values decide which operations run (`branches`),
        # a number is put before it, so that each call gets a record of its own.
        key = f"{len(self.records)}: {example}" if self.traced.branches else str(example)
        if self.traced.input_independent and not self.traced.untracked:
            # All inputs take the way of the first record.
            self.records[key] = self.traced
        if key not in self.records:
            record = record_once(self.traced.modules[""], example)
            if _operations(record.nodes) != _operations(self.nodes):
                why = "the way depends on how many there are, too" if example.listed else ""
                raise SourceError(
                    f"images of size {example} take another way through the network", why
                )

            self.records[key] = record

        input_names = (node.name for node in self.nodes if node.op == "placeholder")
        return {**dict(zip(input_names, example.tensors(), strict=True)), SIZE: key}

    def run(self, values: Values, begin: int, end: int) -> Values:
        """Compute the nodes from `begin` up to, but not including, `end`.

        Args:
            values: The values before `begin`, which are changed in place. A node whose value is
                among them is not computed.
            begin: The index of the first node.
            end: The index of the node at which the run stops.

        Returns:
            The same values, without those that no later node reads.
        """
        # The recorded forward for this size of input. Its last node returns the outputs, and
        # computes nothing.
        record = self.records[values[SIZE]]
        for i in range(begin, end):
            node = record.nodes[i]
            if node.op == "output":
                break
            if node.name not in values:
                values[node.name] = self._compute(record, node, values)

        # Values that no later node reads are dropped, so that they take no memory.
        read_later = {node.name for node in self.nodes[:end] if self.last.get(node, -1) >= end}
        for name in values.keys() - read_later - {SIZE}:
            del values[name]

        return values

    def _compute(self, record: Traced, node: fx.Node, values: Values) -> object:
        """Return the value of a node: a tensor of the network, or the result of an operation.

        Args:
            record: The recorded forward that has the node.
            node: The node.
            values: The values of the nodes that it reads, by name.
        """
        if node.op == "get_attr":
            return record.fetch(str(node.target))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: values[source.name])
        return apply(record, node, args, kwargs)


def _interpreters(models: Sequence[nn.Module], first: Example) -> list[Interpreter]:
    """Return an interpreter of each network, recorded on the first batch.

    Raises:
        SourceError: A network does not run on the batch.
    """
    try:
        return [Interpreter(model, first) for model in models]
    except TraceError as error:
        raise SourceError(
            "the calibration images do not fit the network",
            error.why or error.what,
            remedy_for(first),
        ) from None


def _call_in_one_order(interpreters: Sequence[Interpreter]) -> bool:
    """Whether all networks call the layers that they share once each, and in the same order.

    A layer is a module with parameters. Layers of two networks are shared if their paths are equal.
    """
    orders: list[list[str]] = []
    for interpreter in interpreters:
        modules = ((node, interpreter.traced.module(node)) for node in interpreter.nodes)
        orders.append(
            [
                str(node.target)
                for node, module in modules
                if module is not None and any(True for _ in nn.Module.parameters(module))
            ]
        )

    shared = set(orders[0]).intersection(*orders[1:])
    first, *others = ([path for path in order if path in shared] for order in orders)
    return len(first) == len(shared) and all(order == first for order in others)


class Lockstep:
    """Networks in eval mode that run over the same batches, node by node.

    All of them stop at a node that the caller names (`run_to`). The values of each batch are stored
    there.

    Args:
        models: The networks, which are recorded on the first batch.
        batches: Images as the networks take them (`checked_batches.checked`).
        mirrored: The number of images, from the first on, whose mirror images are added.

    Raises:
        SourceError: The batches do not fit the networks, or hold fewer than two images.
    """

    @torch.no_grad()
    def __init__(
        self, models: Sequence[nn.Module], batches: Iterable[object], *, mirrored: int = 0
    ) -> None:
        examples = checked(models[0], batches)
        first = next(examples, None)
        if first is None:
            raise SourceError("0 calibration images", "at least 2 are needed")

        self.first = first
        self.device = first.images.device
        self.interpreters = _interpreters(models, first)
        # The index of the node before which each network stands.
        self.reached = [0] * len(models)

        # A forward that is written for one batch size cannot run on parts of the batch.
        takes_parts = all(network_input.runs(model, first.first(1)) for model in models)
        # If a network does not run on the images, `run` raises an error that says why, before
        # anything is stored.
        if not takes_parts:
            for model in models:
                run(model, first)

        # For each batch, the stored values of each network, and those before its first node. The
        # latter are kept only if a network may have to begin again (`run_to`).
        self.batches: list[list[Values]] = []
        self.starts: list[list[Values]] = []
        self._keeps_starts = not _call_in_one_order(self.interpreters)
        # The number of the user's images.
        self.images = 0
        # The number of stored images: the user's, and the mirror images of some.
        self.rows = 0
        for batch in itertools.chain([first], examples):
            for example in parts(batch, self.device) if takes_parts else [batch]:
                self._store(example)
                if self.images < mirrored and example.mirrors:
                    self._store(example.map(lambda images: images.flip(-1)))
                self.images += example.count

        if self.images < 2:
            raise SourceError(f"{self.images} calibration images", "at least 2 are needed")

    def _store(self, example: Example) -> None:
        """Add a call to the stored batches, with each network before its first node.

        So the values that are stored of it are the inputs alone.
        """
        self.rows += example.count
        # Each network gets a copy: the first layer may write in place.
        starts = [interpreter.start(example.map(torch.clone)) for interpreter in self.interpreters]
        if self._keeps_starts:
            self.starts.append(copy.deepcopy(starts))
        self.batches.append([_stored(values, {}) for values in starts])

    @torch.no_grad()
    def run_to(self, nodes: list[fx.Node]) -> Iterator[list[Values]]:
        """Run each network up to its node, and yield for each batch the values of each network.

        The node itself is not run. The caller may add the node's value to the yielded values. The
        run to the next stop then takes that value, and does not compute it again.

        Args:
            nodes: The node of each network, in the order of the networks.

        Raises:
            VerificationError: After the last batch, if a value was NaN or infinite.
        """
        stops = [
            interpreter.index[node]
            for interpreter, node in zip(self.interpreters, nodes, strict=True)
        ]
        # If a node lies before the place that its network has reached, what the node reads may have
        # been dropped or written over. Then all networks begin again, and nothing is stored: the
        # next stop goes on from where they were.
        advances = all(end >= begin for begin, end in zip(self.reached, stops, strict=True))
        begins = self.reached if advances else [0] * len(stops)
        assert advances or self.starts, "layers are asked for in the order of their calls"

        extremes: list[Tensor] = []
        for i, stored in enumerate(self.batches if advances else self.starts):
            batch = [_loaded(values, self.device) for values in stored]
            if not advances:
                # The stored inputs must stay as they are.
                batch = copy.deepcopy(batch)

            try:
                for interpreter, values, begin, end in zip(
                    self.interpreters, batch, begins, stops, strict=True
                ):
                    interpreter.run(values, begin, end)
            # The recorded operations are the user's, and may raise anything for other images.
            except Exception as error:
                what = "these images take another way through the network than the first"
                raise misfit(error, what, self.first) from None

            # The values that are new since the last stop are checked after the last batch.
            for values, before in zip(batch, stored, strict=True):
                extremes += _extremes(values[name] for name in values.keys() - before.keys())
            yield batch

            if advances:
                self.batches[i] = [
                    _stored(values, before) for values, before in zip(batch, stored, strict=True)
                ]

        # Reading an answer waits for the GPU, so it is read once for all batches.
        if extremes and not all(map(math.isfinite, torch.stack(extremes).tolist())):
            raise VerificationError(
                "the network gives values that are not finite on the calibration images"
            )

        if advances:
            self.reached = stops


def _stored(values: Values, before: Values) -> Values:
    """Return values as they are stored: new large tensors are moved to files mapped into memory.

    On a GPU with memory to spare they stay where they are.

    Args:
        values: The values at a stop, by name.
        before: The values that were stored at an earlier stop. They are kept as they are.
    """
    # How many of the tensors use the same memory. A network may write into one view of a memory and
    # read another view, so tensors that share memory are not moved to separate files.
    sharing = Counter(
        value.untyped_storage().data_ptr() for value in values.values() if isinstance(value, Tensor)
    )
    stored: Values = {}
    for name, value in values.items():
        stored[name] = before.get(name, value)
        is_large = isinstance(value, Tensor) and value.nbytes >= LARGE and value.is_contiguous()
        if is_large and name not in before and sharing[value.untyped_storage().data_ptr()] == 1:
            stored[name] = value if _device_holds(value) else _mapped(value)
    return stored


def _device_holds(value: Tensor) -> bool:
    """Whether a tensor is on a GPU with at least half of its memory free.

    Such a tensor is not moved to the host, as copying it there and back takes longer than computing
    with it.
    """
    if value.device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(value.device)
    # torch reserves memory that no tensor uses yet. That counts as free, too.
    unused = torch.cuda.memory_reserved(value.device) - torch.cuda.memory_allocated(value.device)
    return 2 * (free + unused) >= total


def _mapped(value: Tensor) -> Tensor:
    """Return a copy of a tensor in a temporary file that is mapped into memory.

    The operating system can write such memory to disk. If the disk is nearly full, the tensor
    itself is returned.
    """
    # Writing to a mapped file on a full disk kills the process.
    if shutil.disk_usage(tempfile.gettempdir()).free < 2 * value.nbytes:
        return value
    # The file is deleted at the end of the block. Its memory stays as long as the tensor does.
    with tempfile.NamedTemporaryFile(prefix="normswap-") as file:
        mapped = torch.from_file(file.name, shared=True, size=value.numel(), dtype=value.dtype)
    return mapped.view(value.shape).copy_(value)


def _loaded(values: Values, device: torch.device) -> Values:
    """Return stored values, with the tensors that are in mapped files copied to the device.

    Large tensors may have been moved to files that are mapped into the CPU's memory. If the network
    runs on the CPU, they are returned as they are.
    """
    loaded = dict(values)
    for name, value in values.items():
        # The storage of such a tensor has the name of its file.
        if (
            isinstance(value, Tensor)
            and value.device.type == "cpu"
            and value.untyped_storage().filename is not None
        ):
            loaded[name] = value.to(device)
    return loaded


def _extremes(values: Iterable[object]) -> Iterator[Tensor]:
    """Yield the least and the largest number of each floating-point tensor among some values.

    Both are finite if and only if the whole tensor is, as a NaN is returned as least and largest.
    """
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            yield from value.aminmax()
