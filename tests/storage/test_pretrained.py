"""What transformers writes of a converted network is the converted network, or is refused."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
    Trainer,
    TrainingArguments,
)

import normswap
from normswap import provenance
from normswap.errors import OptionError

SCHEMES = ("skipinit", "frozen-bn", "groupnorm")


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def source() -> nn.Module:
    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        num_labels=10,
    )
    model = ResNetForImageClassification(config).eval()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.running_mean, 0, 0.2)
            nn.init.uniform_(layer.running_var, 0.5, 2)
    return model


@torch.no_grad()
def logits(model: nn.Module, images: Tensor) -> Tensor:
    answer: Tensor = model.eval()(images).logits
    return answer


def trainer(model: nn.Module, folder: Path, **options: Any) -> Trainer:
    rows = [{"pixel_values": torch.randn(3, 32, 32), "labels": torch.tensor(i)} for i in range(8)]
    arguments = TrainingArguments(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=4,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    return Trainer(model, arguments, train_dataset=rows)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_save_pretrained_writes_opens_here_and_nowhere_else(
    scheme: str, source: nn.Module, images: Tensor, tmp_path: Path
) -> None:
    model: Any = normswap.convert(source, to=scheme, inputs=images).model
    folder = tmp_path / scheme
    model.save_pretrained(folder)

    opened = (
        normswap.load(folder),
        normswap.open(str(folder)),
        normswap.open(f"hf:{folder}"),
        normswap.open(f"hf:{folder}", weights=str(folder / "model.safetensors")),
    )

    for again in opened:
        assert torch.equal(logits(again, images), logits(model, images))
        assert provenance.of(again).plan == provenance.of(model).plan
    for kind in (ResNetForImageClassification, AutoModelForImageClassification):
        with pytest.raises(OSError, match=r"open it with normswap\.load"):
            kind.from_pretrained(folder)
    assert AutoConfig.from_pretrained(folder).normswap["schemes"] == [scheme]


def test_a_directory_that_save_wrote_is_refused_by_transformers_too(
    source: nn.Module, images: Tensor, tmp_path: Path
) -> None:
    done = normswap.convert(source, to="skipinit", inputs=images)
    folder = normswap.save(done, tmp_path / "out")

    assert torch.equal(logits(normswap.open(f"hf:{folder}"), images), logits(done.model, images))
    with pytest.raises(OSError, match=r"open it with normswap\.load"):
        ResNetForImageClassification.from_pretrained(folder)


@pytest.mark.slow
def test_the_mark_follows_copies_and_is_not_on_the_source(
    source: nn.Module, images: Tensor, tmp_path: Path
) -> None:
    model: Any = normswap.convert(source, to="skipinit", inputs=images).model
    unfolded = normswap.convert(model, to="unfold", inputs=images).model

    for unmarked in (source, unfolded):
        assert not hasattr(unmarked.config, "normswap")
        assert "save_pretrained" not in vars(unmarked)
    for number, again in enumerate((copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        again.save_pretrained(tmp_path / str(number))
        loaded = normswap.load(tmp_path / str(number))
        assert torch.equal(logits(loaded, images), logits(model, images))


def test_other_tensors_that_are_given_are_saved(
    source: nn.Module, images: Tensor, tmp_path: Path
) -> None:
    model: Any = normswap.convert(source, to="skipinit", inputs=images).model
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["classifier.1.bias"] += 1

    model.save_pretrained(tmp_path / "out", state_dict=state)
    model.save_pretrained(tmp_path / "other", is_main_process=False)

    assert torch.equal(normswap.load(tmp_path / "out").state_dict()["classifier.1.bias"],
                       state["classifier.1.bias"])  # fmt: skip
    assert not (tmp_path / "other" / "config.json").exists()
    with pytest.raises(OptionError, match="push_to_hub"):
        model.save_pretrained(tmp_path / "hub", push_to_hub=True)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_checkpoint_of_trainer_opens_and_is_resumed(
    scheme: str, source: nn.Module, images: Tensor, tmp_path: Path
) -> None:
    model = normswap.convert(source, to=scheme, inputs=images).model
    torch.manual_seed(0)
    done = trainer(model, tmp_path / "run", save_steps=1)
    done.train()
    done.save_model()

    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-2"):
        assert torch.equal(logits(normswap.load(folder), images), logits(model, images))
    by_file = normswap.load(
        tmp_path / "run" / "checkpoint-1",
        weights=tmp_path / "run" / "checkpoint-2" / "model.safetensors",
    )
    assert torch.equal(logits(by_file, images), logits(model, images))

    torch.manual_seed(0)
    fresh = normswap.convert(source, to=scheme, inputs=images).model
    second = trainer(fresh, tmp_path / "run", save_steps=1)
    second.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert torch.allclose(logits(fresh, images), logits(model, images), atol=1e-6)


def test_frozen_norms_come_back_frozen(source: nn.Module, images: Tensor, tmp_path: Path) -> None:
    model: Any = normswap.convert(source, to="frozen-bn", inputs=images).model
    model.save_pretrained(tmp_path / "out")

    again = normswap.load(tmp_path / "out").train()
    before = {name: tensor.clone() for name, tensor in again.named_buffers()}
    again(images)

    assert before
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.named_buffers())


def test_a_network_of_timm_in_transformers(images: Tensor, tmp_path: Path) -> None:
    arguments = {"channels": (8, 8, 8, 8)}
    config = TimmWrapperConfig(architecture="resnet18", num_labels=10, model_args=arguments)
    wrapper = TimmWrapperForImageClassification(config).eval()
    model: Any = normswap.convert(wrapper, to="skipinit", inputs=images).model
    model.save_pretrained(tmp_path / "out")

    again = normswap.load(tmp_path / "out")

    assert torch.equal(logits(again, images), logits(model, images))
    with pytest.raises(OSError, match=r"open it with normswap\.load"):
        TimmWrapperForImageClassification.from_pretrained(tmp_path / "out")
