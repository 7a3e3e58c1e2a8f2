"""The sentences and rows of README that have a figure, as the tables of tests/lab say them."""

import re

from support.lab_tables import Row, number, row_of, table, tenths, text

INT8 = "int8.md"


def ended(way: str) -> dict[str, str]:
    """Return where a way ended, by task of after_training.md; its first row of a task counts."""
    found: dict[str, str] = {}
    for row in table("after_training.md"):
        if row.get("way") == way and row["at the end"]:
            found.setdefault(row["task"], row["at the end"])
    return found


def installation() -> str:
    """Return what the installation downloads and takes of the disk."""
    linux = row_of("installation.md", system="Linux")
    for_gpus = row_of("installation.md", system="of it for GPUs")
    macos = row_of("installation.md", system="macOS")

    def gigabytes(cell: str) -> str:
        return tenths(number(cell) / 1000)

    return (
        "On Linux, torch's CUDA build makes this a download of"
        f" {gigabytes(linux['download, MB'])} GB ({gigabytes(linux['disk, MB'])} GB on disk)."
        " torch's [CPU build](https://pytorch.org/get-started/locally/), installed first, saves"
        f" {gigabytes(for_gpus['disk, MB'])} GB of disk. On macOS and Windows, pip downloads"
        f" {gigabytes(macos['download, MB'])} GB."
    )


def demo() -> str:
    """Return what other ways to a GroupNorm keep of `demo`."""

    def top1(way: str, calibration: str = "none") -> str:
        row = row_of("schemes.md", network="demo", to=way, calibration=calibration)
        return tenths(row["after"])

    source = row_of("schemes.md", network="demo", to="groupnorm")["top-1 before"]
    return (
        f"On all 10,000 test images of CIFAR-10 the source has {tenths(source)} % top-1, and"
        f" `groupnorm` has {top1('groupnorm', '1000 images')} % once fitted to 1,000 training"
        f" images. Without a fit, `groupnorm` has {top1('groupnorm')} % and the plain norm"
        f" (`--relative-eps 0`) {top1('groupnorm --relative-eps 0')} %. A GroupNorm with copied"
        f" gamma and beta, which takes no time, has {top1('gamma, beta copied')} %. Opacus'"
        " `ModuleValidator.fix`, which inserts newly initialized GroupNorms, has"
        f" {top1('Opacus ModuleValidator.fix')} %"
    )


def normalizes() -> str:
    """Return how much `groupnorm` normalizes, and what that is worth."""

    def top1(scheme: str) -> str:
        return row_of("imagenet.md", how=scheme, images="none")["top-1"]

    groupnorm, frozen = ended("groupnorm"), ended("frozen-bn")
    assert not [task for task in frozen if number(groupnorm[task]) > number(frozen[task])]
    return (
        "On 500 photographs of ImageNet's training set an EfficientNet-Lite0 has"
        f" {top1('skipinit')} % top-1."
        f" `groupnorm` has {top1('groupnorm')} % in one group and"
        f" {top1('groupnorm --groups 32')} % in 32; the plain norm (`--relative-eps 0`) has"
        f" {top1('groupnorm --relative-eps 0')} %. `groupnorm` in one group ends above `frozen-bn`"
        f" on none of the {_numeral(len(frozen))} tasks below."
    )


def _numeral(count: int) -> str:
    return {8: "eight", 9: "nine"}[count]


def elsewhere() -> str:
    """Return what a norm of each sample is worth where images differ from those of training."""
    where = "in another light"
    best, one_group, in_eval, source, copied = (
        _success(way)
        for way in (
            "groupnorm --groups 32",
            "groupnorm",
            "BatchNorm in eval mode",
            "BatchNorm",
            "GroupNorm, gamma and beta copied, groups of 16",
        )
    )
    usual = "as in training"
    return (
        "A robot's policy (20 seeds) that acts in another light than it was trained in succeeds in"
        f" {best[where]} % of its episodes with `groupnorm --groups 32`, in {one_group[where]} %"
        f" with one group, in {in_eval[where]} % with BatchNorm in eval mode and in"
        f" {source[where]} % with BatchNorm. In the same light these are {best[usual]},"
        f" {one_group[usual]}, {in_eval[usual]} and {source[usual]} %. The encoder trains along,"
        " so a GroupNorm with copied gamma and beta recovers, too: it succeeds in"
        f" {copied[where]} % and {copied[usual]} %"
    )


def seen_before() -> str:
    """Return what the statistics of the place are worth to a policy that acts there."""
    row = row_of("policy_recalibrated.md", way="BatchNorm")
    before, after = (
        tenths(number(row[f"in another light{how}"])) for how in ("", ", recalibrated")
    )
    return (
        "`normswap recalibrate` on frames of the new light, without labels or training, takes"
        f" BatchNorm from {before} to {after} % ({row['seeds']} seeds)."
    )


def _success(way: str) -> Row:
    """Return the mean success of a policy, by where it acts."""
    row = row_of("policy_seeds.md", way=way)
    assert row["seeds"] == "20"
    return {column: tenths(number(cell)) for column, cell in row.items() if column != "way"}


def folds() -> str:
    """Return what is left of the norms that fold exactly."""
    whole = row_of("summary.md", family="all")
    assert whole["exact"] == whole["networks"]
    return (
        "In the first two rows weights are random, and networks have at most 100 M parameters. All"
        f" {whole['networks']} timm networks fold exactly. They have {int(whole['norms']):,} norms:"
        f" the {100 - share_folded()} % that do not fold into other layers become a scale or a"
        f" shift. torch.fx's fuser leaves {share_left_by_torch()} % of the norms as they are."
    )


def share_folded() -> int:
    """Return the percentage of timm's norms that fold into other layers."""
    whole = row_of("summary.md", family="all")
    vanish = int(whole["folded back"]) + int(whole["forward"])
    assert vanish + int(whole["scale moved"]) + int(whole["affine left"]) >= int(whole["norms"])
    return 100 * vanish // int(whole["norms"])


def share_left_by_torch() -> int:
    """Return the percentage of timm's norms that torch.fx's fuser leaves."""
    whole = row_of("summary.md", family="all")
    return 100 * int(whole["norms left"]) // int(whole["norms"])


def found_by_the_comparison() -> str:
    """Return how many planted errors the comparison found."""
    found = re.search(r"on (\d+) networks: (\d+) of (\d+) detected", text("summary.md"))
    assert found
    return (
        f"In {found[3]} trials on {found[1]} networks, one channel of one norm was changed by 1 %;"
        f" a comparison in float64 saw {found[2]} of {found[3]}. Dead channels were left out."
    )


def _lost(row: Row, column: str) -> float:
    return round(number(row["top-1 of fp32, %"]) - number(row[column]), 2)


def _int8_rows(*formats: str) -> list[Row]:
    rows = [row for row in table(INT8) if row["format"] in formats]
    assert len(rows) == 5 * len(formats)
    return rows


def measured() -> list[str]:
    """Return the rows of the table `Measured`: what, ours, and its peer's."""
    folded = re.search(r"(\d+) architectures, .*?\*\*(\d+) exact", text("summary.md"))
    assert folded
    assert folded[1] == folded[2]

    same = [row for row in table("export.md") if row.get("dtype") == "fp32"]
    by_export = [row for row in table("export.md") if "same argmax by torch's export" in row]
    assert all(number(row["same argmax"]) == 10_000 for row in same)
    assert all(number(row["same argmax by torch's export"]) == 10_000 for row in by_export)
    assert len(by_export) == 3

    onnx = _int8_rows("onnx")
    openvino, litert = _int8_rows("openvino"), _int8_rows("litert")
    speeds = [number(row["fp32 / ours"]) for row in onnx]
    tools = [number(row["fp32, ms"]) / number(row["tool, ms"]) for row in onnx]
    ratios = [number(row["tool / ours"]) for row in (*openvino, *litert)]

    def most_lost(rows: list[Row], column: str) -> str:
        return tenths(max(_lost(row, column) for row in rows))

    return [
        (
            f"| norms of {folded[1]} timm networks with BatchNorm that fold into other layers |"
            f" [{share_folded()} %](tests/lab/coverage/summary.md) | torch.fx's fuser:"
            f" {100 - share_left_by_torch()} % |"
        ),
        (
            "| networks of torchvision, transformers, Ultralytics, MONAI and others that fold"
            f" exactly, of {_elsewhere()} | [{_elsewhere()}](tests/lab/coverage/wild.md) | not"
            " tried |"
        ),
        (
            "| fp32 exports of three networks: CIFAR-10 test images with the source's class, of"
            " 10,000 each | [10,000](tests/lab/benchmarks/export.md) | `torch.onnx.export`:"
            " 10,000 |"
        ),
        (
            "| int8 in ONNX Runtime (weights of 7 bits), five networks: most top-1 lost, in"
            f" points | [{most_lost(onnx, 'of ours')}](tests/lab/benchmarks/int8.md) | its own"
            f" quantizer, with a scale per channel: {most_lost(onnx, 'of tool')} |"
        ),
        (
            "| the same: speed as a multiple of fp32's, one thread |"
            f" [{tenths(min(speeds))} to {tenths(max(speeds))}](tests/lab/benchmarks/int8.md) | its"
            f" own quantizer: {tenths(min(tools))} to {tenths(max(tools))} |"
        ),
        (
            "| int8 in OpenVINO, five networks: most top-1 lost, in points |"
            f" [{most_lost(openvino, 'of ours')}](tests/lab/benchmarks/int8.md) | its own"
            f" quantizer (NNCF): {most_lost(openvino, 'of tool')} |"
        ),
        (
            "| int8 in LiteRT, five networks: most top-1 lost, in points |"
            f" [{most_lost(litert, 'of ours')}](tests/lab/benchmarks/int8.md) | its own quantizer:"
            f" {most_lost(litert, 'of tool')} |"
        ),
        (
            "| OpenVINO and LiteRT: speed as a multiple of their own quantizers' |"
            f" [{min(ratios):.2f} to {max(ratios):.2f}](tests/lab/benchmarks/int8.md) | 1 |"
        ),
    ]


def _elsewhere() -> str:
    """Return how many networks of other libraries have BatchNorms; all of them fold."""
    rows = [row for row in table("wild.md") if "library" in row]
    count = sum(number(row["walked"]) for row in rows)
    for column in ("not built", "too large", "no BatchNorm"):
        count -= sum(number(row[column]) for row in rows)
    assert sum(number(row["exact"]) for row in rows) == count
    return f"{count:.0f}"


def ends() -> str:
    """Return the words above the table of where training ended."""
    in_eval, groupnorm = ended("BatchNorm in eval mode"), ended("groupnorm")
    assert len(in_eval) == 8
    assert all(number(in_eval[task]) >= number(groupnorm[task]) for task in in_eval)

    trained = number(ended("BatchNorm")["shifted"])
    blurred = row_of("recalibrate.md", network="resnet18_narrow", shift="blurred, 5 x 5")
    return (
        f"On blurred images BatchNorm learns, and ends at {trained} %. `recalibrate` reaches"
        f" {tenths(blurred['recalibrated'])} % there without training (from"
        f" {tenths(blurred['top-1'])} % on all test images)."
    )


def updates() -> str:
    """Return how long the trainings were."""
    counts = [int(count) for count in re.findall(r"(\d+) updates;", text("after_training.md"))]
    # Two epochs of 3,000 images, 500 an update.
    assert "epsilon 3, 500 images an update, 2 epochs of 3,000" in text("after_training.md")
    private = 2 * 3000 // 500
    return (
        f"Trainings are short, {min(counts)} to {max(counts)} updates, the private one {private},"
    )


def speeds() -> str:
    """Return what timm's own script measures on the network of the table of speeds."""
    found = re.search(r"inference (\d+) images/s, training (\d+)", text("h200.md"))
    assert found
    return (
        f"timm's own script measures {found[1]} images/s of inference and {found[2]} of training on"
        " the same BatchNorm network."
    )


SENTENCES = (
    installation,
    demo,
    normalizes,
    elsewhere,
    seen_before,
    folds,
    found_by_the_comparison,
    ends,
    updates,
    speeds,
)
