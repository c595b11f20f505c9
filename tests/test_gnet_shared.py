"""G-Net that reads the model's embeddings instead of copying them."""

import copy
import pickle

import pytest
import torch
from torch import nn

import attnreg
from tests.test_gnet import CASES


def shared(model, **options):
    return attnreg.GNetProvider.for_model(model, initial_keep=0.5, share_embeddings=True, **options)


@pytest.mark.parametrize("name", ["bert", "roberta", "electra", "bart", "gpt2", "t5", "llama"])
def test_shared_embeddings_are_read_as_they_are(name):
    """Equal to a G-Net that has copies, before and after the model's embeddings have changed."""
    model, batch = CASES[name].build(), CASES[name].batch()
    net, copies = (
        shared(model, num_heads=2),
        attnreg.GNetProvider.for_model(model, num_heads=2),
    )
    own = [key for key in net.state_dict() if "tokens" in key or "positions" in key]
    assert own == ([] if name not in ("t5", "llama") else ["network.positions.weight"])
    for _ in range(2):
        missing = copies.load_state_dict(net.state_dict(), strict=False).missing_keys
        assert set(missing) == {f"network.{table}.weight" for table in net.shared_tables}
        with torch.no_grad():
            copies.network.tokens.weight.copy_(model.get_input_embeddings().weight)
            for table in model.modules():
                if "positions" in net.shared_tables and table is net.network.tables["positions"]:
                    copies.network.positions.weight.copy_(table.weight)
        assert torch.equal(net.logits(batch), copies.logits(batch))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1


def test_no_gradient_and_no_optimizer_reaches_shared_embeddings():
    model, batch = CASES["bert"].build(), CASES["bert"].batch()
    net = shared(model, num_heads=4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1)
    with attnreg.attach(model, net):
        net.sample(batch).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert not {id(p) for p in net.parameters()} & {id(p) for p in model.parameters()}
    assert all(not isinstance(module, nn.Embedding) for module in net.modules())


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_a_copy_reads_the_copied_models_embeddings(again):
    model, batch = CASES["bert"].build(), CASES["bert"].batch()
    net = shared(model)
    handle = attnreg.attach(model, net)
    clone, alone = again((model, handle)), again(net)
    (other, other_handle), reads = clone, lambda n: n.network.tables["tokens"]
    assert reads(net) is model.get_input_embeddings()
    assert reads(other_handle.provider) is other.get_input_embeddings() is not model.get_input_embeddings()
    before = net.logits(batch)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()
    assert not torch.equal(net.logits(batch), before)
    assert torch.equal(other_handle.provider.logits(batch), before)
    assert torch.equal(alone.logits(batch), before)
    plain = copy.deepcopy(other)
    attnreg.detach(plain)
    with attnreg.attach(plain, alone):
        assert reads(alone) is plain.get_input_embeddings()


def test_shared_embeddings_of_another_precision_and_device():
    model, batch = CASES["bert"].build(), CASES["bert"].batch()
    net = shared(model)
    expected = net.logits(batch)
    model.to(torch.bfloat16)
    assert net.logits(batch).dtype == torch.float32
    assert torch.allclose(net.logits(batch), expected, atol=1e-2)
    assert net.double().logits(batch).dtype == torch.float64
    net.to("meta"), model.to("meta")
    assert net.logits({name: tensor.to("meta") for name, tensor in batch.items()}).device.type == "meta"


def test_a_loaded_g_net_with_shared_embeddings_wants_a_model(tmp_path):
    model, batch = CASES["bert"].build(), CASES["bert"].batch()
    net = shared(model)
    net.save_pretrained(tmp_path / "p")
    assert (tmp_path / "p" / "model.safetensors").stat().st_size < 8000
    loaded = attnreg.GNetProvider.from_pretrained(tmp_path / "p")
    for ask in (loaded.logits, loaded.sample, loaded.prepare):
        with pytest.raises(RuntimeError, match=r"A G-Net with shared embeddings must be attached to a model first"):
            ask(batch)
    with attnreg.attach(model, attnreg.OnLayers(loaded & attnreg.AttentionDropout(0.1), [0, 1])):
        assert torch.equal(loaded.logits(batch), net.logits(batch))


@pytest.mark.parametrize(("name", "got"), [("electra", r"\(40, 8\)"), ("t5", r"none"), ("roberta", r"\(32, 16\)")])
def test_embeddings_of_another_size_are_refused(name, got):
    net, model = shared(CASES["bert"].build()), CASES[name].build()
    with pytest.raises(ValueError, match=rf"made for embeddings of .* of shape \(.*, 16\), but .* has {got}: use"):
        attnreg.attach(model, net)
    assert not attnreg.is_attached(model)
