"""The parts of a recipe: groups of keys. A group stands beside what obeys it, where that needs no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # of torch's generators


class Part(BaseModel):
    """A group of keys: unknown ones are refused, and nothing changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)
