"""What earlier versions took on the command line and this one does not: one line each says what to use."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple


class Removed(NamedTuple):
    """Neighbouring words that these commands took (patterns, `|` between alternatives), and what to use instead."""

    typed: str
    command: str
    instead: str


_PT2 = "Use FILE.pt2: torch.export is what torch offers in place of TorchScript."
_FOLDED = "`normswap convert MODEL --to folded` writes the folded weights as safetensors."
REMOVED = (
    Removed("--check", "schemes", "The pytest fixture `check_scheme` tries a scheme on small networks."),
    Removed("--side *", "spp", "Use --input-size C,H,W."),
    Removed("--each", "decay", "Use --json."),
    Removed("--weight-decay|--layer-decay *", "decay", "normswap.param_groups takes it, and optim of a recipe."),
    Removed("--csv *", "spp", "Use --json."),
    Removed("--statistics *", "spp", "BatchNorms take the statistics of the batch with --weights random."),
    Removed("--asleep|--bare", "spp", "Name another network beside the first."),
    Removed("--mean *", "doctor|evaluate|export|finetune|recalibrate|verify", "Use --image-mean R,G,B."),
    Removed("--std *", "convert|doctor|evaluate|export|finetune|recalibrate|verify", "Use --image-std R,G,B."),
    Removed("--steady *", "convert", "Use --relative-eps, a multiple of the mean variance: 9 makes a share of 0.9."),
    Removed("--dtype *", "export", "Use --precision."),
    Removed("smp:*", "*", "Use segmentation_models_pytorch:ARCH with --arch-arg encoder_name=ENCODER."),
    Removed("--calibrate noise", "convert", "Give images (25 or more of anything, no labels needed), or none."),
    Removed("--format torchscript", "export", _PT2),
    Removed("-o|--output *.ts", "export", _PT2),
    Removed("--format onnx-data", "export", "Use onnx; onnx.save_model can put the weights beside it."),
    Removed("--format safetensors", "export", _FOLDED),
    Removed("-o|--output *.safetensors", "export", _FOLDED),
    Removed("--count-plain", "export", "`normswap inspect FILE` counts the operators of a file."),
    Removed("--sensitive *", "export", "Every layer is quantized; use --precision fp16 where int8 loses too much."),
    Removed("--per-tensor", "export", "Weights have a step per output channel, which costs less."),
    Removed("--max-drop *", "export", "What int8 loses is printed, and written into FILE.preprocess.json."),
    Removed("--rounds *", "bench", "Use --seconds."),
    Removed("--threads *", "bench", "Set OMP_NUM_THREADS."),
    Removed("--runtime *", "bench", "Name exported files after MODEL: each runs in its own runtime."),
    Removed("--precision|--dtype *", "bench", "Export the file with --precision, and name it after MODEL."),
    Removed("--channels-last", "bench", "Networks are timed in PyTorch's own layout."),
    Removed("--batch *", "bench", "Use --batch-size N,N."),
    Removed("--size *", "bench", "Use --input-size C,H,W."),
    Removed("-o|--output|--csv *", "bench", "Use --json."),
    Removed("--beside *", "doctor", "`normswap recalibrate MODEL --data IMAGES` measures an average's statistics."),
    Removed("--nproc *", "finetune", "Use torchrun --nproc-per-node N -m normswap finetune ..."),
    Removed("--max-restarts *", "finetune", "Use torchrun --max-restarts N ... finetune ... --resume auto."),
    Removed("curves", "curves", "`normswap sweep` draws its own figure; metrics.csv has the epochs of a run."),
    Removed("show|copy *", "recipes", "`normswap recipes NAME` prints one; `> FILE` behind it makes it yours."),
    Removed("--retake", "sweep", "The same command takes up a killed worker's run a minute later."),
    Removed("--resume [!a]*", "finetune", "Use --resume auto. Copy another run's folder, and name the copy by -o."),
    Removed("*.tar.gz|*.tgz|*.tar.xz", "*", "Unpack it: a plain .tar, or a folder."),
    Removed("anneal.means=*", "finetune|sweep", "convert.to=nf convert.calibrate=true fits the filters' means."),
    Removed("distill.kind=*", "finetune|sweep", "A teacher teaches by its logits."),
    Removed("train.not_finite=*|train.rollbacks=*", "finetune|sweep", "A loss that is not finite stops the run."),
)


def instead_of(arguments: Sequence[str]) -> str | None:
    """Return what to say of a removed word in a command line that failed; None if nothing in it was removed."""
    words = [text for word in arguments for text in (word.split("=", 1) if word.startswith("--") else [word])]
    for removed in REMOVED:
        patterns = removed.typed.split()
        if not words or (removed.command != "*" and words[0] not in removed.command.split("|")):
            continue
        for start in range(len(words) - len(patterns) + 1):
            typed = words[start : start + len(patterns)]
            if all(map(_matches, typed, patterns)):
                return f"{' '.join(typed)} was removed. {removed.instead}"
    return None


def _matches(word: str, patterns: str) -> bool:
    return any(fnmatchcase(word, pattern) for pattern in patterns.split("|"))
