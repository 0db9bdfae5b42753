from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from samestep.errors import WorkloadError
from samestep.workload import Loss

Load = Callable[..., Any]


def test_every_image_is_in_exactly_one_of_train_and_test_set(load: Load) -> None:
    _, digits = load("digits")
    train, test = digits.data(), digits.evaluation_data()
    assert (len(train), len(test)) == (1437, 360)
    images = [item["image"].numpy().tobytes() for item in (*without_shift(load), *all_of(test))]
    assert len(images) == 1797
    from sklearn.datasets import load_digits

    everything = torch.from_numpy(load_digits().images).float() / 16
    assert sorted(images) == sorted(image.numpy().tobytes() for image in everything)


def test_the_cut_is_the_same_whatever_the_seed_of_the_process(load: Load) -> None:
    _, digits = load("digits")
    torch.manual_seed(1)
    first = all_of(digits.evaluation_data())
    torch.manual_seed(2)
    second = all_of(digits.evaluation_data())
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a["image"], b["image"])
        assert torch.equal(a["label"], b["label"])


def test_an_item_has_the_declared_shape_and_range(load: Load) -> None:
    _, digits = load("digits")
    item = digits.data()[0]
    assert item["image"].shape == (1, 8, 8)
    assert item["image"].dtype == torch.float32
    assert 0 <= item["image"].min() <= item["image"].max() <= 1
    assert item["label"].dtype == torch.int64
    batch = digits.collate([digits.data()[i] for i in range(3)])
    for name, dims in type(digits).dimensions.items():
        assert batch[name].shape == tuple(3 if dim is None else dim for dim in dims)


def test_shifts_are_drawn_from_torchs_generator_alone(load: Load) -> None:
    _, digits = load("digits")
    data = digits.data()

    def shifted(seed: int) -> bytes:
        torch.manual_seed(seed)
        return torch.stack([data[7]["image"] for _ in range(10)]).numpy().tobytes()

    assert shifted(1) == shifted(1)
    assert shifted(1) != shifted(2)


def test_a_shift_moves_the_image_by_one_pixel_at_most_and_fills_with_black(load: Load) -> None:
    _, digits = load("digits")
    plain = without_shift(load)[0]["image"]
    padded = torch.nn.functional.pad(plain, [1] * 4)
    possible = {
        padded[:, top : top + 8, left : left + 8].numpy().tobytes()
        for top in range(3)
        for left in range(3)
    }
    data = digits.data()
    torch.manual_seed(0)
    seen = {data[0]["image"].contiguous().numpy().tobytes() for _ in range(200)}
    assert seen == possible


def test_loss_is_a_scalar_with_one_accuracy_per_sample(load: Load) -> None:
    _, digits = load("digits")
    data, model = digits.data(), digits.model()
    out = digits.loss(model, digits.collate([data[i] for i in range(5)]))
    assert isinstance(out, Loss)
    assert out.value.shape == ()
    assert out.value.requires_grad
    assert out.weight is None
    accuracy = out.metrics["accuracy"]
    assert isinstance(accuracy, torch.Tensor)
    assert accuracy.shape == (5,)
    assert not accuracy.requires_grad
    assert set(accuracy.tolist()) <= {0.0, 1.0}


def test_the_learning_rate_falls_in_a_line_and_then_stays(load: Load) -> None:
    _, digits = load("digits", lr=1.0, decay_steps=4)
    optimizer = digits.optimizer(digits.model())
    scheduler = digits.scheduler(optimizer)
    rates = []
    for _ in range(7):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([1, 0.755, 0.51, 0.265, 0.02, 0.02, 0.02])


def test_an_unknown_argument_is_named(load: Load) -> None:
    with pytest.raises(WorkloadError, match="widht"):
        load("digits", widht=3)


def test_the_module_uses_public_names_of_samestep_only(load: Load) -> None:
    load("digits")
    import samestep

    module = sys.modules["digits"]
    ours = {name for name, value in vars(module).items() if is_ours(value)}
    assert ours <= set(samestep.__all__)


def test_a_plain_loop_reaches_97_percent_with_the_job_file_as_it_is(
    load: Load, train_plainly: Callable[..., Any], evaluate_plainly: Callable[..., Any]
) -> None:
    spec, digits = load("digits")
    model, losses = train_plainly(spec, digits)
    assert len(losses) == 15 * 23
    assert evaluate_plainly(digits, model)["accuracy"] >= 0.97


def all_of(data: Any) -> list[Any]:
    return [data[index] for index in range(len(data))]


def without_shift(load: Any) -> list[Any]:
    return all_of(load("digits", shift=False)[1].data())


def is_ours(value: object) -> bool:
    return getattr(value, "__module__", "").startswith("samestep")
