"""The fingerprints of a workload's data: size, class, and a digest of a few samples.

Samples at fixed places are read as training reads them, one by one, under seeds of their own that
no job chooses, so that two runs over the same data tell the same. What is read is bounded: few
samples, the beginning of what is large in them, and no further sample once it has taken long.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

import torch
import xxhash
from torch import Tensor
from torch.utils.data import Dataset

from samestep.engine.setup import Built
from samestep.exact.digest import tensor_bytes, tensor_header
from samestep.exact.seeds import Purpose, global_generators_kept, seed_everything
from samestep.incidents.batch_code import encode_batch
from samestep.telemetry.datasets import EVALUATION, TRAINING, DatasetInfo

NUM_SAMPLES: Final = 8
MAX_TENSOR_BYTES: Final = 2**20
LIMIT_S: Final = 2.0

logger = logging.getLogger(__name__)


def fingerprints(
    built: Built, *, monotonic: Callable[[], float] = time.monotonic
) -> list[DatasetInfo]:
    """Those of the training data and, where there is some, the evaluation data.

    Generators are as before afterwards. Call it before loader processes are forked: they share
    open files with this process.
    """
    found = [_fingerprint(built.dataset, built.dataset_size, TRAINING, monotonic)]
    if built.evaluation is not None:
        data = built.evaluation.dataset
        found.append(_fingerprint(data, built.evaluation.size, EVALUATION, monotonic))
    return found


def places(size: int) -> list[int]:
    """Which samples are looked at: the first, the last, and some between, evenly."""
    if size == 0:
        return []
    return sorted({(size - 1) * number // (NUM_SAMPLES - 1) for number in range(NUM_SAMPLES)})


def _fingerprint(
    dataset: Dataset[Any], size: int, context: str, monotonic: Callable[[], float]
) -> DatasetInfo:
    kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    head = f"{kind}\n{size}\n".encode()
    content = xxhash.xxh3_128(head)
    threads = torch.get_num_threads()
    end = monotonic() + LIMIT_S
    num_sampled = 0
    try:
        if threads != 1:
            torch.set_num_threads(1)
        with global_generators_kept():
            for index in places(size):
                if monotonic() > end:
                    raise TimeoutError(f"{num_sampled} samples took over {LIMIT_S:g} s")
                seed_everything(0, Purpose.FINGERPRINT, index)
                _feed(content, index, dataset[index])
                num_sampled += 1
    except (Exception, SystemExit) as error:  # whatever users' samples are or raise: not told here
        logger.info("the fingerprint of %s has no samples: %r", kind, error)
        content, num_sampled = xxhash.xxh3_128(head), 0
    finally:
        if threads != 1:
            torch.set_num_threads(threads)
    return DatasetInfo(
        context=context,
        kind=kind,
        size=size,
        num_sampled=num_sampled,
        digest=content.hexdigest(),
    )


def _feed(content: Any, index: int, sample: Any) -> None:
    text, tensors = encode_batch(sample)
    content.update(f"{index}\n{text}\n".encode())
    for name in sorted(tensors):
        content.update(tensor_header(name, tensors[name]).encode())
        content.update(tensor_bytes(_beginning(tensors[name])))


def _beginning(tensor: Tensor) -> Tensor:
    """As many elements as are hashed of it, in C order."""
    most = max(1, MAX_TENSOR_BYTES // max(1, tensor.element_size()))
    return tensor if tensor.numel() <= most else tensor.reshape(-1)[:most]
