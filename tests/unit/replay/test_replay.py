"""Steps of a run taken again, in a fresh process with another working directory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from planted_runs import BAD, ENDED, Result, Runs, fresh

from samestep.errors import ExitStatus
from samestep.incidents.record import Incident, write
from samestep.names import IncidentKind
from samestep.telemetry.identity import read_numerics


@pytest.mark.parametrize("name", ENDED)
def test_what_ended_a_run_is_reproduced_bit_for_bit(
    replayed: dict[str, Result], runs: Runs, name: str
) -> None:
    found = replayed[name]
    assert found.status == 0, found.out + found.err
    assert found.data["verdict"] == "reproduced"
    assert found.data["step"] == runs.incident(name).step
    assert found.data["numerics"] == []
    if name == "loud":
        assert found.data["record"]["loss"]["v"] > 1e5
    elif name == "raises":
        assert found.data["raised"].startswith("ValueError at ")
        assert found.data["raised"].endswith(" in loss")
    else:
        assert found.data["record"]["loss"]["hex"] in ("nan", "inf")


def test_a_poisoned_sample_is_named(replayed: dict[str, Result]) -> None:
    deep = replayed["poisoned"].data["deep"]
    first = deep["first"]
    assert (first["kind"], first["name"], first["shard"]) == ("input", "batch.x", 1)
    assert [sample["id"] for sample in deep["samples"]] == [BAD]


def test_the_module_that_divides_by_zero_is_named_with_its_sample(
    replayed: dict[str, Result],
) -> None:
    deep = replayed["large"].data["deep"]
    first = deep["first"]
    assert (first["kind"], first["name"]) == ("output", "planted")
    assert (first["module"], first["shard"]) == ("Planted", 1)
    assert [sample["id"] for sample in deep["samples"]] == [BAD]


def test_the_sample_that_raises_is_named(replayed: dict[str, Result]) -> None:
    deep = replayed["raises"].data["deep"]
    assert [item["shard"] for item in deep["raised"]] == [1]
    assert [sample["id"] for sample in deep["samples"]] == [BAD]
    assert "ValueError" in deep["samples"][0]["text"]


@pytest.mark.parametrize(
    ("name", "others"), [("loud", "the other shards"), ("from before", "the steps before")]
)
def test_a_label_that_stands_out_is_named_with_its_sample(
    replayed: dict[str, Result], name: str, others: str
) -> None:
    assert replayed[name].status == 0
    deep = replayed[name].data["deep"]
    assert (deep["first"]["name"], deep["first"]["shard"]) == ("batch.y", 1)
    assert f"times as large as in {others}" in deep["first"]["why"]
    assert [sample["id"] for sample in deep["samples"]] == [BAD]


def test_an_exploding_learning_rate_is_not_put_to_a_sample(replayed: dict[str, Result]) -> None:
    deep = replayed["explodes"].data["deep"]
    assert deep["first"]["name"] == "planted"
    assert len(deep["samples"]) == deep["samples_taken_alone"] == 8


def test_a_step_that_was_left_out_is_left_out_again_and_the_steps_behind_it_are_equal(
    replayed: dict[str, Result],
) -> None:
    found = replayed["skips"]
    assert found.status == 0, found.out
    assert found.data["record"]["skipped"] is True
    assert (found.data["first_step"], found.data["steps"], found.data["compared"]) == (6, 3, 3)


@pytest.mark.parametrize(
    ("name", "first_step", "compared"), [("back", 6, 1), ("back from", 4, 3), ("back all", 0, 9)]
)
def test_steps_before_and_after_a_rollback_are_reproduced(
    replayed: dict[str, Result], name: str, first_step: int, compared: int
) -> None:
    found = replayed[name]
    assert found.status == 0, found.out
    assert (found.data["first_step"], found.data["compared"]) == (first_step, compared)
    if name != "back all":
        assert found.data["record"]["loss"]["hex"] == "nan"


def test_a_packed_bundle_is_replayed_and_looked_into_without_the_data(
    replayed: dict[str, Result],
) -> None:
    assert replayed["pack"].status == 0
    found = replayed["packed"]
    assert found.status == 0, found.out + found.err
    assert (found.data["first_step"], found.data["steps"], found.data["compared"]) == (6, 1, 1)
    assert found.data["deep"]["first"]["name"] == "planted"
    assert [sample["id"] for sample in found.data["deep"]["samples"]] == [BAD]


def test_an_incident_is_reproduced_from_a_checkpoint_by_what_it_saw(
    replayed: dict[str, Result],
) -> None:
    found = replayed["from a checkpoint"]
    assert found.status == 0, found.out
    assert (found.data["first_step"], found.data["steps"], found.data["compared"]) == (4, 3, 3)
    assert found.data["record"]["loss"]["hex"] == "nan"


def test_a_secret_that_is_not_in_the_bundle_has_to_be_given(replayed: dict[str, Result]) -> None:
    assert replayed["secret lacking"].status == 12
    assert "give them with --set args.token=VALUE" in replayed["secret lacking"].err
    assert replayed["secret in the run"].status == 0


def test_a_method_that_needs_what_data_leaves_behind_gets_it_where_the_data_is(
    replayed: dict[str, Result],
) -> None:
    assert replayed["secret given"].status == 0, replayed["secret given"].err
    assert "reproduced bit for bit: step 6" in replayed["secret given"].out


@pytest.mark.parametrize("name", ["behind a bundle", "no data"])
def test_steps_whose_data_is_not_here_can_not_be_replayed(
    replayed: dict[str, Result], name: str
) -> None:
    found = replayed[name]
    assert found.status == 12
    assert "its data may be missing" in found.err
    assert "FileNotFoundError" in found.err


@pytest.mark.parametrize(
    ("name", "first_step", "steps"), [("any", 4, 4), ("from", 4, 4), ("all", 0, 9)]
)
def test_any_step_of_a_run_is_reproduced_from_a_checkpoint_or_its_start(
    replayed: dict[str, Result], name: str, first_step: int, steps: int
) -> None:
    found = replayed[name]
    assert found.status == 0, found.out
    assert found.data["verdict"] == "reproduced"
    assert (found.data["first_step"], found.data["steps"]) == (first_step, steps)
    assert found.data["compared"] == steps


def test_the_verdict_is_told_in_a_line(replayed: dict[str, Result]) -> None:
    lines = replayed["told"].out.splitlines()
    assert lines[0] == "reproduced bit for bit: step 6 (loss nan, grad_norm nan, left out)"
    assert lines[1] == "took step 6 from the state after 6 steps; 1 of 1 compared with the run's"


def test_another_number_of_threads_gives_a_verdict_within_tolerance_that_says_why(
    replayed: dict[str, Result],
) -> None:
    found = replayed["threads"]
    assert found.status == 10, found.out
    assert found.out.startswith("reproduced within 0.001, under other numerics: step 1")
    assert "  threads: 1 against 2" in found.out.splitlines()


def test_a_run_tells_the_dtypes_of_its_model_by_which_it_is_judged(runs: Runs) -> None:
    told = read_numerics(runs.at("calm"))
    assert told is not None
    assert told["informational"]["dtypes"] == ["float32"]


def test_a_run_made_on_cpu_is_reproduced_on_the_device_of_that_name(
    replayed: dict[str, Result],
) -> None:
    found = replayed["on cpu"]
    assert (found.status, found.data["verdict"]) == (0, "reproduced")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_here_is_told(replayed: dict[str, Result]) -> None:
    assert replayed["no gpu"].status == 12
    assert "--device cuda:0: there is no GPU here" in replayed["no gpu"].err


def test_changed_code_is_not_reproduced_and_the_first_difference_is_told(
    replayed: dict[str, Result],
) -> None:
    found = replayed["changed"]
    assert found.status == 11
    assert found.out.startswith("not reproduced: first difference at step 4: shard_losses[0]: 0x")


def test_an_exception_that_the_run_did_not_raise_is_not_reproduced(
    replayed: dict[str, Result],
) -> None:
    found = replayed["changed raises"]
    assert found.status == 11
    assert found.out.startswith("not reproduced: step 6 raised ValueError at ")


def test_a_missing_workload_can_not_be_replayed_and_is_named(
    replayed: dict[str, Result], runs: Runs
) -> None:
    found = replayed["missing"]
    assert found.status == 12
    assert "no module 'wobbly'" in found.err
    assert f"--code; the run found it in {runs.folder}" in found.err


def what_if(found: Result) -> tuple[dict[str, Any], dict[str, Any]]:
    """The one step as it was, and changed."""
    assert found.status == 0, found.out + found.err
    [was], [changed] = (found.data["what_if"][side] for side in ("as_it_was", "changed"))
    return was, changed


def rate_of(effect: dict[str, Any]) -> float:
    [rate] = effect["record"]["lr"]
    return float(rate["v"])


def norm_of(effect: dict[str, Any]) -> float:
    return float(effect["record"]["grad_norm"]["v"])


def test_what_if_shows_the_step_under_both_jobs(replayed: dict[str, Result]) -> None:
    was, changed = what_if(replayed["what if"])
    assert was["record"]["lr"] != changed["record"]["lr"]
    assert rate_of(changed) == 0.05
    told = replayed["what if optimizer"].out
    rates = [line.split() for line in told.splitlines() if "learning rate" in line]
    assert rates == [["step", "7:", "learning", "rate", "0.0125", "1"]]


def test_what_if_with_twice_the_rate_makes_twice_the_update_of_the_same_loss(
    replayed: dict[str, Result],
) -> None:
    was, changed = what_if(replayed["what if twice"])
    # The schedule has halved both by then.
    assert (rate_of(was), rate_of(changed)) == (0.025, 0.05)
    for name in ("loss", "shard_losses", "grad_norm"):
        assert was["record"][name] == changed["record"][name]
    assert was["update_norm"] == pytest.approx(0.025 * norm_of(was), rel=1e-4)
    assert changed["update_norm"] == pytest.approx(2 * was["update_norm"], rel=1e-4)


def test_what_if_clipped_makes_an_update_of_the_rate_times_the_norm_that_is_left(
    replayed: dict[str, Result],
) -> None:
    was, changed = what_if(replayed["what if clipped"])
    assert norm_of(was) > 1.5
    for name in ("loss", "shard_losses", "grad_norm", "lr"):  # the norm is that before clipping
        assert was["record"][name] == changed["record"][name]
    assert was["update_norm"] == pytest.approx(rate_of(was) * norm_of(was), rel=1e-4)
    assert changed["update_norm"] == pytest.approx(rate_of(was) * 1.0, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cut", "shards can't be changed for a step that was taken"),
        ("behind", "the checkpoint after 4 steps lies behind step 2"),
        ("beyond", "has no step 9: its ledger holds 9 steps"),
        ("no such option", "optimizer.rate: SGD has no such option; it has: lr, momentum, "),
        ("no such device", "--device takes cpu, cuda or cuda:N; got 'gpu'"),
        ("a bundle is one step", "one.zip is a bundle, which holds one step and one state"),
        ("both", "give the id of an incident, or --at STEP; incidents of"),
    ],
)
def test_what_can_not_be_asked_for_is_bad_input(
    replayed: dict[str, Result], name: str, text: str
) -> None:
    assert replayed[name].status == 2
    assert text in replayed[name].err


def test_bisect_finds_step_shard_and_tensor(replayed: dict[str, Result]) -> None:
    found = replayed["bisect"]
    assert found.status == 11
    lines = found.out.splitlines()
    assert lines[0].startswith("first difference at step 6: shard_losses[1]: ")
    assert lines[1] == "first shard whose loss differs: 1"
    assert any(
        line.startswith("first tensor that differs: the loss (step 6, forward, shard 1)")
        for line in lines
    )
    assert "run a taken again gives what its ledger says" in lines
    assert "run b taken again gives what its ledger says" in lines
    assert "  args: {} against {'tilts': " in found.out


def test_bisect_finds_the_update_that_differed_before_a_value_did(
    replayed: dict[str, Result],
) -> None:
    found = replayed["bisect update"]
    assert found.status == 11
    told = "the values of step 1 are the same, but not what its update made of them"
    assert told in found.out.splitlines()
    tensor = "first tensor that differs: model/first.weight (step 1, state after the step): "
    assert tensor in found.out


def test_bisect_of_a_run_with_itself_finds_nothing(replayed: dict[str, Result]) -> None:
    found = replayed["bisect same"]
    assert (found.status, found.out) == (0, "identical through step 8: nothing to look for\n")


def test_the_debugger_opens_before_the_step_with_everything_at_hand(
    runs: Runs, tmp_path: Path
) -> None:
    run = str(runs.folder / "runs" / "calm")
    said = (
        "p 'at', step, shard.ids == tuple(batch['index'].tolist())\np len(batches), state.step\nc\n"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "samestep", "replay", run),
            *("--at", "6", "--break", "--code", str(runs.folder)),
        ],
        cwd=tmp_path,
        input=said,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "('at', 6, True)" in done.stdout
    assert "(2, 6)" in done.stdout
    assert "reproduced bit for bit: step 6 (" in done.stdout


def test_a_step_that_takes_its_process_with_it_is_taken_by_another_one(
    runs: Runs, tmp_path: Path
) -> None:
    run, commands, written = runs.at("calm"), [], []
    here, there = (f"{phase} of step 6, shard 1" for phase in ("forward", "backward"))
    for name, kind, argument, place in (
        ("crash", IncidentKind.CRASH, "kills", None),
        ("exit", IncidentKind.CRASH, "exits", None),
        ("hang", IncidentKind.HANG, "hangs", None),  # stopped, say: it could not tell where
        ("here", IncidentKind.HANG, "hangs", here),
        ("there", IncidentKind.HANG, "hangs", there),
    ):
        incident = Incident(
            kind=kind,
            step=6,
            attempt=1,
            world_rank=1,
            message="planted",
            id=f"{name}-planted",
            seen={"workers": {"0": {"place": "exchange of step 6"}}},
        )
        if place is not None:
            incident.seen["workers"]["1"] = {"place": place}
        written.append(write(run, incident).id)
        options = ["--set", f"args.{argument}={BAD}", "--still", "1", "--code", str(runs.folder)]
        commands.append(["replay", str(run.root), written[-1], *options, "--json"])
    try:
        found = fresh(tmp_path, *commands)
    finally:
        for name in written:
            run.delete(f"incidents/{name}")
    assert [result.status for result in found] == [0, 0, 0, 0, int(ExitStatus.DIFFERENT)]
    for result in found:  # from the checkpoint after step 4 on
        assert (result.data["first_step"], result.data["compared"]) == (4, 2)
    stands_still = f"it stands still in {here}"
    assert [result.data["ended"] for result in found] == [
        f"the process was ended by SIGKILL in {here}",
        f"the process ended itself with status 0 in {here}",
        *[stands_still] * 3,
    ]
    assert found[-1].data["notes"] == [f"the run met hang at step 6, in {there}"]


def test_json_output_is_one_object(replayed: dict[str, Result]) -> None:
    assert json.loads(replayed["any"].out)["exit_status"] == 0
