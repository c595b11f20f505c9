"""What needs a GPU: `pytest -m gpu`. The same promises as on a CPU, with compiled FlexAttention and its gradients."""

import copy

import pytest
import torch
import transformers as hf
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attnreg
from attnreg.draws import Draws
from attnreg.injection.running.passes import Passes
from tests.helpers.cases import keep_few_activations
from tests.helpers.flex import NEEDS_FLEX
from tests.helpers.method_cases import BATCH, sgd
from tests.helpers.provider_cases import PROVIDERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("default"),  # those of compilers are not ours
]
B, H, N, D = 2, 4, 128, 64
KERNEL = flex_attention


@pytest.fixture(scope="module", autouse=True)
def kernel():
    """The compiled kernel is a name of this module, by which attnreg finds it; only a test imports the compiler."""
    global KERNEL
    KERNEL = torch.compile(flex_attention)


@pytest.fixture(autouse=True)
def uncompiled():
    """Otherwise torch, after eight ways in which the kernel is called, would no longer compile it."""
    torch._dynamo.reset()


def dense(query, key, value, mask, valid):
    """The routes that the tests on a CPU compare with loops."""
    if mask.weights is None:
        return attnreg.functional.scores_dropout(query, key, value, mask.scores, valid)
    return (attnreg.functional.attention_weights(query, key, valid) * mask.weights) @ value


class Kernel(torch.nn.Module):
    def __init__(self, *, causal):
        super().__init__()
        self.block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, N, N) if causal else None

    def forward(self, q, k, v):
        return KERNEL(q, k, v, block_mask=self.block_mask)


@NEEDS_FLEX
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("placement", ["scores", "weights"])
def test_flex_attention_trains_with_the_masks_of_the_dense_route(causal, p, placement, monkeypatch):
    torch.manual_seed(0)
    inputs = [torch.randn(B, H, N, D, device="cuda", requires_grad=True) for _ in range(3)]
    model, provider = Kernel(causal=causal), attnreg.AttentionDropout(p, placement=placement)
    monkeypatch.setattr(Passes, "draws_at", lambda *args: Draws(9))
    with attnreg.attach(model, provider, stacks=["cross"], example_inputs=inputs):
        out = model(*inputs)
        out.sin().sum().backward()
    site = attnreg.AttentionSite(shape=(B, H, N, N), draws=Draws(9), dtype=torch.float64)
    mask = provider(site)
    valid = torch.ones(N, N, dtype=torch.bool).tril() if causal else None
    exact = [x.detach().double().cpu().requires_grad_() for x in inputs]
    slow = dense(*exact, mask, valid)
    assert (out.detach().cpu() - slow.detach()).abs().max() < 5e-3  # TF32
    slow.sin().sum().backward()
    for ours, theirs in zip(inputs, exact, strict=True):
        assert (ours.grad.cpu() - theirs.grad).abs().max() < 1e-2 * max(1.0, float(theirs.grad.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["eager", "sdpa", pytest.param("flex_attention", marks=NEEDS_FLEX)])
def test_one_seed_gives_the_masks_of_the_cpu(kernel, dtype):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    config = hf.BertConfig(vocab_size=20, **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    here = hf.BertModel(config).train()
    there = copy.deepcopy(here).to("cuda", dtype)
    there.set_attn_implementation(kernel)
    ids = torch.randint(1, 20, (2, 128))
    outputs, rates = [], []
    for model, given in ((here, ids), (there, ids.cuda())):
        with attnreg.attach(model, attnreg.DropKey(0.3)) as handle:
            torch.manual_seed(5)
            outputs.append(model(input_ids=given).last_hidden_state.float().cpu())
            rates.append(handle.drop_rates())
    assert rates[0] == pytest.approx(rates[1], abs=1e-6)
    assert (outputs[0] - outputs[1]).abs().max() < (0.2 if dtype == torch.bfloat16 else 0.02)


def test_inductor_compiles_masks():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 64, 0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda().train()
    x = torch.randn(4, 64, 64, device="cuda")
    with attnreg.attach(model, attnreg.AttentionDropout(0.3, placement="scores"), example_inputs=(x[:2],)):
        compiled = torch.compile(model)
        for seed in (1, 2, 3):
            torch.manual_seed(seed)
            expected = model(x)
            torch.manual_seed(seed)
            assert (compiled(x) - expected).abs().max() < 1e-2


@NEEDS_FLEX
@pytest.mark.parametrize("length", [2048, 8192, 32768])
def test_flex_attention_has_no_mask_in_memory(length):
    config = hf.LlamaConfig(
        vocab_size=100, hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=length, attn_implementation="flex_attention", use_cache=False,
    )  # fmt: skip
    model = hf.LlamaModel(config).cuda().bfloat16().train()
    ids = torch.randint(0, 100, (1, length), device="cuda")
    peaks = []
    for p in (0.0, 0.1):
        with attnreg.attach(model, attnreg.DropKey(p)):
            for _ in range(2):  # the first compiles
                torch.cuda.reset_peak_memory_stats()
                model(input_ids=ids).last_hidden_state.sum().backward()
                model.zero_grad()
            peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] - peaks[0] < length * length  # a boolean mask of one head


def two_steps(case, device, dropout=0.0, checkpointing=False):
    """Losses, drop rates and weights after two steps under a provider, in float64."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    model = hf.BertForSequenceClassification(
        hf.BertConfig(**sizes, intermediate_size=16, initializer_range=0.5, **rates)
    ).double()
    provider = case.make(model).double().to(device)
    model.to(device)
    if checkpointing:
        keep_few_activations(model, {"use_reentrant": False})
    optimizer = sgd(model)
    if learned := provider.learned_parameters():
        optimizer.add_param_group({"params": learned})
    method = attnreg.training.FineTuning(model, optimizer, attnreg.attach(model, provider))
    torch.manual_seed(2)
    losses, rates = [], []
    for _ in range(2):
        losses.append(float(method.step({name: value.to(device) for name, value in BATCH.items()}).loss))
        rates.append({name: float(rate) for name, rate in method.drop_rates().items()})
    weights = torch.cat([each.detach().flatten().cpu() for each in (*model.parameters(), *provider.parameters())])
    return losses, weights, rates


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert (found[1] - expected[1]).abs().max() < 1e-6
    for ours, theirs in zip(found[2], expected[2], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize("case", PROVIDERS, ids=str)
def test_every_provider_trains_as_on_the_cpu(case):
    assert_same(two_steps(case, "cuda"), two_steps(case, "cpu"))


@pytest.mark.parametrize("case", PROVIDERS, ids=str)
def test_recomputing_for_the_backward_pass_changes_nothing(case):
    assert_same(two_steps(case, "cuda", 0.1, checkpointing=True), two_steps(case, "cuda", 0.1))
