"""What a healthy model looks like to the rules: the measured ranges that their thresholds cite.

    python benchmarks/healthy_ranges.py              # SmolLM2-135M on five kinds of text, a few minutes on two cores
    python benchmarks/healthy_ranges.py --optimizer docs  # also the simulated step of four little trained models
    python benchmarks/healthy_ranges.py --logs docs       # also how far healthy batches stand above a log that scatters

Every kind is judged alone and against the documentation as baseline; a rule that fires here is a false alarm.
"""

from __future__ import annotations

import argparse
import dataclasses
import pydoc_data.topics
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from fixtures import tiny, tiny_text
from fixtures.smollm2 import smollm2_folder
from stability_probe.examination import examine
from stability_probe.incident import Request, load_incident
from stability_probe.judge import judge, load_rules
from stability_probe.measure import Measurements
from stability_probe.replay import Subject, replay

ROWS, LENGTH = 4, 256


def texts() -> dict[str, str]:
    rng = random.Random(0)
    return {
        "docs": "\n".join(pydoc_data.topics.topics[name] for name in ("import", "class", "exceptions", "with", "try")),
        "python": tiny_text.source("argparse") + tiny_text.source("ast"),
        "csv": tiny_text.table(rng, 400),
        "chinese": tiny_text.chinese(rng, 400),
        "chat": tiny_text.chat(rng, 200),
    }


def batches(folder: Path) -> dict[str, Path]:
    """One saved batch per kind of text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    paths = {}
    for kind, text in texts().items():
        ids = tokenizer(text)["input_ids"][: ROWS * LENGTH]
        paths[kind] = folder / f"{kind}.pt"
        torch.save({"input_ids": torch.tensor(ids).reshape(ROWS, LENGTH)}, paths[kind])
    return paths


def measured(batch: Path, baselines: tuple[Path, ...] = ()) -> Measurements:
    incident = load_incident(Request(ckpt=smollm2_folder(), batch=batch, baselines=baselines))
    bench, _, _ = examine(incident, Subject.of(incident.model.module, "cpu"))
    return bench.measurements


def spread(values: list[float]) -> str:
    return f"{min(values):.4g} … {statistics.median(values):.4g} … {max(values):.4g}"


def ranges(m: Measurements) -> Iterator[tuple[str, str]]:
    """(what, numbers) of everything that a threshold cites."""
    heads = m.heads["max_logit"].tolist()
    yield "largest attention logit per head", spread(heads)
    yield "  over the median head", f"{max(heads) / statistics.median(heads):.2f}"
    over_baseline = (m.heads["max_logit"] / m.heads["baseline_max_logit"]).dropna().tolist()
    if over_baseline:
        yield "  over the same head on the baseline", spread(over_baseline)
    yield "attention entropy, nats", spread(m.heads["entropy"].tolist())
    blocks = m.modules[m.modules["role"] == "block"]
    yield "largest |residual| per block", spread(blocks["absmax"].tolist())
    yield "gradient norm at the blocks' outputs", spread(blocks["grad_norm"].tolist())
    yield "mean log Z, largest |logit|", f"{m.log_z_mean:.2f}, {m.logit_absmax:.2f}"
    gap = m.precisions["bf16"]
    yield (
        "bf16 gap per token, of it rounding, recentred",
        f"{gap.token_gap:.4f}, {gap.rounding_gap}, {gap.recentred_gap}",
    )
    for role in ("attention", "mlp", "norm", "linear", "block"):
        found = m.modules[(m.modules["role"] == role) & m.modules["gap_bf16"].notna()]["gap_bf16"].tolist()
        if found:
            yield f"relative error in bf16, {role}", spread(found)
    yield "relative gradient error in bf16, parameters", spread(m.parameters["gap_bf16"].dropna().tolist())
    yield "loss by offset", ", ".join(f"{k:+d}: {v:.2f}" for k, v in sorted(m.offset_losses.items()))
    yield "row losses", spread(m.rows["loss"].tolist())
    yield "gradient norm", f"{m.global_grad_norm:.3f}"
    yield "unigram entropy", f"{m.unigram_entropy:.2f}"


def weight_ranges(m: Measurements) -> Iterator[tuple[str, str]]:
    table = m.parameters
    yield "largest |w| / median |w|", spread((table["absmax"] / table["median_abs"]).tolist())
    yield "constant tensors", str(int(table["constant"].notna().sum()))
    inside = table[table["layer"] >= 0]
    usual = inside.groupby("kind")["rms"].transform("median")
    yield "rms / median of siblings", spread((inside["rms"] / usual).tolist())
    largest = inside.groupby("kind")["absmax"].agg(lambda x: x.max() / x.median())
    yield "largest |w| / median of siblings' largest", spread(largest.tolist())


def embedding_range() -> str:
    from transformers import AutoModelForCausalLM

    table = AutoModelForCausalLM.from_pretrained(smollm2_folder()).get_input_embeddings()
    norms = table.weight.detach().norm(dim=1)
    return spread((norms / norms.median()).tolist())


def fired(m: Measurements) -> list[str]:
    return [f"{suspect.cause}: {suspect.summary}" for suspect in judge(load_rules(), m)[0]]


def optimizer_ranges(folder: Path) -> Iterator[tuple[str, str]]:
    """g²/v̂ per tensor and the damage of one step, with the stored moments of little models that were really trained."""
    text = tiny_text.stream("held_out")
    paths = {"batch": text[:512].reshape(4, 128), "baseline": text[2048:3072].reshape(8, 128)}
    for name, ids in paths.items():
        torch.save({"input_ids": ids.long()}, folder / f"tiny-{name}.pt")
    for name in ("llama", "qwen3", "gpt2", "gemma2"):
        made = tiny.tiny(name)
        request = Request(
            ckpt=made.ckpt,
            batch=folder / "tiny-batch.pt",
            baselines=(folder / "tiny-baseline.pt",),
            optimizer=made.folder / tiny.OPTIMIZER_FILE,
            lr=made.lr,
            grad_clip=tiny.GRAD_CLIP,
        )
        incident = load_incident(request)
        m = examine(incident, Subject.of(incident.model.module, "cpu"))[0].measurements
        yield f"{name}: sum g2 / sum v over tensors", spread(m.parameters["g2_over_v"].dropna().tolist())
        damage = m.step_effect.damage if m.step_effect else float("nan")
        yield f"{name}: loss of the baseline after one step, nats", f"{damage:+.4f}"


WIDE = 0.3  # nats: from here on six standard deviations of a log are nearly two nats


def log_ranges(folder: Path) -> Iterator[tuple[str, str]]:
    """Loss above the log, on the healthy controls of the benchmark of verdicts whose log scatters widely."""
    from fixtures.verdict_incidents import INCIDENTS

    above, in_sigmas = [], []
    for number, control in enumerate(i for i in INCIDENTS if i.truth.causes == ("none",) and i.log):
        place = folder / f"control-{number}"
        place.mkdir()
        incident = load_incident(control.make(place))
        log = incident.log
        if log is None or log.usual_loss is None or not log.loss_spread or log.loss_spread < WIDE:
            continue
        loss = replay(Subject.of(incident.model.module), incident.batch, backward=False, detail=False).loss
        above.append(loss - log.usual_loss)
        in_sigmas.append(above[-1] / log.loss_spread)
    yield f"{len(above)} healthy batches above such a log, nats", spread(above)
    yield "the same in its standard deviations", spread(in_sigmas)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", action="store_true")
    parser.add_argument("--logs", action="store_true")
    parser.add_argument("kinds", nargs="*", help="of docs, python, csv, chinese, chat; all without any")
    given = parser.parse_args()
    alarms = 0
    with tempfile.TemporaryDirectory() as scratch:
        paths = batches(Path(scratch))
        kinds = given.kinds or list(paths)
        for number, kind in enumerate(kinds):
            m = measured(paths[kind], () if kind == "docs" else (paths["docs"],))
            if not number:
                print("== weights")
                for what, numbers in weight_ranges(m):
                    print(f"{what:<48} {numbers}")
                print(f"{'embedding row norm / median':<48} {embedding_range()}")
            print(f"== {kind}: loss {m.loss:.4f}, baseline {m.baseline_loss}")
            for what, numbers in ranges(m):
                print(f"{what:<48} {numbers}")
            alone = dataclasses.replace(m, baseline_loss=None, baseline_grad_norm=None, baseline_row_losses=())
            for name, one in (("with the baseline", m), ("alone", _without_baseline_columns(alone))):
                found = fired(one)
                alarms += len(found)
                print(f"rules that fire {name}: {found or 'none'}", flush=True)
        if given.optimizer:
            print("== optimizer")
            for what, numbers in optimizer_ranges(Path(scratch)):
                print(f"{what:<48} {numbers}", flush=True)
        if given.logs:
            print("== logs")
            for what, numbers in log_ranges(Path(scratch)):
                print(f"{what:<48} {numbers}", flush=True)
    print(f"{alarms} alarms (data-shift against the baseline of another kind is no alarm)")


def _without_baseline_columns(m: Measurements) -> Measurements:
    frames = {}
    for name in ("modules", "heads", "parameters"):
        frame = getattr(m, name).copy()
        frame.loc[:, [column for column in frame.columns if column.startswith("baseline_")]] = float("nan")
        frames[name] = frame
    return dataclasses.replace(m, **frames)


if __name__ == "__main__":
    main()
