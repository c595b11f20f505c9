"""Masks, targets and figures where a batch, a checkpoint or a Trainer is unusual."""

import copy
import functools
import types

import peft
import pytest
import torch
import transformers as hf
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import attnreg
from attnreg.attendout.rewards import Referee, negative_loss
from attnreg.attribution import Target
from attnreg.errors import InputError
from attnreg.integrations import AttnRegCallback, RegularizedTrainer
from attnreg.training import (
    SAM,
    AttackerDefender,
    CrossEntropy,
    FineTuning,
    R3FLoss,
    RDropLoss,
    Reinforce,
    Rewards,
    Rounds,
    adamw,
)  # fmt: skip
from tests.helpers.cases import CACHE, SMALL, bert_in_float64, sample
from tests.helpers.own_dropout_cases import SOUND
from tests.helpers.trainers import Rows, arguments, bert

IDS = torch.randint(1, 9, (3, 8), generator=torch.Generator().manual_seed(0))
PRODUCTS = torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default


def saving_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def test_ad_drop_where_checkpoints_save_products():
    batch = {"input_ids": IDS, "labels": torch.tensor([0, 1, 1])}  # 8 tokens, as a head has features
    gradients = []
    for options in ({}, {"context_fn": functools.partial(create_selective_checkpoint_contexts, saving_products)}):
        torch.manual_seed(0)
        model = bert_in_float64(hidden_size=16, num_attention_heads=2, attention_probs_dropout_prob=0.1)
        provider = attnreg.AttributionProvider(0.5, 0.5)
        attnreg.attach(model, provider)
        model.train()
        for block in model.bert.encoder.layer:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
        torch.manual_seed(1)
        provider.attribute(model, batch)
        model(**batch).loss.backward()
        gradients.append([each.grad for each in model.parameters() if each.grad is not None])
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*gradients, strict=True))


def test_a_batch_without_labels_teaches_learnable_rates_nothing():
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = hf.LlamaForCausalLM(config)
    provider = attnreg.LearnableBernoulli.for_model(model)
    optimizer = adamw(model, 1e-3)
    optimizer.add_param_group({"params": provider.learned_parameters(), "weight_decay": 0.0})
    method = FineTuning(model, optimizer, provider)
    method.step({"input_ids": IDS, "labels": torch.full_like(IDS, -100)})
    assert all(bool(each.isfinite().all()) for each in (*model.parameters(), *provider.parameters()))
    assert method.step({"input_ids": IDS, "labels": IDS}).loss.isfinite()


@pytest.mark.parametrize("stacks", [["decoder"], ["cross"]])
def test_padded_queries_of_a_decoder_count_nowhere(stacks):
    found = []
    for padding in (0, 5):
        torch.manual_seed(0)
        config = hf.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, dropout_rate=0.0)
        model = hf.T5ForConditionalGeneration(config)
        target = torch.nn.functional.pad(IDS[:, :4], (0, padding))
        mask = (torch.arange(4 + padding) < 4).int().expand(3, -1)
        batch = {"input_ids": IDS, "decoder_input_ids": target, "decoder_attention_mask": mask}
        entropy, drop = attnreg.AttentionEntropy(0.1), attnreg.AttributionProvider(0.5, 1.0)
        with attnreg.attach(model, entropy & drop, stacks=stacks) as handle:
            model.train()
            drop.attribute(model, {**batch, "labels": target.masked_fill(mask == 0, -100)})
            model(**batch, labels=target.masked_fill(mask == 0, -100))
            found.append(torch.stack([entropy.penalty(), *handle.drop_rate_tensors().values()]))
    assert torch.allclose(*found, atol=1e-6)


def test_latent_vectors_that_ask_are_no_tokens():
    class Latents(attnreg.MaskProvider):
        def forward(self, site):
            seen.append(site.queries)

    seen = []
    config = hf.PerceiverConfig(num_latents=5, d_latents=16, d_model=16, num_blocks=1, num_self_attends_per_block=1,
                                num_self_attention_heads=2, num_cross_attention_heads=2, vocab_size=20,
                                max_position_embeddings=8)  # fmt: skip
    model = hf.PerceiverForMaskedLM(config)
    inputs = {"inputs": IDS[:, :5], "attention_mask": (torch.arange(5) < 2).int().repeat(3, 1)}
    with attnreg.attach(model, Latents(), stacks=["cross"], example_inputs=inputs):
        model.train()
        model(**inputs)
    assert seen
    assert all(each is None for each in seen)


def test_choices_of_one_row_have_their_own_lengths():
    seen = []

    class Lengths(attnreg.HiddenProvider):
        where = "embeddings"

        def forward(self, site, states):
            seen.append(site.lengths.tolist())

    model = hf.BertForMultipleChoice(hf.BertConfig(**SMALL))
    mask = (torch.arange(8) < torch.tensor([[8], [4], [2]])).int()
    with attnreg.attach(model, Lengths()):
        model.train()
        for rows in (1, 2):
            model(input_ids=IDS.repeat(rows, 1, 1), attention_mask=mask.repeat(rows, 1, 1))
    assert seen[-2:] == [[8, 4, 2], [8, 4, 2] * 2]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # of peft
def test_prompt_tokens_of_peft_have_no_score():
    config = hf.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    tuned = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(hf.LlamaForCausalLM(config), tuned)
    labels = IDS.masked_fill(torch.arange(8) < 5, -100)
    output = model(input_ids=IDS, labels=labels)
    for kind in ("predicted", "label"):
        classes = Target(kind).for_model(model).classes(output, {"input_ids": IDS, "labels": labels})
        where = torch.arange(11).expand(3, -1)
        assert torch.equal(classes != -100, (where >= 7) & (where < 10))  # 3 more, and one earlier
        if kind == "label":
            assert torch.equal(classes[:, 7:10], IDS[:, 5:])


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # of peft
@pytest.mark.parametrize("case", ["r-drop", "r3f", "cross-entropy", "reward", "micro-batches"])
def test_prompt_tokens_of_peft_have_no_label(case):
    torch.manual_seed(0)
    tuned = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    dropout = 0.0 if case == "micro-batches" else 0.3
    config = hf.LlamaConfig(**SMALL, vocab_size=50, num_key_value_heads=4, attention_dropout=dropout)
    model = peft.get_peft_model(hf.LlamaForCausalLM(config).double(), tuned).double()
    batch = {"input_ids": IDS, "labels": IDS.masked_fill(torch.arange(8) < 2, -100)}
    uneven = {"input_ids": IDS, "labels": IDS.masked_fill(torch.arange(8) < torch.tensor([[0], [6], [3]]), -100)}
    if case in ("cross-entropy", "reward"):  # those of the model itself
        model.eval().requires_grad_(False)
        output = model(**batch)
        found = CrossEntropy(model)(output, batch) if case == "cross-entropy" else -negative_loss(model, batch).mean()
        assert float(found) == pytest.approx(float(output.loss), rel=1e-6)
        return
    if case == "micro-batches":
        whole = [float(FineTuning(model, adamw(model, 0.0), micro_batches=n).step(uneven).loss) for n in (1, 2)]
        assert whole[0] == pytest.approx(whole[1], rel=1e-6)
        return
    method = FineTuning(model, adamw(model, 0.0), objective={"r-drop": RDropLoss(1.0), "r3f": R3FLoss(1.0)}[case])
    logits = []
    hook = model.get_base_model().register_forward_hook(lambda module, args, output: logits.append(output.logits))
    loss = float(method.step(batch).loss)
    hook.remove()
    log_p, log_q = (each[:, 4:10].detach().log_softmax(-1) for each in logits)  # what predicts the last six of 11
    gap = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1).mean() / 2
    of_pass = [-torch.gather(each, 2, IDS[:, 2:, None]).mean() for each in (log_p, log_q)]
    expected = (of_pass[0] + of_pass[1] + gap) / 2 if case == "r-drop" else of_pass[0] + 2 * gap
    assert loss == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("kind", ["predicted", "label"])
def test_class_labels_under_prompt_tuning_are_not_padded(kind):
    target = Target(kind)
    target._model = torch.nn.Linear(1, 1)
    target._model.active_peft_config = types.SimpleNamespace(num_virtual_tokens=2)
    assert target.classes(torch.eye(3)[:2], {"labels": torch.tensor([[0], [1]])}).flatten().tolist() == [0, 1]


@pytest.mark.parametrize("kind", ["predicted", "label"])
def test_labels_of_another_shape_are_no_classes(kind):
    with pytest.raises(
        InputError, match=r"Labels \(2, 6\) are no classes of logits \(2, 6\): pass `target` as a function"
    ):
        Target(kind).classes(torch.randn(2, 6), {"labels": torch.ones(2, 6, dtype=torch.long)})


def test_rows_without_a_gold_label_have_no_score():
    logits = torch.randn(3, 2)
    batch = {"labels": torch.tensor([0, -100, 1])}
    target = Target("label")
    assert float(target.score(logits, batch, target.classes(logits, batch))) == float(logits[0, 0] + logits[2, 1])


def test_the_padding_of_an_encoder_is_not_that_of_its_decoder():
    batch = {"attention_mask": (torch.arange(8) < 5).int().expand(3, -1), "decoder_input_ids": IDS}
    assert bool((Target().classes(torch.randn(3, 8, 4), batch) >= 0).all())


def test_a_trainer_has_one_callback(tmp_path):
    model = bert()
    handle = attnreg.attach(model, attnreg.DropKey(0.1))
    given = {"model": model, "args": arguments(tmp_path), "train_dataset": Rows()}
    with pytest.raises(InputError, match="another AttnRegCallback: keep one"):
        RegularizedTrainer(**given, provider=handle, callbacks=[AttnRegCallback(handle)])
    trainer = hf.Trainer(**given, callbacks=[AttnRegCallback(handle)])
    with pytest.raises(InputError, match="another AttnRegCallback: keep one"):
        AttnRegCallback(handle).add_to(trainer)


@pytest.mark.slow
def test_the_mean_rate_counts_compiled_passes():
    model = bert_in_float64(num_hidden_layers=1)
    with attnreg.attach(model, attnreg.AttentionDropout(0.4)) as handle:
        model.train()
        compiled, rates = torch.compile(model, backend="eager"), []
        for _ in range(3):
            compiled(input_ids=IDS).logits.sum().backward()
            rates.append(handle.drop_rate_tensors()["encoder.0"])
            handle.step()
        assert len({float(each) for each in rates}) > 1
        assert abs(handle.rates.mean()["encoder.0"] - float(torch.stack(rates).mean())) < 1e-6


@pytest.mark.parametrize("method", sample(["gradient", "integrated_gradients", "attention"], lambda method: method == "gradient"))  # fmt: skip
def test_a_layer_that_the_model_skips_in_the_first_pass_has_no_attribution(method):
    still = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "activation_dropout": 0.0}
    config = hf.Wav2Vec2Config(**{**SOUND, "num_hidden_layers": 3}, **still, layerdrop=0.4, apply_spec_augment=False)
    torch.manual_seed(0)
    model = hf.Wav2Vec2ForSequenceClassification(config).double()
    batch = {"input_values": torch.randn(2, 100).double(), "labels": torch.tensor([0, 1])}
    provider = attnreg.AttributionProvider(0.5, 0.5, method, first_pass="train", steps=2)
    attnreg.attach(model, provider)
    model.train()
    numbers = set()
    for seed in range(4):
        torch.manual_seed(seed)
        provider.attribute(model, batch)
        found, ran = provider.attributions, [int(label[8:]) for label in provider.attributions]
        model(**batch).loss.backward()  # other layers may be skipped now
        numbers.add(len(ran))
        if ran:  # the reference has these layers alone
            alone = copy.deepcopy(model)
            attnreg.detach(alone)
            alone.wav2vec2.encoder.layers = alone.wav2vec2.encoder.layers[:0].extend(
                alone.wav2vec2.encoder.layers[layer] for layer in ran
            )
            alone.wav2vec2.encoder.config.layerdrop = 0.0
            wanted = attnreg.AttributionProvider(0.5, 0.5, method, steps=2)
            attnreg.attach(alone, wanted)
            wanted.attribute(alone, batch)
            for place, layer in enumerate(ran):
                assert torch.allclose(found[f"encoder.{layer}"], wanted.attributions[f"encoder.{place}"])
    assert len(numbers) > 1


@pytest.mark.parametrize("cache", [hf.DynamicCache, functools.partial(hf.StaticCache, max_cache_len=16)])
@pytest.mark.parametrize("case", ["attribute", "learnable", "hidden", "r-drop", "r3f", "sam"])
def test_each_pass_has_the_cache_of_the_batch(case, cache):
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, vocab_size=50, num_key_value_heads=4)).double()
    keys = cache(config=model.config)
    with torch.no_grad():
        model(input_ids=IDS[:, :5], **{CACHE: keys})
    batch = {"input_ids": IDS[:, 5:], "labels": IDS[:, 5:], CACHE: keys}
    plain = float(model(**{**batch, CACHE: copy.deepcopy(keys)}).loss.detach())
    provider = {
        "attribute": attnreg.AttributionProvider(0.5, 0.0),
        "learnable": attnreg.LearnableBernoulli(2, p=1e-9, regularizer=0.0),
        "hidden": attnreg.HiddenAttributionDropout(0.5, 0.0),
    }.get(case)
    objective = {"r-drop": RDropLoss(1.0), "r3f": R3FLoss(eps=1e-12)}.get(case)
    optimizer = adamw(model, 0.0)
    if case == "learnable":
        optimizer.add_param_group({"params": provider.learned_parameters()})
    if case == "sam":
        method = SAM(model, optimizer, rho=1e-12)
    else:
        method = FineTuning(model, optimizer, provider, objective=objective)
    for _ in range(2):
        assert float(method.step(batch).loss) == pytest.approx(plain, rel=1e-6)
        assert float(negative_loss(model, batch).mean().detach()) == pytest.approx(-plain, rel=1e-6)  # a reward
    assert int(keys.get_seq_length()) == 5


def test_a_cache_of_example_inputs_or_of_a_trainer_stays_as_it_is(tmp_path):
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, vocab_size=50, num_key_value_heads=4)).double()
    keys = hf.DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=IDS[:, :5], **{CACHE: keys})
    batch = {"input_ids": IDS[:, 5:], "labels": IDS[:, 5:], CACHE: keys}
    attnreg.attach(model, attnreg.DropKey(0.5), example_inputs=batch).detach()
    attnreg.attach(model, attnreg.DropKey(0.5), example_inputs=(IDS[:, 5:], None, None, keys)).detach()
    assert int(keys.get_seq_length()) == 5
    grown = hf.DynamicCache(config=model.config)
    model(input_ids=IDS[:, :5], **{CACHE: grown})  # with gradients
    attnreg.attach(model, attnreg.DropKey(0.5), example_inputs={**batch, CACHE: grown}).detach()
    loss = float(FineTuning(model, adamw(model, 0.0)).step({**batch, CACHE: grown}).loss)
    assert loss == pytest.approx(float(model(**{**batch, CACHE: copy.deepcopy(keys)}).loss.detach()), rel=1e-6)
    arguments = hf.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    trainer = RegularizedTrainer(model.train(), arguments, objective=RDropLoss(1.0))
    losses = [float(trainer.compute_loss(model, batch).detach()) for _ in range(2)]
    assert losses == pytest.approx([float(model(**batch).loss.detach())] * 2, rel=1e-6)


def test_a_static_cache_of_padding_continues_its_masks():
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, vocab_size=50, num_key_value_heads=4)).eval()
    mask = (torch.arange(8) > 1).long().expand(3, -1)  # each row begins with two tokens of padding
    with attnreg.attach(model, attnreg.DropKey(0.5)) as handle, torch.no_grad():
        with handle.replay(3):
            whole = model(input_ids=IDS, attention_mask=mask).logits
        cache, parts = hf.StaticCache(config=model.config, max_cache_len=16), []
        for begin, end in ((0, 5), (5, 8)):
            with handle.replay(3):
                given = {"attention_mask": mask[:, :end], CACHE: cache, "use_cache": True}
                parts.append(model(input_ids=IDS[:, begin:end], **given).logits)
    assert torch.allclose(torch.cat(parts, 1)[:, 2:], whole[:, 2:], atol=1e-5)


def test_the_weight_of_the_entropy_follows_the_depth():
    def penalty(provider):
        model = bert_in_float64()
        with attnreg.attach(model, provider):
            model.train()(input_ids=IDS)
            return float(provider.penalty().detach())

    alone = [penalty(attnreg.OnLayers(attnreg.AttentionEntropy(1.0), [layer])) for layer in (0, 1)]
    weighted = attnreg.Scheduled(attnreg.AttentionEntropy(1.0), over="depth", alpha=[(0, 0.2), (1, 0.7)])
    assert penalty(weighted) == pytest.approx(0.2 * alone[0] + 0.7 * alone[1])


@pytest.mark.parametrize("number", [4, 5])
def test_reward_rows_keep_their_order_over_processes(number):
    batches = [{"input_ids": torch.tensor([[each]])} for each in range(number)]
    dealt = []
    for processes in (1, 2, 3):
        updaters = [types.SimpleNamespace(rank=rank, processes=processes) for rank in range(processes)]
        each = [Referee(updater, Rewards(batches), "greedy")._batches() for updater in updaters]
        dealt.append([int(batch["input_ids"]) for batches_of_one in each for batch in batches_of_one])
    assert dealt == [[*range(number)]] * 3


def test_rewards_take_a_list():
    loader = torch.utils.data.DataLoader([{"input_ids": IDS[0]}])
    with pytest.raises(InputError, match="to be a list of at least one batch"):
        Rewards(loader)


@pytest.mark.parametrize("per", ["round", "sample"])
def test_a_generator_with_frozen_tokens_learns_the_rest(per):
    model = bert_in_float64().float()
    generator = attnreg.GNetProvider.for_model(model)
    frozen = generator.network.tokens.weight.requires_grad_(False)
    before = {name: each.detach().clone() for name, each in generator.named_parameters()}
    credit = Reinforce(per=per, reward="gap")
    game = AttackerDefender(
        model, generator, functools.partial(adamw, learning_rate=1e-2), rounds=Rounds(1), credit=credit
    )
    for _ in range(3):
        game.step({"input_ids": IDS, "labels": torch.tensor([0, 1, 1])})
    moved = {name for name, each in generator.named_parameters() if not torch.equal(each, before[name])}
    assert moved
    assert torch.equal(frozen, before["network.tokens.weight"])
