"""Ablations: every change makes a recipe and a network, equal time means steps by cost, gaps by hand."""

from dataclasses import replace
from itertools import cycle

import numpy as np
import pandas as pd
import pytest
from networks import TINY

from nnpiper import ablations, checkpoint, vcta
from nnpiper.ablations import CHANGES, Training
from nnpiper.network import Network
from nnpiper.paths import DATA
from nnpiper.problem import InputError


def test_each_change_is_one_of_the_recipe_and_each_is_asked_about_once():
    recipes = {name: ablations._recipe(name) for name in CHANGES}
    assert len({str(recipe) for recipe in recipes.values()}) == len(CHANGES)
    assert recipes["recipe"] == vcta.Recipe() and recipes["base"] == vcta.Recipe(**ablations.BASE)


@pytest.mark.parametrize("name, kinds", [
    ("ablations.csv", set(CHANGES)),
    ("ablations_longer.csv", {"base", "best against spread", "self-labelling", "policy gradient",
                              "contrast grows", "one layer"})])
def test_the_shipped_studies_are_of_three_seeds(name, kinds):
    rows = pd.read_csv(DATA / name)
    counts = rows.groupby("ablation").agg({"seed": "nunique", "steps": "nunique"})
    assert set(counts.index) == kinds and (counts["seed"] == 3).all() and (counts["steps"] == 1).all()
    assert (rows.groupby(["ablation", "seed"]).size() == 20 * len(ablations.SIZES)).all()


def test_what_a_step_costs(monkeypatch):
    """A step that takes 0.5 s, then one that takes 2 s, on a clock of the test's own."""
    clock = [0.0]

    def step(network, recipe, number):
        clock[0] += 2.0 if recipe.polish else 0.5
        return next(network.parameters()).sum()

    monkeypatch.setattr(ablations.vcta, "contrast_step", step)
    monkeypatch.setattr(ablations.time, "process_time", lambda: clock[0])
    assert ablations.step_cpu_s("base") == 0.5
    assert ablations.step_cpu_s("with polished pairs") == 2.0


def test_the_steps_of_a_growing_contrast_are_timed_in_their_shares(monkeypatch):
    seen = []
    monkeypatch.setattr(ablations.vcta, "contrast_step", lambda network, recipe, number: (
        seen.append(recipe.groupings_at(number)), next(network.parameters()).sum())[1])
    ablations.step_cpu_s("contrast grows", timed=20)
    assert [seen[1:].count(groupings) for groupings in (8, 16, 32)] == [10, 6, 4]


def test_a_study_trains_judges_and_is_not_made_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(ablations, "step_cpu_s", lambda name: 0.5)
    monkeypatch.setattr(ablations, "REFERENCE", dict(runs=1, moves=2_000))
    monkeypatch.setattr(ablations, "each", lambda function, items, **_: map(function, items))
    small = dict(size=TINY, instances=2, groupings=3, divisions=2)
    monkeypatch.setattr(vcta, "Recipe", lambda **fields: replace(vcta_recipe(**fields), **small))
    names = ("base", "blind to memory")
    rows = ablations.study(tmp_path, 1.0, 2, names, sizes=((4, 2),))
    assert len(rows) == 2 * 2 * 20
    assert set(zip(rows["ablation"], rows["seed"])) == {(name, seed) for name in names for seed in (0, 1)}
    assert (rows["polished_s"] <= rows["network_s"] * (1 + 1e-12)).sum() >= 0.9 * rows["network_s"].notna().sum()
    pd.testing.assert_frame_equal(rows, pd.read_csv(tmp_path / "ablations.csv"), check_exact=False, rtol=1e-4)
    monkeypatch.setattr(vcta, "contrast_step", lambda *_: pytest.fail("trained again"))
    again = ablations.study(tmp_path, 1.0, 2, names, sizes=((4, 2),))
    pd.testing.assert_frame_equal(rows, again)
    with pytest.raises(InputError, match="steps.csv: cpu_seconds: 1; allowed: 2"):
        ablations.study(tmp_path, 2.0, 2, names)


def test_a_study_goes_on_with_other_names_and_counts_the_fastest_round(tmp_path, monkeypatch):
    seconds, slower = {"base": 1 / 7, "one layer": 1 / 9, "contrast grows": 1 / 4}, cycle([2.0, 1.0, 3.0])
    monkeypatch.setattr(ablations, "step_cpu_s", lambda name: seconds[name] * next(slower))
    path = tmp_path / "steps.csv"
    assert ablations._steps_of(path, 1.0, ("base",)).to_dict() == {"base": 7}
    seconds["base"] = 1 / 70  # measured once
    assert ablations._steps_of(path, 1.0, ("one layer", "base", "contrast grows")).to_dict() == {
        "base": 7, "one layer": 9, "contrast grows": 4}


vcta_recipe = vcta.Recipe


def test_training_of_an_ablation_has_its_change_and_seed(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(vcta, "train", lambda out, recipe, progress: seen.append((out, recipe)))
    ablations.train(Training("self-labelling", 2, 30, tmp_path / "nnpiper.pt"))
    recipe = vcta.Recipe(steps=30, seed=2, log_rows=0, loss="self-labelling", groupings=8, grows=False)
    assert seen == [(tmp_path, recipe)]


def test_summary_by_hand():
    """Two problems with S = K, one with S < K; two seeds. Best steps: 1.0 (reference), 2.0 (another's polish), 4.0."""
    trial = dict(set="development", environment="realistic", schedule="1f1b", transfers="blocking")
    sizes = [(4, 4, 0), (4, 4, 1), (4, 2, 0)]
    steps = {("self-labelling", 0): [(1.1, 1.0), (2.4, 2.2), (np.nan, 4.0)],
             ("self-labelling", 1): [(1.3, 1.0), (2.4, 2.2), (4.4, 4.0)],
             ("base", 0): [(1.0, 1.0), (2.0, 2.0), (4.0, 4.4)],
             ("base", 1): [(1.0, 1.0), (2.0, 2.0), (4.0, 4.4)]}
    rows = pd.DataFrame([dict(ablation=name, seed=seed, steps=7, **trial, devices=K, stages=S, number=n,
                              network_s=network, polished_s=polished, reference_s=best)
                         for (name, seed), found in steps.items()
                         for (K, S, n), (network, polished), best in zip(sizes, found, (1.0, 2.5, 4.2))])
    table = ablations.summary(rows).set_index("ablation")
    assert list(table.index) == ["base", "self-labelling"]  # the order of CHANGES
    shipped, own = table.loc["base"], table.loc["self-labelling"]
    assert (own["seeds"], own["steps"]) == (2, 7)
    assert own["network, S = K [%]"] == pytest.approx((15 + 25) / 2)  # seeds: (10 + 20) / 2, (30 + 20) / 2
    assert own["network, S = K sd"] == pytest.approx(np.std([15, 25], ddof=1))
    assert own["network, S < K [%]"] == pytest.approx(10) and own["network, S < K no plan"] == 0.5
    assert own["polished, S = K [%]"] == pytest.approx(5) and own["polished, S < K [%]"] == pytest.approx(0)
    assert shipped["polished, S < K [%]"] == pytest.approx(10) and shipped["network, S = K [%]"] == 0


def test_networks_beside_the_ablations(tmp_path):
    """They plan the problems of the rows; the gap is to the best step of both. The network's weights are random. A
    training named as an ablation is not mixed with it."""
    trial = ablations.trials("development", ((4, 4),))[0]
    path = tmp_path / "other.pt"
    checkpoint.save(Network(TINY).eval(), path, {"recipe": {"steps": 3}, "start": {"recipe": {"steps": 4}}})
    own = ablations.judged(Training("own", 0, 3, path), [trial]).iloc[0]
    rows = pd.DataFrame([dict(own, ablation="base", network_s=9.0, reference_s=0.5 * own["polished_s"])])
    table = ablations.beside(rows, {"base": [path, path]})
    assert table["training"].tolist() == ["base"] and table["seeds"].tolist() == [2] and table["steps"].tolist() == [7]
    assert table["polished, S = K [%]"].tolist() == pytest.approx([100.0])
    assert table["network, S = K [%]"].tolist() == pytest.approx([200 * own["network_s"] / own["polished_s"] - 100])
