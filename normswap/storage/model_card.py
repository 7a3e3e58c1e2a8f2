"""The model card that stands beside converted weights."""

from pathlib import Path, PurePath

from huggingface_hub import EvalResult, ModelCardData

from normswap import schemes
from normswap.models import kinds
from normswap.plan import Step
from normswap.provenance import Provenance
from normswap.surgery.report import Report

_CARD = Path(__file__).with_suffix(".md")


def render(
    record: Provenance, report: Report | None, *, code: str = "", license: str | None = None
) -> str:
    """Write in Markdown what this is, what was done and measured, and the code that loads it, by
    default from here.
    """
    steps = [_said(step) for step in record.plan.steps]
    arch = getattr(record.arch, "name", "network")
    task = (
        "image-classification"
        if record.pretrained_cfg.get("num_classes")
        else "image-feature-extraction"
    )
    title = f"{arch} converted to {steps[-1]}" if steps else arch
    code = code or loading_code(".", record)
    data = ModelCardData(
        license=license,
        base_model=base_model(record),
        library_name="normswap" if "normswap" in code else "timm",
        tags=[task, *([record.arch.builder] if record.arch else []), "normswap"],
        model_name=title,
        eval_results=_results(task, report) if report else None,
    )
    reversible = record.norms and (not report or report.exact)
    return _CARD.read_text(encoding="utf-8").format(
        data=data.to_yaml(),
        title=title,
        # A path is of no use to anybody else.
        source=record.source if base_model(record) else PurePath(record.source).name,
        hash=f" (tensors' SHA-256 `{record.sha256}`)" if record.sha256 else "",
        conversion=" -> ".join(["source", *steps]),
        measured=(
            _measured(report) if report else "Not verified since the last change to its weights.\n"
        ),
        code=code,
        back="; `--to unfold` brings the BatchNorm network back" if reversible else "",
    )


def loading_code(place: str, record: Provenance) -> str:
    """Return code that opens the network at that place by normswap."""
    is_foreign = record.arch is not None and kinds.by_builder(record.arch.builder).foreign
    trust = ", trust_factory=True" * is_foreign
    return f'import normswap\n\nmodel = normswap.open("{place}"{trust})  # in eval mode'


def base_model(record: Provenance) -> str | None:
    """Return the repository on the hub that the weights are from, if they are from one."""
    prefix, _, place = record.source.rpartition(":")
    if record.sha256 is None or PurePath(place).is_absolute():
        return None
    if prefix in ("hf-hub", "hf"):
        return place.partition("@")[0]
    is_timms = (
        not prefix and record.arch is not None and record.arch.builder == "timm" and "." in place
    )
    return f"timm/{place}" if is_timms else None


def _results(task: str, report: Report) -> list[EvalResult]:
    kept = report.kept
    results = [EvalResult(task, "noise", report.inputs, "relative_l2", report.worst.relative_l2)]
    if kept is not None and kept.agreement is not None:
        results.append(
            EvalResult(task, "images", f"{kept.count} held-out images", "agreement", kept.agreement)
        )
    return results


def _said(step: Step) -> str:
    options = ", ".join(
        f"{key} = {value}" for key, value in schemes.changed(step.scheme, step.options).items()
    )
    if not options:
        return step.scheme
    return f"{step.scheme} ({options})"


def _measured(report: Report) -> str:
    claim = (
        "keeps the function of its source" if report.exact else "changes the function of its source"
    )
    lines = [
        f"Measured against the source on {report.inputs} (this conversion {claim}):\n",
        "| precision | input | relative L2 | largest |" + " same argmax |" * report.exact,
        "|---|---|---|---|" + "---|" * report.exact,
    ]
    for error in report.logits:
        size = "x".join(map(str, error.size))
        same = "" if error.agreement is None else f"{error.agreement:.1%}"
        row = f"| {error.precision} | {size} | {error.relative_l2:.1e} | {error.largest:.1e} |"
        # On noise an approximate result's argmax says nothing.
        lines.append(row + f" {same} |" * report.exact)
    if report.kept:
        lines.append(
            f"\nMeasured on images that nothing was fitted to: {report.kept}. Other images may keep"
            " less."
        )
    elif not report.exact:
        why = f": {report.unmeasured}" if report.unmeasured else ""
        lines.append(f"\nHow much of the accuracy this keeps was not measured{why}.")
    return "\n".join([*lines, ""])
