"""What is defined in a cell has a source, can be compiled and pickled, and reaches processes that a rank starts."""

from __future__ import annotations

import pytest

from ddp_lab import CellError
from ddp_lab.output.terminal import plain
from ddp_lab.protocol.messages import CellText
from tests.cluster.conftest import Lab

DEFINITIONS = """import dataclasses, inspect, io, pickle
from torch.utils.data import DataLoader, Dataset

def double(x):
    return 2 * x  # of a cell

class Tens(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return Item(torch.tensor(10.0 * index))

@dataclasses.dataclass
class Item:
    value: object

class Plain:
    shared = 3

    class Inner:
        pass

def collate(items):
    return [Item(double(item.value)) for item in items]"""


@pytest.fixture(scope="module", autouse=True)
def defined(lab: Lab) -> None:
    """A cell with functions and classes; its first line is the third of its notebook's cell."""
    lab.run(CellText(DEFINITIONS, first_line=3), label="definitions")


def test_sources(lab: Lab) -> None:
    """`inspect` gives the text and the notebook's line of functions, methods and classes, with or without methods."""
    lab.run("torch.nn.Linear(1, 1)")  # a later cell
    texts = "inspect.getsource(double), inspect.getsource(Tens.__len__), inspect.getsource(Plain)"
    function, method, plain_class = lab.values(texts)[0]
    assert function == "def double(x):\n    return 2 * x  # of a cell\n"
    assert method == "    def __len__(self):\n        return 4\n"
    assert plain_class.startswith("class Plain:\n    shared = 3\n")
    assert plain_class.endswith("    class Inner:\n        pass\n")
    assert lab.values("inspect.getsource(Tens).splitlines()[0]")[0] == "class Tens(Dataset):"
    assert lab.values("inspect.getsource(Plain.Inner)")[0] == "    class Inner:\n        pass\n"
    assert lab.values("inspect.getsourcelines(double)[1], inspect.getsourcelines(Plain)[1]")[1] == (6, 20)
    assert lab.values("inspect.getfile(Item), inspect.getfile(double)")[1] == ("<cell definitions>",) * 2
    with pytest.raises(CellError, match="TypeError"):
        lab.run("inspect.getfile(int)")


def test_a_newer_definition_counts(lab: Lab) -> None:
    """Of a class that was defined again, each one's source is its own."""
    lab.run("class Again:\n    def old(self): return 1\nolder = Again", label="older")
    lab.run("class Again:\n    def new(self): return 2", label="newer")
    sources = lab.values("inspect.getsource(older), inspect.getsource(Again)")[0]
    assert sources == ("class Again:\n    def old(self): return 1\n", "class Again:\n    def new(self): return 2\n")


def test_lines_in_tracebacks(lab: Lab) -> None:
    """Lines are the notebook's, also below empty ones, in functions of earlier cells, and for the doctor."""
    with pytest.raises(CellError) as caught:
        lab.run(CellText("\n\ndouble(\n    None\n)", first_line=2), label="calls")
    report = plain(caught.value.report)
    assert "Cell calls, line 4" in report
    assert "Cell definitions, line 7, in double" in report
    assert "----> 7     return 2 * x" in report


def test_compile_and_pickle(lab: Lab) -> None:
    """torch.compile takes a function of a cell; objects of its classes are pickled and saved."""
    compiled = "torch.compile(double, backend='eager', fullgraph=True)(torch.ones(2)).tolist()"
    assert lab.values(compiled) == {0: [2.0, 2.0], 1: [2.0, 2.0]}
    assert lab.values("pickle.loads(pickle.dumps(Item(rank))).value") == {0: 0, 1: 1}
    saved = "file = io.BytesIO(); torch.save(Item(torch.ones(1)), file); _ = file.seek(0)"
    assert lab.values(f"{saved}; torch.load(file, weights_only=False).value.item()") == {0: 1.0, 1: 1.0}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loaders(lab: Lab, method: str) -> None:
    """Worker processes get a cell's data set and collate function, forked or spawned, and give its objects back."""
    code = (
        "loader = DataLoader(Tens(), num_workers=1, batch_size=2, collate_fn=collate, "
        f"multiprocessing_context={method!r})\n"
        "batches = [[(type(item) is Item, item.value.item()) for item in batch] for batch in loader]\nbatches"
    )
    ranks = [0] if method == "spawn" else None  # importing torch takes a spawned process seconds
    batches = [[(True, 0.0), (True, 20.0)], [(True, 40.0), (True, 60.0)]]
    assert set(map(str, lab.values(code, ranks=ranks).values())) == {str(batches)}


def test_what_can_not_be_spawned(lab: Lab) -> None:
    """What can't travel by value is refused at once, with the culprit and the remedies."""
    code = (
        "import threading\nlock = threading.Lock()\ndef locked():\n    with lock: pass\n"
        "torch.multiprocessing.get_context('spawn').Process(target=locked).start()"
    )
    with pytest.raises(CellError, match=r"PicklingError: locked was defined in a cell.* by value.*lock.*'fork'"):
        lab.run(code, ranks=[0])
