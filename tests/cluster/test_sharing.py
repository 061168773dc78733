"""What travels between a notebook and real ranks: arrays, tensors, models, other objects; and what may go wrong."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pandas
import pytest

from ddp_lab import CellError
from ddp_lab.protocol.shared_memory import Segments
from tests.cluster.conftest import Lab

LARGE = 1 << 17  # float64 numbers: 1 MiB
Notebook = Callable[[str], dict[str, Any]]


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    """Runs code in `__main__`, as a notebook's cells are run; its names are gone after the test."""
    names = vars(sys.modules["__main__"])
    before = dict(names)

    def run(code: str) -> dict[str, Any]:
        exec(textwrap.dedent(code), names)
        return names

    yield run
    names.clear()
    names.update(before)


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook that has not imported torch."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)


@pytest.fixture
def torch() -> Any:
    """A notebook that has."""
    return pytest.importorskip("torch")


def descriptors() -> list[str]:
    """Shared memory that a process holds open."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(each))
    return [each for each in found if "memfd:ddp_lab" in each]


MAPPED = "'memfd:ddp_lab' in open('/proc/self/maps').read()"


def arrays() -> dict[str, Any]:
    """Every layout and kind of array, most of them large."""
    base = numpy.arange(2.0 * LARGE).reshape(2, -1)
    read_only = numpy.arange(LARGE)
    read_only.flags.writeable = False
    return {
        "plain": base,
        "fortran": numpy.asfortranarray(base),
        "strided": base[:, ::2],
        "turned": base.reshape(4, 8, -1).transpose(1, 0, 2),
        "reversed": base[::-1],
        "flags": base > 7,
        "complex": base + 2j,
        "records": numpy.zeros(LARGE, dtype=[("x", "f4"), ("y", "i8", 2)]),
        "objects": numpy.array([1, "two", None], dtype=object),
        "texts": numpy.array(["a", "bcd"] * LARGE),
        "read_only": read_only,
        "empty": numpy.empty((0, 3)),
        "point": numpy.array(3.5),
        "small": numpy.arange(3, dtype=">i2"),
        "times": numpy.array(["2024-01-01"], dtype="M8[D]"),
    }


@pytest.mark.parametrize("shared", ["1", "0"])
def test_arrays(lab: Lab, shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of any layout reach the ranks and come back equal, also where memory can't be shared."""
    monkeypatch.setenv("DDP_LAB_SHARED_MEMORY", shared)
    given = arrays()
    lab.push({"given": given})
    pulled = lab.pull("given")
    for rank in (0, 1):
        for name, array in given.items():
            found = pulled[rank][name]
            assert (found.dtype, found.shape) == (array.dtype, array.shape), name
            assert numpy.array_equal(found, array), name
            assert found.flags.writeable == array.flags.writeable, name
    assert pulled[0]["fortran"].flags.f_contiguous
    assert lab.values("given['plain'].flags.writeable, given['plain'].flags.aligned") == {
        0: (True, True),
        1: (True, True),
    }


def test_each_has_its_own(lab: Lab) -> None:
    """Nobody sees what another one does with an array: not the notebook, not a rank."""
    array = numpy.zeros(LARGE)
    lab.push({"array": array})
    array[:] = 5
    lab.run("array += rank + 1")
    assert lab.values("float(array.sum())") == {0: LARGE, 1: 2 * LARGE}
    pulled = lab.pull("array")
    pulled[1][:] = 9
    assert pulled[0].sum() == LARGE
    assert lab.values("float(array[0])") == {0: 1.0, 1: 2.0}
    assert array[0] == 5


def test_memory_is_shared_and_given_back(lab: Lab) -> None:
    """A large array lies on shared memory, nobody holds a descriptor of it, and it is gone with the last array."""
    lab.push({"array": numpy.zeros(LARGE), "small": numpy.zeros(3)})
    assert lab.values(MAPPED) == {0: True, 1: True}
    pulled = lab.pull("array")
    assert "memfd:ddp_lab" in Path("/proc/self/maps").read_text()
    with Segments(1):
        assert len(descriptors()) == 1
    assert descriptors() == []
    assert lab.values(descriptors) == {0: [], 1: []}
    del pulled
    lab.run("del array")
    assert lab.values(MAPPED) == {0: False, 1: False}
    assert "memfd:ddp_lab" not in Path("/proc/self/maps").read_text()


def test_tables_and_long_texts(lab: Lab) -> None:
    """DataFrames and large plain data travel, too; to and from some ranks, and as the value of an expression."""
    frame = pandas.DataFrame({"x": numpy.arange(LARGE), "y": numpy.ones(LARGE), "name": ["a"] * LARGE})
    lab.push({"frame": frame, "text": "t" * 1_000_000, "data": b"d" * 1_000_000})
    assert lab.values("int(frame.x.sum()), len(text), data == b'd' * 1_000_000")[1] == (frame.x.sum(), 1_000_000, True)
    pandas.testing.assert_frame_equal(lab.pull("frame")[0], frame)
    assert lab.pull("text")[1] == "t" * 1_000_000
    lab.push({"only": "one"}, ranks=[1])
    assert lab.pull("only", ranks=[1]) == {1: "one"}
    assert lab.pull("len(text) + rank") == {0: 1_000_000, 1: 1_000_001}


def test_dataclasses_of_the_notebook(lab: Lab, notebook: Notebook) -> None:
    """An object of a class of the notebook arrives as what it is, and comes back as one."""
    names = notebook(
        """
        import dataclasses
        @dataclasses.dataclass
        class Config:
            weights: object
            deeper: list
        """
    )
    config = names["Config"](numpy.arange(LARGE), [names["Config"](None, [1])])
    lab.push({"config": config})
    assert lab.values("config.weights.sum() == config.weights.size * (config.weights.size - 1) // 2")[0]
    pulled = lab.pull("config")[1]
    assert type(pulled) is names["Config"]
    assert pulled.deeper == config.deeper


def test_tensors_that_are_pushed(lab: Lab, torch: Any) -> None:
    """Tensors arrive as tensors of the same kind; those that share memory still do."""
    base = torch.arange(2.0 * LARGE)
    lab.push(
        {
            "base": base,
            "half": base[LARGE:],
            "turned": base.view(2, -1).T,
            "brain": torch.ones(LARGE, dtype=torch.bfloat16),
            "leaf": torch.ones(LARGE, requires_grad=True),
            "parameter": torch.nn.Parameter(torch.zeros(3)),
            "conj": torch.tensor([1 + 2j]).conj(),
            "sparse": torch.eye(3).to_sparse(),
            "none": torch.empty(0, 4),
            "point": torch.tensor(True),
            "few": torch.zeros(4 * LARGE)[5:8],
        }
    )
    lab.run("base[LARGE] = -1".replace("LARGE", str(LARGE)))
    assert lab.values("half[0].item(), turned[0, 1].item(), tuple(turned.stride())")[1] == (-1, -1, (1, LARGE))
    assert lab.values("brain.dtype == torch.bfloat16 and brain.sum().item() == brain.numel()")[0]
    assert lab.values("leaf.requires_grad and leaf.is_leaf, type(parameter).__name__")[0] == (True, "Parameter")
    assert lab.values("conj.item(), sparse.to_dense().sum().item(), tuple(none.shape), point.item()")[0] == (
        1 - 2j,
        3,
        (0, 4),
        True,
    )
    assert lab.values("few.tolist()")[0] == [0, 0, 0]
    assert base[LARGE] == LARGE


def test_models_that_are_pushed(lab: Lab, torch: Any, notebook: Notebook) -> None:
    """A model of a class of the notebook arrives as what it is, parameters still its own; its state comes back."""
    names = notebook(
        """
        import torch
        class Net(torch.nn.Module):
            def __init__(self, width):
                super().__init__()
                self.inner = torch.nn.Linear(width, width)
            def forward(self, x):
                return self.inner(x).relu()
        """
    )
    model = names["Net"](512)
    lab.push({"model": model, "parameters": [*model.parameters()]})
    lab.run("optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)")
    lab.run("model(torch.ones(1, 512)).sum().backward(); optimizer.step()")
    assert lab.values("parameters[0] is model.inner.weight, type(model).__name__")[1] == (True, "Net")
    state = lab.pull("model")[1]
    assert list(state) == ["inner.weight", "inner.bias"]
    assert isinstance(state["inner.weight"], torch.Tensor)
    assert not torch.equal(state["inner.weight"], model.inner.weight)
    model.load_state_dict(state)
    both = lab.pull("{'model': model, 'optimizer': optimizer}", ranks=[0])[0]
    assert torch.equal(both["model"]["inner.weight"], model.inner.weight)
    assert both["optimizer"]["state"][0]["momentum_buffer"].shape == (512, 512)


def test_tensors_that_are_pulled(lab: Lab, torch: Any) -> None:
    """A notebook with torch gets tensors: every dtype, and shared memory still shared."""
    lab.run(
        f"base = torch.arange({2 * LARGE}.0); nest = [base, base[{LARGE}:], base.bfloat16(), torch.nn.Parameter(base), "
        "{'size': torch.Size([2]), 'dtype': torch.int8}, torch.tensor(2.0), base[::2], torch.eye(2).to_sparse()]"
    )
    base, half, brain, parameter, names, point, strided, sparse = lab.pull("nest")[1]
    base[LARGE] = -1
    assert half[0] == -1
    assert strided[LARGE // 2] == -1
    assert brain.dtype == torch.bfloat16
    assert isinstance(parameter, torch.nn.Parameter)
    assert names == {"size": torch.Size([2]), "dtype": torch.int8}
    assert point.item() == 2
    assert sparse.to_dense().sum() == 2


@pytest.mark.usefixtures("no_torch")
def test_a_notebook_without_torch(lab: Lab) -> None:
    """It gets numpy arrays, of models and optimizers too, and still has no torch."""
    lab.run("net = torch.nn.Linear(1024, 1024); optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)")
    lab.run("net(torch.ones(1024)).sum().backward(); optimizer.step(); both = {'net': [net], 'optimizer': optimizer}")
    lab.run("t = torch.ones(4, 1024, 256); kinds = [t.bfloat16(), t[:, ::2], t.to(torch.complex64).conj(), t.bool()]")
    small = lab.pull("{'few': [torch.ones(2, dtype=torch.bfloat16)], 'size': torch.Size([2])}")[0]
    assert (small["few"][0].tolist(), small["few"][0].dtype, small["size"]) == ([1, 1], numpy.float32, (2,))
    both = lab.pull("both")[1]
    assert list(both["net"][0]) == ["weight", "bias"]
    assert type(both["net"][0]["weight"]) is numpy.ndarray
    assert both["optimizer"]["param_groups"][0]["lr"] == 0.5
    kinds = lab.pull("kinds")[0]
    assert [str(each.dtype) for each in kinds] == ["float32", "float32", "complex64", "bool"]
    assert all((each == 1).all() for each in kinds)
    assert "torch" not in sys.modules


def test_errors_name_the_part(lab: Lab, notebook: Notebook) -> None:
    """What can't travel is named down to its part, with what to do, and no rank's variable has changed. So are a
    variable that some ranks lack, and what can't name one."""
    lab.run("fine = 'old'")
    names = notebook("class Config: pass")
    config = names["Config"]()
    config.parts = {"lock": threading.Lock()}
    with pytest.raises(TypeError, match=r"config .a Config. can't be pushed: config\.parts\['lock'\] .*omit it"):
        lab.push({"fine": "new", "config": config})
    assert lab.pull("fine") == {0: "old", 1: "old"}
    lab.run("import threading\nclass Own: pass\nnest = {'a': [1, threading.Lock()], 'own': None}\nown = [Own()]")
    with pytest.raises(TypeError, match=r"nest .a dict on rank 0. can't be pulled: nest\['a'\]\[1\]: .*lock"):
        lab.pull("nest")
    with pytest.raises(TypeError, match="class Own was defined on the rank"):
        lab.pull("own")
    lab.run("if rank == 0: there = 1")
    with pytest.raises(NameError, match=r"no there on rank 1 .*; rank 0 has it"):
        lab.pull("there")
    with pytest.raises(TypeError, match=r"frames .a generator. can't be pushed"):
        lab.push({"frames": (i for i in ())})
    with pytest.raises(TypeError, match="can't name a variable"):
        lab.push({"not a name": 1})


def test_nothing_is_set_if_one_rank_can_not_load(lab: Lab, notebook: Notebook) -> None:
    """If a value can't be loaded on one rank, all ranks keep what they had."""
    lab.run("fine = 'old'")
    names = notebook(
        """
        import os
        class Picky:
            def __setstate__(self, state):
                if os.environ["RANK"] == "1":
                    raise ValueError("not here")
        """
    )
    picky = names["Picky"]()
    picky.something = 1
    with pytest.raises(CellError, match="rank 1 failed: ValueError: not here"):
        lab.push({"fine": "new", "picky": picky})
    assert lab.pull("fine") == {0: "old", 1: "old"}


def test_an_interrupted_push_sets_nothing(lab: Lab, notebook: Notebook) -> None:
    """An interrupt while a rank still loads what was pushed leaves all variables as they were, and no memory open."""
    lab.run("fine = 'old'")
    names = notebook(
        f"""
        import os, signal, time
        class Slow:
            def __setstate__(self, state):
                if os.environ["RANK"] == "0":
                    os.kill({os.getpid()}, signal.SIGINT)
                    time.sleep(600)
        """
    )
    slow = names["Slow"]()
    slow.array = numpy.zeros(LARGE)
    with pytest.raises(KeyboardInterrupt):
        lab.push({"fine": "new", "slow": slow})
    assert lab.pull("fine") == {0: "old", 1: "old"}
    assert descriptors() == []
    assert lab.values(descriptors) == {0: [], 1: []}


def test_an_interrupt_leaves_nothing(lab: Lab) -> None:
    """An interrupt in the middle of a pull leaves no shared memory open on either side."""
    lab.run(
        "import os, signal\nclass Slow:\n    def __getstate__(self):\n        import time\n"
        f"        os.kill({os.getpid()}, signal.SIGINT) if rank == 0 else None\n        time.sleep(600)\n"
        "value = [torch.ones(1 << 20), Slow()]"
    )
    with pytest.raises(KeyboardInterrupt):
        lab.pull("value")
    assert descriptors() == []
    assert lab.values(descriptors) == {0: [], 1: []}


def test_functions_with_what_they_mention(lab: Lab, notebook: Notebook) -> None:
    """Arrays, lambdas, classes and other functions of the notebook travel with a function that mentions them."""
    names = notebook(
        f"""
        import functools, numpy
        weights = numpy.ones({LARGE})
        double = lambda x: 2 * x
        class Base:
            def __init__(self, start=1):
                self.start = start
            def add(self, x, *, plus=0):
                return self.start + x + plus + rank
        class Counter(Base):
            def __init__(self):
                super().__init__(10)
        def fibonacci(n):
            return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
        def total(scale=double(1), *, power=1):
            return double(float(weights.sum()) * scale) ** power + Counter().add(0)
        """
    )
    assert lab.run(names["total"]).values == {0: 4 * LARGE + 10, 1: 4 * LARGE + 11}
    assert lab.run(names["total"], 1, power=2).values[0] == 4 * LARGE**2 + 10
    assert lab.run(names["fibonacci"], 10).values == {0: 55, 1: 55}
    assert lab.run(names["Counter"]().add, 5, plus=1).values == {0: 16, 1: 17}
    assert lab.run(names["functools"].partial(names["total"], 0), power=1).values == {0: 10, 1: 11}
    given = {"label": 1, "board": 2, "view": 3, "tick": 4, "code": 5, "self": 6}
    assert lab.run(lambda **kwargs: kwargs, ranks=[1], **given).values == {1: given}
    assert lab.run(names["Counter"].add, names["Base"](3), 1).values == {0: 4, 1: 5}
    here = numpy.arange(LARGE)
    assert lab.run(lambda more: int(here[-1]) + more[0], [1]).values == {0: LARGE, 1: LARGE}
    assert lab.run(len, [1, 2]).values == {0: 2, 1: 2}
    assert lab.run(numpy.sum, here).values[1] == here.sum()


def test_functions_and_the_ranks_names(lab: Lab, notebook: Notebook) -> None:
    """A function sees the rank's names, the notebook's first but for the rank's own; what ranks hold is kept."""
    lab.run("held = [rank]; both = 'of the rank'; counter = 0")
    names = notebook(
        """
        import threading
        rank, both, get_ipython = "a leftover of a loop", "of the notebook", threading.Lock()
        def look():
            global counter
            counter += 1
            helper = torch.ones(1) if get_ipython().user_ns["rank"] == rank else None
            both_here = both
            return rank, held, both_here, counter, int(helper.item())
        """
    )
    assert lab.run(names["look"]).values == {0: (0, [0], "of the notebook", 1, 1), 1: (1, [1], "of the notebook", 1, 1)}
    assert lab.run(names["look"]).values[1][3] == 2
    assert lab.values("held, both, counter, rank, 'look' in globals(), 'helper' in globals()")[1] == (
        [1],
        "of the rank",
        2,
        1,
        False,
        False,
    )
    lab.push({"look": names["look"]})
    lab.run("held = 'later'")
    assert lab.values("look()[1]") == {0: "later", 1: "later"}


def test_functions_that_are_refused(lab: Lab, notebook: Notebook) -> None:
    """Generators, coroutines and functions that mention what can't travel are refused before anything runs."""
    names = notebook(
        """
        import threading
        lock = threading.Lock()
        def numbers():
            yield 1
        async def later():
            pass
        def locked():
            with lock:
                return lab
        """
    )
    names["lab"] = lab
    with pytest.raises(TypeError, match=r"numbers is a generator function.*return a list"):
        lab.run(names["numbers"])
    with pytest.raises(TypeError, match="later is a coroutine function"):
        lab.run(names["later"])
    with pytest.raises(TypeError, match=r"locked .a function. can't be sent to a rank: its variable lock .a lock"):
        lab.run(names["locked"])
    with pytest.raises(TypeError, match=r"argument 0 .a list. can't be sent to a rank: argument 0\[1\] .a lock"):
        lab.run(len, [1, names["lock"]])
    assert lab.busy_ranks() == set()
    stayed = lab.run(lambda: (each for each in [1])).values[0]
    assert "generator" in stayed.why
    assert descriptors() == []
