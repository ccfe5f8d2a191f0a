"""The object that runs a plan inside a training loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from clipwise.accounting import GaussianSteps, Ledger, ProjectedSteps, Relation
from clipwise.clipping import Style, is_private
from clipwise.engine import Clipped, Clipper, Constants
from clipwise.engine.origin import Evidence
from clipwise.engine.precision import widened
from clipwise.errors import (
    BudgetSpent,
    InvalidLosses,
    InvalidPlan,
    InvalidSampling,
    NotSeparable,
    UnaccountedUpdate,
    UnsupportedNode,
)
from clipwise.noise import GaussianNoise, Normals
from clipwise.plan import Plan
from clipwise.private import checkpoint, saving, state
from clipwise.private.batch import Batch
from clipwise.private.digests import Looked
from clipwise.private.evidence import Checked, Checks
from clipwise.private.evidence.closure import batch_size
from clipwise.private.evidence.modes import none_watching
from clipwise.private.evidence.records import Again
from clipwise.private.feeding import Feeding
from clipwise.private.fit import Fit
from clipwise.private.guard import Guard, check_one_process
from clipwise.private.loader import Loader, Part, check_dataset, check_options, check_part, not_declared
from clipwise.private.seeding import Seeding
from clipwise.private.statistics import StepStatistics
from clipwise.sampling import Poisson

__all__ = ["Private"]

LossFunction = Callable[[nn.Module, Any], Tensor]


class Private:
    """Clips, sums, adds noise, steps the optimizer and keeps the ledger, in an ordinary training loop.

    Guarantees: every step is on `ledger` before its noise is drawn; what the optimizer sees is the clipped sum plus
    noise of `noise_multiplier` times its joint sensitivity, divided by the *expected* batch size; after `plan.steps`
    steps nothing more is released. The model, the optimizer and the data set are used as they are; only `p.grad` is
    written.

    Without `seed` all randomness is the operating system's and none of it can be saved. With `seed` the run can be
    repeated bit for bit (same machine, same versions; its loader also sets the global generators before every batch),
    and anyone who knows the seed can remove the noise: for tests and experiments. Any other run of the seed has other
    noise: docs/loop.md says what it is labelled with. `loss_fn` (as for `clipwise.check_model`) has the first batch of
    the loader checked for losses that depend on other samples in ways that a graph does not show. `noise` chooses
    another source of normal numbers.

    A sample's gradient must depend on that sample alone. The loop's own forward pass is therefore watched between the
    loader and `step`, at the first steps and now and then: see `checked` and docs/soundness.md. `constants` are tensors
    or modules outside the model that hold no data of records though they change during training, such as a teacher
    that averages released weights.

    Until its last step, or `close`, the steps of the optimizer are the run's: `loss.backward(); optimizer.step()` is
    refused before it changes the weights, and a gradient that others wrote ends the run (docs/loop.md). Batches
    come from `loader`. `own_batches=True` takes those of your own loader instead: that they are drawn as the
    plan's sampling says is then declared, on the ledger and in every report.

    >>> import clipwise as cw, torch
    >>> from torch.utils.data import TensorDataset
    >>> dataset = TensorDataset(torch.randn(100, 3), torch.randn(100))
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> plan = cw.Plan(sampling=cw.Poisson(100, 10), steps=5, clip=cw.Abadi(1.0), noise_multiplier=1.0)
    >>> private = cw.Private(plan, model, optimizer, seed=0)
    >>> for x, y in private.loader(dataset):
    ...     done = private.step((model(x).squeeze(1) - y).square())
    >>> private.ledger.steps
    5
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        seed: int | None = None,
        loss_fn: LossFunction | None = None,
        noise: Normals | None = None,
        constants: Constants = (),
        own_batches: bool = False,
    ) -> None:
        if not isinstance(plan, Plan):
            raise InvalidPlan(f"plan must be a clipwise.Plan, got {type(plan).__name__}.")
        if plan.noise_multiplier is None:
            raise InvalidPlan("the plan has no noise yet: plan.calibrate(epsilon=..., delta=...) gives it some.")
        check_one_process()
        self._plan, self._model, self._optimizer, self._loss_fn = plan, model, optimizer, loss_fn
        self._own_batches = own_batches
        self._seeding = Seeding(seed, plan, model, optimizer)
        self._source = noise
        planned = plan.events()[0].repeated(1)
        assert isinstance(planned, (GaussianSteps, ProjectedSteps))
        self._event = replace(planned, own_batches=own_batches)
        self._ledger = Ledger()
        self._done = 0
        self._guard = Guard()
        self._bind()
        declared = (constants,) if isinstance(constants, (Tensor, nn.Module)) else tuple(constants)
        self._checks = Checks(model, declared, isinstance(plan.sampling, Poisson), self._seeding.entropy)

        self._batch = Batch()
        self._last: tuple[int, list[Clipped[Any]]] | None = None

        self._iteration = 0  # of the loader
        self._passed_by = False  # a batch was handed out, and no losses of it came
        self._iterating = self._closed = False
        self._offered: Part | None = None
        self._parts = 0
        self._complete = False

        self._expected_weights: str | None = None
        self._journal: checkpoint.Journal | None = None
        self.extra: Any = None
        """What was given to `save(path, extra=...)`, after a resume."""

    def _bind(self) -> None:
        self._fit = Fit.of(self._model, self._optimizer)
        named = dict(zip(self._fit.names, self._fit.tensors, strict=True))
        self._clip: Callable[[Tensor, Style, Evidence], Clipped[Any]] = Clipper(named)
        self._position = {id(p): place for place, p in enumerate(self._fit.tensors)}
        self._wide = [widened(p.dtype) for p in self._fit.tensors]
        self._guard.bind(self._fit.names, self._fit.tensors, self._fit.frozen)
        self._noise = GaussianNoise(self._fit.tensors, self._seeding.entropy, self._source)
        self._scaled: tuple[Style, list[float]] | None = None

    # What can be asked

    @property
    def plan(self) -> Plan:
        """The plan of the run."""
        return self._plan

    @property
    def ledger(self) -> Ledger:
        """Everything that was released, as facts. An update that clipwise did not make stands there without noise."""
        self._guard.look(self._ledger, self._plan.sampling)
        return self._ledger

    def _check_accounted(self) -> None:
        """Refuse to continue, or to state anything, after an update that clipwise did not make."""
        self._guard.look(self._ledger, self._plan.sampling)
        self._guard.check()

    def _check_open(self) -> None:
        if self._closed:
            raise BudgetSpent("the run was closed by private.close(). Begin another one to train further.")
        check_one_process()
        self._check_accounted()

    @property
    def steps_done(self) -> int:
        """Steps of the plan that are used up."""
        return self._done

    @property
    def last(self) -> StepStatistics | None:
        """Statistics of the last step: norms, clipping, bad samples, batch size. **Not covered by epsilon**."""
        return None if self._last is None else StepStatistics.of(*self._last)

    @property
    def checked(self) -> Checked:
        """What the checks for samples that mix have shown so far.

        The forward pass is repeated with other records in the batch; a sample whose loss or gradient moves is refused.
        """
        return self._checks.found

    @property
    def looked(self) -> Looked:
        """Whether the data of a seeded run stayed the same, as far as they were looked at."""
        return self._seeding.digests.looked

    def epsilon(self, delta: float, accountant: str = "exact", *, relation: Relation | None = None) -> float:
        """The epsilon spent so far at this `delta`; refused after an update that clipwise did not make."""
        self._check_accounted()
        if self._passed_by and not self._done:
            raise UnaccountedUpdate(
                "batches of the loader were used, but the losses of none were given to private.step: whatever was "
                "computed from them is not on the ledger, so epsilon 0 would say nothing of it."
            )
        return self._ledger.epsilon(delta, accountant, relation=relation)

    # The step

    def backward(self, losses: Tensor) -> None:
        """Add the clipped gradients of a physical batch to the sum of the logical one. Nothing is released.

        An error leaves everything as it was, so the same batch can be tried again.
        """
        self._checks.pause()
        with none_watching():  # of another run in the same loop
            try:
                self._backward(losses)
            except (NotSeparable, UnsupportedNode):
                self._checks.block()
                raise

    def _backward(self, losses: Tensor) -> None:
        self._check_ready()
        if not isinstance(losses, Tensor) or losses.dim() != 1:
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise InvalidLosses(f"losses must be a tensor of shape (B,), one per sample, got {shape}.")
        part = self._take_part(losses.shape[0])
        self._batch.check(losses)
        style = self._current_style()
        evidence = self._checks.close(losses, self._position, self._fit.tensors)
        clipped = self._clip(losses, style, evidence)
        self._checks.accept(self._done)
        self._batch.add(losses, clipped, self._fit.names, self._wide)
        if part is not None:
            self._offered = None
            self._parts += 1
            self._complete = part.last

    def step(self, losses: Tensor | None = None) -> bool:
        """`backward`, and at the end of the logical batch record, add noise, step the optimizer. True if it did so.

        With `private.loader` the loader knows where a logical batch ends. With own batches every `step` ends one, and
        `backward` before it adds further physical batches. `step()` without losses ends what `backward` gathered.
        """
        if losses is not None:
            self.backward(losses)
        else:
            self._check_gathered()
        return self._end_batch(self._step)

    def release(self) -> bool:
        """As `step()`, but the caller steps the optimizer: once, with `p.grad` as it is. True if there is one.

        The batch is charged, noised and written to `p.grad` when this returns True, whether or not a step follows. Give
        the losses to `backward` before; docs/loop.md has the loop.
        """
        self._check_gathered()
        return self._end_batch(self._release)

    def _check_gathered(self) -> None:
        self._checks.abandon()
        self._check_ready()
        if self._offered is not None:
            raise InvalidSampling("the batch from the loader was not given to backward(losses) or step(losses).")

    def _end_batch(self, end: Callable[[], None]) -> bool:
        """Make the release if the logical batch is complete."""
        if not self._own_batches and not self._complete:
            return False
        with none_watching(), self._guard.restoring():
            end()
        return True

    def close(self) -> None:
        """End the run before its last step: no step follows, and model and optimizer are the caller's again.

        What was spent stays spent. A run that made all its steps is closed by itself, when its loop ends.
        """
        self._check_accounted()
        self._forget()
        self._closed = True
        self._guard.close()

    def _check_ready(self) -> None:
        if self._done >= self._plan.steps:
            raise BudgetSpent(
                f"all {self._plan.steps} steps of the plan are made. More would spend privacy that was not planned: "
                "make a plan with more steps before training."
            )
        self._check_open()
        if not self._own_batches and not self._iteration:
            raise not_declared(self._plan.sampling)
        if not self._fit.holds(self._optimizer):
            if self._batch.sums is not None:
                raise InvalidPlan(
                    "parameters were frozen, unfrozen, added, removed, replaced or resized within a logical batch. Do "
                    "so between batches, and give the optimizer the new ones."
                )
            self._bind()
        self._fit.check_step()
        if self._expected_weights is not None:
            state.check_weights(self._expected_weights, self._model, self._optimizer)
            self._expected_weights = None

    def _take_part(self, size: int) -> Part | None:
        """The part of the logical batch that the next losses belong to; None when the batches are the user's own."""
        self._guard.begun = True
        if self._own_batches:
            self._batch.check_own(size, self._plan.sampling)
            return None
        check_part(self._offered, (self._done, self._parts), size)
        return self._offered

    def _current_style(self) -> Style:
        """The style of this step: one object for clipping and for noise."""
        style = self._plan.style(self._done) if self._batch.style is None else self._batch.style
        if (self._scaled is None or self._scaled[0] is not style) and self._plan.noise_multiplier:
            if not is_private(style):
                raise InvalidPlan(f"{style!r} of step {self._done} does not bound what a sample contributes.")
            groups = style.groups(self._fit.names)
            scales = style.noise_scales(list(groups))
            of = {name: self._plan.noise_multiplier * scales[group] for group in groups for name in groups[group]}
            self._scaled = (style, [of[name] for name in self._fit.names])
        return style

    def _step(self) -> None:
        """Release, and step the optimizer with what was released."""
        self._release()
        with self._guard.stepping():
            self._optimizer.step()
        self._optimizer.zero_grad()
        self._guard.expect_none()
        self._close_if_done()

    def _release(self) -> None:
        """Charge first, then noise, average, write. From the charge on the step is spent, whatever happens."""
        fit, step = self._fit, self._done
        self._current_style()
        sums = self._batch.sums
        if sums is None:
            sums = [torch.zeros_like(p, dtype=d) for p, d in zip(fit.tensors, self._wide, strict=True)]
        self._ledger.record(self._event)
        self._done += 1
        self._last = (step, self._batch.parts)
        self._forget()
        if self._journal is not None:
            self._journal.charge(self._done)
        for p, g in zip(fit.tensors, self._noised_mean(sums, step), strict=True):
            p.grad = g.to(p.dtype)
        self._guard.expect_step()
        self._close_if_done()

    def _close_if_done(self) -> None:
        self._guard.is_last = self._done >= self._plan.steps and not self._iterating
        if self._guard.is_last and not self._guard.is_due:
            self._guard.close()

    def _noised_mean(self, sums: list[Tensor], step: int) -> list[Tensor]:
        """(sums + noise) / expected batch size, a public number, on the public grid."""
        scale = 1.0 / self._plan.batch_size
        if self._plan.noise_multiplier:
            assert self._scaled is not None
            before = self._seeding.charging(self._ledger, self._event, step)
            return self._noise.release(sums, self._scaled[1], scale, step, self._seeding.label(), before)
        torch._foreach_mul_(sums, scale)
        return sums

    def _forget(self) -> None:
        """Drop what was gathered of the logical batch."""
        self._batch = Batch()
        self._parts, self._complete = 0, False

    # The loader

    def loader(
        self,
        dataset: Dataset[Any],
        physical_batch_size: int | None = None,
        yield_empty: bool = False,
        **options: Any,
    ) -> Loader:
        """The batches of the steps still to be made, drawn as the plan's sampling says.

        `physical_batch_size` cuts a logical batch into pieces that fit the memory. Other keywords go to
        `torch.utils.data.DataLoader`, but those that would change the sampling are refused. An empty batch makes its
        noise-only step by itself, or is handed out with length zero under `yield_empty=True`.
        """
        if self._own_batches:
            raise InvalidSampling("own_batches=True declares your own batches: omit it to use the loader.")
        steps, size = self._plan.steps, physical_batch_size
        check_dataset(dataset, self._plan.sampling)
        check_options(size, options)
        digests = self._seeding.look_at(dataset, size)
        draws, entropy = self._seeding.draws(), self._seeding.entropy
        loader = Loader(Feeding(self), dataset, draws, entropy, steps, size, yield_empty, options, digests)
        self._checks.add_data(dataset, options.get("collate_fn"))
        return loader

    def _open_watch(self, batch: Any, size: int, again: Again | None) -> None:
        """Watch the forward pass on this batch."""
        self._checks.open(batch, size, self._done, again)

    def watch(self, batch: Any) -> AbstractContextManager[None]:
        """Watch the forward pass on your own batch (`own_batches=True`), as the loader does by itself.

        With the loader it serves to compute the losses of its batch again after an error.

        >>> import clipwise as cw
        >>> model = torch.nn.Linear(3, 1)
        >>> plan = cw.Plan(sampling=cw.FullBatch(10), steps=5, clip=cw.Abadi(1.0), noise_multiplier=1.0)
        >>> private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), own_batches=True)
        >>> x, y = torch.randn(10, 3), torch.randn(10)
        >>> with private.watch((x, y)):
        ...     losses = (model(x).squeeze(1) - y).square()
        >>> private.step(losses)
        True
        """
        if not self._own_batches and not self._iteration:
            raise not_declared(self._plan.sampling)
        return self._checks.watching(batch, batch_size(batch), self._done)

    # Saving and resuming

    def state_dict(self) -> dict[str, Any]:
        """Plan, ledger, position and, for a seeded run only, the seed. Never a sum, a key or a digest of data."""
        return state.capture(self)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`, in a `Private` that has made no step yet; load model and optimizer as well.

        Steps made after `state_dict()` was called are not known here. `save` and `resume` count those too.
        """
        state.restore(self, saved)

    def save(self, path: str | os.PathLike[str], extra: Any = None) -> None:
        """Write model, optimizer and run to one file, such that a crash leaves the old file or the new one.

        From then on every step is counted in that file before it is made (unseeded runs). `extra` holds whatever the
        loop needs besides, such as `{"scheduler": scheduler.state_dict()}`.
        """
        saving.save(self, path, extra)

    @classmethod
    def resume(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizer,
        *,
        plan: Plan | None = None,
        loss_fn: LossFunction | None = None,
        noise: Normals | None = None,
        constants: Constants = (),
    ) -> Private:
        """Go on from `save`: model and optimizer are filled, and `private.loader(dataset)` gives the next batch.

        `plan` is only needed when it holds your own clipping rule, and must equal the saved one; `own_batches` is
        as it was saved. A seeded run repeats the steps after the last save bit for bit. An unseeded one draws fresh
        noise, and the steps begun since stay charged.
        """
        options = dict(loss_fn=loss_fn, noise=noise, constants=constants)
        return saving.resume(cls, path, model, optimizer, plan, options)

    def __getstate__(self) -> NoReturn:
        raise TypeError("Private cannot be pickled or copied: a run has one ledger. Use save(path) and resume.")
