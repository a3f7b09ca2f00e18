"""Profiles: layers are those that the workload counts, times scale by the formula, files say what is wrong."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nnpiper import profiling
from nnpiper.problem import InputError
from nnpiper.profiles import KindTimes, Profile
from nnpiper.workload import MODELS, chain

FAMILIES = {"gpt": "gpt2", "bert": "bert-large", "llama": "llama3-8b", "t5": "t5-large"}


def tiny(family, **changes):
    known = MODELS[FAMILIES[family]]
    return replace(known, **{"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "feed_forward": 48, "vocabulary": 61,
                             "positions": 20 if known.positions else 0, "sequence_length": 12} | changes)


def made_up(model, micro_batch_size=1, sequence_length=12, recompute=False, **changes):
    """A profile with a different time for every kind and pass."""
    kinds = dict.fromkeys(chain(model, 1, sequence_length).kinds)
    times = {kind: KindTimes(0.01 * (i + 1), 0.03 * (i + 1), 0.001, 0.002) for i, kind in enumerate(kinds)}
    fields = dict(device="GPU", memory_bytes=24e9, model=model, micro_batch_size=micro_batch_size,
                  sequence_length=sequence_length, recompute=recompute, dtype="bfloat16", kinds=times, runs=20,
                  processor="GPU", torch_version="2.9", date="2026-01-01")
    return Profile(**(fields | changes))


# What is built


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_layers_have_the_parameters_of_the_workload(family, kv_heads):
    model = tiny(family, kv_heads=kv_heads)
    work = chain(model)
    for kind in dict.fromkeys(work.kinds):
        # a T5 half's first block holds the table of positions and its second embedding a norm, which are not measured
        places = [i for i, other in enumerate(work.kinds) if other == kind]
        place = places[0] if kind == "embedding" else places[-1]
        built = sum(parameter.numel() for parameter in profiling.layer(model, kind).parameters())
        assert built == work.parameters[place], kind


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("b, s", [(1, 12), (3, 7)])
def test_layers_do_the_matrix_products_of_the_workload(family, b, s):
    model = tiny(family)
    work = chain(model, b, s)
    for kind in dict.fromkeys(work.kinds):
        place = work.kinds.index(kind)
        module = profiling.layer(model, kind)
        read = profiling.inputs(model, kind, b, s, torch.device("cpu"), torch.float32)
        with sdpa_kernel(SDPBackend.MATH):
            with FlopCounterMode(display=False) as forward:
                out = module(*read)
            with FlopCounterMode(display=False) as backward:
                out.backward() if out.dim() == 0 else out.backward(out.detach())
        beside = 2 * b * (32 * 32 + 32 * 2) if (family, kind) == ("bert", "head") else 0  # its pooled token
        assert forward.get_total_flops() == work.forward_flops[place] + beside, kind
        assert backward.get_total_flops() == work.backward_flops[place] + 2 * beside, kind


def test_masks_and_positions(monkeypatch):
    monkeypatch.setattr(profiling, "DROPOUT", 0.0)
    torch.manual_seed(0)
    for family, kind, causal in (("gpt", "block", True), ("llama", "block", True), ("bert", "block", False),
                                 ("t5", "encoder", False), ("t5", "decoder", True)):
        model = tiny(family)
        module = profiling.layer(model, kind).eval()
        read = profiling.inputs(model, kind, 1, 6, torch.device("cpu"), torch.float32)
        changed = [read[0].detach().clone(), *read[1:]]
        changed[0][:, -1] += torch.randn(32)
        with torch.no_grad():
            moved = (module(*changed) - module(*read)).abs().amax(-1)[0]
        assert (moved[:-1] > 1e-4).any() != causal, (family, kind)
    # rotary positions: a product of query and key depends on their distance alone
    x = torch.ones(1, 1, 9, 8)
    products = profiling.rotate(x)[0, 0] @ profiling.rotate(x)[0, 0].T
    assert products.diagonal(3).std() < 1e-5 < products[0].std()


# What is measured


class _Sleep(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        _Sleep.calls += 1
        time.sleep(0.004)
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        assert len(ctx.saved_tensors) == 1  # recomputation starts when this is asked for
        time.sleep(0.010)
        return gradient


class _Sleeper(nn.Module):
    def forward(self, x, *_):
        x = _Sleep.apply(x if x.is_floating_point() else torch.zeros(1, requires_grad=True))
        return x.sum() if x.dim() == 1 else x


@pytest.mark.parametrize("recompute", [False, True])
def test_times_are_those_of_the_passes(monkeypatch, recompute):
    monkeypatch.setattr(profiling, "layer", lambda model, kind: _Sleeper())
    monkeypatch.setattr(_Sleep, "calls", 0)
    seen = []
    profile = profiling.measure(tiny("gpt"), 1, None, recompute, warm_up=1, repeats=5, progress=seen.append)
    assert seen == list(profile.kinds) == ["embedding", "block", "head"]
    assert _Sleep.calls == 6 * (4 if recompute else 3)  # only the block recomputes
    for kind, times in profile.kinds.items():
        again = 0.004 if recompute and kind == "block" else 0.0
        assert 0.004 <= times.forward_s < 0.010 <= 0.010 + again <= times.backward_s < 0.1, kind
        assert times.forward_spread_s >= 0 and times.backward_spread_s >= 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_tiny_model_is_measured_on_the_cpu(tmp_path, family, recompute):
    model = tiny(family)
    state = torch.get_rng_state()
    profile = profiling.measure(model, 2, 8, recompute, warm_up=1, repeats=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert set(profile.kinds) == set(chain(model).kinds)
    assert profile.memory_bytes is None and profile.dtype == "float32" and profile.runs == 2
    assert (profile.micro_batch_size, profile.sequence_length, profile.recompute) == (2, 8, recompute)
    path = tmp_path / "profile.json"
    path.write_text(profile.to_json())
    assert Profile.from_file(path) == profile
    for seconds in profile.times(chain(model, 2, 8, recompute)):
        assert (seconds > 0).all() and seconds.shape == (chain(model).layers,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_small_model_is_measured_on_cuda():
    profile = profiling.measure(tiny("gpt", hidden=512, heads=8, kv_heads=8), 4, device="cuda", repeats=5)
    assert profile.dtype in ("bfloat16", "float16") and profile.memory_bytes > 1e9
    assert all(times.forward_s > 0 and times.backward_s > 0 for times in profile.kinds.values())


@pytest.mark.parametrize("error", [RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 1 byte"),
                                   torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), MemoryError()])
def test_memory_that_runs_out_is_said_with_what_helps(monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(profiling.Block, "forward", fail)
    with pytest.raises(InputError, match="device: 'cpu': too little memory for a layer of kind 'block' of 'gpt2' with "
                                         "micro-batch size 2 and sequence length 12; allowed: .*micro-batch below 2 "
                                         "or a sequence below 12 or recomputation or a smaller model$"):
        profiling.measure(tiny("gpt"), 2, warm_up=1, repeats=1)


def test_other_errors_are_not_taken_for_memory(monkeypatch):
    def fail(*_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(profiling.Block, "forward", fail)
    with pytest.raises(RuntimeError, match="illegal"):
        profiling.measure(tiny("gpt"), warm_up=1, repeats=1)


@pytest.mark.parametrize("arguments, message", [
    ({"model": "gpt9"}, "model: 'gpt9' .did you mean 'gpt2'"),
    ({"device": "cuda:99"}, "device: 'cuda:99'; allowed here: cpu"),
    ({"device": None}, "device: None; allowed here: cpu"),
    ({"repeats": 0}, "repeats: 0; allowed: an integer from 1"),
    ({"warm_up": 1.5}, "warm_up: 1.5"),
    ({"micro_batch_size": 0}, "micro_batch_size: 0"),
    ({"sequence_length": 21}, "sequence_length: 21; allowed: an integer from 1 to 20"),
    ({"model": tiny("gpt", hidden=30)}, "model: 'gpt2': hidden 30, heads 4, kv_heads 2; allowed: a multiple of 4"),
    ({"model": tiny("llama", hidden=36)}, "a multiple of 8"),
    ({"model": tiny("gpt", kv_heads=3)}, "heads a multiple of kv_heads"),
])
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        profiling.measure(**({"model": tiny("gpt")} | arguments))


# How times scale


@given(st.sampled_from(list(MODELS)), st.integers(1, 8), st.integers(1, 256), st.booleans())
def test_the_profiled_chain_has_the_measured_times_exactly(name, b, s, recompute):
    profile = made_up(MODELS[name], b, s, recompute)
    forward, backward = profile.times(chain(name, b, s, recompute))
    for i, kind in enumerate(chain(name).kinds):
        if i and kind == "embedding":  # T5's second sends twice the bytes, but its gradient is no larger
            assert forward[i] == 2 * profile.kinds[kind].forward_s
            assert 1 < backward[i] / profile.kinds[kind].backward_s < 1.5
        else:
            assert (forward[i], backward[i]) == (profile.kinds[kind].forward_s, profile.kinds[kind].backward_s)


def test_other_sizes_scale_by_flops_and_the_embedding_by_bytes():
    model = tiny("gpt", kv_heads=4)
    profile = made_up(model, 1, 12)
    b, s, h, f, V = 4, 16, 64, 256, 100
    other = tiny("gpt", kv_heads=4, hidden=h, feed_forward=f, vocabulary=V, layers=5)
    forward, backward = profile.times(chain(other, b, s))

    def block(b, s, h, f):  # four projections, scores and their use, two feed-forward matrices
        return b * s * (8 * h * h + 4 * s * h + 4 * h * f)

    ratio = block(b, s, h, f) / block(1, 12, 32, 48)
    assert forward[1:-1] == pytest.approx(0.02 * ratio) and backward[1:-1] == pytest.approx(0.06 * ratio)
    assert forward[-1] == pytest.approx(0.03 * (b * s * h * V) / (12 * 32 * 61))
    assert forward[0] == pytest.approx(0.01 * (b * s * h) / (12 * 32))
    # its gradient is that of the whole table of tokens and positions
    assert backward[0] == pytest.approx(0.03 * (b * s * h + (V + 20) * h) / (12 * 32 + (61 + 20) * 32))


def test_recomputation_scales_the_backward_pass_by_its_flops():
    model = tiny("llama")
    plain, again = (made_up(model).times(chain(model, recompute=recompute)) for recompute in (False, True))
    np.testing.assert_array_equal(plain[0], again[0])
    assert again[1] / plain[1] == pytest.approx([1, 1.5, 1.5, 1])


def test_a_kind_that_was_not_measured_is_refused():
    with pytest.raises(InputError, match="profile of 'gpt2' on 'GPU': no times for kind 'encoder' of 't5-large'; "
                                         "allowed: embedding, block, head"):
        made_up(tiny("gpt")).times(chain("t5-large"))


# Files


def _changed(path, value):
    """The fields of a profile file with one changed: a path of keys, and its value, or `...` to take it out."""
    fields = json.loads(made_up(tiny("gpt")).to_json())
    place = fields
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    if value is ...:
        del place[path[-1]]
    return fields


@pytest.mark.parametrize("path, value, message", [
    (["kinds", "block", "forward_s"], -1.0, "kinds.block.forward_s: -1.0"),
    (["kinds", "block", "backward_s"], float("nan"), "kinds.block.backward_s: NaN"),
    (["kinds", "block", "backward_s"], float("inf"), "kinds.block.backward_s: Infinity"),
    (["kinds", "block", "backward_s"], "3 ms", 'kinds.block.backward_s: "3 ms"'),
    (["kinds", "block", "backward_s"], 1e300, "kinds.block.backward_s"),
    (["kinds", "block", "forward_spread_s"], ..., "kinds.block.forward_spread_s"),
    (["kinds", "hidden"], {}, "kinds.hidden"),
    (["kinds", "encoder"], {"forward_s": 1, "backward_s": 1, "forward_spread_s": 0, "backward_spread_s": 0},
     "kinds: 'encoder'; allowed for 'gpt2': embedding, block, head"),
    (["kinds"], {}, "kinds"),
    (["memory_bytes"], 0, "memory_bytes: 0"),
    (["model", "hidden"], 10**40, "model.hidden"),
    (["model", "heads"], 0, "model.heads: 0"),
    (["model", "layers"], True, "model.layers: true"),
    (["model", "family"], "mamba", 'model.family: "mamba"'),
    (["sequence_length"], 21, "sequence_length: 21; allowed: an integer from 1 to 20"),
    (["micro_batch_size"], 10**6, "micro_batch_size: 1000000; allowed: an integer from 1 to 65536"),
    (["dtype"], "int8", 'dtype: "int8"'),
    (["recompute"], "yes", 'recompute: "yes"'),
    (["format"], "nnpiper-plan-1", 'format: "nnpiper-plan-1"'),
    (["speed"], 1, "speed: 1: .*allowed fields: format, device"),
    (["device"], "", "device"),
])
def test_a_wrong_field_is_named(tmp_path, path, value, message):
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(_changed(path, value)))
    with pytest.raises(InputError, match=message) as caught:
        Profile.from_file(file)
    assert str(caught.value).startswith(f"{file}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", made_up(tiny("gpt")).to_json()[:-40]])
def test_a_file_that_is_no_profile(tmp_path, text):
    file = tmp_path / "profile.json"
    file.write_text(text)
    for path in (file, tmp_path, tmp_path / "none"):
        with pytest.raises(InputError) as caught:
            Profile.from_file(path)
        assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


@given(st.data())
def test_any_cut_or_changed_byte_gives_a_profile_or_one_line(tmp_path_factory, data):
    text = bytearray(made_up(tiny("t5")).to_json().encode())
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.mktemp("fuzz") / "profile.json"
    file.write_bytes(text[:data.draw(st.integers(0, len(text)))] if data.draw(st.booleans()) else text)
    try:
        profile = Profile.from_file(file)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        for seconds in profile.times(profile.chain()) if set(profile.kinds) == set(profile.chain().kinds) else ():
            assert np.isfinite(seconds).all() and (seconds >= 0).all()
