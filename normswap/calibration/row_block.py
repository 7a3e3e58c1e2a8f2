"""Rows of inputs and targets, one behind the other in memory that is used again and again.

Of new memory every page costs a fault, which takes longer than what is done with the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class RowBlock:
    """Rows about a point, and room for more.

    Args:
        count: of the rows that are in it.
        x, y: room for rows (G, n, f) and (G, n, o), in float32 at least.
    """

    count: int = 0
    x: Tensor | None = None
    y: Tensor | None = None

    def add(self, x: Tensor, x0: Tensor, y: Tensor, y0: Tensor) -> None:
        """Put rows (G, ..., f) and (G, ..., o) less the points (G, f) and (G, o) behind the others."""
        precision = x.dtype if x.dtype == torch.float64 else torch.float32
        end = self.count + x.shape[1:-1].numel()
        self.x, self.y = self._put(self.x, x, x0, end, precision), self._put(self.y, y, y0, end, precision)
        self.count = end

    def _put(self, room: Tensor | None, rows: Tensor, point: Tensor, end: int, precision: torch.dtype) -> Tensor:
        groups, width = point.shape
        if room is None or room.shape[1] < end:
            larger = point.new_empty((groups, end if room is None else 2 * end, width), dtype=precision)
            if room is not None:
                larger[:, : self.count] = room[:, : self.count]
            room = larger
        place = room[:, self.count : end].view(rows.shape)
        between = (1,) * (rows.ndim - 2)
        torch.sub(rows, point.to(precision).view(groups, *between, width), out=place)
        return room

    def taken(self) -> tuple[Tensor, Tensor]:
        """All rows; the block counts as empty then, and they are valid until something is put into it."""
        assert self.x is not None
        assert self.y is not None
        count, self.count = self.count, 0
        return self.x[:, :count], self.y[:, :count]
