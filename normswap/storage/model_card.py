"""The model card that stands beside converted weights."""

from __future__ import annotations

import re

from huggingface_hub import ModelCardData

from normswap import schemes
from normswap.models import kinds
from normswap.plan import Body
from normswap.provenance import Provenance
from normswap.surgery.report import Report

_PLACE = '"path/to/this/directory"'
_LOAD = f"model = normswap.load({_PLACE}"


def render(record: Provenance, report: Report | None) -> str:
    """Write in Markdown what this is, what was done, what was measured, and how to use it."""
    steps = [f"{step.scheme}{_options(schemes.changed(step.scheme, step.options))}" for step in record.plan.steps]
    foreign = record.arch is None or kinds.by_builder(record.arch.builder).foreign
    arch = record.arch.name if record.arch else "network"
    builder = "pytorch" if foreign or record.arch is None else record.arch.builder
    task = ["image-classification"] if record.pretrained_cfg.get("num_classes") else []
    trust = ", trust_factory=True" if record.arch and foreign else ""
    lines = [
        "---",
        ModelCardData(library_name=builder, tags=[*task, builder, "normswap"]).to_yaml(),
        "---",
        f"# {arch}{' converted to ' + steps[-1] if steps else ''}",
        "",
        f"- Source: `{record.source}`" + (f" (tensors' SHA-256 `{record.sha256}`)" if record.sha256 else ""),
        f"- Conversion: {' -> '.join(['source', *steps])}",
        "",
        *_measured(report),
        "## Use",
        "",
        "```python",
        "import normswap",
        f"{_LOAD}{trust})  # in eval mode",
        "```",
        "",
        "`normswap verify DIR` measures it against its source again; `normswap convert DIR --to ...` goes on from here"
        + (
            "; `--to unfold` brings the BatchNorm network back."
            if record.norms and (not report or report.exact)
            else "."
        ),
    ]
    return "\n".join(lines) + "\n"


def published(card: str, repo: str, *, alone: bool) -> str:
    """Return the card as it stands on the hub: how to get the network from there, and by which library.

    Args:
        alone: timm builds and loads it without normswap.
    """
    if alone:
        code = f'import timm\nmodel = timm.create_model("hf-hub:{repo}", pretrained=True).eval()'
        return re.sub(rf"import normswap\n{re.escape(_LOAD)}.*", lambda _: code, card)
    card = card.replace("import normswap\n", "import normswap\nfrom huggingface_hub import snapshot_download\n")
    return re.sub(r"library_name: .*", "library_name: normswap", card).replace(_PLACE, f'snapshot_download("{repo}")')


def _options(options: Body) -> str:
    return f" ({', '.join(f'{key} = {value}' for key, value in options.items())})" if options else ""


def _measured(report: Report | None) -> list[str]:
    if report is None:
        return ["Not verified since the last change to its weights.", ""]
    rows = [
        f"| {e.precision} | {'x'.join(map(str, e.size))} | {e.relative_l2:.1e} | {e.largest:.1e} |"
        + f" {_share(e.agreement)} |" * report.exact  # of an approximate result it would say nothing, on noise
        for e in report.logits
    ]
    claim = "keeps the function of its source" if report.exact else "changes the function of its source"
    return [
        f"Measured against the source on {report.inputs} (this conversion {claim}):",
        "",
        "| precision | input | relative L2 | largest |" + " same argmax |" * report.exact,
        "|---|---|---|---|" + "---|" * report.exact,
        *rows,
        "",
        *_kept(report),
    ]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _kept(report: Report) -> list[str]:
    kept = report.kept
    if kept is None:
        why = f": {report.unmeasured}" if report.unmeasured else ""
        return [] if report.exact else [f"How much of the accuracy this keeps was not measured{why}.", ""]
    same = (
        ""
        if kept.agreement is None
        else (f"the source's answer on {kept.agreement:.1%} of them (at least {kept.least:.0%}), ")
    )
    return [f"On {kept.count} of the calibration images, to which nothing was fitted: {same}"
            f"relative L2 {kept.relative_l2:.2g}. Other images may keep less.", ""]  # fmt: skip
