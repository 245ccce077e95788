"""SmolLM2-135M: healthy text is called healthy, planted faults are named, located and confirmed.

OMP_NUM_THREADS=2 python -m pytest -m real_model          # about two minutes a test on two cores
"""

from __future__ import annotations

import email.message
import random
import shutil
from pathlib import Path

import pytest
import torch

from fixtures import plant
from fixtures.incidents import saved
from fixtures.smollm2 import smollm2_folder
from fixtures.tiny import MODELS_FILE
from fixtures.tiny_text import table
from stability_probe.pipeline import run
from stability_probe.request import Request
from tests.planted import Expected, check

pytestmark = pytest.mark.real_model

LENGTH, LAYER, HEAD, ROW = 256, 17, 4, 2
EMBEDDING = "model.embed_tokens.weight"
CHINESE = (
    "人工智能是计算机科学的一个分支，它试图了解智能的实质，并生产出一种新的能以人类智能相似的方式做出反应的智能机器。"
    "该领域的研究包括机器人、语言识别、图像识别、自然语言处理和专家系统等。自诞生以来，理论和技术日益成熟，应用领域也不断扩大。"
    "北京是中国的首都，历史悠久，文化繁荣，每年吸引大量游客前来参观故宫、长城和颐和园。春天的时候，公园里开满了樱花，人们纷纷出来散步、拍照。"
    "他每天早上六点起床，先在河边跑步，然后回家做早饭。邻居们说，这条小巷几十年来几乎没有变过，只有孩子们长大了。"
)
CHAT = (
    "<|im_start|>user\nCan you explain how photosynthesis works?<|im_end|>\n<|im_start|>assistant\nPhotosynthesis is "
    "the process by which plants, algae and some bacteria turn light into chemical energy. It takes place in the "
    "chloroplasts, where chlorophyll absorbs sunlight. In the light-dependent reactions water is split and oxygen is "
    "released, which gives ATP and NADPH. In the Calvin cycle these are used to fix carbon dioxide into sugars."
    "<|im_end|>\n<|im_start|>user\nAnd why are leaves green?<|im_end|>\n<|im_start|>assistant\nLeaves look green "
    "because chlorophyll absorbs mostly red and blue light and reflects green light, which reaches our eyes. In autumn "
    "it breaks down and other pigments, such as carotenoids, become visible, giving yellow and orange.<|im_end|>\n"
    "<|im_start|>user\nThanks! Could you give me an experiment to try at home?<|im_end|>\n<|im_start|>assistant\nSure. "
    "Take a water plant such as elodea, put it in a glass of water under a lamp, and count the bubbles of oxygen that "
    "rise per minute. Then move the lamp further away and count again. You will see fewer, because there is less light."
)


@pytest.fixture(scope="module")
def texts():
    """Token ids of five kinds of text."""
    from pydoc_data import topics

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_folder() / "tokenizer.json"))
    prose = {"docs": topics.topics["assert"] + topics.topics["class"] + topics.topics["numbers"]}
    prose |= {"more docs": topics.topics["exceptions"] + topics.topics["with"] + topics.topics["import"]}
    prose |= {"source": Path(email.message.__file__).read_text(encoding="utf-8"), "chinese": CHINESE, "chat": CHAT}
    prose |= {"csv": table(random.Random(0), 60)}
    return {kind: tokenizer.encode(text, add_special_tokens=False).ids for kind, text in prose.items()}


@pytest.fixture(scope="module")
def batch(texts):
    rows = [texts["docs"][100:], texts["source"][400:], texts["more docs"][100:]]
    return plant.batch_of([ids[:LENGTH] for ids in rows])


@pytest.fixture(scope="module")
def baseline(texts, tmp_path_factory):
    rows = [texts["docs"][500:], texts["source"][2400:]]
    return saved(plant.batch_of([ids[:LENGTH] for ids in rows]), tmp_path_factory.mktemp("baseline") / "baseline.pt")


@pytest.fixture
def folder(tmp_path):
    """A place for half a gigabyte of weights; removed as soon as the test is over."""
    place = tmp_path / "big"
    place.mkdir()
    yield place
    shutil.rmtree(place)


def weights():
    from safetensors.torch import load_file

    return load_file(smollm2_folder() / "model.safetensors")


def planted_weights(state, folder):
    from safetensors.torch import save_file

    for name in ("config.json", "tokenizer.json"):
        shutil.copy(smollm2_folder() / name, folder / name)
    save_file({name: tensor.detach().contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    return folder


def diagnose(what, tmp_path, *, baseline=None, ckpt=None, **options):
    path = saved(what, tmp_path / "batch.pt")
    baselines = (baseline,) if baseline else ()
    return run(Request(ckpt=ckpt or smollm2_folder(), batch=path, baselines=baselines, **options))


# --- healthy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_baseline", [True, False])
def test_healthy_text_of_five_kinds(with_baseline, texts, baseline, tmp_path):
    rows = [texts[kind][:LENGTH] for kind in ("docs", "source", "csv", "chinese", "chat")]
    report = diagnose(plant.batch_of(rows), tmp_path, baseline=baseline if with_baseline else None)
    assert report.verdict.cause in ("none", "data-shift") if with_baseline else report.verdict.cause == "none"
    if report.verdict.cause == "none":
        assert any("residual stream" in note for note in report.verdict.healthy_notes)


# --- the batch ------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_baseline", [True, False])
def test_a_row_of_repeated_tokens(with_baseline, batch, baseline, texts, tmp_path):
    gram = texts["docs"][10:12]
    what = plant.repeated_tokens(batch, ROW, gram, start=100)
    report = diagnose(what, tmp_path, baseline=baseline if with_baseline else None)
    check(report, Expected("repeated-tokens", where={"rows": (ROW,)}, least=0.8, only_rows=True))
    row, start, end = max(report.verdict.location.positions, key=lambda span: span[2] - span[1])
    assert row == ROW and abs(start - 100) <= 2 and end == LENGTH


def test_labels_shifted_twice(batch, baseline, tmp_path):
    report = diagnose(plant.labels_moved(batch, 1), tmp_path, baseline=baseline, labels="unshifted")
    check(report, Expected("label-misalignment", where={"rows": (0, 1, 2)}))


def test_a_row_without_targets(batch, baseline, tmp_path):
    report = diagnose(plant.row_without_targets(batch, ROW), tmp_path, baseline=baseline)
    check(report, Expected("no-valid-labels", ("decisive",), {"rows": (ROW,)}, only_rows=True))


# --- the weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize("with_baseline", [True, False])
def test_one_head_grown(with_baseline, batch, baseline, folder, tmp_path):
    """Nine query heads on three key heads of width 64."""
    prefix = f"model.layers.{LAYER}.self_attn"
    places = [
        (f"{prefix}.q_proj.weight", slice(HEAD * 64, HEAD * 64 + 64)),
        (f"{prefix}.k_proj.weight", slice(HEAD // 3 * 64, HEAD // 3 * 64 + 64)),
    ]
    ckpt = planted_weights(plant.head_times(weights(), places, 8), folder)
    report = diagnose(batch, tmp_path, baseline=baseline if with_baseline else None, ckpt=ckpt)
    where = {"layer": LAYER, "heads": ((LAYER, HEAD),)}
    check(report, Expected("attention-logit-growth", ("confirmed", "latent"), where))


def test_a_flipped_exponent_bit(batch, baseline, folder, tmp_path):
    weight = f"model.layers.{LAYER}.mlp.up_proj.weight"
    ckpt = planted_weights(plant.flipped_bit(weights(), weight, (300, 100)), folder)
    report = diagnose(batch, tmp_path, baseline=baseline, ckpt=ckpt)
    check(report, Expected("corrupt-weights", where={"layer": LAYER, "parameters": (f"{weight}[300, 100]",)}))


def test_an_embedding_row_times_1000(batch, baseline, folder, tmp_path):
    token = int(batch["input_ids"].flatten().mode().values)
    ckpt = planted_weights(plant.times(weights(), EMBEDDING, 1000, token), folder)
    report = diagnose(batch, tmp_path, baseline=baseline, ckpt=ckpt)
    check(report, Expected("embedding-row-outlier", where={"parameters": (f"{EMBEDDING}[{token}]",)}))


@pytest.mark.parametrize("with_baseline", [True, False])
def test_a_constant_of_500_on_the_logits(with_baseline, batch, baseline, tmp_path):
    model = f"{MODELS_FILE}:drifted"
    report = diagnose(batch, tmp_path, baseline=baseline if with_baseline else None, model=model)
    check(report, Expected("logit-drift"))


# --- the optimizer --------------------------------------------------------------------------------


def test_a_stale_second_moment_after_a_few_steps(batch, baseline, texts, folder, tmp_path):
    """Three AdamW steps on healthy text, then exp_avg_sq of one layer × 1e-6."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95))
    for start in (0, 128, 256):
        ids_BT = torch.tensor([texts["source"][3000 + start :][:128], texts["more docs"][start:][:128]])
        optimizer.zero_grad()
        model(input_ids=ids_BT, labels=ids_BT).loss.backward()
        optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    stale = [index for index, name in enumerate(names) if name.startswith(f"model.layers.{LAYER}.")]
    ckpt = planted_weights(dict(model.named_parameters()), folder)
    torch.save(plant.moments_times(optimizer.state_dict(), stale, 1e-6), folder / "optimizer.pt")
    del model, optimizer
    report = diagnose(batch, tmp_path, baseline=baseline, ckpt=ckpt)
    check(report, Expected("stale-second-moment", ("confirmed", "latent"), {"layer": LAYER}))
