"""A small GPT that learns to write Python, byte by byte, in plain PyTorch.

Tied input and output embeddings, AdamW with two parameter groups, clipping, and a cosine
schedule with warm-up, on 303 kB of real text that every machine has: modules of Python's own
standard library.

    samestep check workloads/chargpt/job.yaml
    samestep train workloads/chargpt/job.yaml --name gpt1 --workers 1
    samestep train workloads/chargpt/job.yaml --name gpt2 --workers 2
    samestep compare gpt1 gpt2
"""

from __future__ import annotations

import hashlib
import math
import platform
import sysconfig
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from samestep import Workload

Item = dict[str, Tensor]

NUM_BYTES = 256

# Old, finished modules: they were the same to the byte in Python 3.11.2, 3.11.7, 3.12.1 and
# 3.13.0. Any later release may touch one of them, which the hash in the job file tells.
TRAIN_FILES = (
    "difflib.py",
    "optparse.py",
    "tracemalloc.py",
    "xml/sax/handler.py",
    "_markupbase.py",
    "json/__init__.py",
    "stringprep.py",
    "xml/dom/xmlbuilder.py",
    "xml/sax/saxutils.py",
    "multiprocessing/heap.py",
    "pyclbr.py",
)
TEST_FILES = ("heapq.py", "unittest/suite.py")


def read_library(files: tuple[str, ...]) -> bytes:
    """Source of modules of the running Python's standard library, joined."""
    folder = Path(sysconfig.get_path("stdlib"))
    try:
        return b"".join((folder / file).read_bytes() for file in files)
    except OSError as error:
        raise FileNotFoundError(
            f"chargpt trains on the source of Python's standard library, but {error.filename} "
            f"can't be read ({error.strerror}); use a Python that comes with its .py files"
        ) from error


class TrainingWindows(Dataset[Item]):
    """The text in pieces of `context` bytes, each cut at a new random place in every epoch.

    An item is `{"input": int64 [context], "target": int64 [context]}`: the target is the input
    moved on by one byte. samestep seeds the `torch.randint`.
    """

    def __init__(self, text: bytes, context: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        # One piece less than there is room for, since the last one moves too.
        return (len(self.text) - 1) // self.context - 1

    def __getitem__(self, index: int) -> Item:
        start = index * self.context + int(torch.randint(self.context, ()))
        return window(self.text, start, self.context)


class HeldOutWindows(Dataset[Item]):
    """The held-out text in pieces of `context` bytes, side by side; items as in training."""

    def __init__(self, text: bytes, context: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> Item:
        return window(self.text, index * self.context, self.context)


def window(text: Tensor, start: int, context: int) -> Item:
    """Input and target, int64 [context] each, from a text of uint8 [length]."""
    piece = text[start : start + context + 1].long()
    return {"input": piece[:-1], "target": piece[1:]}


class Block(nn.Module):
    """Causal self-attention and an MLP, each behind a LayerNorm: [n, time, width] to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Adds what attention and MLP found to `x`."""
        n, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(seen.transpose(1, 2).reshape(n, time, width))
        thought: Tensor = self.shrink(F.gelu(self.expand(self.norm2(x))))
        return x + thought


class GPT(nn.Module):
    """Bytes, int64 [n, time], to logits of the byte that follows each, float [n, time, 256]."""

    def __init__(self, *, context: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(NUM_BYTES, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            # What is added to the stream 2 * depth times is made smaller, so that it stays of
            # the same size at any depth.
            added = name.endswith(("attended.weight", "shrink.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if added else 0.02)
        self.head.weight = self.token.weight

    def forward(self, text: Tensor) -> Tensor:
        """Logits for every position."""
        positions = torch.arange(text.shape[1], device=text.device)
        x = self.token(text) + self.position(positions)
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class CharGPT(Workload):
    """Predicts the next byte of Python source.

    Args:
        context: bytes that the model sees at once.
        width: of the residual stream; a multiple of `heads`.
        depth: number of blocks.
        heads: attention heads of a block.
        lr: learning rate at its highest.
        weight_decay: of matrices and embeddings; biases and LayerNorms have none.
        warmup_steps: steps in which the learning rate rises in a line.
        decay_steps: step at which the cosine has brought it down to a tenth, where it stays. Not
            taken from the length of the run: so a finished run that gets more steps goes on as
            it would have.
        sha256: what the text must hash to (training files, then test files, in their order);
            None trains on whatever this Python's library holds, and prints the hash.
    """

    dimensions: ClassVar = {"input": (None, None), "target": (None, None)}

    def __init__(
        self,
        *,
        context: int = 128,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        lr: float = 2e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 30,
        decay_steps: int = 300,
        sha256: str | None = None,
    ) -> None:
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got {width} and {heads}")
        self.context = context
        self.width = width
        self.depth = depth
        self.heads = heads
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.decay_steps = decay_steps
        self.train_text = read_library(TRAIN_FILES)
        self.test_text = read_library(TEST_FILES)
        check_text(self.train_text + self.test_text, sha256)

    def model(self) -> nn.Module:
        """The GPT with weights drawn from the job's seed."""
        return GPT(context=self.context, width=self.width, depth=self.depth, heads=self.heads)

    def data(self) -> Dataset[Item]:
        """Windows of the training files."""
        return TrainingWindows(self.train_text, self.context)

    def loss(self, model: nn.Module, batch: Item) -> Tensor:
        """Cross entropy in nats, the mean over all bytes of the shard.

        Every sample has as many bytes, so weighting shards by samples, which is what happens
        unless a `Loss` says otherwise, weights them by bytes.
        """
        return F.cross_entropy(model(batch["input"]).flatten(0, 1), batch["target"].flatten())

    def optimizer(self, model: nn.Module) -> AdamW:
        """AdamW; a tied weight comes up once in `parameters()`."""
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return AdamW(groups, lr=self.lr, betas=(0.9, 0.95))

    def scheduler(self, optimizer: Optimizer) -> LambdaLR:
        """Up in a line, down in half a cosine to a tenth, then flat."""

        def share(step: int) -> float:
            if step < self.warmup_steps:
                return (step + 1) / self.warmup_steps
            length = max(1, self.decay_steps - self.warmup_steps)
            progress = min(1.0, (step - self.warmup_steps) / length)
            return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

        return LambdaLR(optimizer, share)

    def evaluation_data(self) -> Dataset[Item]:
        """Windows of two files that training never sees."""
        return HeldOutWindows(self.test_text, self.context)

    def evaluate(self, model: nn.Module, batch: Item) -> dict[str, Tensor]:
        """Mean loss (nats per byte) and share of bytes guessed right, of each window."""
        logits = model(batch["input"])
        loss = F.cross_entropy(logits.transpose(1, 2), batch["target"], reduction="none")
        right = logits.argmax(dim=2) == batch["target"]
        return {"loss": loss.mean(dim=1), "accuracy": right.float().mean(dim=1)}

    def show(self, batch: Item, index: int) -> str:
        """The text, for the report of an incident."""
        return bytes(batch["input"][index].tolist()).decode("latin-1")


def check_text(text: bytes, sha256: str | None) -> None:
    """Refuses a text other than the expected one; prints the hash where none is expected."""
    found = hashlib.sha256(text).hexdigest()
    python = f"Python {platform.python_version()}"
    if sha256 is None:
        print(f"chargpt: the text of {python}'s library has sha256 {found}")
    elif found != sha256.lower():
        raise ValueError(
            f"the text of {python}'s library has sha256 {found}, but args.sha256 is {sha256}: this "
            "release changed one of the files. Use the Python of the run to compare with, or train "
            f"on this text: --set args.sha256={found}"
        )
