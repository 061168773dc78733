"""Former names lead to the present ones; those that warn do so at the caller's line; nothing of ours uses them."""

from __future__ import annotations

import contextlib
import inspect
import re
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ddp_lab
import ddp_lab.errors
from ddp_lab.cluster.processes.keeper import DetachedCluster
from ddp_lab.control.training import TrainingControl
from ddp_lab.errors import ClusterError
from ddp_lab.parallel.observe import Observation
from ddp_lab.renamed import TABLE, Renamed
from tests import plain_words
from tests.training_events import Training
from tests.unit.conftest import SITE, SiteModule

ROOT = Path(__file__).resolve().parents[2]
NAMES = [row for row in TABLE if not row.old.startswith("--") and not row.old.endswith("=")]
ARGUMENTS = [row for row in TABLE if row.old.endswith("=")]
OPTIONS = [row for row in TABLE if row.old.startswith("--")]


def observation() -> Observation:
    """One without a model, which needs no ranks."""
    made = object.__new__(Observation)
    made.model_id = 3
    return made


OWNERS: dict[str, Callable[[], Any]] = {
    "ddp_lab": lambda: ddp_lab,
    "Cluster": lambda: ddp_lab.Cluster(2),
    "Runs": lambda: ddp_lab.Cluster(2).results,
    "TrainingControl": lambda: ddp_lab.Cluster(2).training,
    "DetachedCluster": lambda: DetachedCluster("a", (2, 2), None, 0.0, 60.0, 60.0, 1),
    "Timeline": lambda: ddp_lab.Timeline(),
    "DistributedDataParallel": lambda: ddp_lab.DistributedDataParallel,
    "Observation": observation,
    "RankFailure": lambda: ddp_lab.RankFailure(0, "ValueError", "no", "long", 1, True, short_traceback="short"),
}
# argument of Cluster -> what else the call needs, the argument's value, and where the cluster keeps it
CLUSTER: dict[str, tuple[dict[str, Any], Any, Callable[[Any], Any]]] = {
    "client_address": ({"hosts": "a:1"}, "10.0.0.1", lambda lab: lab._config.hosts.starting.client_address),
    "launcher": ({"hosts": "a:1"}, "lsf", lambda lab: lab._config.hosts.starting.launcher),
    "host_timeout": ({"hosts": "a:1"}, 5.0, lambda lab: lab._config.hosts.starting.host_timeout),
    "idle_timeout": ({"detach": True}, 60.0, lambda lab: lab.idle_timeout),
    "hang_seconds": ({}, 3.0, lambda lab: lab.hang_seconds),
}


def heard(act: Callable[[], Any]) -> tuple[Any, list[warnings.WarningMessage]]:
    """What a call returns, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return act(), caught


def assert_told(caught: list[warnings.WarningMessage], row: Renamed, times: int = 1) -> None:
    """There was the row's warning, at a line of this file, or none if the row is quiet."""
    assert len(caught) == (0 if row.quiet else times)
    for one in caught:
        assert one.category is DeprecationWarning
        assert one.filename == __file__
        assert row.spelled(row.old) in str(one.message)
        assert row.spelled(row.new) in str(one.message)


@pytest.mark.parametrize("row", NAMES, ids=lambda row: f"{row.owner}.{row.old}")
def test_a_former_name_leads_to_the_present_one(row: Renamed) -> None:
    """It gives what the present name gives, warns once at the caller's line, and is in no list of names."""
    owner = OWNERS[row.owner]()
    present = getattr(owner, row.new)
    found, caught = heard(lambda: getattr(owner, row.old))
    assert found == present
    assert_told(caught, row)
    if not isinstance(owner, type):
        assert row.old not in dir(owner)
        assert row.new in dir(owner)


def test_the_module_of_errors_has_its_former_name() -> None:
    """`ddp_lab.errors` leads to the class as the package does, and has no other former name. `hang_seconds` of a
    cluster is set by its former name as well."""
    row = next(row for row in TABLE if row.old == "ScheduleError")
    found, caught = heard(lambda: ddp_lab.errors.ScheduleError)
    assert found is ddp_lab.BucketStateError
    assert_told(caught, row)
    assert not hasattr(ddp_lab.errors, "install")
    lab, row = ddp_lab.Cluster(2), next(row for row in TABLE if row.old == "watch_seconds")
    _, caught = heard(lambda: setattr(lab, "watch_seconds", 1.5))
    assert lab.hang_seconds == 1.5
    assert_told(caught, row)


@pytest.mark.parametrize("row", [row for row in ARGUMENTS if row.owner == "Cluster"], ids=lambda row: row.old)
def test_a_former_argument_of_a_cluster(row: Renamed) -> None:
    """The cluster has its value; the warning points at the caller's line; both names together are refused."""
    old, new = row.old[:-1], row.new[:-1]
    further, value, kept = CLUSTER[new]
    lab, caught = heard(lambda: ddp_lab.Cluster(**further, **{old: value}))
    assert kept(lab) == value
    assert_told(caught, row)
    with pytest.raises(TypeError, match=f"both {old}= and {new}="):
        ddp_lab.Cluster(**further, **{old: value, new: value})


def methods() -> list[tuple[str, str]]:
    """The methods that take the number of a model: owner and name."""
    classes = {"Cluster.*": ddp_lab.Cluster, "TrainingControl.*": TrainingControl, "Timeline.*": ddp_lab.Timeline}
    assert set(classes) == {row.owner for row in ARGUMENTS if row.old == "reducer="}
    found = []
    for owner, cls in classes.items():
        for name in dir(cls):
            method = inspect.getattr_static(cls, name)
            public = inspect.isfunction(method) and not name.startswith("_")
            if public and "model" in inspect.signature(method).parameters:
                found.append((owner.removesuffix(".*"), name))
    return found


@pytest.mark.parametrize(("owner", "name"), methods())
def test_a_former_argument_of_a_method(owner: str, name: str) -> None:
    """Each warns at the caller's line, whatever becomes of the call; both names together are refused."""
    method = getattr(OWNERS[owner](), name)
    parameters = inspect.signature(method).parameters.values()
    positional = [one for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    needed = {one.name: None for one in positional if one.name != "model"}

    def call() -> None:
        with contextlib.suppress(ClusterError, ValueError, TypeError, AttributeError):  # there are no ranks, no steps
            method(**needed, reducer=0)

    _, caught = heard(call)
    assert [str(one.message).split(":")[0] for one in caught] == [
        f"{owner}.{name}(reducer=) is now {owner}.{name}(model=)"
    ]
    assert caught[0].filename == __file__
    with pytest.raises(TypeError, match="both reducer= and model="):
        method(**needed, reducer=0, model=0)


def test_a_model_is_chosen_by_the_former_argument() -> None:
    """A table of a model is the same, whichever name the argument has; so is a comparison."""
    timeline = Training(ranks=2, buckets=2, reducer=1).trained(12)
    spans, caught = heard(lambda: timeline.spans(reducer=1))  # type: ignore[call-arg]
    assert len(caught) == 1
    assert set(spans["reducer"]) == {1}
    assert spans.equals(timeline.spans(model=1))
    assert timeline.spans(model=0).empty
    found, caught = heard(lambda: ddp_lab.compare(timeline, timeline, reducers=(1, None)))  # type: ignore[call-arg]
    assert [one.filename for one in caught] == [__file__]
    assert str(found) == str(ddp_lab.compare(timeline, timeline, models=(1, None)))
    with pytest.raises(TypeError, match="both reducers= and models="):
        ddp_lab.compare(timeline, timeline, reducers=(1, 1), models=(1, 1))  # type: ignore[call-arg]


@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: row.old)
def test_a_former_option_is_accepted(row: Renamed, site_module: SiteModule) -> None:
    """It means the same as the present one; the help names it in one line alone, and a typo is never led to it."""
    parser = site_module("option_tables").parser_of(row.owner)
    value = {"--launcher": ["slurm"], "--idle-timeout": ["5"], "--client-address": ["10.0.0.1"]}.get(row.new, [])
    given, caught = heard(lambda: parser.parse_args([row.old, *value]))
    assert given == parser.parse_args([row.new, *value]) != parser.parse_args([])
    assert_told(caught, row)
    listed, _, former = parser.format_help().partition("Former names are still accepted:")
    assert row.old not in listed
    assert f"{row.old} (now {row.new})" in " ".join(former.split())
    with pytest.raises(Exception, match=f"unknown option '{row.old}x") as refused:
        parser.parse_args([f"{row.old}x"])
    assert f"did you mean {row.old}" not in str(refused.value)


def test_the_page_lists_every_row(site_module: SiteModule) -> None:
    """The site's page is filled with a line for each row."""
    page = (SITE / "reference" / "renamed_names.md").read_text(encoding="utf-8")
    filled = site_module("option_tables").filled(page)
    for row in TABLE:
        assert f"| `{row.spelled(row.old)}` | `{row.spelled(row.new)}` | {'no' if row.quiet else 'yes'} |" in filled


def former_names() -> re.Pattern[str]:
    """Former names in code and text, where nothing else has such a name; keys of files, in quotes, keep theirs."""
    words = {row.old.rstrip("=") for row in TABLE if re.search("[a-z]_[a-z]|[a-z][A-Z]", row.old)}
    words -= {"reducer_id"}  # C++
    variables = {"ddp_lab": ("ddp_lab",), "Cluster": ("Cluster", "lab"), "Timeline": ("Timeline", "timeline")}
    spelled = [rf"{name}\.{row.old}" for row in NAMES for name in variables.get(row.owner, ())]
    options = "|".join(row.old for row in OPTIONS)
    return re.compile(rf"""(?<!["'\w])(?:{"|".join([*words, *spelled])})\b|(?<=[ `])(?:{options})\b""")


def test_nothing_of_ours_uses_a_former_name() -> None:
    """Neither code, nor documents, nor notebooks; pytest makes errors of the warnings that remain."""
    pattern = former_names()
    assert pattern.search("lab.watch_seconds = 3")
    assert pattern.search("print(lab.vitals())")
    assert pattern.search("`%cluster start --lease 5`")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    suffixes = plain_words.SUFFIXES | {".html"}
    names = [name for name in listed.splitlines() if Path(name).suffix in suffixes and "renamed" not in name]
    found = [(name, one) for name in names for one in pattern.findall(plain_words.text_of(ROOT / name))]
    for_type_checkers, key = (
        ("ddp_lab/__init__.py", "restore_from"),
        ("ddp_lab/engine/processes/keeper.py", "lease_seconds"),
    )
    assert [one for one in found if one not in (for_type_checkers, key)] == []
