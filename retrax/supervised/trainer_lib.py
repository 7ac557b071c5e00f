"""`train()`: from a gin configuration to a trained model.

It makes a Trainer or a Loop of its arguments and runs it; the command line only parses
a configuration and calls it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import gin

from retrax import layers as tl
from retrax import optimizers
from retrax.data.inputs import Inputs
from retrax.errors import ConfigError
from retrax.supervised import lr_schedules
from retrax.supervised.training import EvalTask, Loop, TrainTask
from retrax.trainer import (
    OptState,
    Trainer,
    TrainerState,
    epochs,
    hosts,
    load_trainer_state,
)
from retrax.trainer.arguments import made_inputs, made_model, stream_of
from retrax.trainer.default_metrics import default_metrics, target_rank
from retrax.trainer.epochs import at_steps
from retrax.trainer.precision import Policy
from retrax.trainer.sharding import Sharding

__all__ = [
    "Loop",
    "NamedStream",
    "OptState",
    "Trainer",
    "TrainerState",
    "epochs",
    "load_trainer_state",
    "named_stream",
    "num_devices",
    "train",
]


@gin.configurable(module="retrax.supervised.trainer_lib")
def num_devices(value: int | None = None) -> int | None:
    """Returns how many devices to train on, for gin to set; None is all of them."""
    return value


class NamedStream(NamedTuple):
    """Evaluation data with a name.

    Attributes:
      name: prefix of its metrics and folder of its logs.
      stream: batches, as of `EvalTask`.
    """

    name: str
    stream: Any


@gin.configurable(module="retrax.supervised.trainer_lib")
def named_stream(
    name: str = gin.REQUIRED,  # type: ignore[assignment]
    stream: Any = gin.REQUIRED,
) -> NamedStream:
    """Returns evaluation data with a name, for `train.additional_eval_streams`."""
    return NamedStream(name, stream)


@gin.configurable(module="retrax.supervised.trainer_lib", denylist=["output_dir"])
def train(
    output_dir: str | os.PathLike[str] | None,
    model: Callable[..., tl.Layer] = gin.REQUIRED,  # type: ignore[assignment]
    loss_fn: tl.Layer | None = None,
    inputs: Inputs | Callable[[], Inputs] = gin.REQUIRED,  # type: ignore[assignment]
    optimizer: Callable[..., Any] = optimizers.Adafactor,
    lr_schedule_fn: Callable[[], Callable[[int], float]] = lr_schedules.multifactor,
    trainer_class: Callable[..., Any] = Trainer,
    steps: int = 1000,
    checkpoints_at: Iterable[int] | None = None,
    permanent_checkpoints_at: Iterable[int] | None = None,
    eval_steps: int | None = 10,
    eval_frequency: int | None = 100,
    permanent_checkpoint_frequency: int | None = None,
    random_seed: int | None = None,
    save_graphs: bool = False,
    metrics: Mapping[str, tl.Layer] | None = None,
    checkpoint_highest: str | None = None,
    checkpoint_lowest: str | None = None,
    use_loop: bool = False,
    loss_chunk_size: int = 0,
    use_memory_efficient_trainer: bool = False,
    adasum: bool = False,
    init_checkpoint: str | None = None,
    callbacks: Any = None,
    precision: str | Policy | None = None,
    sharding: str | Sharding | None = None,
    n_weights_shards: int = 1,
    additional_train_tasks: Sequence[TrainTask] | None = None,
    additional_eval_tasks: Sequence[EvalTask] | None = None,
    additional_eval_streams: Sequence[NamedStream] | None = None,
) -> TrainerState | Loop:
    """Trains a model; goes on where a checkpoint in output_dir ends.

    Args:
      output_dir: directory for checkpoints and logs; None writes nothing.
      model: function of `mode` that makes the model.
      loss_fn: loss layer; WeightedCategoryCrossEntropy() by default.
      inputs: data streams, or a function that makes them.
      optimizer: an optimizer or a function (class) that makes one.
      lr_schedule_fn: function that makes the learning-rate schedule.
      trainer_class: makes the trainer; takes the arguments of `Trainer`, or is Loop or
        a subclass of it.
      steps: number of training steps in all, those before a resume included.
      checkpoints_at: steps whose checkpoint is kept for good.
      permanent_checkpoints_at: the same, under Trax's other name.
      eval_steps: batches in one evaluation; None evaluates a finite set wholly.
      eval_frequency: steps between evaluations; None or 0 evaluates at the end only.
      permanent_checkpoint_frequency: steps between checkpoints that are kept for good.
      random_seed: where all random keys come from; None is 0.
      save_graphs: also write the forward computation to forward.txt.
      metrics: name -> metric layer; the usual ones for the loss by default.
      checkpoint_highest: metric whose highest value is kept as a checkpoint.
      checkpoint_lowest: metric whose lowest value is kept as a checkpoint.
      use_loop: train by a Loop (in Trax this is the default).
      loss_chunk_size: see `Loop`.
      use_memory_efficient_trainer: see `Loop`.
      adasum: combine the gradients of several devices by Adasum.
      init_checkpoint: checkpoint of another run to take the weights from.
      callbacks: see `Callback`; functions (classes) of the trainer that make them.
      precision: 'float32', 'mixed_bfloat16' or 'mixed_float16', or a `Policy`.
      sharding: 'fsdp' or a `Sharding`, for several devices.
      n_weights_shards: 1; weights are whole on each device.
      additional_train_tasks: more tasks to train on, with a Loop.
      additional_eval_tasks: more tasks to evaluate on, with a Loop.
      additional_eval_streams: more data to evaluate on by `metrics`, with a Loop.

    Returns:
      The state after the last step; the Loop if there is one.

    Raises:
      ConfigError: arguments that cannot work, before anything is written.
      Interrupted: after SIGINT or SIGTERM; the last finished step is saved.
    """
    _check_count("steps", steps, least=1)
    _check_count("eval_steps", eval_steps, least=0, optional=True)
    _check_count("eval_frequency", eval_frequency, least=0, optional=True)
    kept = {*(checkpoints_at or ()), *(permanent_checkpoints_at or ())}
    every = permanent_checkpoint_frequency
    kept |= _regular_steps(steps, every, permanent_checkpoints_at)
    _check_shards(n_weights_shards)
    loss_fn = tl.WeightedCategoryCrossEntropy() if loss_fn is None else loss_fn
    options: dict[str, Any] = {
        "random_seed": random_seed,
        "n_devices": num_devices(),
        "init_checkpoint": init_checkpoint,
    }
    given = {"callbacks": callbacks, "precision": precision, "sharding": sharding}
    options |= {name: x for name, x in given.items() if x is not None}
    more = _Additional(
        tuple(additional_train_tasks or ()),
        tuple(additional_eval_tasks or ()),
        tuple(additional_eval_streams or ()),
    )
    loop_class = _loop_class(trainer_class, use_loop)
    if loop_class is not None:
        trainer = _make_loop(
            loop_class,
            (model, loss_fn, optimizer, lr_schedule_fn(), inputs, metrics, more),
            (steps, eval_frequency, eval_steps),
            output_dir=output_dir,
            permanent_checkpoint_at=kept - {0},
            checkpoint_high_metric=checkpoint_highest,
            checkpoint_low_metric=checkpoint_lowest,
            loss_chunk_size=loss_chunk_size,
            use_memory_efficient_trainer=use_memory_efficient_trainer,
            adasum=adasum,
            **options,
        )
        arguments = (max(steps - trainer.step, 0),)
    else:
        _refuse_for_trainer(more, loss_chunk_size, use_memory_efficient_trainer)
        trainer = trainer_class(
            model,
            loss_fn,
            optimizer,
            lr_schedule_fn(),
            inputs,
            output_dir,
            checkpoints_at=kept,
            metrics=metrics,
            checkpoint_highest=checkpoint_highest,
            checkpoint_lowest=checkpoint_lowest,
            **({"step_options": {"adasum": True}} if adasum else {}),
            **options,
        )
        arguments = (steps, eval_frequency, eval_steps)
    _run(trainer, steps, arguments, save_graphs)
    return trainer if isinstance(trainer, Loop) else trainer.state


def _loop_class(trainer_class: Any, use_loop: bool) -> type[Loop] | None:
    """Returns what makes the Loop; None if a Trainer is wanted."""
    if isinstance(trainer_class, type) and issubclass(trainer_class, Loop):
        return trainer_class
    return Loop if use_loop else None


def _check_shards(n_weights_shards: int) -> None:
    if n_weights_shards != 1:
        raise ConfigError(
            f"n_weights_shards={n_weights_shards!r}: weights are whole on each device "
            "here; leave it out."
        )


def _regular_steps(steps: int, every: int | None, at: Any) -> set[int]:
    """Returns the steps whose checkpoints are kept because they come regularly."""
    _check_count("permanent_checkpoint_frequency", every, least=1, optional=True)
    if every and at is not None:
        raise ConfigError(
            "set only one of permanent_checkpoint_frequency and "
            "permanent_checkpoints_at."
        )
    return set(range(0, steps + 1, every)) if every else set()


class _Additional(NamedTuple):
    train_tasks: tuple[TrainTask, ...]
    eval_tasks: tuple[EvalTask, ...]
    eval_streams: tuple[NamedStream, ...]


def _refuse_for_trainer(
    more: _Additional, loss_chunk_size: int, use_memory_efficient_trainer: bool
) -> None:
    """Raises ConfigError for what only a Loop can do."""
    given = {f"additional_{name}": x for name, x in more._asdict().items() if x}
    if loss_chunk_size:
        given["loss_chunk_size"] = loss_chunk_size
    if use_memory_efficient_trainer:
        given["use_memory_efficient_trainer"] = True
    if given:
        raise ConfigError(
            f"{', '.join(sorted(given))} needs a Loop: set train.use_loop = True."
        )


def _make_loop(
    loop_class: Callable[..., Loop],
    what: tuple[Any, ...],
    when: tuple[int, int | None, int | None],
    **options: Any,
) -> Loop:
    """Makes a Loop that trains, evaluates and saves when a Trainer would."""
    model, loss_fn, optimizer, schedule, inputs, metrics, more = what
    steps, eval_frequency, eval_steps = when
    inputs = made_inputs(inputs)
    if not isinstance(loss_fn, tl.Layer):
        raise TypeError(f"loss_fn must be a loss layer, got {loss_fn!r}.")
    n = options["n_devices"] or 1
    train_stream = stream_of(inputs, "train_stream", n)
    task = TrainTask(train_stream, loss_fn, optimizer, schedule, loss_name="loss")
    if metrics is None:
        metrics = default_metrics(loss_fn, target_rank(task.sample_batch))
    regular = at_steps("eval_frequency", eval_frequency or None, None)

    def due(step: int) -> bool:
        return step == steps or regular(step)

    def eval_task(stream: Any, prefix: str | None = None) -> EvalTask:
        names, layers = list(metrics), list(metrics.values())
        return EvalTask(stream, layers, names, eval_steps, export_prefix=prefix)

    eval_tasks = (
        [] if eval_steps == 0 else [eval_task(stream_of(inputs, "eval_stream", n))]
    )
    eval_tasks += [eval_task(s.stream, s.name) for s in more.eval_streams]
    return loop_class(
        made_model(model, "train"),
        [task, *more.train_tasks],
        eval_model=made_model(model, "eval"),
        eval_tasks=[*eval_tasks, *more.eval_tasks],
        eval_at=due,
        checkpoint_at=due,
        **options,
    )


def _run(
    trainer: Trainer | Loop, steps: int, arguments: tuple[Any, ...], save_graphs: bool
) -> None:
    """Runs what was made, unless the run is done already, and closes it."""
    try:
        if trainer.step >= steps and not trainer.evaluation_due:
            trainer.log_step(
                f"This run is done: it has {trainer.step} of {steps} steps. To train "
                "longer raise train.steps, for example "
                f"--config='train.steps = {2 * steps}'."
            )
            return
        where = _devices_text(trainer.n_devices, hosts.count())
        trainer.log_step(f"Starting training on {where}.")
        trainer.print_n_weights()
        if save_graphs:
            trainer.save_computation_graphs()
        trainer.save_gin()
        trainer.run(*arguments)
        trainer.save_gin()  # Now with what evaluation used, too.
        if trainer.step >= steps:
            trainer.log_step("Training done.")
    finally:
        trainer.close()


def _devices_text(n: int, n_hosts: int) -> str:
    text = "1 device" if n == 1 else f"{n} devices"
    return text if n_hosts == 1 else f"{text} of {n_hosts} processes"


def _check_count(name: str, value: Any, least: int, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number, got {value!r}.")
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}.")
