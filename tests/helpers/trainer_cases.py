"""What somebody may write instead of the public methods of a Trainer, and the kinds of regularizers that act in it."""

import contextlib

import torch

import attnreg
from attnreg.training import RDropLoss
from tests.helpers.method_cases import weights
from tests.helpers.trainers import Rows, arguments, bert

KINDS = {  # of what acts in a Trainer
    "mask": lambda: {"provider": attnreg.DropKey(0.3)},
    "schedule": lambda: {"provider": attnreg.Scheduled(attnreg.DropHead(), 4, p=[(0, 0.1), (1, 0.5)])},
    "epochs": lambda: {"provider": attnreg.CrossTuning(attnreg.DropKey(0.3))},
    "penalty": lambda: {"provider": attnreg.AttentionEntropy(2.0)},
    "learned": lambda: {"provider": attnreg.ConcreteDropout(2, 0.2)},
    "two passes": lambda: {"provider": attnreg.AttributionProvider(0.5, 0.5)},
    "objective": lambda: {"provider": attnreg.DropKey(0.3), "objective": RDropLoss(2.0)},
}


def made(kind):
    """The arguments of a kind of regularizer, of all of them at once, or of none."""
    if kind == "everything":
        several = [make()["provider"] for name, make in KINDS.items() if name != "objective"]
        return {"provider": attnreg.Compose(*several)}
    return {} if kind == "plain" else KINDS[kind]()


def stock_step(self, model, inputs, num_items_in_batch=None):
    """What `Trainer.training_step` does, written by somebody."""
    model.train()
    inputs = self._prepare_inputs(inputs)
    loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
    loss = loss / self.current_gradient_accumulation_steps
    self.accelerator.backward(loss)
    return loss.detach()


def stock_loss(self, model, inputs, return_outputs=False, **kwargs):
    output = model(**inputs)
    return (output.loss, output) if return_outputs else output.loss


def stock_optimizer(self, model=None):
    kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
    decayed, kept = self.get_decay_parameter_names(self.model), dict(self.model.named_parameters())
    groups = [[p for name, p in kept.items() if (name in decayed) is decays] for decays in (True, False)]
    groups = [{"params": group, "weight_decay": 0.0} for group in groups]
    self.optimizer = kind(groups, **options)  # the Trainer looks at no result


def stock_scheduler(self, num_training_steps, optimizer=None):
    self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)


def train_loader(self):
    sampler = torch.utils.data.RandomSampler(self.train_dataset)
    loader = torch.utils.data.DataLoader(self.train_dataset, 4, sampler=sampler, collate_fn=self.data_collator)
    return self.accelerator.prepare(loader)


def other_loader(self, *args):
    return torch.utils.data.DataLoader(Rows(), 4, collate_fn=self.data_collator)


def both(self, num_training_steps):
    raise AssertionError  # nobody calls it in this version


@contextlib.contextmanager
def nothing(self, *args, **kwargs):
    yield


def search(self, *args, **kwargs):
    return None


def no_metrics(self, *args, **kwargs):
    return {}


# What somebody may write instead of each public method that runs in training.
REPLACED = {
    "training_step": stock_step,
    "compute_loss": stock_loss,
    "create_optimizer": stock_optimizer,
    "create_optimizer_and_scheduler": both,
    "create_scheduler": stock_scheduler,
    "get_decay_parameter_names": lambda self, model: [name for name, _ in model.named_parameters()],
    "get_optimizer_cls_and_kwargs": staticmethod(
        lambda args, model=None: (torch.optim.AdamW, {"lr": 1e-2, "fused": True})
    ),
    "get_train_dataloader": train_loader,
    "get_eval_dataloader": other_loader,
    "get_test_dataloader": other_loader,
    "compute_loss_context_manager": nothing,
    "autocast_smart_context_manager": nothing,
    "log": lambda self, logs, *args, **kwargs: None,
    "evaluate": no_metrics,
    "predict": no_metrics,
    "prediction_step": lambda self, *args, **kwargs: (torch.zeros(()), None, None),
    "save_model": lambda self, *args, **kwargs: None,
    "store_flos": lambda self: None,
    "floating_point_ops": lambda self, inputs: 0,
    "get_total_train_batch_size": lambda self, args: 4,
    "call_model_init": lambda self, trial=None: self.model_init(),
    "hyperparameter_search": search,
}
ONLY_CALLED = {  # by overrides: nobody writes them anew, or only with the same result
    "evaluation_loop", "get_batch_samples", "set_initial_training_values", "create_accelerator_and_postprocess", "train",
    "add_callback", "pop_callback", "remove_callback", "num_examples", "is_local_process_zero", "is_world_process_zero",
    "get_sp_size", "get_cp_size", "get_tp_size",
}  # fmt: skip
OUTSIDE = {  # of training: nothing in it calls them
    "init_hf_repo", "create_model_card", "push_to_hub", "end", "save_metrics", "log_metrics", "metrics_format",
    "save_state", "get_num_trainable_parameters", "get_learning_rates", "get_optimizer_group",
}  # fmt: skip


def trained(folder, kind, options, before=lambda trainer: None, **given):
    """The weights of model and provider after a training; ``before`` may change the trainer."""
    usual = {"max_steps": 4, "num_train_epochs": 2, "gradient_accumulation_steps": 2}
    given = {"model": bert(0.0), **given}
    usual |= given.pop("args", {})
    rows = {"train_dataset": Rows(), "eval_dataset": Rows()}
    trainer = kind(args=arguments(folder, **usual), **rows, **options, **given)
    before(trainer)
    trainer.train()
    trainer.evaluate()
    trainer.predict(Rows())
    learned = [*trainer.handle.provider.parameters()] if "provider" in options else []
    return torch.cat([weights(trainer.model), *(each.detach().flatten() for each in learned)])
