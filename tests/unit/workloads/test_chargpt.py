from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.errors import WorkloadError
from samestep.spec import load_spec

Load = Callable[..., Any]
FOLDER = Path(__file__).resolve().parents[3] / "workloads" / "chargpt"
TINY = {"width": 32, "depth": 2, "heads": 2, "context": 32}


@pytest.fixture
def load_any(load: Load, capsys: pytest.CaptureFixture[str]) -> Load:
    """Loads chargpt on whatever text this Python has, smaller than the job file's."""

    def load_any(**args: Any) -> Any:
        loaded = load("chargpt", **{**TINY, "sha256": None, **args})
        capsys.readouterr()
        return loaded

    return load_any


def test_the_job_file_pins_the_text(load: Load, load_any: Load) -> None:
    load_any()
    pinned = load_spec(FOLDER / "job.yaml").args["sha256"]
    if library_hash(sys.modules["chargpt"]) == pinned:
        _, gpt = load("chargpt")
        assert hashlib.sha256(gpt.train_text + gpt.test_text).hexdigest() == pinned
    else:
        with pytest.raises(WorkloadError, match=str(pinned)):
            load("chargpt")


def test_another_text_is_refused_and_the_error_tells_what_to_do(load: Load) -> None:
    with pytest.raises(WorkloadError, match=r"args\.sha256 is 00ff") as caught:
        load("chargpt", sha256="00ff")
    assert f"--set args.sha256={library_hash(sys.modules['chargpt'])}" in str(caught.value)


def test_without_a_hash_any_text_will_do_and_its_hash_is_printed(
    load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    load("chargpt", sha256=None)
    assert library_hash(sys.modules["chargpt"]) in capsys.readouterr().out


def test_the_hash_may_be_written_in_capitals(load_any: Load) -> None:
    load_any()
    load_any(sha256=library_hash(sys.modules["chargpt"]).upper())


def test_there_are_at_least_200_kB_to_learn_from(load_any: Load) -> None:
    _, gpt = load_any()
    assert len(gpt.train_text) >= 200_000
    assert b"def " in gpt.test_text


def test_a_python_without_sources_is_told_which_file_is_missing(load_any: Load) -> None:
    load_any()
    with pytest.raises(FileNotFoundError, match=r"no_such_module\.py can't be read"):
        sys.modules["chargpt"].read_library(("no_such_module.py",))


def test_every_window_is_whole_wherever_it_is_cut(load_any: Load) -> None:
    _, gpt = load_any(context=100)
    data = gpt.data()
    starts = set()
    for _ in range(500):
        item = data[len(data) - 1]
        assert item["input"].shape == item["target"].shape == (100,)
        assert item["input"].dtype == torch.int64
        assert torch.equal(item["input"][1:], item["target"][:-1])
        starts.add(gpt.train_text.rindex(bytes(item["input"].tolist())))
    assert max(starts) + 100 < len(gpt.train_text)
    assert len(starts) > 90


def test_windows_are_drawn_from_torchs_generator_alone(load_any: Load) -> None:
    _, gpt = load_any()
    data = gpt.data()

    def drawn(seed: int) -> list[int]:
        torch.manual_seed(seed)
        values: list[int] = data[5]["input"].tolist()
        return values

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_the_test_windows_lie_side_by_side_and_do_not_move(load_any: Load) -> None:
    _, gpt = load_any()
    data = gpt.evaluation_data()
    joined = b"".join(bytes(data[i]["input"].tolist()) for i in range(len(data)))
    assert joined == gpt.test_text[: len(joined)]
    assert len(gpt.test_text) - len(joined) <= 33


def test_input_and_output_embeddings_are_one_parameter(load_any: Load) -> None:
    _, gpt = load_any()
    model = gpt.model()
    assert model.head.weight is model.token.weight
    names = [name for name, _ in model.named_parameters()]
    assert "token.weight" in names
    assert "head.weight" not in names
    assert "head.weight" in model.state_dict()


def test_the_default_size_is_842496_parameters(load_any: Load) -> None:
    _, gpt = load_any(width=128, depth=4, heads=4, context=128)
    assert sum(p.numel() for p in gpt.model().parameters()) == 842_496


def test_a_byte_sees_nothing_of_what_comes_after_it(load_any: Load) -> None:
    _, gpt = load_any()
    model = gpt.model().eval()
    text = torch.randint(256, (1, 32))
    changed = text.clone()
    changed[0, 20:] = (changed[0, 20:] + 1) % 256
    a, b = model(text), model(changed)
    assert a.shape == (1, 32, 256)
    torch.testing.assert_close(a[:, :20], b[:, :20])
    assert not torch.allclose(a[:, 20:], b[:, 20:])


def test_every_parameter_is_in_one_group_and_only_matrices_decay(load_any: Load) -> None:
    _, gpt = load_any(weight_decay=0.3)
    model = gpt.model()
    groups = gpt.optimizer(model).param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    assert {p.dim() for p in groups[0]["params"]} == {2}
    assert {p.dim() for p in groups[1]["params"]} == {1}


def test_the_learning_rate_rises_falls_as_a_cosine_and_stays_at_a_tenth(load_any: Load) -> None:
    _, gpt = load_any(lr=1.0, warmup_steps=4, decay_steps=12)
    optimizer = gpt.optimizer(gpt.model())
    scheduler = gpt.scheduler(optimizer)
    rates = []
    for _ in range(15):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1, 1])
    assert rates[8] == pytest.approx(0.55)
    assert rates[12:] == pytest.approx([0.1, 0.1, 0.1])


def test_the_loss_is_the_mean_over_all_bytes(load_any: Load) -> None:
    _, gpt = load_any()
    data, model = gpt.data(), gpt.model()
    batch = gpt.collate([data[i] for i in range(3)])
    loss = gpt.loss(model, batch)
    assert loss.shape == ()
    assert loss.requires_grad
    model.eval()
    with torch.no_grad():
        per_sample = gpt.evaluate(model, batch)
    assert per_sample["loss"].shape == per_sample["accuracy"].shape == (3,)
    torch.testing.assert_close(loss.detach(), per_sample["loss"].mean())


def test_width_must_be_a_multiple_of_heads(load: Load) -> None:
    with pytest.raises(WorkloadError, match="multiple of heads, got 30 and 4"):
        load("chargpt", width=30, heads=4, sha256=None)


def test_a_small_one_learns_in_a_plain_loop(
    load_any: Load, train_plainly: Callable[..., Any], evaluate_plainly: Callable[..., Any]
) -> None:
    spec, gpt = load_any(lr=0.01, warmup_steps=10, decay_steps=80)
    model, losses = train_plainly(spec.model_copy(update={"max_steps": 80}), gpt)
    assert losses[0] > 5
    assert evaluate_plainly(gpt, model)["loss"] < 2.9


def library_hash(module: Any) -> str:
    text: bytes = module.read_library(module.TRAIN_FILES + module.TEST_FILES)
    return hashlib.sha256(text).hexdigest()
