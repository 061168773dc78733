"""What a rank says of names while it computes: completions and help, for which nothing of the user's is called."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch

from ddp_lab.engine.cells import name_lookup
from ddp_lab.protocol.messages import LookUp, Page
from tests.waiting import DEADLINE_S


class Touchy:
    """Notes what is called of it."""

    __slots__ = ("slot",)
    called: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.slot = math

    @property
    def computed(self) -> Any:
        raise AssertionError("the property was called")

    @classmethod
    def made(cls) -> Touchy:
        raise AssertionError("the method was called")


class Computed:
    """A descriptor of Python code."""

    def __get__(self, instance: Any, owner: Any) -> Any:
        raise AssertionError("the descriptor was called")


class Holder:
    computed = Computed()


NAMES: dict[str, Any] = {
    "math": math,
    "touchy": Touchy(),
    "Touchy": Touchy,
    "holder": Holder(),
    "layers": torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()),
    "table": {"a": [1, "text"]},
    "_hidden": 1,
    "text": "words",
    "number": 7,
}


@pytest.mark.parametrize(
    ("begun", "found"),
    [
        ("ma", [("math", "module")]),
        ("To", [("Touchy", "class")]),
        ("_h", [("_hidden", "instance")]),
        ("touchy.", [("called", "instance"), ("computed", "instance"), ("made", "function"), ("slot", "module")]),
        ("touchy.slot.sq", [("sqrt", "function")]),
        ("touchy.computed.", []),
        ("holder.computed.", []),
        ("layers[0].weight.requires_gr", [("requires_grad", "instance"), ("requires_grad_", "function")]),
        ("layers['1'].inpl", [("inplace", "instance")]),
        ("layers[5].", []),
        ("table['a'][1].isal", [("isalnum", "function"), ("isalpha", "function")]),
        ("table[[]].", []),
        ("table[{}].", []),
        ("number[0].", []),
        ("math.nothing.", []),
        ("nobody.", []),
        ("touchy.made().", []),
        ("1 +.", []),
    ],
)
def test_completions(begun: str, found: list[tuple[str, str]]) -> None:
    """Names and kinds of what is stored, and none where it would have to be computed."""
    assert name_lookup.complete(begun, NAMES) == found


def test_help() -> None:
    """Classes with a metaclass of their own have no signature, long values are cut, and no name means nothing. A
    dictionary's key that is none, and a module's child that is not there, are no names."""
    kinds = {"Meta": type("Meta", (type,), {})}
    kinds["Own"] = kinds["Meta"]("Own", (), {"__doc__": "Of its own kind."})
    titles = dict(name_lookup.inspection_page("Own", kinds))
    assert (titles["Type"], titles["Docstring"], "Signature" in titles) == ("Meta", "Of its own kind.", False)
    assert dict(name_lookup.inspection_page("long", {"long": "x" * 999}))["Value"] == f"'{'x' * 198}…"
    assert dict(name_lookup.inspection_page("layers[0]", NAMES))["Parameters"] == "9 in 2 tensors"
    assert dict(name_lookup.inspection_page("layers[1]", NAMES))["Parameters"] == "none"
    assert dict(name_lookup.inspection_page("buffer", {"buffer": torch.ones(2)}))["Tensor"] == "float32 [2] on cpu"
    assert name_lookup.inspection_page("nobody", NAMES) == []
    for text in ("table['b']", "layers[9]", "number['a']", "layers[1.5]"):
        assert name_lookup.inspection_page(text, NAMES) == []


def test_a_look_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for, meanwhile nobody else looks, and what it raises is told."""
    monkeypatch.setattr(name_lookup, "_namespace", dict)
    gate = threading.Event()

    def look(request: LookUp, names: Any) -> Page:
        if request.text == "wait":
            assert gate.wait(DEADLINE_S)
            return Page()
        raise KeyError("nothing")

    answer = name_lookup.on_worker_thread(look, Page, seconds=0.01)
    assert answer(LookUp("wait")) == Page()
    assert answer(LookUp("")) == Page()
    gate.set()
    patient = name_lookup.on_worker_thread(look, Page, seconds=60)
    assert patient(LookUp("")) == Page(error="KeyError: 'nothing'")
    for thread in threading.enumerate():
        if thread.name == "ddp_lab-look-up":
            thread.join()
