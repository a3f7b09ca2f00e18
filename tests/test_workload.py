"""Workloads against published parameter counts, FLOPs and activation sizes."""

import doctest
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnpiper import workload
from nnpiper.problem import InputError
from nnpiper.workload import MODELS, chain

OPENAI = "OpenAI gpt-2 repository, model names"
BROWN = "Brown et al. 2020, table D.1"
SC21 = "Narayanan et al. 2021, table 1"
HUB = "Hugging Face Hub, size stated for the released weights"
PUBLISHED_PARAMETERS = {
    "gpt2": (124e6, OPENAI), "gpt2-medium": (355e6, OPENAI), "gpt2-large": (774e6, OPENAI), "gpt2-xl": (1558e6, OPENAI),
    "gpt3-1.3b": (1320e6, BROWN), "gpt3-2.7b": (2650e6, BROWN), "gpt3-6.7b": (6660e6, BROWN),
    "gpt3-13b": (12850e6, BROWN), "gpt3-175b": (174600e6, BROWN),
    "gpt3-39b": (39.1e9, SC21), "gpt3-76b": (76.1e9, SC21),
    "bert-large": (336e6, "model card of bert-large-uncased"),
    "llama2-7b": (6.74e9, HUB), "llama2-13b": (13.02e9, HUB), "llama3-8b": (8.03e9, HUB), "llama3-70b": (70.6e9, HUB),
    "t5-large": (738e6, HUB),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_published_ones(name):
    published, _ = PUBLISHED_PARAMETERS[name]
    assert MODELS[name].parameters == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.family == "gpt"])
def test_flops_with_recomputation_are_megatrons(name):
    # Narayanan et al. 2021, equation 3: 96 b s l h^2 (1 + s / 6h + V / 16 l h)
    m, b, s = MODELS[name], 3, 1024
    L, h, V = m.layers, m.hidden, m.vocabulary
    published = 96 * b * s * L * h**2 * (1 + s / (6 * h) + V / (16 * L * h))
    work = chain(name, micro_batch_size=b, sequence_length=s, recompute=True)
    assert work.forward_flops.sum() + work.backward_flops.sum() == pytest.approx(published, rel=1e-12)


@pytest.mark.parametrize("name, published", [("gpt3-1.3b", 2.38e21), ("gpt3-2.7b", 4.77e21), ("gpt3-6.7b", 1.20e22),
                                             ("gpt3-13b", 2.31e22), ("gpt3-175b", 3.14e23)])
def test_training_compute_is_gpt3s(name, published):
    # Brown et al. 2020, table D.1: total training FLOPs of 300 billion tokens, without the attention scores
    m, work = MODELS[name], chain(name)
    scores = 3 * 4 * m.sequence_length**2 * m.hidden * m.layers
    per_token = (work.forward_flops.sum() + work.backward_flops.sum() - scores) / m.sequence_length
    assert 300e9 * per_token == pytest.approx(published, rel=0.01)


def test_training_time_of_gpt3_175b():
    # Narayanan et al. 2021, section 5.1: 300 billion tokens at 140 TFLOP/s on 1024 GPUs take 34 days
    work = chain("gpt3-175b", recompute=True)
    seconds = 300e9 / 2048 * (work.forward_flops.sum() + work.backward_flops.sum()) / (1024 * 140e12)
    assert seconds / 86400 == pytest.approx(34, rel=0.03)


@pytest.mark.parametrize("name", ["llama2-7b", "llama3-8b", "llama3-70b", "t5-large"])
def test_each_matrix_costs_two_flops_a_weight_and_token(name):
    m, work = MODELS[name], chain(name)
    s, h, L = m.sequence_length, m.hidden, m.layers
    if m.family == "llama":
        vectors = m.vocabulary * h + (2 * L + 1) * h
        scores = 4 * s**2 * h * L
    else:
        vectors = 2 * m.vocabulary * h + (2 * L + 3 * L + 2) * h + 2 * 32 * m.heads
        scores = 4 * s**2 * h * 3 * L
    expected = 2 * s * (work.parameters.sum() - vectors) + scores
    assert work.forward_flops.sum() == pytest.approx(expected, rel=1e-12)


def test_stash_is_korthikantis():
    # Korthikanti et al. 2022, section 5: 5 a s / h is 80 for GPT-3 175B, so that scores are 70 % of 34 + 80
    work, s, h = chain("gpt3-175b"), 2048, 12288
    factor = work.stash_bytes[1] / (s * h)
    assert factor == 34 + 80
    assert 1 - 34 / factor == pytest.approx(0.70, abs=0.005)


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.family == "gpt"])
def test_stash_of_embedding_blocks_and_head(name):
    # the same, equation 1 and section 4.3: s b h (34 + 5 a s / h) a block, s b h at the input, 4 s b h (1 + V / h) at
    # the end
    m, b, s = MODELS[name], 4, 512
    work, full = chain(name, b, s), chain(name, b, s, recompute=True)
    unit = s * b * m.hidden
    assert work.stash_bytes[1:-1] == pytest.approx(unit * (34 + 5 * m.heads * s / m.hidden), rel=1e-12)
    assert full.stash_bytes[1:-1] == pytest.approx(2 * unit)
    for each in (work, full):
        assert each.stash_bytes[0] == unit
        assert each.stash_bytes[-1] == pytest.approx(4 * unit * (1 + m.vocabulary / m.hidden), rel=1e-12)


def test_static_bytes_are_zeros():
    # Rajbhandari et al. 2020, section 3.1: a model of 1.5 billion parameters (GPT-2) takes at least 24 GB, not 3 GB
    work, m = chain("gpt2-xl"), MODELS["gpt2-xl"]
    assert work.static_bytes.sum() - 16 * m.vocabulary * m.hidden == pytest.approx(24e9, rel=0.05)
    assert (work.gradient_bytes * 8 == work.static_bytes).all()


@pytest.mark.parametrize("name, parameters, flops", [("gpt2-xl", 2.6, 2.4), ("gpt3-13b", 0.8, 0.8),
                                                     ("llama3-8b", 2.4, 1.8), ("llama3-70b", 1.2, 1.1)])
def test_head_is_worth_so_many_blocks(name, parameters, flops):
    work = chain(name)
    assert work.parameters[-1] / work.parameters[1] == pytest.approx(parameters, abs=0.05)
    assert work.forward_flops[-1] / work.forward_flops[1] == pytest.approx(flops, abs=0.05)


def test_grouped_queries_save_keys_and_values():
    few = MODELS["llama3-8b"]
    many = replace(few, kv_heads=few.heads)
    g, h, s = few.hidden // 4, few.hidden, few.sequence_length
    saved = 2 * h * (h - g)  # weights of keys and values
    assert (chain(many).parameters - chain(few).parameters)[1] == saved
    assert (chain(many).forward_flops - chain(few).forward_flops)[1] == 2 * s * saved
    assert (chain(many).stash_bytes - chain(few).stash_bytes)[1] == s * 4 * (h - g)


def test_stash_of_a_llama_block_and_of_berts_head_tensor_by_tensor():
    h, g, f, s = 4096, 1024, 14336, 8192
    inputs = [h, h, h, h]  # of norm, attention, norm, MLP
    attention = [h, g, g, h]  # queries, keys, values, what goes into the projection
    gated = [f, f, f, f]  # gate, up, activated gate, their product
    assert chain("llama3-8b").stash_bytes[1] == 2 * s * sum(inputs + attention + gated)
    h, V, s = 1024, 30522, 512
    halves = [h, h, h, h]  # inputs of dense layer, its activation, norm, projection
    assert chain("bert-large").stash_bytes[-1] == s * (2 * sum(halves) + 4 * V)


def test_t5_sends_the_encoder_output_along():
    work = chain("t5-large", micro_batch_size=2)
    one = 2 * 2 * 512 * 1024
    sent = [work.output_bytes[i] / one for i in range(work.layers)]
    assert sent == [1] * 25 + [2] * 24 + [1, 0]
    assert work.kinds == ("embedding", *["encoder"] * 24, "embedding", *["decoder"] * 24, "head")
    assert len(set(work.layer_names)) == work.layers
    # a decoder block over an encoder block: one more attention of 4 h^2 weights and a norm
    assert work.parameters[30] - work.parameters[5] == 4 * 1024**2 + 1024
    # Korthikanti's attention (11 h + 5 a s bytes a token), its norm, and the encoder's output
    assert (work.stash_bytes[30] - work.stash_bytes[5]) / 1024 == 11 * 1024 + 5 * 16 * 512 + 4 * 1024


@given(st.sampled_from(list(MODELS)), st.integers(1, 64), st.integers(1, 512), st.booleans())
def test_invariants(name, b, s, recompute):
    one, work = chain(name, 1, s, recompute), chain(name, b, s, recompute)
    L = work.layers
    assert len(work.layer_names) == len(work.kinds) == L
    for field in ("forward_flops", "backward_flops", "output_bytes", "stash_bytes"):
        array = getattr(work, field)
        assert array.shape == (L,) and (array >= 0).all() and not array.flags.writeable
        np.testing.assert_allclose(array, b * getattr(one, field), rtol=1e-12)
    for field in ("parameters", "static_bytes", "gradient_bytes"):
        assert (getattr(work, field) == getattr(one, field)).all() and (getattr(work, field) > 0).all()
    inner = [i for i, kind in enumerate(work.kinds) if kind not in ("embedding", "head")]
    factor = np.full(L, 2)
    factor[inner] += recompute
    assert (work.backward_flops == factor * work.forward_flops).all()
    assert (work.output_bytes[:-1] > 0).all() and work.output_bytes[-1] == 0
    kept = chain(name, b, s).stash_bytes
    assert (work.stash_bytes <= kept).all()
    assert ((work.stash_bytes < kept)[inner] == recompute).all()


@pytest.mark.parametrize("call, words", [
    (lambda: chain("gpt3-14b"), ["model: 'gpt3-14b'", "did you mean 'gpt3-13b'", "llama2-7b"]),
    (lambda: chain("GPT2-XL"), ["did you mean 'gpt2-xl'"]),
    (lambda: chain("?"), ["model: '?'; allowed: gpt2, "]),
    (lambda: chain("gpt2", micro_batch_size=0), ["micro_batch_size: 0", "1 to"]),
    (lambda: chain("gpt2", micro_batch_size=1.5), ["micro_batch_size: 1.5"]),
    (lambda: chain("gpt2", sequence_length=1025), ["sequence_length: 1025", "1 to 1024"]),
])
def test_errors_are_one_line_that_says_what_is_allowed(call, words):
    with pytest.raises(InputError) as caught:
        call()
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_rotary_positions_do_not_limit_the_sequence():
    assert chain("llama2-7b", sequence_length=32768).output_bytes[0] == 2 * 32768 * 4096


def test_docstring_examples():
    assert doctest.testmod(workload).failed == 0
