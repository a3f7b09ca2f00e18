"""Problem and Strategy: every field is checked, files round trip, errors are one line that names file and field."""

import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from instances import random_problem
from plans import random_strategy

from nnpiper.problem import SCHEDULES, SHAPES, TRANSFERS, InputError, Problem, Strategy, write_text

SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return random_problem(np.random.default_rng(0), K=3, L=4, S=2, M=5)


def refused(change, message):
    """The change raises InputError of one line that holds the message."""
    with pytest.raises(InputError) as caught:
        change()
    assert message in str(caught.value) and "allowed" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def same(one: Problem, other: Problem) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in Problem.__dataclass_fields__)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, -1.0, 1e31])
def test_values_that_are_no_costs(problem, name, wrong):
    array = getattr(problem, name).copy()
    array.reshape(-1)[1] = wrong  # entry 1 is off the diagonal
    refused(lambda: problem.replace(**{name: array}), f"{name}[")


def test_a_link_without_bandwidth(problem):
    zero = np.zeros((3, 3))
    message = refused(lambda: problem.replace(bandwidth_bytes_per_s=zero), "bandwidth_bytes_per_s[0, 1]: 0.0")
    assert "from 1e-06" in message


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("wrong", [
    1.0, None, "12", "x", [], [[]], [[[1.0]]], [1.0, [2.0]], [["1.0", "2.0"]], ["1", "2", "3", "4"], [True] * 4, {},
    [None] * 4, [1j] * 4, np.zeros((0, 3))], ids=repr)
def test_shapes_and_types_that_do_not_fit(problem, name, wrong):
    refused(lambda: problem.replace(**{name: wrong}), f"{name}: ")


@pytest.mark.parametrize("name, rows", [("forward_s", 5), ("output_bytes", 5), ("memory_bytes", 4)])
def test_sizes_that_disagree(problem, name, rows):
    refused(lambda: problem.replace(**{name: np.ones((rows, *getattr(problem, name).shape[1:]))}), "does not fit")


def test_transposed_costs_are_refused(problem):
    refused(lambda: problem.replace(backward_s=problem.backward_s.T), "backward_s: shape [3, 4] does not fit L = 4")


@pytest.mark.parametrize("name", ["stages", "micro_batches"])
@pytest.mark.parametrize("wrong", [0, -1, 2.0, 1.5, True, np.bool_(True), "2", None, [2], np.nan, 10**30])
def test_counts(problem, name, wrong):
    refused(lambda: problem.replace(**{name: wrong}), f"{name}: ")


def test_no_more_stages_than_layers_or_devices():
    rng = np.random.default_rng(1)
    for L, K in ((2, 5), (5, 2), (1, 1)):
        problem = random_problem(rng, K=K, L=L)
        problem.replace(stages=min(L, K))
        refused(lambda: problem.replace(stages=min(L, K) + 1), f"stages: {min(L, K) + 1}; allowed: an integer from 1")


@pytest.mark.parametrize("name, choices", [("schedule", SCHEDULES), ("transfers", TRANSFERS)])
def test_choices(problem, name, choices):
    for choice in choices:
        assert getattr(problem.replace(**{name: choice}), name) == choice
    for wrong in ("zero-bubble", "1F1B", "", None, 1):
        assert all(c in refused(lambda: problem.replace(**{name: wrong}), f"{name}: {wrong!r}") for c in choices)


def test_counts_of_numpy_become_plain(problem):
    plain = problem.replace(stages=np.int32(2), micro_batches=np.uint8(7))
    assert type(plain.stages) is type(plain.micro_batches) is int


def test_arrays_are_copied_and_read_only(problem):
    mine = problem.output_bytes.copy()
    other = problem.replace(output_bytes=mine)
    mine[:] = 7.0
    assert np.array_equal(other.output_bytes, problem.output_bytes)
    with pytest.raises(ValueError, match="read-only"):
        other.output_bytes[0] = 1.0
    with pytest.raises(AttributeError):
        other.stages = 1


def test_the_diagonal_of_the_links_is_not_read(problem):
    bandwidth, latency = problem.bandwidth_bytes_per_s.copy(), problem.latency_s.copy()
    for wrong in (0.0, np.nan, -1.0, np.inf):
        np.fill_diagonal(bandwidth, wrong)
        np.fill_diagonal(latency, wrong)
        assert same(problem.replace(bandwidth_bytes_per_s=bandwidth, latency_s=latency), problem)


@given(SEEDS)
def test_json_round_trip(tmp_path_factory, seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, K=int(rng.integers(1, 6)), L=int(rng.integers(1, 6)))
    path = tmp_path_factory.getbasetemp() / "problem.json"
    write_text(path, problem.to_json())
    assert same(Problem.from_file(path), problem)  # to the last bit
    assert Problem.from_file(path).to_json() == problem.to_json()


def test_a_byte_order_mark_is_skipped(problem, tmp_path):
    path = tmp_path / "problem.json"
    path.write_bytes(b"\xef\xbb\xbf" + problem.to_json().encode())
    assert same(Problem.from_file(path), problem)


def test_json_is_plain_json(problem):
    def no_constant(text):
        raise AssertionError(text)

    assert set(json.loads(problem.to_json(), parse_constant=no_constant)) == set(Problem.__dataclass_fields__)


def test_schedule_and_transfers_may_be_left_out_of_a_file(problem, tmp_path):
    fields = json.loads(problem.to_json())
    del fields["schedule"], fields["transfers"]
    write_text(tmp_path / "p.json", json.dumps(fields))
    found = Problem.from_file(tmp_path / "p.json")
    assert (found.schedule, found.transfers) == ("1f1b", "blocking")


BAD_FILES = [
    (lambda d: d.pop("latency_s"), "latency_s"),
    (lambda d: d.update(colour="red"), "colour"),
    (lambda d: d.update({"two\nlines": 1}), "two lines"),
    (lambda d: d.update(stages="2"), "stages"),
    (lambda d: d.update(stages=2.0), "stages"),
    (lambda d: d.update(stages=True), "stages"),
    (lambda d: d.update(stages=99), "stages: 99"),
    (lambda d: d.update(micro_batches=None), "micro_batches"),
    (lambda d: d.update(micro_batches=10**400), "micro_batches"),
    (lambda d: d.update(schedule="zb-h1"), "schedule"),
    (lambda d: d.update(transfers=["blocking"]), "transfers"),
    (lambda d: d.update(forward_s=[[1.0], [2.0, 3.0]]), "forward_s"),
    (lambda d: d.update(forward_s="x" * 500), "forward_s"),
    (lambda d: d["forward_s"][1].__setitem__(2, "fast"), "forward_s.1.2"),
    (lambda d: d["forward_s"][1].__setitem__(2, "0.5"), "forward_s.1.2"),
    (lambda d: d["forward_s"][1].__setitem__(2, True), "forward_s.1.2"),
    (lambda d: d["forward_s"][1].__setitem__(2, -1), "forward_s[1, 2]: -1.0"),
    (lambda d: d["memory_bytes"].__setitem__(0, float("nan")), "memory_bytes"),
    (lambda d: d["memory_bytes"].__setitem__(0, float("inf")), "memory_bytes"),
    (lambda d: d["memory_bytes"].append(1.0), "memory_bytes"),
]


@pytest.mark.parametrize("change, field", BAD_FILES)
def test_bad_problem_files(problem, tmp_path, change, field):
    fields = json.loads(problem.to_json())
    change(fields)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(InputError) as caught:
        Problem.from_file(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and field in message
    assert len(message.splitlines()) == 1 and len(message) < len(str(path)) + 500


@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b"1", b"null", b"\xff\xfe", b"[" * 5000, b'{"stages": 1' + b"0" * 9999])
def test_files_that_are_no_problem(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    for read in (Problem.from_file, Strategy.from_file):
        with pytest.raises(InputError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: ") and len(str(caught.value).splitlines()) == 1


def test_files_that_are_not_there(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        refused(lambda: Problem.from_file(path), f"{path}: cannot be read")
    refused(lambda: Problem.from_file("a\0b"), "cannot be read")


@given(SEEDS)
def test_strategy_text_and_json_round_trip(tmp_path_factory, seed):
    rng = np.random.default_rng(seed)
    K, L = int(rng.integers(1, 13)), int(rng.integers(1, 13))
    problem = random_problem(rng, K=K, L=L)
    strategy = random_strategy(rng, problem)
    strategy.check(problem)
    text = strategy.text(L)
    assert "\n" not in text and Strategy.parse(text) == strategy
    assert Strategy.parse(text.replace(" ", "")) == Strategy.parse(f"  {text}\n") == strategy
    path = tmp_path_factory.getbasetemp() / "strategy.json"
    write_text(path, json.dumps({"cuts": strategy.cuts, "groups": strategy.groups}))
    assert Strategy.from_file(path) == strategy


def test_strategy_text():
    strategy = Strategy((7, 13), ((3,), (4, 1), (0,)))
    assert strategy.text(26) == "0-6@3 | 7-12@1,4 | 13-25@0"
    assert Strategy((), ((2,),)).text(1) == "0-0@2"
    assert Strategy.parse(" 0 - 6 @3\t,  4 |7-12 @ 1\n") == Strategy((7,), ((3, 4), (1,)))
    assert Strategy.parse("0@2") == Strategy((), ((2,),))
    assert Strategy.parse("0-6@3 | 7-12@1", layers=13).cuts == (7,)
    with pytest.raises(InputError, match="last layer 12; allowed: 25"):
        Strategy.parse("0-6@3 | 7-12@1", layers=26)


@pytest.mark.parametrize("text", [
    "", "|", "0-6", "@3", "0-6@", "0-6@3,", "0-6@a", "1-6@3", "0-6@3 | 8-9@1", "0-6@3 | 6-9@1", "6-0@3", "0-6@3 7-9@1",
    "0-6@-3", "0-6@3 |", "0-6@3 | 7-9@1 | 7-9@2", "0-6@1.5", "0-6@1 2", "0-6@1,2  3", "0 1-2@3", "0-6@٣", "0-6@3\n1-2@4", "0-" + "9" * 5000 + "@1"])
def test_text_that_is_no_strategy(text):
    with pytest.raises(InputError, match="^strategy: stage .*; *allowed"):
        Strategy.parse(text)


@pytest.mark.parametrize("cuts, groups, message", [
    ((), ((0,),), "1 groups and 0 cuts"),
    ((1, 2), ((0,), (1,), (2,)), "3 groups and 2 cuts"),
    ((2,), ((0,),), "1 groups and 1 cuts"),
    ((0,), ((0,), (1,)), "cuts [0]"),
    ((4,), ((0,), (1,)), "cuts [4]"),
    ((-1,), ((0,), (1,)), "cuts [-1]"),
    ((10**30,), ((0,), (1,)), "cuts ["),
    ((2,), ((0,), ()), "no empty group"),
    ((2,), ((0,), (3,)), "device 3; allowed: 0 to 2"),
    ((2,), ((0,), (-1,)), "device -1"),
    ((2,), ((0, 1), (1,)), "no device twice"),
    ((2,), ((0, 0), (1,)), "no device twice"),
])
def test_check_refuses_each_kind_of_invalid_strategy(problem, cuts, groups, message):
    refused(lambda: Strategy(cuts, groups).check(problem), message)


def test_check_refuses_cuts_that_do_not_increase():
    problem = random_problem(np.random.default_rng(2), K=3, L=5, S=3)
    for cuts in ((2, 2), (3, 2), (2, 5), (0, 2)):
        refused(lambda: Strategy(cuts, ((0,), (1,), (2,))).check(problem), f"cuts {list(cuts)}")
    Strategy((2, 3), ((0,), (1,), (2,))).check(problem)


@pytest.mark.parametrize("cuts, groups", [
    ((1.7,), ((0,), (1,))), ((1,), ((0.5,), (1,))), (("1",), ((0,), (1,))), ((1,), (0, 1))])
def test_a_strategy_holds_integers(cuts, groups):
    refused(lambda: Strategy(cuts, groups), "strategy: ")


def test_strategy_files(problem, tmp_path):
    path = tmp_path / "s.json"
    for text, field in (
            ('{"cuts": [1]}', "groups"), ('{"cuts": [1.5], "groups": [[0], [1]]}', "cuts.0"),
            ('{"cuts": [1], "groups": [0, 1]}', "groups.0"), ('{"cuts": [1], "groups": [["0"], [1]]}', "groups.0.0"),
            ('{"cuts": [true], "groups": [[0], [1]]}', "cuts.0"), ('{"cuts": [], "group": []}', "groups")):
        path.write_text(text)
        with pytest.raises(InputError) as caught:
            Strategy.from_file(path)
        assert str(caught.value).startswith(f"{path}: {field}: ") and len(str(caught.value).splitlines()) == 1


def test_groups_are_sorted_so_that_equal_plans_are_equal():
    assert Strategy((1,), ((2, 0), (1,))) == Strategy((1,), ((0, 2), (1,))) != Strategy((1,), ((1,), (0, 2)))
    assert len({Strategy((1,), ((2, 0), (1,))), Strategy([np.int64(1)], [[0, 2], [1]])}) == 1


def test_write_text_leaves_the_old_file_or_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "file.txt"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half written, then \ud800")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    assert path.read_text() == "old" and os.listdir(path.parent) == ["file.txt"]
    monkeypatch.undo()
    write_text(path, "new")
    assert path.read_text() == "new" and os.listdir(path.parent) == ["file.txt"]
