"""The model card that stands beside converted weights."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePath

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.utils import yaml_dump

from normswap import schemes
from normswap.errors import printable
from normswap.models import kinds, timm_models
from normswap.plan import Step
from normswap.proof.verdict import Report
from normswap.provenance import Provenance

_CARD = Path(__file__).with_suffix(".md")
# Characters that Markdown, or HTML in it, would not show. It shows an underscore within a word.
_MARKS = re.compile(r"[\\`*\[\]<|&~$]|\b_|_\b")


@dataclass(frozen=True)
class Accuracy:
    """Top-1 of a network on labelled images, as its model card states it.

    Args:
        top1: The share of images whose label has the highest score, in percent.
        count: The number of images.
        images: The name of the images, as a reader sees it.
        split: The part of the dataset, such as validation. Empty if the dataset has no parts.
        dataset: The repository of the dataset on the hub. None if the images are not on the hub.
            Then only the card's text has the figure.
        task: The name of the measurement in the dataset's `eval.yaml`.
        source_top1: Top-1 of the network before its conversion, on the same images. None if it was
            not measured.
    """

    top1: float
    count: int
    images: str
    split: str = ""
    dataset: str | None = None
    task: str = "default"
    source_top1: float | None = None

    def __str__(self) -> str:
        part = f"{_plain(self.images)}, {_plain(self.split)}" if self.split else _plain(self.images)
        sentence = f"Top-1: **{self.top1:.2f} %** of {self.count} labelled images ({part})"
        if self.source_top1 is None:
            return f"{sentence}.\n"
        return f"{sentence}; the source has {self.source_top1:.2f} % of the same images.\n"


def eval_results(accuracy: Accuracy | None) -> dict[str, bytes]:
    """Return the file from which the hub reads a network's top-1: its path, and its content.

    The hub shows the figure if the dataset is one of its benchmarks. The dict has one entry, or
    none if top-1 was not measured on a dataset of the hub.

    Source: https://huggingface.co/docs/hub/eval-results
    """
    if accuracy is None or accuracy.dataset is None:
        return {}

    notes = f"top-1 in percent, {accuracy.count} images"
    if accuracy.split:
        notes += f" of {printable(accuracy.split)}"
    dataset = {"id": printable(accuracy.dataset), "task_id": printable(accuracy.task)}
    entry = {"dataset": dataset, "value": accuracy.top1, "notes": notes}
    # The file has the name of the dataset without its owner. A character that may not stand in the
    # name of a file, or a dot in front, is replaced or dropped.
    name = re.sub(r"[^a-z0-9._-]", "-", accuracy.dataset.rpartition("/")[2].lower()).lstrip(".")
    return {f".eval_results/{name}.yaml": yaml_dump([entry], sort_keys=False).encode()}


# The tensors of frozen norms have the names of BatchNorm's, so timm loads them into BatchNorms.
_THAWS = (
    "The norms are frozen where normswap opens this network. timm opens it with BatchNorms: the"
    " same in eval mode, but in training mode their statistics move."
)


def render(
    record: Provenance,
    report: Report | None,
    *,
    code: str = "",
    license: str | None = None,
    accuracy: Accuracy | None = None,
) -> str:
    """Return the model card in Markdown: the network, its conversion, its figures, how to load it.

    Names and figures may come from somebody else's file. Whatever they hold, Markdown shows them
    literally, in one line.

    Args:
        record: Where the network comes from, and the plan of its conversions.
        report: The measurements of the conversion. None if the weights have changed since.
        code: Python code that loads the network. The default opens the directory of the card.
        license: The license of the weights, by the hub's name. None if it is not known.
        accuracy: Top-1 of this network on labelled images. None if it was not measured.
    """
    steps = [_described(step) for step in record.plan.steps]
    # If it is not known how to build the network, the title just says `network`.
    arch = getattr(record.arch, "name", "network")
    title = f"{arch} converted to {steps[-1]}" if steps else arch
    code = code or loading_code(".", record)
    base = base_model(record)
    data = _data_for_hub(record, title, base, code, license, accuracy)

    # Write the paragraphs of the text. A path on this disk is of no use to anybody else, so only
    # its last part is shown.
    source = record.source if base else PurePath(record.source).name
    sha256 = f" (tensors' SHA-256 {_code_span(record.sha256)})" if record.sha256 else ""
    measured = "Not verified since the last change to its weights.\n"
    is_exact = schemes.are_exact_if_known(record.plan.steps)
    # This program may not know a scheme of the plan. Then the report tells what it has claimed.
    if is_exact is None:
        is_exact = report is None or report.exact
    if report:
        # `steps_before` is the number of conversions before the one that was measured.
        before = " -> ".join(["source", *steps[: report.steps_before]])
        measured = _measured(report, before, is_exact=is_exact)
    if accuracy:
        measured = f"{accuracy}\n{measured}"
    # A frozen norm has tensors of the same names as a BatchNorm, so timm would open it as one.
    if record.arch is not None and record.arch.builder == "timm" and _is_frozen(record):
        measured = f"{measured}\n{_THAWS}\n"
    # The BatchNorms can be brought back if their tensors are stored, and no conversion has changed
    # the network's function.
    reversible = record.norms and is_exact
    return _CARD.read_text(encoding="utf-8").format(
        data=data.to_yaml(),
        title=_plain(title),
        source=_code_span(source),
        hash=sha256,
        conversion=_plain(" -> ".join(["source", *steps])),
        measured=measured,
        code=code,
        back="; `--to unfold` brings the BatchNorm network back" if reversible else "",
    )


def _data_for_hub(
    record: Provenance,
    title: str,
    base: str | None,
    code: str,
    license: str | None,
    accuracy: Accuracy | None,
) -> ModelCardData:
    """Return the entries of the card's YAML header, which the hub reads.

    Args:
        record: Where the network comes from, and the plan of its conversions.
        title: The title of the card.
        base: The hub's repository that the weights were taken from, or None.
        code: Python code that loads the network.
        license: The license of the weights, by the hub's name. None if it is not known.
        accuracy: Top-1 of this network on labelled images. None if it was not measured.
    """
    task = "image-feature-extraction"
    if record.pretrained_cfg.get("num_classes"):
        task = "image-classification"

    builders = [record.arch.builder] if record.arch else []
    dataset = accuracy.dataset if accuracy else None
    # The texts may come from somebody else's file, so invisible characters are escaped. The library
    # is timm if its code alone loads the network.
    return ModelCardData(
        license=license and printable(license),
        base_model=base and printable(base),
        datasets=[printable(dataset)] if dataset else None,
        metrics=["accuracy"] if accuracy else None,
        pipeline_tag=task,
        library_name="normswap" if "normswap" in code else "timm",
        tags=[*map(printable, builders), "normswap"],
        model_name=printable(title),
        eval_results=_results(task, accuracy),
    )


def _is_frozen(record: Provenance) -> bool:
    """Return whether the last conversion of a network has frozen its BatchNorms.

    Args:
        record: The provenance of the network, which has the plan of its conversions.
    """
    schemes_of_steps = [step.scheme for step in record.plan.steps]
    # A network without conversions has no last scheme, so the slice is empty.
    return schemes_of_steps[-1:] == ["frozen-bn"]


def loading_code(place: str, record: Provenance) -> str:
    """Return Python code that opens a network with normswap.

    Args:
        place: The directory or repository of the network, as `normswap.open` takes it.
        record: The provenance of the network. It tells whether the code must trust the user's own
            function that builds the network.
    """
    trust = ""
    if record.arch is not None and kinds.by_builder(record.arch.builder).foreign:
        trust = ", trust_factory=True"
    return f'import normswap\n\nmodel = normswap.open("{place}"{trust})  # in eval mode'


def base_model(record: Provenance) -> str | None:
    """Return the hub's repository that the weights were taken from, as owner/name, or None."""
    # The source is written as the user typed it: `hf-hub:owner/name@revision`, `hf:owner/name`, a
    # path, or a name of timm with the tag of its weights, such as `resnet50.a1_in1k`.
    # Random weights, which have no hash, were taken from nowhere.
    prefix, _, place = record.source.rpartition(":")
    if record.sha256 is None or PurePath(place).is_absolute():
        return None
    if prefix in ("hf-hub", "hf"):
        return place.partition("@")[0]
    is_name_of_timm = (
        not prefix and record.arch is not None and record.arch.builder == "timm" and "." in place
    )
    return timm_models.repository(place) if is_name_of_timm else None


def _plain(text: str) -> str:
    """Return a text in which the marks of Markdown are escaped.

    Then Markdown shows the text literally, in one line.
    """
    return _MARKS.sub(r"\\\g<0>", printable(text))


def _code_span(text: str) -> str:
    """Return a text as Markdown shows code in a line: between backticks."""
    # The text may hold backticks itself. It ends at the first row of as many as stood before it, so
    # one more than its longest row is put around it.
    text = printable(text)
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    # Markdown takes one blank off at each end.
    padding = " " if longest else ""
    return f"{fence}{padding}{text}{padding}{fence}"


def _results(task: str, accuracy: Accuracy | None) -> list[EvalResult] | None:
    """Return top-1 as the entry of the card's header that the hub reads as an evaluation result.

    The result is None if top-1 was not measured on a dataset of the hub. Other figures, such as the
    agreement with the source, are no results on a dataset, so only the card's text has them.

    Args:
        task: The hub's name of the task, such as image-classification.
        accuracy: The measured top-1, or None.
    """
    if accuracy is None or accuracy.dataset is None:
        return None
    result = EvalResult(
        task_type=task,
        dataset_type=printable(accuracy.dataset),
        dataset_name=printable(accuracy.images),
        dataset_split=printable(accuracy.split) or None,
        dataset_args={"images": accuracy.count},
        metric_type="accuracy",
        metric_name="top-1, percent",
        metric_value=accuracy.top1,
    )
    return [result]


def _described(step: Step) -> str:
    """Return a conversion in words, such as the name of its scheme.

    Options of the scheme that are not at their defaults stand behind the name, in brackets.
    """
    options = ", ".join(
        f"{key} = {value}" for key, value in schemes.changed(step.scheme, step.options).items()
    )
    if not options:
        return step.scheme
    return f"{step.scheme} ({options})"


def _measured(report: Report, before: str, *, is_exact: bool) -> str:
    """Return the card's paragraph about the measurements, in Markdown.

    Args:
        report: The measurements.
        before: The network that the result was measured against, in words: `source`, followed by
            the conversions that had been applied to it, as in `source -> folded`.
        is_exact: Whether all conversions since the source keep the network's function.
    """
    # Say what was claimed, and against which network it was measured.
    claim = "this conversion changes the function of its source"
    if is_exact:
        claim = "this conversion keeps the function of its source"
    elif report.exact:
        claim = "this keeps the function of that network, which has another one than its source"

    reference = "the source"
    if report.steps_before:
        reference = f"the network after {_plain(before)}"
    heading = f"Measured against {reference} on {_plain(report.inputs)} ({claim}):\n"
    lines = [heading, *_table_of_errors(report)]

    # Say how much of the accuracy is kept, or that this was not measured.
    if report.kept:
        kept = _plain(str(report.kept))
        lines.append(
            f"\nMeasured on images that nothing was fitted to: {kept}. Other images may keep less."
        )
    elif not report.exact:
        why = f": {_plain(report.unmeasured)}" if report.unmeasured else ""
        lines.append(f"\nHow much of the accuracy this keeps was not measured{why}.")
    return "\n".join([*lines, ""])


def _table_of_errors(report: Report) -> list[str]:
    """Return the lines of a Markdown table with a row for each precision and input size."""
    # On noise the argmax of an approximate result means nothing, so its column is left out.
    heading = "| precision | input | relative L2 | largest |"
    rule = "|---|---|---|---|"
    if report.exact:
        heading += " same argmax |"
        rule += "---|"

    lines = [heading, rule]
    for error in report.logits:
        size = "x".join(map(str, error.size))
        agreement = "" if error.agreement is None else f"{error.agreement:.1%}"
        precision = _plain(error.precision)
        row = f"| {precision} | {size} | {error.relative_l2:.1e} | {error.largest:.1e} |"
        if report.exact:
            row += f" {agreement} |"
        lines.append(row)
    return lines
