"""segmentation_models_pytorch's Unet trained with two images per update, its norms of eight kinds: mean IoU.

    python tests/lab/benchmarks/segmentation.py -o tests/lab/benchmarks/segmentation.md

The encoder is the timm ResNet of `resnet18_narrow`, trained on CIFAR-10, as smp has it (`tu-resnet18`); the decoder is
fresh. Pictures: `canvases.py`. First every way is trained for fewer updates with each learning rate; the one with the
best mean IoU on held-out training pictures is then used for all updates, and measured on test pictures that nothing
was chosen on. What is measured is kept, a line each, in runs/segmentation.jsonl.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import segmentation_models_pytorch as smp
import torch
import torch.nn.functional as F
from canvases import CLASSES, NETWORK, SIDE, Canvases, canvases
from kept import Kept, Row, arguments
from robot_policy import replaced
from schemes_table import NETWORKS, ROOT
from torch import Tensor, nn
from tuning import Tuning

import normswap
from normswap.storage.checkpoint import open_model

TRAINED, HELD_OUT, TESTED = 600, 100, 300
BATCH, CLIP, RATES, TRIAL, UPDATES, SEEDS = 2, 1.0, (3e-4, 1e-3, 3e-3), 200, 600, (0, 1)
TUNING = Tuning(RATES, SEEDS, "iou")
HOW = f"""
`smp.Unet` with the encoder of `{NETWORK}`: {TRAINED} training pictures of {SIDE} px with two CIFAR-10 objects each,
of three classes ({", ".join(CLASSES)}); {UPDATES} updates of {BATCH} images, AdamW, one cycle,
gradients clipped to norm {CLIP:g}. Learning rate: of {", ".join(f"{rate:g}" for rate in RATES)} the best for that way
after {TRIAL} updates, on {HELD_OUT} held-out training pictures (seed {SEEDS[0]}). Mean IoU in percent on {TESTED} test
pictures: mean of {len(SEEDS)} seeds (each in brackets) of the fresh decoder and the order of the pictures. Loss: mean
of the last 100 updates. The decoder has BatchNorm unless the row says otherwise (`fresh GroupNorm`: everywhere);
GroupNorms have 16 channels to a group.
"""
Change = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Way:
    """What becomes of the norms.

    Args:
        encoder: of the Unet's encoder, by the Unet.
        decoder: whether the decoder gets GroupNorms in the place of its BatchNorms, which are fresh, too.
        still: the encoder's BatchNorms stay in eval mode; gamma and beta learn.
    """

    encoder: Change
    decoder: bool = False
    still: bool = False


def same(unet: nn.Module) -> nn.Module:
    return unet


def grouped(unet: nn.Module, *, keep: bool) -> nn.Module:
    unet.encoder = replaced(unet.encoder, keep=keep)
    return unet


def ours(to: str, **options: int) -> Change:
    shape = (3, SIDE, SIDE)
    return lambda unet: normswap.convert(unet, to, only="encoder", input_size=shape, **options).model


WAYS = {
    "BatchNorm": Way(same),
    "BatchNorm, encoder in eval mode": Way(same, still=True),
    "the same, GroupNorm in the decoder": Way(same, decoder=True, still=True),
    "fresh GroupNorm": Way(functools.partial(grouped, keep=False), decoder=True),
    "fresh GroupNorm in the encoder": Way(functools.partial(grouped, keep=False)),
    "GroupNorm in the encoder, gamma and beta copied": Way(functools.partial(grouped, keep=True)),
    "`groupnorm --only encoder`": Way(ours("groupnorm", group_size=16)),
    "`frozen-bn --only encoder`": Way(ours("frozen-bn")),
    "`skipinit --only encoder`": Way(ours("skipinit")),
}


def unet(way: Way, seed: int) -> nn.Module:
    """The network before training."""
    trained = open_model(str(NETWORKS[NETWORK]))
    torch.manual_seed(seed)
    shape = {"channels": (16, 32, 64, 128), "stem_type": "deep", "stem_width": 8}
    model = smp.Unet(
        "tu-resnet18", encoder_weights=None, classes=len(CLASSES), decoder_channels=(64, 48, 32, 16, 16), **shape
    )
    state = {name: value for name, value in trained.state_dict().items() if not name.startswith("fc.")}
    model.encoder.model.load_state_dict(state)
    if way.decoder:
        model.decoder = replaced(model.decoder)
    return way.encoder(model.eval())


def train(way: Way, lr: float, seed: int, updates: int, pictures: Canvases) -> tuple[nn.Module, float]:
    """The trained network, and the mean loss of its last 100 updates."""
    model = unet(way, seed).train()
    if way.still:
        model.encoder.eval()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=lr)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=updates)
    random = torch.Generator().manual_seed(seed)
    losses = []
    while len(losses) < updates:
        for batch in torch.randperm(len(pictures), generator=random).split(BATCH)[: updates - len(losses)]:
            loss = F.cross_entropy(model(pictures.pictures[batch]), pictures.masks[batch])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(learning, CLIP)
            optimizer.step()
            rate.step()
            losses.append(loss.item())
    return model.eval(), sum(losses[-100:]) / 100


@torch.inference_mode()
def mean_iou(model: nn.Module, pictures: Canvases) -> float:
    """Percent: the mean over classes of intersection over union, of all pictures together."""
    many = len(CLASSES)
    counts = torch.zeros(many * many)
    for index in torch.arange(len(pictures)).split(50):
        found = model(pictures.pictures[index]).argmax(1)
        counts += torch.bincount((many * pictures.masks[index] + found).flatten(), minlength=many**2)
    table: Tensor = counts.view(many, many)
    hits = table.diagonal()
    return 100 * float((hits / (table.sum(0) + table.sum(1) - hits)).mean())


def measure(kept: Kept, write: Callable[[], None]) -> None:
    """Every trial and every run that is not kept yet."""
    train_set, test = canvases("train", TRAINED + HELD_OUT, seed=0), canvases("test", TESTED, seed=1)
    known, held_out = train_set.part(slice(TRAINED)), train_set.part(slice(TRAINED, None))

    def run(updates: int, on: Canvases, said: str, lr: float, seed: int) -> Row:
        model, loss = train(WAYS[said], lr, seed, updates, known)
        return {"loss": loss, "iou": mean_iou(model, on)}

    trial, final = functools.partial(run, TRIAL, held_out), functools.partial(run, UPDATES, test)
    TUNING.measure(kept, WAYS, trial, final, write)


def table(kept: Kept) -> list[str]:
    lines = ["| norms | lr | training loss | mean IoU |", "|---|---|---|---|"]
    for said in WAYS:
        if runs := TUNING.runs(kept, said):
            loss, iou = TUNING.mean(runs, "loss"), TUNING.mean(runs, "iou")
            lines.append(f"| {said} | {runs[0]['lr']:g} | {loss:.2f} | {iou:.1f} ({TUNING.each(runs)}) |")
    said = "Held-out mean IoU of each learning rate, from which it was chosen:"
    return [*lines, "", said, "", *TUNING.tried(kept, WAYS)]


def main() -> None:
    given = arguments(__doc__).parse_args()
    kept = Kept(ROOT / "runs" / "segmentation.jsonl", fresh=given.fresh)

    def write() -> None:
        made = f"segmentation_models_pytorch {smp.__version__}"
        kept.write(given.output, "Segmentation with two images per update", [HOW, *table(kept)], made)

    measure(kept, write)
    write()


if __name__ == "__main__":
    main()
