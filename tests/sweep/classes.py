"""Which class of transformers is the model of a model type."""

import importlib

from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import model_type_to_module_name

# Where a model type has no base model: the tasks that need the whole of it first.
MAPPINGS = [
    "MODEL",
    "MODEL_FOR_MULTIMODAL_LM",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ",
    "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_MASKED_LM",
]
MAPPINGS += sorted(
    name.removesuffix("_MAPPING_NAMES")
    for name in vars(modeling_auto)
    if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES") and "BACKBONE" not in name
)
MAPPINGS += ["MODEL_FOR_BACKBONE"]
# Where another class than the first that is found is wanted, or none is.
NAMES = {
    "bark": "BarkSemanticModel",
    "blip_text_model": "modeling_blip_text.BlipTextModel",
    "idefics_vision": "vision.IdeficsVisionTransformer",
    "musicgen": "MusicgenForConditionalGeneration",
    "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
    # Their attention is in the head.
    "pp_ocrv5_mobile_rec": "PPOCRV5MobileRecForTextRecognition",
    "pp_ocrv5_server_rec": "PPOCRV5ServerRecForTextRecognition",
    "pp_ocrv6_small_rec": "PPOCRV6SmallRecForTextRecognition",
    "pp_ocrv6_tiny_rec": "PPOCRV6TinyRecForTextRecognition",
    # The base model takes neither sounds nor words, only vectors.
    "speecht5": "SpeechT5ForSpeechToText",
    "t5_gemma_module": "modeling_t5gemma.T5GemmaEncoder",
    "vibevoice": "VibeVoiceModel",
}


def model_class(model_type):
    """The base model of a type, or the first class that there is."""
    name = NAMES.get(model_type)
    folder = f"transformers.models.{model_type_to_module_name(model_type)}"
    if name is not None and "." in name:
        file, _, name = name.rpartition(".")
        return getattr(importlib.import_module(f"{folder}.{file}"), name)
    module = importlib.import_module(folder)
    if name is None:
        for mapping in MAPPINGS:
            names = getattr(modeling_auto, f"{mapping}_MAPPING_NAMES", {}).get(model_type)
            if names:
                name = names if isinstance(names, str) else names[0]
                break
    if name is not None:
        for place in (module, importlib.import_module("transformers")):
            if hasattr(place, name):
                return getattr(place, name)
        return getattr(_modeling(CONFIG_MAPPING[model_type]), name)
    return _by_configuration(model_type)


def _modeling(configuration):
    return importlib.import_module(configuration.__module__.replace(".configuration_", ".modeling_"))


def _by_configuration(model_type):
    """The class that takes a type's configuration, where no auto class knows one."""
    wanted = CONFIG_MAPPING[model_type]
    module = _modeling(wanted)
    classes = [
        cls
        for cls in vars(module).values()
        if isinstance(cls, type)
        and issubclass(cls, PreTrainedModel)
        and cls.__module__ == module.__name__
        and cls.config_class is wanted
        and not cls.__name__.endswith("PreTrainedModel")
    ]
    stem = wanted.__name__.removesuffix("Config")
    return min(classes, key=lambda cls: (cls.__name__ not in (stem, f"{stem}Model"), -len(cls.__name__)))
