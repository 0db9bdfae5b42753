"""Which command of which page is run where; test_shown_commands.py runs what is `Here`.

Runs are of mode local, MLflow and metrics are off and long jobs are cut short: those are the
options that a command is `given`.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

FRESH = "tests/system/test_fresh_checkout.py"

INCIDENT = "non_finite-step-00000020-attempt-1"
# Other placeholders (RUN, BUNDLE, FILE, ...) are names that runs and files may have, and have here.
FILLED = {"ID": INCIDENT, "STEP": "12", "N": "5", "A:B": "3:5", "@NAME@": "flowers"}
LOCAL = "--mode local --set tracking.enabled=false --set metrics.enabled=false"
SMALL = f"{LOCAL} --set max_steps=2 --set args.width=32 --set args.depth=1"
SHORT = f"{LOCAL} --set epochs=1"
TEMPLATE = "platform/samestep/cli/templates/README.md.txt"


@dataclass(frozen=True, kw_only=True)
class Here:
    """A command that is run here, and a regular expression that is found in what it prints.

    `given` are options beside its own. One that `dies` takes its process with it; what it prints
    when it is repeated, in this one, is `again`.
    """

    prints: str
    given: str = ""
    status: int | None = 0
    dies: bool = False
    again: str | None = None


@dataclass(frozen=True)
class Elsewhere:
    """Why a command is not run here, and `file::text`: where it is run."""

    reason: str
    by: str


README = Elsewhere(
    "run word for word by a user who has just got the files",
    f"{FRESH}::test_the_commands_of_the_readme_do_what_it_says",
)
WINE = Elsewhere(
    "run with the files of its page",
    "tests/unit/test_docs.py::test_the_plain_loop_and_the_workload_learn_the_same_thing",
)
PROMETHEUS = Elsewhere(
    "does not end by itself, and needs Debian's package",
    "tests/system/test_prometheus.py::test_every_query_of_every_panel_returns_data",
)
SUBMIT = Elsewhere(
    "needs a cluster",
    "tests/integration/test_submitted_job.py::"
    "test_a_job_is_refused_relative_storage_then_trains_is_attached_to_stopped_and_resumed",
)
SUBMITTED = (
    "ray job submit --address http://HEAD:8265 --working-dir . --runtime-env "
    "deploy/runtime_env.yaml -- python -m samestep train workloads/digits/job.yaml --name digits "
    "--set storage=/shared/runs"
)
TRAINED = r"status +done\n"
SAME_STEP = r"reproduced bit for bit: step 20 \(loss nan, grad_norm nan, left out\)"

COMMANDS: dict[str, dict[str, Here | Elsewhere]] = {
    "CONTRIBUTING.md": {
        "make venv": Elsewhere(
            "takes minutes and the network",
            f"{FRESH}::test_make_venv_sets_up_the_command_and_has_nothing_to_do_again",
        ),
        "make lint": Elsewhere("takes a minute; CI runs it", ".ci/run::target lint train"),
        "make test": Elsewhere(
            "would run this test", f"{FRESH}::test_make_test_passes_for_a_user_without_rights"
        ),
        "make fmt": Elsewhere(
            "changes the checkout; what it makes anew is compared",
            "tests/unit/test_dashboards.py::test_the_files_are_what_the_script_makes",
        ),
        ".ci/run": Elsewhere("would run this test", ".ci/run::step make test"),
    },
    "README.md": {
        "git clone REPOSITORY samestep && cd samestep": Elsewhere(
            "copies of the files stand for it", f"{FRESH}::def checkout"
        ),
        "make train": README,
        ".venv/bin/samestep train workloads/digits/job.yaml --name one --workers 1": README,
        ".venv/bin/samestep train workloads/digits/job.yaml --name actor --mode dataparallel": (
            README
        ),
        ".venv/bin/samestep compare digits one": README,
        ".venv/bin/samestep compare digits actor": README,
        "mkdir -p /tmp/marks": README,
        ".venv/bin/samestep train workloads/faulty/job.yaml --name calm --mode local": README,
        ".venv/bin/samestep train workloads/faulty/job.yaml --name crashed --workers 2 "
        "--set args.crash_at=40 --set args.marker=/tmp/marks": README,
        ".venv/bin/samestep train workloads/faulty/job.yaml --name nan --workers 3 "
        "--set args.nan_at=20 --set args.position=9 --set incidents.non_finite=skip": Here(
            given=LOCAL, prints=rf"incident {INCIDENT}: step 20: loss nan, grad_norm nan\n"
        ),
        f".venv/bin/samestep pack nan {INCIDENT} --out nan.zip": Here(
            prints=r"^nan\.zip: non_finite at step 20, "
        ),
        ".venv/bin/samestep replay nan.zip --code workloads/faulty --report page.html": Here(
            prints=SAME_STEP
        ),
        "samestep check job.yaml": README,
        "samestep train job.yaml": README,
        ".venv/bin/samestep watch digits": Here(prints=r"^digits  done  attempt 1, local, "),
        ".venv/bin/samestep ui": Elsewhere(
            "does not end by itself",
            "tests/integration/test_tracking.py::"
            "test_the_ui_shows_the_runs_until_a_signal_and_leaves_nothing_behind",
        ),
        "prometheus --config.file=dashboards/prometheus/prometheus.yml": PROMETHEUS,
        SUBMITTED: SUBMIT,
    },
    "dashboards/README.md": {
        "prometheus --config.file=dashboards/prometheus/prometheus.yml": PROMETHEUS,
    },
    "deploy/README.md": {
        "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=...": SUBMIT,
        SUBMITTED: SUBMIT,
    },
    "docs/bundles.md": {
        "samestep incidents list RUN": Here(prints=rf"\n{INCIDENT} +non_finite +20 .* MB "),
        "samestep incidents show RUN ID": Here(
            prints=rf"\nbundle: \S+/{INCIDENT}\n(.*\n)* +state after 20 steps \(live\)\n"
        ),
        "samestep pack RUN ID --out FILE": Here(prints=r"^FILE: non_finite at step 20, "),
        "samestep pack FOLDER --out FILE": Here(prints=r"^FILE: non_finite at step 20, "),
    },
    "docs/checkpoints.md": {
        "samestep checkpoints RUN": Here(
            prints=r"^step +size +age +status +which *\n(.*\n)* *112 .* whole +latest"
        ),
        "samestep checkpoints RUN --verify": Here(prints=r"\n *112 .* whole +latest"),
        "samestep export RUN --out F": Here(prints=r"^F: weights after 112 steps, 6 tensors, "),
    },
    "docs/faults.md": {
        "samestep drill workloads/faulty/job.yaml --faults faults.yaml --nodes 3 "
        "--set args.pause_s=0.05": Elsewhere(
            "needs a minute and nodes of Ray; a drill of random faults is run on three",
            "tests/chaos/test_random_faults.py::test_random_faults_change_no_bit",
        ),
    },
    "docs/incidents.md": {
        "samestep fork RUN --at 80 --name NEW --skip-steps 80:101 --set clip_norm=1": Here(
            prints=r"^NEW: forked from \S+/RUN after 80 steps\n(.*\n)*"
            r"train it on with:\n  \S.* train job\.yaml --name NEW "
        ),
    },
    "docs/replay.md": {
        "samestep incidents list RUN": Here(prints=rf"\n{INCIDENT} +non_finite +20 "),
        "samestep replay RUN ID": Here(prints=SAME_STEP),
        "samestep replay BUNDLE": Here(prints=SAME_STEP),
        "samestep replay RUN --at STEP": Here(prints=r"^reproduced bit for bit: step 12 \(loss 0"),
        "samestep bisect RUN_A RUN_B": Here(
            status=11,
            prints=r"^first difference at step 0: lr(.*\n)*first tensor that differs: model/0",
        ),
    },
    "docs/workload.md": {
        "samestep check job.yaml": WINE,
        "samestep train job.yaml --name wine --mode local": WINE,
        "samestep show wine": WINE,
        "samestep train job.yaml --name four --workers 4": WINE,
        "samestep compare wine four": WINE,
        "samestep evaluate wine --checkpoint best": WINE,
    },
    TEMPLATE: {
        "@COMMAND@ check job.yaml": Here(prints=r"fine: the dry step found no obstacle\n"),
        "@COMMAND@ train job.yaml": Here(given=SHORT, prints=TRAINED),
        "@COMMAND@ evaluate @NAME@": Here(prints=r"equal bit for bit to the evaluation in the le"),
        "@COMMAND@ train job.yaml --name one --workers 1": Here(given=SHORT, prints=TRAINED),
        "@COMMAND@ train job.yaml --name two --workers 2": Here(given=SHORT, prints=TRAINED),
        "@COMMAND@ compare one two": Here(prints=r"^identical through step 14 "),
    },
    "workloads/chargpt/README.md": {
        # Another release of Python may have another text, which is refused.
        "samestep train workloads/chargpt/job.yaml": Here(
            given=SMALL, status=None, prints=rf"{TRAINED}|args\.sha256 is 2432f3"
        ),
        "samestep train workloads/chargpt/job.yaml --set args.sha256=null": Here(
            given=f"{SMALL} --name other", prints=r"library has sha256 [0-9a-f]{64}\n"
        ),
    },
    "workloads/digits/README.md": {
        "samestep train workloads/digits/job.yaml": Here(given=SHORT, prints=TRAINED),
        "samestep train workloads/digits/job.yaml --name a --workers 1": Here(
            given=SHORT, prints=TRAINED
        ),
        "samestep train workloads/digits/job.yaml --name b --workers 3": Here(
            given=SHORT, prints=TRAINED
        ),
        "samestep compare a b": Here(prints=r"^identical through step 22 "),
    },
    "workloads/faulty/README.md": {
        "samestep train workloads/faulty/job.yaml --name calm": Here(
            given=LOCAL, prints=rf"{TRAINED}steps +64\ntest squared_error +0\.0[0-4]\d+\n"
        ),
        # In mode local the crash is the command's own.
        "samestep train workloads/faulty/job.yaml --name crash --workers 2 --set args.crash_at=20 "
        "--set args.position=15 --set args.marker=/tmp/faulty-crash": Here(
            given=LOCAL,
            dies=True,
            status=-signal.SIGKILL,
            prints=r"faulty: crash at step 20, pid \d+\n",
            again=rf"attempt 2 starts at step \d+: (.*\n)*{TRAINED}steps +64\n",
        ),
    },
}

# Blocks that are fenced. What is written in a language is a file or a script; the rest is output.
WRITTEN = {
    "README.md": "tests/unit/test_readme.py::test_a_script_trains_the_example_of_the_readme",
    "docs/faults.md": (
        "tests/unit/cluster/test_strikes.py::test_the_faults_file_of_the_documents_is_read"
    ),
    "docs/workload.md": WINE.by,
}
SHOWN = {
    "identical through step 344 ": README.by,
    "[worker pid=18433] faulty: crash at step 40, ": README.by,
    "reproduced bit for bit: step 20 ": (
        "tests/unit/test_shown_commands.py::test_the_readme_shows_what_replay_prints"
    ),
    "digits  interrupted  attempt 3, ": (
        "tests/unit/test_shown_commands.py::test_the_readme_shows_what_watch_prints"
    ),
}
