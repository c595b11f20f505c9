"""One mask for all log-probabilities that TRL compares: old and new policy, chosen and rejected; the others plain."""

import copy

import peft
import pytest
import torch
import transformers as hf

import attnreg
from attnreg.integrations import AttnRegCallback
from tests.helpers.cases import CACHE, SMALL, TEXT, tiny_bert
from tests.helpers.trainers import EXTRA, QUIET, WORDS, of_trl

pytestmark = QUIET
trl = pytest.importorskip("trl", reason=EXTRA)
LORA = {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with dropout of its own, which `disable_dropout` of TRL does not reach."""
    folder = tmp_path_factory.mktemp("llama")
    tiny_bert(WORDS, folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "[END]"})
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = {**TEXT, **SMALL, "attention_dropout": 0.3, "initializer_range": 0.5}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**config, eos_token_id=tokenizer.eos_token_id))
    model.save_pretrained(folder)
    return folder


def trainer_of(name, folder, tmp_path, *, lora=False, model=None, **options):
    """A trainer that never changes the policy, so that old and new log-probabilities differ by their masks alone."""
    from datasets import Dataset

    model = model or hf.AutoModelForCausalLM.from_pretrained(folder)
    config = {"learning_rate": 0.0, "per_device_train_batch_size": 4, "max_steps": 4}
    config |= {"gradient_accumulation_steps": 1, **options}
    given = {"processing_class": hf.AutoTokenizer.from_pretrained(folder)}
    given |= {"peft_config": peft.LoraConfig(**LORA)} if lora else {}
    if name == "DPOTrainer":
        rows = {"prompt": ["red"] * 8, "chosen": [" green blue"] * 8, "rejected": [" green blue"] * 8}
    else:
        rows = {"prompt": ["red", "green blue", "blue", "green red"] * 4}
        config = {"num_generations": 4, "max_completion_length": 6, "steps_per_generation": 2, "beta": 0.1, **config}
        given["reward_funcs"] = lambda completions, **_: [float(len(each)) for each in completions]
    args = of_trl(getattr(trl, name.replace("Trainer", "Config")), tmp_path, **{"num_train_epochs": 1, **config})
    return getattr(trl, name)(model, args=args, train_dataset=Dataset.from_dict(rows), **given)


def one_mask(trainer, provider=None):
    AttnRegCallback(attnreg.DropKey(0.2) if provider is None else provider, one_mask=True).add_to(trainer)
    return trainer


def differences(trainer):
    """Train; return the largest difference of old and new log-probabilities in each micro-batch."""
    computed, found = [], []
    log_probs, loss = trainer._get_per_token_logps_and_entropies, trainer._compute_loss

    def note(*args, **kwargs):
        computed.append(log_probs(*args, **kwargs))
        return computed[-1]

    def compare(model, inputs):
        out, mask = loss(model, inputs), inputs["completion_mask"]
        new = computed[-1][0] * mask
        old = inputs["old_logps"] if "old_logps" in inputs else inputs["old_per_token_logps"] * mask
        found.append(float(((new.sum(1) if old.dim() == 1 else new) - old).detach().abs().max()))
        return out

    trainer._get_per_token_logps_and_entropies, trainer._compute_loss = note, compare
    trainer.train()
    return found


SETTINGS = [
    ("GRPOTrainer", {}),
    ("GRPOTrainer", {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 2, "lora": True}),
    ("RLOOTrainer", {"gradient_accumulation_steps": 2, "lora": True}),
]


@pytest.mark.parametrize(("name", "options"), SETTINGS, ids=["grpo", "grpo, inner iterations", "rloo"])
def test_old_and_new_policy_have_one_mask(folder, tmp_path, name, options):
    trainer = one_mask(trainer_of(name, folder, tmp_path, **options))
    found = differences(trainer)
    assert len(found) == 4 * options.get("gradient_accumulation_steps", 1)
    assert max(found) < 1e-6  # rounding: a sample's place in its batch is another one
    assert trainer.model.training
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert all(log["drop_rate/decoder.0"] > 0 for log in logs)
    # The same without the callback: the model's own dropout alone.
    assert min(differences(trainer_of(name, folder, tmp_path, **options))) > 1e-2


def test_each_generation_has_masks_of_its_own(folder, tmp_path):
    trainer, seeds = one_mask(trainer_of("GRPOTrainer", folder, tmp_path)), []
    loss = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: seeds.append(int(inputs["attnreg_seed"])) or loss(model, inputs)
    trainer.train()
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


@pytest.mark.parametrize("lora", [False, True])
def test_rollouts_and_references_are_plain(folder, tmp_path, lora):
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    plain, seen = copy.deepcopy(model).eval(), []
    trainer = trainer_of("GRPOTrainer", folder, tmp_path, lora=lora, model=model)
    one_mask(trainer)

    def note(module, args, kwargs, output):
        kwargs.pop(CACHE, None)
        seen.append((module.training, torch.is_grad_enabled(), kwargs, output.last_hidden_state))

    hooks = [model.model.register_forward_hook(note, with_kwargs=True)]
    if trainer.ref_model is not None:
        hooks.append(trainer.ref_model.model.register_forward_hook(note, with_kwargs=True))
    trainer.train()
    for hook in hooks:
        hook.remove()
    policy = [kwargs for training, _, kwargs, _ in seen if training]
    scored = [each for each in seen if not each[0] and each[2].get("use_cache") is False]
    assert len(policy) == 8  # old and new, in two micro-batches of two generations
    assert len(scored) == 4  # the reference
    assert len(seen) > 12  # completions are generated in eval mode
    for _, gradients, kwargs, states in scored:
        assert not gradients
        torch.testing.assert_close(plain.model(**kwargs).last_hidden_state, states)


@pytest.mark.parametrize("lora", [False, True])
def test_chosen_and_rejected_have_one_mask_and_a_pass_repeats_exactly(folder, tmp_path, lora):
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    plain = copy.deepcopy(model).eval()
    trainer = one_mask(trainer_of("DPOTrainer", folder, tmp_path, lora=lora, model=model))
    handle, seen = trainer.callback_handler.callbacks[0].handle, []

    def note(module, args, kwargs, output):
        seen.append((module, torch.is_grad_enabled(), kwargs, output.log_probs, handle.seed))

    hooks = [trainer.model.register_forward_hook(note, with_kwargs=True)]
    if trainer.ref_model is not None:
        hooks.append(trainer.ref_model.register_forward_hook(note, with_kwargs=True))
    trainer.train()
    for hook in hooks:
        hook.remove()
    assert [gradients for _, gradients, *_ in seen] == [True, False] * 4
    for module, gradients, kwargs, log_probs, seed in seen:
        ids, labels, mask = (kwargs[name] for name in ("input_ids", "labels", "attention_mask"))
        if gradients:
            assert torch.equal(log_probs[:4], log_probs[4:])  # the answers are the same here
            with torch.no_grad(), handle.replay(seed, torch.arange(4).repeat(2)):
                again = module.train()(**kwargs).log_probs
            assert torch.equal(again, log_probs)
            with torch.no_grad():  # today: another pass in training mode
                assert (module(**kwargs).log_probs - log_probs).abs().max() > 1e-2
        else:
            logits = plain(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
            expected = logits.gather(2, ids[:, 1:, None])[..., 0].where(labels[:, 1:] != -100, 0.0)
            torch.testing.assert_close(log_probs, expected)
    margins = [log["rewards/margins"] for log in trainer.state.log_history if "rewards/margins" in log]
    assert margins == [0.0] * 4


def test_other_pairs_of_masks_differ(folder, tmp_path):
    """Without one mask, the same answer as chosen and as rejected has two log-probabilities."""
    trainer = trainer_of("DPOTrainer", folder, tmp_path)
    AttnRegCallback(attnreg.DropKey(0.2)).add_to(trainer)
    trainer.train()
    assert all(log["rewards/margins"] != 0 for log in trainer.state.log_history if "rewards/margins" in log)


def test_what_cannot_be_right_is_refused(folder, tmp_path):
    def refuses(trainer, says, provider, **options):
        with pytest.raises(ValueError, match=says):
            AttnRegCallback(provider, **options).add_to(trainer)

    grpo = trainer_of("GRPOTrainer", folder, tmp_path)
    AttnRegCallback(attnreg.DropKey(0.1)).add_to(grpo)
    says = "before training: this trainer compares two passes, which would have different"
    with pytest.raises(ValueError, match=says):
        grpo.train()
    attnreg.detach(grpo.model)
    refuses(grpo, "needs `attach\\(", attnreg.attach(grpo.model, attnreg.DropKey(0.1)), one_mask=True)
    attnreg.detach(grpo.model)
    refuses(grpo, "TokenDropout decides for a whole batch", attnreg.TokenDropout(0.1), one_mask=True)
    refuses(grpo, "Expected `one_mask` to be True or False", attnreg.DropKey(0.1), one_mask=1)

    callback = AttnRegCallback(attnreg.DropKey(0.1), one_mask=True)
    dpo = trainer_of("DPOTrainer", folder, tmp_path)
    dpo.add_callback(callback)
    callback.on_init_end(dpo.args, dpo.state, dpo.control, model=dpo.model)
    with pytest.raises(ValueError, match=r"one_mask=True\).add_to\(trainer\)` before training\.$"):
        dpo.train()
    dpo.padding_free = True
    refuses(dpo, "set `padding_free=False`", callback.handle, one_mask=True)
    dpo.padding_free, dpo.precompute_ref_logps = False, True
    dpo.model.train()
    refuses(dpo, "were computed in training mode", callback.handle, one_mask=True)
    plain = hf.Trainer(hf.AutoModelForCausalLM.from_pretrained(folder), of_trl(hf.TrainingArguments, tmp_path))
    says = "is for DPOTrainer, GRPOTrainer and RLOOTrainer of TRL 1.16, got Trainer"
    refuses(plain, says, attnreg.DropKey(0.1), one_mask=True)
