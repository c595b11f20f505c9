"""No model type is forgotten."""

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tests.sweep.zoo import not_built, specimens


def test_every_model_type_is_built_or_has_its_reason():
    names = [specimen.name for specimen in specimens()]
    assert sorted([*names, *not_built()]) == sorted(CONFIG_MAPPING_NAMES)
    assert all(not_built().values())
