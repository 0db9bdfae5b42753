from __future__ import annotations

import pytest
import torch

from samestep.engine.devices import gpu_loads, memory, physical_index


@pytest.mark.parametrize(
    ("index", "visible", "number"),
    [
        (0, None, 0),
        (1, "", 1),
        (0, "3", 3),
        (1, "6, 2", 2),
        (0, "GPU-5a1b", 0),  # by UUID: which number that is only the driver knows
        (4, "6,2", 4),
    ],
)
def test_a_device_has_the_number_that_its_machine_gives_it(
    index: int, visible: str | None, number: int
) -> None:
    assert physical_index(index, visible) == number


def test_without_a_gpu_there_is_nothing_to_tell() -> None:
    device = torch.device("cpu")
    assert memory(device) == (0, 0)
    assert gpu_loads([device]) == []
