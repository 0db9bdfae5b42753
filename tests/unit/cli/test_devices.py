"""`--device`: what it takes, and what is said where there is no such device."""

from __future__ import annotations

import pytest
import torch

from samestep.cli.devices import device_of
from samestep.errors import CannotReplayError, ExitStatus, InputError

CPU = torch.device("cpu")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "0", "meta", "mps", "CPU "])
def test_a_name_of_no_device_that_can_be_used_is_refused_and_the_allowed_ones_are_told(
    name: str,
) -> None:
    for num_gpus in (0, 1):
        with pytest.raises(InputError) as caught:
            device_of(name, num_gpus)
        assert str(caught.value) == f"--device takes cpu, cuda or cuda:N; got {name!r}"
        assert caught.value.exit_status == ExitStatus.BAD_INPUT


def test_a_run_made_on_cpu_is_taken_again_there_and_one_from_a_gpu_too_where_that_is_asked() -> (
    None
):
    assert device_of(None, 0) == CPU
    assert device_of("cpu", 0) == CPU
    assert device_of("cpu", 1) == CPU


@without_gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:3"])
def test_a_gpu_that_is_asked_for_where_there_is_none_is_told_by_its_name(name: str) -> None:
    with pytest.raises(CannotReplayError) as caught:
        device_of(name, 0)
    assert str(caught.value) == f"--device {name}: there is no GPU here"
    assert caught.value.exit_status == ExitStatus.CANNOT_REPLAY


@without_gpu
def test_a_run_from_a_gpu_where_there_is_none_is_told_what_to_do() -> None:
    with pytest.raises(CannotReplayError) as caught:
        device_of(None, 1)
    assert str(caught.value).startswith("the run was on a GPU, and there is none here: ")
    assert "go to a machine with one, or give --device cpu" in str(caught.value)
