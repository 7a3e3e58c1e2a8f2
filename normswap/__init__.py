"""normswap: move a pretrained vision network to another normalization scheme, keeping the function it learned.

The public names, imported when first used, so that `import normswap` and `normswap --help` stay fast. No file of the
package has the name of a public function: importing it would put the module in the function's place.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from normswap.version import __version__ as __version__

if TYPE_CHECKING:
    from normswap.analysis.weight_decay import param_groups as param_groups
    from normswap.diagnosis.doctor import diagnose as diagnose
    from normswap.diagnosis.findings import Diagnosis as Diagnosis
    from normswap.diagnosis.findings import Finding as Finding
    from normswap.errors import NormswapError as NormswapError
    from normswap.exporting.exporter import Exported as Exported
    from normswap.exporting.exporter import export as export
    from normswap.graph.inspection import Anatomy as Anatomy
    from normswap.graph.inspection import inspect as inspect
    from normswap.layers.known_norms import register_norm as register_norm
    from normswap.plan import Arch as Arch
    from normswap.plan import Plan as Plan
    from normswap.schemes import Scheme as Scheme
    from normswap.schemes import register_scheme as register_scheme
    from normswap.storage.checkpoint import load as load
    from normswap.storage.checkpoint import save as save
    from normswap.surgery.carrying_out import Conversion as Conversion
    from normswap.surgery.comparison import verify as verify
    from normswap.surgery.conversion import convert as convert
    from normswap.surgery.network import Network as Network
    from normswap.surgery.report import Report as Report
    from normswap.training.engine import Result as Result
    from normswap.training.engine import finetune as finetune
    from normswap.training.recipe import Recipe as Recipe
    from normswap.training.recipe_files import load_recipe as load_recipe

_HOMES = {
    "Anatomy": "graph.inspection",
    "Arch": "plan",
    "Conversion": "surgery.conversion",
    "Diagnosis": "diagnosis.findings",
    "Exported": "exporting.exporter",
    "Finding": "diagnosis.findings",
    "Network": "surgery.network",
    "NormswapError": "errors",
    "Plan": "plan",
    "Scheme": "schemes",
    "Recipe": "training.recipe",
    "Report": "surgery.report",
    "Result": "training.engine",
    "convert": "surgery.conversion",
    "diagnose": "diagnosis.doctor",
    "export": "exporting.exporter",
    "finetune": "training.engine",
    "inspect": "graph.inspection",
    "load": "storage.checkpoint",
    "load_recipe": "training.recipe_files",
    "param_groups": "analysis.weight_decay",
    "register_norm": "layers.known_norms",
    "register_scheme": "schemes",
    "save": "storage.checkpoint",
    "verify": "surgery.comparison",
}
__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'normswap' has no attribute {name!r}")
    return getattr(importlib.import_module(f"normswap.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
