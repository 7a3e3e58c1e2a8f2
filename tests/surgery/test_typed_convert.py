"""Editors and type checkers know the options of `normswap.convert`."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest
from mypy import api

from normswap.schemes.catalogue import TARGETS
from normswap.surgery import conversion

CALLS = """
from typing import Any

import normswap
from torch import nn


def calls(model: nn.Module, name: str, options: dict[str, Any]) -> None:
    normswap.convert(model, to="groupnorm", steady=0.9, groups=8)
    normswap.convert(model, "groupnorm", input_size=(3, 32, 32), only="layer1.*")
    normswap.convert(model, to="folded", branches="keep")
    normswap.convert(model, to="skipinit", alpha=0.5)
    normswap.convert(model, to="skipinit", alpha="match")
    normswap.convert(model, to="rmsnorm", skip=["head"])
    normswap.convert(model, to="batchnorm", like="resnet18")
    normswap.convert(model, to="a scheme of one's own", **options)
    normswap.convert(model, to="groupnorm", steadi=0.9)  # wrong
    normswap.convert(model, to="groupnorm", steady="much")  # wrong
    normswap.convert(model, to="folded", branches="cut")  # wrong
    normswap.convert(model, to="groupnorm", input_size=32)  # wrong
    normswap.convert(model, to="groupnorm", purpose="privat")  # wrong
    normswap.convert(model)  # wrong
"""

# Everything behind the types of `convert`, torch too, is taken for Any: else mypy reads for half a minute.
QUICK = """
[mypy]
follow_imports = skip
ignore_missing_imports = true

[mypy-normswap,normswap.surgery.conversion,normswap.models.modes]
follow_imports = silent
"""


def test_every_option_of_a_scheme_has_a_type() -> None:
    own = {option.name for scheme in TARGETS.values() for option in scheme.options}
    assert own | {"only", "skip", "purpose"} == set(typing.get_type_hints(conversion.ConvertOptions))


def test_wrong_options_are_errors_to_mypy_and_right_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "calls.py").write_text(CALLS)
    (tmp_path / "mypy.ini").write_text(QUICK)
    monkeypatch.setenv("MYPYPATH", str(Path(str(conversion.__file__)).parents[2]))
    monkeypatch.chdir(tmp_path)
    said, trouble, _ = api.run(["--strict", "--hide-error-context", "calls.py"])
    assert not trouble
    wrong = [number for number, line in enumerate(CALLS.split("\n"), start=1) if line.endswith("# wrong")]
    assert sorted({int(number) for number in re.findall(r"^calls\.py:(\d+): error", said, re.MULTILINE)}) == wrong
    assert 'Unexpected keyword argument "steadi"' in said
