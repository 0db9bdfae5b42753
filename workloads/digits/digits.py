"""Handwritten digits: a small CNN with everything in it that usually breaks bit-exactness.

BatchNorm (buffers), dropout (random numbers in forward), random shifts (random numbers in
`__getitem__`), and 1,437 training images, which no usual batch size divides.

    samestep check workloads/digits/job.yaml
    samestep train workloads/digits/job.yaml --name a --workers 1
    samestep train workloads/digits/job.yaml --name b --workers 3
    samestep compare a b

The images are scikit-learn's `load_digits` (8x8 pixels, part of the package: nothing is
downloaded). Train and test set are a fixed cut, the same for every seed of a job.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import Dataset

from samestep import Loss, Workload

Item = dict[str, Tensor]

TEST_SIZE = 360
MAX_SHIFT = 1
FINAL_LR_SHARE = 0.02


class DigitImages(Dataset[Item]):
    """Images and labels of one side of the cut.

    An item is `{"image": float32 [1, 8, 8] in 0..1, "label": int64 []}`. With `shift`, an
    image moves by up to `MAX_SHIFT` pixels each way. `torch.randint` needs no seed of ours:
    samestep seeds it for each item by its position in the epoch.
    """

    def __init__(self, *, train: bool, shift: bool) -> None:
        bunch = load_digits()
        # NumPy promises that RandomState gives the same stream in every version.
        order = np.random.RandomState(0).permutation(len(bunch.target))
        chosen = order[TEST_SIZE:] if train else order[:TEST_SIZE]
        images = torch.from_numpy(bunch.images[chosen]).float().div(16).unsqueeze(1)
        self.padded = F.pad(images, [MAX_SHIFT] * 4)
        self.labels = torch.from_numpy(bunch.target[chosen]).long()
        self.shift = shift

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        top, left = MAX_SHIFT, MAX_SHIFT
        if self.shift:
            top, left = torch.randint(0, 2 * MAX_SHIFT + 1, (2,)).tolist()
        image = self.padded[index, :, top : top + 8, left : left + 8]
        return {"image": image, "label": self.labels[index]}


def digit_net(width: int, dropout: float) -> nn.Sequential:
    """Three convolutions and a linear layer: float [n, 1, 8, 8] to logits [n, 10]."""
    return nn.Sequential(
        *conv_block(1, width),
        *conv_block(width, 2 * width),
        nn.MaxPool2d(2),
        *conv_block(2 * width, 2 * width),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(2 * width * 2 * 2, 10),
    )


def conv_block(num_in: int, num_out: int) -> list[nn.Module]:
    """Convolution, BatchNorm, ReLU."""
    conv = nn.Conv2d(num_in, num_out, kernel_size=3, padding=1, bias=False)
    return [conv, nn.BatchNorm2d(num_out), nn.ReLU()]


class Digits(Workload):
    """Classifies the ten digits.

    Args:
        lr: learning rate of SGD at the first step.
        decay_steps: steps over which it falls, in a straight line, to `FINAL_LR_SHARE` of
            itself, where it stays. Not taken from the number of epochs: so a finished run
            that gets more epochs goes on as it would have.
        momentum: its momentum.
        weight_decay: L2 penalty on all parameters.
        width: channels of the first convolution; the others have twice as many.
        dropout: share of the last layer's inputs that is dropped.
        shift: whether training images are shifted at random.
    """

    dimensions: ClassVar = {"image": (None, 1, 8, 8), "label": (None,)}

    def __init__(
        self,
        *,
        lr: float = 0.05,
        decay_steps: int = 345,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        width: int = 16,
        dropout: float = 0.2,
        shift: bool = True,
    ) -> None:
        self.lr = lr
        self.decay_steps = decay_steps
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.width = width
        self.dropout = dropout
        self.shift = shift

    def model(self) -> nn.Module:
        """The net with weights drawn from the job's seed."""
        return digit_net(self.width, self.dropout)

    def data(self) -> Dataset[Item]:
        """The 1,437 training images."""
        return DigitImages(train=True, shift=self.shift)

    def loss(self, model: nn.Module, batch: Item) -> Loss:
        """Cross entropy, the mean over the shard's samples, and which ones were right."""
        logits = model(batch["image"])
        value = F.cross_entropy(logits, batch["label"])
        return Loss(value=value, metrics={"accuracy": correct(logits, batch["label"])})

    def optimizer(self, model: nn.Module) -> SGD:
        """SGD with momentum over all parameters."""
        return SGD(
            model.parameters(),
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )

    def scheduler(self, optimizer: Optimizer) -> LinearLR:
        """A straight line down, then flat."""
        return LinearLR(
            optimizer,
            start_factor=1.0,
            end_factor=FINAL_LR_SHARE,
            total_iters=self.decay_steps,
        )

    def evaluation_data(self) -> Dataset[Item]:
        """The 360 test images, never shifted."""
        return DigitImages(train=False, shift=False)

    def evaluate(self, model: nn.Module, batch: Item) -> dict[str, Tensor]:
        """One value per image, so that sums do not depend on how the data is cut."""
        logits = model(batch["image"])
        return {
            "accuracy": correct(logits, batch["label"]),
            "loss": F.cross_entropy(logits, batch["label"], reduction="none"),
        }

    def show(self, batch: Item, index: int) -> Tensor:
        """The image, for the report of an incident."""
        return batch["image"][index, 0]


def correct(logits: Tensor, label: Tensor) -> Tensor:
    """1.0 for each sample that is classified right, else 0.0: float32 [n]."""
    return (logits.detach().argmax(dim=1) == label).float()
