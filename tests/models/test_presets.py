import dataclasses

import pytest

from dynajax.errors import DynajaxError, ModelError
from dynajax.models import LlamaConfig, count_parameters, parameter_specs, preset, preset_names
from dynajax.models.presets import preset_table

PUBLISHED = [name for name in preset_names() if "params_b" in preset_table()[name]]


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name):
    """Within 1 %, or within the rounding of a figure printed with one decimal (GPT-3's 2.7 is 2.65)."""
    published = preset_table()[name]["params_b"]
    decimals = len(str(published).partition(".")[2])
    slack = max(0.01 * published, 0.5 * 10**-decimals)
    assert abs(count_parameters(preset(name)) / 1e9 - published) <= slack


def test_llama_7b_has_exactly_the_parameters_of_the_release():
    assert count_parameters(preset("llama-7b")) == 6_738_415_616


def test_llama3_70b_has_exactly_the_parameters_of_the_release():
    assert count_parameters(preset("llama3-70b")) == 70_553_706_496


def test_the_known_names_are_there():
    wanted = "tiny small llama-7b llama-13b llama-32b llama2-70b gpt3-xl gpt3-2.7b gpt3-6.7b"
    assert set(wanted.split()) <= set(preset_names())


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_names_its_source_and_is_hashable(name):
    assert preset_table()[name]["source"]
    assert hash(preset(name)) == hash(preset(name))


def test_unknown_preset_names_the_known_ones():
    with pytest.raises(DynajaxError, match=r"'llama-8b'.*tiny.*llama2-70b"):
        preset("llama-8b")


@pytest.mark.parametrize("axis", [1, 2, 4, 8])
def test_small_is_cut_evenly_by_every_axis_up_to_8(axis):
    config = preset("small")
    for size in (config.hidden, config.ffn, config.heads, config.kv_heads, config.vocab):
        assert size % axis == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 3}, "divisor of 4"),
        ({"head_dim": 5}, "even"),
        ({"layers": 0}, r"layers is 0"),
        ({"hidden": 2.5}, r"hidden is 2\.5"),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    config = LlamaConfig(layers=2, hidden=8, ffn=8, heads=4, kv_heads=2, head_dim=4, vocab=5)
    with pytest.raises(ModelError, match=message):
        dataclasses.replace(config, **change)


def test_shapes_of_70b_as_planned():
    blocks = parameter_specs(preset("llama2-70b"))["blocks"]
    assert blocks["attention"]["k"].shape == (80, 8192, 8, 128)
    assert blocks["attention"]["o"].axes == ("layers", "heads", "head_dim", "embed")
    assert blocks["mlp"]["down"].shape == (80, 28672, 8192)
    assert blocks["mlp"]["down"].size == 80 * 28672 * 8192
