"""The object that runs a plan inside a training loop."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn, final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from clipwise._show import html_table
from clipwise._validate import is_count
from clipwise.accounting import Ledger, Relation
from clipwise.clipping import Style
from clipwise.engine import Constants
from clipwise.errors import CheckpointError, InvalidPlan, InvalidSampling, NotSeparable, UnsupportedNode
from clipwise.noise import Normals
from clipwise.plan import Plan, warn_of_delta
from clipwise.private import labels, saving
from clipwise.private.batch import Batch
from clipwise.private.digests import Looked
from clipwise.private.evidence import Checked, Checks
from clipwise.private.evidence.closure import LossFn, batch_size
from clipwise.private.evidence.modes import none_watching
from clipwise.private.feeding import Feeding
from clipwise.private.fit import Fit
from clipwise.private.loader import Loader, check_dataset, check_options, not_declared
from clipwise.private.norms import Given, norms_of
from clipwise.private.position import Position
from clipwise.private.release import Release
from clipwise.private.state import PrivateState
from clipwise.private.statistics import StepStatistics
from clipwise.private.witness import Witness

__all__ = ["Private"]


@final
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
    plan's sampling says is then declared, on the ledger and in every report. `witness`, a file on other storage, keeps
    an older copy of a saved run from being continued (`clipwise.Witness`). `memory` is how many bytes gradients of
    single samples may take to save time, beyond what a step holds anyway; None: a tenth of what a plain step holds.

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
        loss_fn: LossFn | None = None,
        noise: Normals | None = None,
        constants: Constants = (),
        own_batches: bool = False,
        witness: Witness | str | os.PathLike[str] | None = None,
        memory: int | None = None,
    ) -> None:
        if not isinstance(plan, Plan):
            raise InvalidPlan(f"plan must be a clipwise.Plan, got {type(plan).__name__}.")
        if plan.mechanism.unit != "example":
            raise InvalidPlan(f"the mechanism {plan.mechanism!r} is run by clipwise.federated.Server, not by Private.")
        if memory is not None and not is_count(memory, least=0):
            raise InvalidPlan(f"memory must be a number of bytes or None, got {memory!r}.")
        self._plan, self._model, self._optimizer = plan, model, optimizer
        self._fit = Fit.of(model, optimizer)
        self._position = Position(
            plan.steps,
            plan.sampling,
            seed,
            start=lambda: labels.of_run(plan, model, optimizer),
            now=lambda: labels.of_optimizer(optimizer),
        )
        self._release = Release(plan, self._position, noise, own_batches=own_batches, witness=Witness.of(witness))
        self._batch = Batch(plan.sampling, own_batches)
        declared = (constants,) if isinstance(constants, (Tensor, nn.Module)) else tuple(constants)
        self._checks = Checks(model, declared, plan.sampling.has_random_sizes, self._position.entropy, loss_fn)
        self._norms = norms_of(Given(plan, model, loss_fn, noise, self._position, self._batch, self._checks, memory))
        self._attach()
        self._state = PrivateState(plan, model, optimizer, own_batches, memory, self._release)
        self.extra: Any = None
        """What was given to `save(path, extra=...)`, after a resume."""

    def _bind(self) -> None:
        """Find the parameters that are trained now."""
        self._fit = Fit.of(self._model, self._optimizer)
        self._attach()

    def _attach(self) -> None:
        """Clip, guard and release for these parameters."""
        self._clip = self._norms.bind(self._fit)
        self._release.guard.bind(self._fit.names, self._fit.tensors, self._fit.frozen)
        self._release.bind(self._fit.names, self._fit.tensors)

    # What can be asked

    @property
    def plan(self) -> Plan:
        """The plan of the run."""
        return self._plan

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self._model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that makes the steps."""
        return self._optimizer

    @property
    def seed(self) -> int | None:
        """The seed, with which anyone can remove the noise; None: the operating system's entropy."""
        return self._position.entropy.seed

    @property
    def ledger(self) -> Ledger:
        """Everything that was released, as facts. An update that clipwise did not make stands there without noise."""
        self._release.look()
        return self._release.ledger

    @property
    def steps_done(self) -> int:
        """Steps of the plan that are used up."""
        return self._position.done

    @property
    def style(self) -> Style:
        """The clipping of the step that is being made, or comes next: one object for clipping and for noise."""
        return self._release.style if self._batch.style is None else self._batch.style

    @property
    def bound(self) -> float | None:
        """Where an adaptive norm (`AdaptiveClip`) stands; covered by epsilon."""
        return self._position.bound

    @property
    def last(self) -> StepStatistics | None:
        """Statistics of the last step: norms, clipping, bad samples, batch size. **Not covered by epsilon**."""
        return None if self._batch.last is None else StepStatistics.of(*self._batch.last)

    @property
    def checked(self) -> Checked:
        """What the checks for samples that mix have shown so far.

        The forward pass is repeated with other records in the batch; a sample whose loss or gradient moves is refused.
        """
        return self._checks.found

    @property
    def looked(self) -> Looked:
        """Whether the data of a seeded run stayed the same, as far as they were looked at."""
        return self._position.digests.looked

    def epsilon(
        self, delta: float | None = None, accountant: str = "exact", *, relation: Relation | None = None
    ) -> float:
        """The epsilon spent so far at this `delta`; refused after an update that clipwise did not make.

        A `delta` over 1/n is warned about.
        """
        spent = self._release.epsilon(delta, accountant, relation)
        if delta is not None:
            warn_of_delta(self._plan, delta)
        return spent

    def __repr__(self) -> str:
        return f"Private({type(self._model).__name__}, {self.steps_done} of {self._plan.steps} steps made)"

    def _repr_html_(self) -> str:
        return html_table(repr(self), self._plan.rows(self.epsilon))

    # The step

    def losses(self, batch: Any) -> Tensor:
        """`loss_fn(model, batch)`, one loss per sample, for `step` or `backward`; no loss for an empty batch.

        A plan with estimated norms (`cw.mechanisms.ProjectedNorms`) takes its losses from here only: they are
        measured with them, by several forward passes with the same random numbers. With exact norms it saves a line.

        >>> import clipwise as cw, torch
        >>> from torch.utils.data import TensorDataset
        >>> model = torch.nn.Linear(3, 1)
        >>> plan = cw.Plan(cw.Poisson(100, 10), 5, cw.Abadi(1.0), 2.0, mechanism=cw.mechanisms.ProjectedNorms(100))
        >>> def loss_fn(model, batch):
        ...     x, y = batch
        ...     return (model(x).squeeze(1) - y).square()
        >>> private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=loss_fn, seed=0)
        >>> for batch in private.loader(TensorDataset(torch.randn(100, 3), torch.randn(100))):
        ...     done = private.step(private.losses(batch))
        >>> private.ledger.events
        (ProjectedSteps(sampling=Poisson(sample_size=100, batch_size=10, max_batch_size=None), noise_multiplier=2.0,
        projections=100, steps=5, reason='training', own_batches=False),)
        """
        with none_watching():
            self._check_ready()
        if self._batch.offered is not None and not self._batch.offered.size:  # many networks cannot run on no sample
            return self._fit.tensors[0].new_zeros(0)
        return self._norms.losses(batch)

    def backward(self, losses: Tensor) -> None:
        """Add the clipped gradients of a physical batch to the sum of the logical one. Nothing is released.

        After an error the same losses can be given again. After one amid the addition itself (an interrupt) the logical
        batch is dropped, as the next call says.
        """
        self._gather(losses)
        self._batch.unconfirmed = False  # nothing follows that an interrupt could break off

    def _gather(self, losses: Tensor) -> None:
        """Add a physical batch, and leave it unconfirmed."""
        self._checks.arrive(self._position.done)
        with none_watching():  # of another run in the same loop
            try:
                self._check_ready()
                step, fit = self._position.done, self._fit
                self._release.guard.begun = True
                self._batch.check(losses, step)
                self._release.prepare(style := self.style)
                evidence = self._checks.close(losses, fit.places, fit.tensors)
                clipped = self._clip(losses, style, evidence, onto=self._batch.total)
                self._checks.accept(step)
                self._batch.add(losses, clipped, fit)
            except (NotSeparable, UnsupportedNode):
                self._checks.block()
                raise

    def step(self, losses: Tensor | None = None) -> bool:
        """`backward`, and at the end of the logical batch record, add noise, step the optimizer. True if it did so.

        With `private.loader` the loader knows where a logical batch ends. With own batches every `step` ends one, and
        `backward` before it adds further physical batches. `step()` without losses ends what `backward` gathered.
        """
        self._check_gathered() if losses is None else self._gather(losses)
        if not self._batch.is_complete:
            self._batch.unconfirmed = False
            return False
        with none_watching(), self._release.guard.restoring():
            self._write()
            self._step()
        return True

    def release(self) -> bool:
        """As `step()`, but the caller steps the optimizer: once, with `p.grad` as it is. True if there is one.

        The batch is charged, noised and written to `p.grad` when this returns True, whether or not a step follows. Give
        the losses to `backward` before; docs/loop.md has the loop.
        """
        self._check_gathered()
        if not self._batch.is_complete:
            return False
        with none_watching(), self._release.guard.restoring():
            self._write()
        return True

    def close(self) -> None:
        """End the run before its last step: no step follows, and model and optimizer are the caller's again.

        What was spent stays spent. A run that made all its steps is closed by itself, when its loop ends.
        """
        self._release.check_accounted()
        self._batch.forget()
        self._position.is_closed = True
        self._release.guard.close()

    def _check_gathered(self) -> None:
        self._checks.abandon()
        self._check_ready()
        self._batch.check_given()

    def _check_ready(self) -> None:
        self._position.check_left()
        self._release.check_open()
        self._check_declared()
        if not self._fit.holds(self._optimizer):
            if self._batch.sums is not None:
                raise InvalidPlan(
                    "parameters were frozen, unfrozen, added, removed, replaced or resized within a logical batch. Do "
                    "so between batches, and give the optimizer the new ones."
                )
            self._bind()
        self._fit.check_step()
        if self._state.expected is not None:
            self._state.check_weights()

    def _check_declared(self) -> None:
        if not self._batch.own and not self._position.iteration:
            raise not_declared(self._plan.sampling)

    def _write(self) -> None:
        """Charge first, then noise, average, write. From the charge on the step is spent, whatever happens."""
        style, within = self.style, 0.0 if self.bound is None else self._batch.within
        sums = self._batch.take(self._position.done, self._fit)
        self._release.write(sums, style, 1.0 / self._plan.denominator, within)

    def _step(self) -> None:
        """Step the optimizer with what was released."""
        with self._release.guard.stepping():
            self._optimizer.step()
        self._optimizer.zero_grad()
        self._release.guard.expect_none()
        self._release.close_if_done()

    def _empty_step(self) -> None:
        """The step of a batch without samples."""
        self._check_ready()
        self._batch.offered = None
        with self._release.guard.restoring():
            self._write()
            self._step()

    # The loader

    def loader(
        self,
        dataset: Dataset[Any],
        physical_batch_size: int | None = None,
        yield_empty: bool = False,
        **options: Any,
    ) -> Loader:
        """The batches of the steps still to be made, drawn as the plan's sampling says.

        `physical_batch_size` cuts a logical batch into pieces that fit the memory, small ones at the first steps, which
        are checked. Other keywords go to `torch.utils.data.DataLoader`, but not those that would change the sampling.
        An empty batch makes its noise-only step by itself, or is handed out under `yield_empty=True`.
        """
        if self._batch.own:
            raise InvalidSampling("own_batches=True declares your own batches: omit it to use the loader.")
        steps, size = self._plan.steps, physical_batch_size
        check_dataset(dataset, self._plan.sampling)
        check_options(size, options)
        digests = self._position.look_at(dataset, size)
        draws, entropy = self._position.draws, self._position.entropy
        feeding = Feeding(self._batch, self._release, self._checks, self._bind, self._empty_step)
        loader = Loader(feeding, dataset, draws, entropy, steps, size, yield_empty, options, digests)
        self._checks.add_data(dataset, options.get("collate_fn"))
        return loader

    def watch(self, batch: Any) -> AbstractContextManager[None]:
        """Watch the forward pass on your own batch (`own_batches=True`), as the loader does by itself.

        With the loader it serves to compute the losses of its batch again after an error.

        >>> import clipwise as cw, torch
        >>> model = torch.nn.Linear(3, 1)
        >>> plan = cw.Plan(sampling=cw.FullBatch(10), steps=5, clip=cw.Abadi(1.0), noise_multiplier=1.0)
        >>> private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), own_batches=True)
        >>> x, y = torch.randn(10, 3), torch.randn(10)
        >>> with private.watch((x, y)):
        ...     losses = (model(x).squeeze(1) - y).square()
        >>> private.step(losses)
        True
        """
        self._check_declared()
        return self._checks.watching(batch, batch_size(batch), self._position.done)

    # Saving and resuming

    def state_dict(self) -> dict[str, Any]:
        """Plan, ledger, position and, for a seeded run only, the seed. Never a sum, a key or a digest of data.

        With correlated noise, that of a seeded run holds its past noise besides, which tells as much as such a digest.
        """
        return self._state.capture()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`, in a `Private` that had no batch yet; load model and optimizer as well.

        Steps made after `state_dict()` was called are not known here. `save` and `resume` count those too.
        """
        self._state.check(saved)
        if self._position.iteration or self._batch.sums is not None:
            raise CheckpointError(
                "this Private has had batches already, drawn for a run of its own: they are not those of the saved "
                "one. Make a new one, load the saved run, and iterate over its loader then."
            )
        self._state.restore(saved)

    def save(self, path: str | os.PathLike[str], extra: Any = None) -> None:
        """Write model, optimizer and run to one file, such that a crash leaves the old file or the new one.

        From then on the file is this run's alone, and every step is counted in it before it is made (unseeded runs).
        `extra` holds whatever the loop needs besides, such as `{"scheduler": scheduler.state_dict()}`.
        """
        state = self._state.capture(with_weights=False)
        saving.save(path, self._state, state, self._model, self._optimizer, extra)

    @classmethod
    def resume(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizer,
        *,
        plan: Plan | None = None,
        loss_fn: LossFn | None = None,
        noise: Normals | None = None,
        constants: Constants = (),
        witness: Witness | str | os.PathLike[str] | None = None,
        changed_data: bool = False,
    ) -> Private:
        """Continue from `save`: model and optimizer are filled, and `private.loader(dataset)` gives the next batch.

        `plan` is only needed when it holds your own clipping rule, and must equal the saved one; `own_batches` and
        `memory` are as they were saved. A seeded run repeats the steps after the last save bit for bit. An unseeded one
        draws fresh noise, and the steps begun since stay charged. `witness` is only needed when its file was moved, or
        when the run had none before. A run of this process that continued the file has ended with this.

        `changed_data=True` says that the records are not those that the run was begun with: the ledger then names it
        at every further step. A seeded run refuses them.
        """
        saved = saving.read(path, PrivateState.kind)
        private = cls(
            plan or PrivateState.plan_of(saved.state),
            model,
            optimizer,
            seed=saved.state.get("seed"),
            loss_fn=loss_fn,
            noise=noise,
            constants=constants,
            own_batches=saved.state.get("own_batches") is True,
            witness=witness,
            memory=PrivateState.memory_of(saved.state),
        )
        saved.continue_in(private._state, model, optimizer, changed_data=changed_data)
        private.extra = saved.extra
        return private

    def __getstate__(self) -> NoReturn:
        raise TypeError("Private cannot be pickled or copied: a run has one ledger. Use save(path) and resume.")
