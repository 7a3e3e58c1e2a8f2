"""Checkpoints: what is loaded computes what was saved; nothing is lost or half written; damage is
named.
"""

import errno
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.lived_in_networks import batchnorms, distance, lived_in, run
from support.model_sources import rewrite
from support.sampled_tables import quick
from support.small_trainings import network
from torch import nn

import normswap
from normswap import provenance
from normswap.errors import OutputError, PlanError, RefusedError, SourceError
from normswap.plan import Arch, Plan, Step
from normswap.proof.verdict import Error, Kept, Report
from normswap.provenance import Provenance
from normswap.storage import checkpoint, header, model_card, network_folder
from normswap.surgery.conversion import convert

CHANNELS = (8, 16, 24, 32)
NETWORKS = {
    "resnet18": {"channels": CHANNELS, "layers": (1, 2, 1, 1)},
    "seresnet18": {"channels": CHANNELS, "layers": (1, 2, 1, 1)},
    "resnetv2_18": {"channels": CHANNELS, "stem_chs": 8, "layers": (1, 2, 1, 1)},
}


def lived(name: str, **kwargs: object) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **NETWORKS[name], **kwargs)
    return lived_in(model, torch.randn(4, 3, 64, 64)).float().eval()


def images() -> torch.Tensor:
    return torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "options", "kind"),
    [
        ("groupnorm", {"relative_eps": 0}, "GroupNorm"),
        pytest.param("dyt", {}, "DynamicTanh", marks=pytest.mark.slow),
    ],
)
def test_unfold_of_another_kind_of_norm_is_refused(
    to: str, options: dict[str, float], kind: str, tmp_path: Path
) -> None:
    """No BatchNorm computes what it does; one that does so on average folds away, and then there is
    a way back.
    """
    source = timm.create_model("resnet18", channels=(8, 8, 8, 8), num_classes=3).eval()
    x = torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    done = convert(source, to, input_size=(3, 32, 32), **options)

    with pytest.raises(
        RefusedError, match=rf"cannot unfold bn1: a {kind} sits there now, .* `calibrate=DATA`"
    ):
        convert(done.model, "unfold", input_size=(3, 32, 32))

    checkpoint.save(done, tmp_path / "other")
    assert "--to unfold" not in (tmp_path / "other" / "README.md").read_text(encoding="utf-8")

    folded = convert(done.model, "folded", input_size=(3, 32, 32), calibrate=x).model
    back = convert(folded, "unfold", input_size=(3, 32, 32)).model
    assert len(batchnorms(back)) == len(batchnorms(source))
    assert distance(run(folded, x), run(back, x)) < 1e-4


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_survives(dtype: torch.dtype, tmp_path: Path) -> None:
    conversion = convert(lived("resnet18").to(dtype), "folded")
    loaded = checkpoint.load(checkpoint.save(conversion, tmp_path / "out"))
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert torch.equal(loaded(images().to(dtype)), conversion.model(images().to(dtype)))


def two_norms() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.BatchNorm2d(4)
    second = nn.BatchNorm2d(6)
    layers = (nn.Conv2d(3, 4, 3), first, nn.ReLU(), nn.Conv2d(4, 6, 3), second)
    return lived_in(nn.Sequential(*layers), torch.randn(4, 3, 16, 16)).float().eval()


def with_settings() -> nn.Sequential:
    """The two norms, with settings that are neither the usual ones nor those of each other."""
    model: Any = two_norms()
    first = model[1]
    second = model[4]
    first.eps = 1e-3
    first.momentum = None
    second.eps = 1e-4
    second.momentum = 0.3
    return model


def test_every_number_of_a_replaced_norm_comes_back_from_a_directory(tmp_path: Path) -> None:
    source = with_settings()
    done = convert(source, "folded", input_size=(3, 16, 16))

    loaded = checkpoint.load(checkpoint.save(done, tmp_path / "net"), skeleton=two_norms())

    norms = provenance.of(loaded).norms
    torch.testing.assert_close(
        norms, provenance.of(done.model).norms, rtol=0, atol=0, equal_nan=True
    )
    back = convert(loaded, "unfold", input_size=(3, 16, 16), like=with_settings()).model
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert distance(run(source, x), run(back, x)) < 1e-5


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    conversion = convert(two_norms(), "folded", input_size=(3, 16, 16))
    long_source = provenance.Provenance(source="x" * 20_000)
    nameless = provenance.attach(conversion.model, long_source)

    with pytest.raises(OutputError, match=r"model\.safetensors: .* source"):
        checkpoint.save(nameless, tmp_path / "net")
    with pytest.raises(OutputError, match=r"model\.safetensors: .* version 99"):
        header.record_to_write({"version": 99}, tmp_path / "net" / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_run_names_the_networks_in_it(tmp_path: Path) -> None:
    network_folder.check_no_run(tmp_path)
    (tmp_path / "recipe.yaml").write_text("summary: x", encoding="utf-8")
    network_folder.check_no_run(tmp_path)
    (tmp_path / "best").mkdir()

    with pytest.raises(SourceError) as caught:
        network_folder.check_no_run(tmp_path)

    assert str(tmp_path / "best") in caught.value.remedy


def test_a_users_own_network_needs_its_skeleton(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.bn = nn.BatchNorm2d(4)
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.bn(self.conv(x)).relu().mean((2, 3)))

    own = lived_in(Own(), torch.randn(4, 3, 16, 16)).float().eval()
    conversion = convert(own, "folded", input_size=(3, 16, 16))
    folder = checkpoint.save(conversion, tmp_path / "own")

    assert torch.equal(
        checkpoint.load(folder, skeleton=Own())(images()), conversion.model(images())
    )
    with pytest.raises(SourceError, match="does not say how its network is built"):
        checkpoint.load(folder)


def test_arguments_that_timm_does_not_remember_can_be_given(tmp_path: Path) -> None:
    conversion = convert(lived("resnet18"), "folded")
    arch = Arch("resnet18", {"num_classes": 5, "channels": list(CHANNELS), "layers": [1, 2, 1, 1]})
    loaded = checkpoint.load(checkpoint.save(conversion, tmp_path / "out", arch=arch))
    assert torch.equal(loaded(images()), conversion.model(images()))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return checkpoint.save(convert(lived("resnet18"), "skipinit"), tmp_path / "out")


def test_the_place_is_respected(saved: Path, tmp_path: Path) -> None:
    conversion = convert(lived("resnet18"), "folded")
    before = (saved / "model.safetensors").read_bytes()

    with pytest.raises(OutputError, match="exists"):
        checkpoint.save(conversion, saved)
    assert (saved / "model.safetensors").read_bytes() == before

    checkpoint.save(conversion, saved, force=True)
    assert (saved / "model.safetensors").read_bytes() != before

    other = tmp_path / "letters"
    other.mkdir()
    (other / "love.txt").write_text("dear", encoding="utf-8")

    with pytest.raises(OutputError, match="not a model directory"):
        checkpoint.save(conversion, other, force=True)
    with pytest.raises(OutputError, match="is a file"):
        checkpoint.save(conversion, other / "love.txt", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["letters", "out"]


def test_of_a_link_the_directory_that_it_points_to_is_replaced(saved: Path, tmp_path: Path) -> None:
    link = tmp_path / "links" / "net"
    link.parent.mkdir()
    link.symlink_to(saved)
    before = (saved / "model.safetensors").read_bytes()

    assert checkpoint.save(convert(lived("resnet18"), "folded"), link, force=True) == link
    assert link.readlink() == saved
    assert (saved / "model.safetensors").read_bytes() != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["links", "out"]
    assert list(link.parent.iterdir()) == [link]


@pytest.mark.parametrize("what", ["model.safetensors", "norms.safetensors"])
def test_a_full_disk_loses_nothing(
    saved: Path, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def full(tensors: object, file: Path, metadata: object) -> None:
        if file.name == what:
            file.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, file, metadata)

    monkeypatch.setattr(checkpoint, "save_file", full)

    with pytest.raises(OutputError, match="No space left"):
        checkpoint.save(convert(lived("resnet18"), "folded"), saved, force=True)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_files_are_open_to_whom_the_user_lets_in(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        folder = checkpoint.save(convert(lived("resnet18"), "folded"), tmp_path / "out")
    finally:
        os.umask(before)

    assert folder.stat().st_mode & 0o7777 == 0o777 & ~mask
    assert {file.stat().st_mode & 0o7777 for file in folder.iterdir()} == {0o666 & ~mask}


def test_why_it_cannot_be_written_is_said_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    monkeypatch.setattr(tempfile, "mkdtemp", full)

    with pytest.raises(
        OutputError, match=f"^cannot write {tmp_path / 'out'}: No space left on device$"
    ):
        checkpoint.save(convert(lived("resnet18"), "folded"), tmp_path / "out")


DAMAGE = {
    "a tensor is missing": ({"tensors": {"fc.bias": None}}, SourceError, "fc.bias"),
    "a tensor is too many": ({"tensors": {"extra": torch.zeros(1)}}, SourceError, "extra"),
    "NaN": ({"tensors": {"fc.weight": torch.full((5, 32), torch.nan)}}, SourceError, "fc.weight"),
    "a later schema": ({"header": {"version": 99}}, SourceError, "version 99"),
    "an edited plan": (
        {"header": {"plan": {"version": 2, "steps": [], "digest": "0"}}},
        PlanError,
        "digest",
    ),
    "another architecture": (
        {"header": {"arch": asdict(Arch("resnet18"))}},
        PlanError,
        "layer1.0.downsample.0",
    ),
    "an unknown architecture": (
        {"header": {"arch": asdict(Arch("resnet1800"))}},
        SourceError,
        "resnet1800",
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(saved: Path, case: str) -> None:
    change, error, match = DAMAGE[case]
    rewrite(saved, **change)
    with pytest.raises(error, match=match):
        checkpoint.load(saved)


@pytest.mark.parametrize("keep", [0, 4, 100, 50_000])
def test_truncation_is_named(saved: Path, keep: int) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])

    with pytest.raises(SourceError, match="not a readable safetensors file"):
        checkpoint.load(saved)
    with pytest.raises(SourceError, match="not a readable"):
        checkpoint.open_model(str(saved))


@pytest.mark.parametrize("given", [{"weights": "random"}, {"arch": "resnet18"}, {"num_classes": 3}])
def test_options_that_a_checkpoint_makes_useless(saved: Path, given: dict) -> None:
    with pytest.raises(SourceError, match="knows its architecture"):
        checkpoint.open_model(str(saved), **given)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = lived_in(
        timm.create_model("resnet18", num_classes=3, channels=(4, 4, 8, 8)),
        torch.randn(4, 3, 64, 64).double(),
    )
    return normswap.save(
        convert(model.float(), "skipinit"), tmp_path_factory.mktemp("flips") / "net"
    )


@pytest.mark.parametrize(
    "name", quick(["model.safetensors", "norms.safetensors"], ["norms.safetensors"])
)
def test_every_flipped_bit_is_noticed(name: str, written: Path, tmp_path: Path) -> None:
    """In the tensor that it is in, unless that has NaN or inf then."""
    whole = (written / name).read_bytes()
    tensors = load_file(written / name)

    begin = 8 + int.from_bytes(whole[:8], "little")
    for place in torch.randint(
        begin, len(whole), (12,), generator=torch.Generator().manual_seed(0)
    ).tolist():
        shutil.copytree(written, tmp_path / f"{place}")
        harmed = bytearray(whole)
        harmed[place] ^= 1 << place % 8
        (tmp_path / f"{place}" / name).write_bytes(harmed)
        harmed_tensors = load_file(tmp_path / f"{place}" / name)
        (other,) = (
            key
            for key, t in tensors.items()
            if t.numpy().tobytes() != harmed_tensors[key].numpy().tobytes()
        )

        with pytest.raises(
            SourceError,
            match=rf"{name}.* (are not those that were saved: {other}: |has NaN or inf)",
        ):
            normswap.load(tmp_path / f"{place}")


@pytest.mark.slow
def test_changed_tensors_can_be_taken_on_purpose(written: Path, tmp_path: Path) -> None:
    file = shutil.copytree(written, tmp_path / "net") / "model.safetensors"
    rewrite(file.parent, tensors={name: tensor + 1 for name, tensor in load_file(file).items()})

    with pytest.raises(SourceError, match=r"changed=True"):
        normswap.load(file.parent)

    model = normswap.load(file.parent, changed=True)
    assert model.fc.bias.mean() > 0.5
    assert torch.equal(
        normswap.load(normswap.save(model, tmp_path / "again")).fc.bias, model.fc.bias
    )

    for name, tensor in load_file(file).items():
        rewrite(file.parent, tensors={name: None, f"module.{name}": tensor})
    with pytest.raises(SourceError, match=r"are not those that were saved: conv1"):
        normswap.load(file.parent)


def test_a_record_without_a_hash_of_each_tensor_is_read(written: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(written, tmp_path / "net")
    rewrite(folder, header={"tensors": {}})
    normswap.load(folder)
    rewrite(folder, tensors={"fc.bias": torch.zeros(3)})

    with pytest.raises(
        SourceError, match=r"are not those that were saved: model.safetensors: missing, damaged"
    ):
        normswap.load(folder)


def test_a_weights_file_opens_alone(tmp_path: Path) -> None:
    folder = checkpoint.save(convert(lived("resnet18"), "folded"), tmp_path / "out")
    alone = tmp_path / "elsewhere.safetensors"
    shutil.copy(folder / "model.safetensors", alone)
    x = torch.randn(1, 3, 64, 64)
    opened = normswap.open(str(alone))

    assert torch.equal(opened(x), normswap.load(folder)(x))
    assert not provenance.of(opened).norms  # they are in a file of their own
    assert len(provenance.of(normswap.open(str(folder / "model.safetensors"))).norms) > 0
    with pytest.raises(SourceError, match=r"knows its architecture\. Drop arch="):
        normswap.open(str(alone), arch="resnet18")

    alone.write_bytes(alone.read_bytes()[:-4] + b"abcd")
    with pytest.raises(SourceError, match=r"not those that were saved"):
        normswap.open(str(alone))


def test_load_names_what_opens_the_directory_of_another_library(tmp_path: Path) -> None:
    save_file(lived("resnet18").state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(SourceError, match=r"was not written by normswap.*normswap\.open\(MODEL\)"):
        normswap.load(tmp_path)


def test_the_card_says_what_was_asked_for(tmp_path: Path) -> None:
    folder = checkpoint.save(convert(lived("resnet18"), "skipinit", alpha=0.25), tmp_path / "out")

    assert "skipinit (alpha = 0.25)" in (folder / "README.md").read_text(encoding="utf-8")

    plain = checkpoint.save(convert(lived("resnet18"), "folded"), tmp_path / "plain")
    assert "folded (" not in (plain / "README.md").read_text(encoding="utf-8")
    assert "keeps the function of its source" in (plain / "README.md").read_text(encoding="utf-8")

    other = checkpoint.save(
        convert(lived("resnet18"), "layernorm", relative_eps=0), tmp_path / "other"
    )
    assert "changes the function of its source" in (other / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (None, ""),
        (
            Kept(0.875, 0.25, 16),
            (
                "same prediction on 87.5 % of 16 held-out images (at least 63 %, with 97.5 %"
                " confidence), relative L2 2.5e-01"
            ),
        ),
        (Kept(None, 0.25, 16), "relative L2 2.5e-01 on 16 held-out images"),
    ],
)
def test_the_card_of_a_chain(kept: Kept | None, said: str) -> None:
    record = Provenance(
        plan=Plan((Step("skipinit", {"alpha": "0"}, ()), Step("groupnorm", {"groups": 2}, ())))
    )
    error = Error("logits", "float32", (2, 3, 8, 8), 0.125, 0.5, 1.0)
    card = model_card.render(record, Report(False, True, "some noise", (error,), kept=kept))

    assert "\n# network converted to groupnorm (groups = 2)\n" in card
    assert "- Conversion: source -> skipinit (alpha = 0) -> groupnorm (groups = 2)\n" in card
    assert "\n| float32 | 2x3x8x8 | 1.2e-01 | 5.0e-01 |\n" in card

    lines = [f"Measured on images that nothing was fitted to: {said}. Other images may keep less."]
    assert [line for line in card.splitlines() if "nothing was fitted" in line] == (
        lines if kept else []
    )
    assert "BatchNorm network back" not in card
    assert "SHA-256" not in card

    known = model_card.render(Provenance(source="resnet18.a1_in1k", sha256="ab12"), None)
    assert (
        "\n- Source: `resnet18.a1_in1k` (tensors' SHA-256 `ab12`)\n- Conversion: source\n" in known
    )
    assert "Not verified" in model_card.render(record, None)


# Networks with and without a file of the norms that were replaced.
KINDS = ("source", "folded", "groupnorm")


@pytest.fixture(scope="module")
def of_each_kind() -> dict[str, nn.Module]:
    return {
        "source": network(),
        "folded": network("folded"),
        "groupnorm": network("groupnorm"),
    }


def contents(folder: Path) -> dict[str, object]:
    """The files of a network; of tensors, whose header has no order, names, texts and size."""
    found: dict[str, object] = {}
    for path in folder.iterdir():
        found[path.name] = path.read_bytes()
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as opened:
                found[path.name] = opened.metadata(), {*opened.keys()}, path.stat().st_size
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("before", KINDS)
@pytest.mark.parametrize("after", KINDS)
def test_what_replaces_a_network_is_what_stands_alone(
    before: str, after: str, of_each_kind: dict[str, nn.Module], tmp_path: Path
) -> None:
    """Nothing of the network before is left, in any order of two kinds."""
    alone = normswap.save(of_each_kind[after], tmp_path / "alone")
    place = normswap.save(of_each_kind[before], tmp_path / "place")
    (place / "notes.txt").write_text("the user's own", encoding="utf-8")

    normswap.save(of_each_kind[after], place, force=True)

    assert (place / "notes.txt").read_text(encoding="utf-8") == "the user's own"
    (place / "notes.txt").unlink()
    assert contents(place) == contents(alone)
    loaded = normswap.load(place).state_dict()
    for name, tensor in of_each_kind[after].state_dict().items():
        assert torch.equal(loaded[name], tensor)


@pytest.mark.parametrize("classes", [0, 5])
@pytest.mark.parametrize("to", [None, "skipinit", "groupnorm"])
@pytest.mark.parametrize("again", [False, True])
def test_a_head_that_it_got_since_is_saved_with_it(
    to: str | None, classes: int, again: bool, tmp_path: Path
) -> None:
    """By timm's own method, also after it was loaded."""
    model: Any = normswap.open("demo")
    if to:
        model = normswap.convert(model, to).model
    if again:
        model = normswap.load(normswap.save(model, tmp_path / "before"))
    model.reset_classifier(classes)

    loaded: Any = normswap.load(normswap.save(model, tmp_path / "net"))

    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(loaded(x), model.eval()(x))
    assert loaded.num_classes == classes
