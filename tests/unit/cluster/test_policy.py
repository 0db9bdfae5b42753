"""Which failures are retried, how often, and what is said in the end."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from samestep.cluster.policy import MAX_BACKOFF_S, Cause, Fault, RetryPolicy
from samestep.spec_faults import Retries

CRASH = Fault(cause=Cause.CRASH, message="worker 1 on h was lost")
USER = Fault(cause=Cause.USER, message="KeyError: 'x'", kind="UserCodeError", step=5)
ECHO = Fault(cause=Cause.LOST, message="lost worker 1", told=True)


def test_the_first_cause_leads_whoever_else_complains() -> None:
    policy = RetryPolicy(Retries(user=0))
    verdict = policy.decide([ECHO, USER, replace(CRASH, world_rank=2)], step=5)
    assert (verdict.retry, verdict.first) == (False, USER)
    assert verdict.message.startswith("KeyError: 'x'\n")
    assert "faults.retries.user is 0" in verdict.message


def test_an_exception_is_retried_once_and_ends_the_run_when_it_comes_again() -> None:
    policy = RetryPolicy(Retries(user=3))
    assert policy.decide([USER], step=5).retry
    again = policy.decide([USER], step=5)
    assert not again.retry
    assert "The same step failed in the same way twice" in again.message


def test_exceptions_of_other_steps_have_a_budget_of_their_own_each() -> None:
    policy = RetryPolicy(Retries(user=1))
    for step in (5, 9, 12):
        assert policy.decide([replace(USER, step=step)], step=step).retry
    other = replace(USER, step=12, message="ValueError: another")
    assert not policy.decide([other], step=12).retry


def test_crashes_with_progress_in_between_go_on_for_ever_and_without_it_do_not() -> None:
    policy = RetryPolicy(Retries(infrastructure=2))
    for step in range(50):
        assert policy.decide([CRASH], step=step).retry
    assert [policy.decide([CRASH], step=49).retry for _ in range(3)] == [True, False, False]


def test_lack_of_memory_is_not_retried_for_ever_even_with_progress() -> None:
    policy = RetryPolicy(Retries(infrastructure=4))
    memory = replace(CRASH, cause=Cause.OUT_OF_MEMORY)
    assert [policy.decide([memory], step=step).retry for step in range(6)] == [True] * 4 + [
        False,
        False,
    ]


def test_lack_of_memory_on_the_node_spends_another_budget_than_the_workloads_own() -> None:
    of_node = replace(CRASH, cause=Cause.OUT_OF_MEMORY)
    own = replace(USER, cause=Cause.OUT_OF_MEMORY, told=True)
    policy = RetryPolicy(Retries(user=0, infrastructure=3))
    assert [policy.decide([of_node], step=3).retry for _ in range(3)] == [True] * 3
    ended = policy.decide([of_node], step=3)
    assert not ended.retry
    assert "4 failures in a row" in ended.message
    assert "faults.retries.infrastructure is 3" in ended.message
    ended = RetryPolicy(Retries(user=0, infrastructure=3)).decide([own], step=3)
    assert not ended.retry
    assert "faults.retries.user is 0" in ended.message


def test_what_no_retry_can_mend_is_final_at_once() -> None:
    fault = replace(USER, cause=Cause.FINAL, message="no such file", exit_status=2)
    verdict = RetryPolicy(Retries()).decide([ECHO, fault], step=0)
    assert (verdict.retry, verdict.message, verdict.first.exit_status) == (
        False,
        "no such file",
        2,
    )


def test_retries_without_progress_wait_longer_and_longer() -> None:
    policy = RetryPolicy(Retries(infrastructure=20))
    delays = [policy.decide([CRASH], step=3).delay_s for _ in range(12)]
    assert delays[:4] == [0.0, 0.5, 1.0, 2.0]
    assert delays == sorted(delays)
    assert delays[-1] == MAX_BACKOFF_S


@given(seed=st.integers(0, 10**6), user=st.integers(0, 3), infrastructure=st.integers(0, 5))
def test_a_run_that_makes_no_step_ends_within_its_budgets(
    seed: int, user: int, infrastructure: int
) -> None:
    draw = random.Random(seed)
    policy = RetryPolicy(Retries(user=user, infrastructure=infrastructure))
    num_retries = 0
    while policy.decide([draw.choice([CRASH, USER, ECHO])], step=7).retry:
        num_retries += 1
    assert num_retries <= user + infrastructure
