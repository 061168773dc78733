"""The walk-through of DataParallel: a random dataset, a linear layer with a sigmoid, and what is lost in replicas."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ddp_lab

INPUTS, SAMPLES, BATCH = 5, 100, 30
DEVICES = ["cpu:0", "cpu:1", "cpu:2"]


class RandomDataset(Dataset[torch.Tensor]):
    """Normally distributed rows."""

    def __init__(self) -> None:
        self.data = torch.randn(SAMPLES, INPUTS, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index]


class Model(nn.Module):
    """One probability for each sample; counts its forwards, and notes what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(INPUTS, 1)
        self.sigmoid = nn.Sigmoid()
        self.counter = 0
        self.sizes: list[int] = []  # the same list in all replicas

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counter += 1
        self.sizes.append(len(x))
        return self.sigmoid(self.fc(x))


def _train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.BCELoss()
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(3):
        for batch in DataLoader(RandomDataset(), BATCH, shuffle=True, generator=generator):
            targets = torch.randint(2, (len(batch), 1), generator=generator).float()
            loss = criterion(model(batch), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def _model() -> Model:
    torch.manual_seed(0)
    return Model()


def test_training_with_replicas_is_training_with_the_module() -> None:
    """The example trains as the module alone does: batches of 30, 30, 30 and 10 split over three devices."""
    alone, split = _model(), _model()
    expected = _train(alone)
    torch.testing.assert_close(_train(ddp_lab.DataParallel(split, DEVICES)), expected)
    torch.testing.assert_close(list(split.parameters()), list(alone.parameters()))
    assert alone.sizes == [30, 30, 30, 10] * 3
    assert sorted(split.sizes) == sorted([10] * 27 + [4, 4, 2] * 3)


def test_a_counter_in_the_module_stays_where_it_was() -> None:
    """Replicas are destroyed after each forward: the attribute that they count up is still 0."""
    model = _model()
    _train(ddp_lab.DataParallel(model, DEVICES))
    assert model.counter == 0


def test_the_first_device_shares_the_modules_memory() -> None:
    """An update in place on the first device is recorded in the module; on the others it is lost."""

    class Marks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(len(DEVICES)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen[int(x[0])] = 1
            return x

    module = Marks()
    ddp_lab.DataParallel(module, DEVICES)(torch.arange(3.0))
    assert module.seen.tolist() == [1, 0, 0]


def test_results_are_joined_on_the_output_device() -> None:
    """`output_device` names where the parts are joined, along dimension 0; inputs may be anywhere."""
    model = ddp_lab.DataParallel(_model(), DEVICES, output_device="cpu:1")
    assert model(torch.randn(BATCH, INPUTS)).shape == (BATCH, 1)


def test_on_a_machine_without_accelerators_the_example_runs_unchanged() -> None:
    """`DataParallel(model)` alone is the module itself where there is no accelerator."""
    model = _model().to(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    x = torch.randn(BATCH, INPUTS, device=model.fc.weight.device)
    torch.testing.assert_close(ddp_lab.DataParallel(model)(x), model.sigmoid(model.fc(x)))
