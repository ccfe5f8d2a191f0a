"""The server's side of a round: select users, bound what they send, add up, record, add noise. Both runners use it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.data import Dataset

from clipwise.accounting import Ledger, Relation, needed_delta
from clipwise.clipping import Style
from clipwise.entropy import Entropy
from clipwise.errors import ClipwiseError, DataError, InvalidPlan, InvalidSampling
from clipwise.federated.state import ServerState
from clipwise.federated.updates import Reply, admit, norms, shorten
from clipwise.hashing import joined, whole
from clipwise.mechanisms import Rounds
from clipwise.noise import Normals
from clipwise.plan import Plan, warn_of_delta
from clipwise.private import (
    Looked,
    Position,
    Release,
    Witness,
    label_of_plan,
    label_of_values,
    read_checkpoint,
    save_checkpoint,
)

__all__ = ["Failure", "Round", "RoundReport", "Server", "Successes", "apply", "select"]

_LOG = logging.getLogger("clipwise.federated")
_ROUNDING = 1e-4  # an update longer than the bound by less was clipped in another precision, not by nobody


@dataclass(frozen=True)
class Round:
    """A round that was opened: its number (from 0), its clipping, and who takes part (perhaps nobody)."""

    number: int
    style: Style
    selected: tuple[int, ...]
    asks_within: bool
    """Whether users are to say if their update was within the norm, for an adaptive norm."""


@dataclass(frozen=True)
class Failure:
    """In the place of a reply: this user failed, with the reason for the log."""

    reason: str
    cause: Exception | None = None


class Successes:
    """Knows whether any user has ever succeeded; until then, that nobody does is taken for a mistake in the work.

    Guarantees: nothing is spent on a round if none of the users who were selected so far has succeeded.
    """

    def __init__(self) -> None:
        self._any = False

    def among(
        self, replies: Iterable[tuple[int, Reply | Failure]], selected: int
    ) -> Iterator[tuple[int, Reply | Failure]]:
        """The same replies of a round, one after the other, so that only one update is held at a time."""
        failed = Failure("no reply")
        for user, reply in replies:
            if isinstance(reply, Failure):
                failed = reply
            else:
                self._any = True
            yield user, reply
        if selected and not self._any:  # still before the round is recorded
            problem = f"the work of every user so far failed, the last one's with: {failed.reason}"
            raise ClipwiseError(problem) from failed.cause


@dataclass
class _Gathered:
    """What a round has added up so far."""

    sums: list[Tensor]
    within: float = 0.0
    """Users within the norm less those beyond it, halved."""
    used: int = 0
    shortened: int = 0
    problems: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True)
class RoundReport:
    """What happened in a round, for those who may see the data. **Not covered by epsilon**, except `bound`."""

    number: int
    selected: int
    used: int
    """Users whose update is in the sum."""
    shortened: int
    """Updates that came longer than an honest client sends them."""
    problems: tuple[tuple[int, str], ...]
    """User and reason, for everything that was left out."""
    bound: float | None
    """The next round's norm, with an adaptive one."""


def select(users: Sequence[int], rate: float, entropy: Entropy, number: int) -> tuple[int, ...]:
    """Each user independently with probability `rate`, in round `number`; perhaps nobody.

    >>> select([3, 5, 8], 1.0, Entropy(), 0), select([3, 5, 8], 1e-9, Entropy(0), 0)
    ((3, 5, 8), ())
    """
    coins = entropy.generator("users", number).random(len(users))
    return tuple(user for user, coin in zip(users, coins, strict=True) if coin < rate)


class Server:
    """Turns the users' replies of a round into a noisy mean update, and keeps the ledger.

    `open(users)` selects who takes part, `close(replies)` gives the update to add to the model. `model` is only read:
    its trainable parameters are what is learnt. Without `seed` all randomness is the operating system's; with it the
    selection and the noise can be repeated, and removed, by anyone who knows it. Noise is labelled with the plan,
    the initial values and the updates themselves, so a seeded server draws other noise for other updates.
    `ledger` continues one that holds earlier releases. `witness`, a file on other storage, keeps an older copy of a
    saved run from being continued (`clipwise.Witness`).

    Guarantees: whatever a user sends, or whether it sends anything, moves the sum by at most `weight_cap` times the
    sensitivity of the clipping; the noise is `noise_multiplier` times that; the round is on `ledger` before its noise
    is drawn; after `plan.steps` rounds nothing more is released.

    >>> from clipwise import Abadi, FullBatch
    >>> plan = Plan(FullBatch(2), steps=1, clip=Abadi(1.0), noise_multiplier=0.0, mechanism=Rounds())
    >>> server = Server(plan, nn.Linear(1, 1, bias=False))
    >>> opened = server.open([0, 1])
    >>> server.close([(0, Reply({"weight": torch.tensor([[0.5]])}, 1)), (1, Failure("switched off"))])
    {'weight': tensor([[0.2500]])}
    >>> server.last.used, server.ledger.steps
    (1, 1)
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        *,
        seed: int | None = None,
        noise: Normals | None = None,
        ledger: Ledger | None = None,
        witness: Witness | str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(plan, Plan) or not isinstance(plan.mechanism, Rounds):
            raise InvalidPlan(
                "plan must be a clipwise.Plan with mechanism=cw.mechanisms.Rounds(), got "
                f"{getattr(plan, 'mechanism', plan)!r}."
            )
        self._plan, self._rounds = plan, plan.mechanism
        self._position = Position(plan.steps, plan.sampling, seed, partial(_start, plan, model), unit="rounds")
        self._position.begin()  # with the values that the model has now
        self._like = _sums_like(model)
        self._release = Release(plan, self._position, noise, ledger, first=1, witness=Witness.of(witness))
        self._release.bind(self.parameters, list(self._like.values()), self._rounds.weight_cap)
        self._state = ServerState(plan, self._release, continues=ledger is not None)
        self._opened: Round | None = None
        self._last: RoundReport | None = None

    @property
    def plan(self) -> Plan:
        """The plan of the run."""
        return self._plan

    @property
    def ledger(self) -> Ledger:
        """Everything that was released, as facts."""
        return self._release.ledger

    @property
    def rounds_done(self) -> int:
        """Rounds of the plan that are used up."""
        return self._position.done

    @property
    def bound(self) -> float | None:
        """Where an adaptive norm stands; covered by epsilon."""
        return self._position.bound

    @property
    def rate(self) -> float:
        """The probability with which a user takes part in a round."""
        return self._rounds.rate(self._plan.sampling)

    @property
    def style(self) -> Style:
        """The clipping of the next round; an adaptive norm stands at `bound`."""
        return self._release.style

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that are learnt."""
        return tuple(self._like)

    @property
    def last(self) -> RoundReport | None:
        """What happened in the last round. **Not covered by epsilon**."""
        return self._last

    @property
    def looked(self) -> Looked:
        """Whether the users' data of a seeded run stayed the same. Only `run`, with all users here, can see them."""
        return self._position.digests.looked

    def look_at(self, datasets: Sequence[Dataset[Any]]) -> None:
        """In a seeded run, refuse other data of the users than the run was begun with, if they lie in memory."""
        found = [whole(dataset) for dataset in datasets] if self._position.seeded else [None]
        known = [digest for digest in found if digest is not None]
        self._position.digests.look_at(joined(known) if len(known) == len(found) else None)

    def epsilon(
        self, delta: float | None = None, accountant: str = "exact", *, relation: Relation | None = None
    ) -> float:
        """The epsilon spent so far at this `delta`, for everything of one user. One over 1/users is warned about."""
        delta = needed_delta(delta, self._plan.sampling)
        warn_of_delta(self._plan, delta)
        return self._release.ledger.epsilon(delta, accountant, relation=relation)

    def open(self, users: Sequence[int]) -> Round:
        """Select among the users that are there, each by its own coin. A round that was not closed is forgotten."""
        self._position.check_left()
        if len(set(users)) != len(users):
            raise InvalidSampling("a user is listed twice: it would take part more often than the plan says.")
        number, coins = self._position.done, self._position.entropy.labelled(self._position.begin())
        chosen = select(users, self.rate, coins, number)
        self._opened = Round(number, self.style, chosen, asks_within=self.bound is not None)
        return self._opened

    def close(self, replies: Iterable[tuple[int, Reply | Failure]]) -> dict[str, Tensor]:
        """The noisy mean update of the opened round: sum of capped weight * clipped update, noised, over q * W.

        What cannot be used is left out and logged, and the round continues: it is never the reason to stop.
        """
        opened = self._opened
        if opened is None:
            raise InvalidSampling(
                "no round is open: open(users) selects who takes part, and only a selection by these coins can be "
                "accounted for."
            )
        gathered = self._gather(opened, replies)
        self._opened = None
        scale = 1.0 / self._plan.denominator
        mean = self._release.mean(gathered.sums, opened.style, scale, gathered.within)
        problems = tuple(gathered.problems)
        self._last = RoundReport(
            opened.number, len(opened.selected), gathered.used, gathered.shortened, problems, self.bound
        )
        return dict(zip(self._like, mean, strict=True))

    def _gather(self, opened: Round, replies: Iterable[tuple[int, Reply | Failure]]) -> _Gathered:
        """Add up what can be used. Each reply is judged by itself, so none can change what another contributes."""
        gathered = _Gathered([torch.zeros_like(t) for t in self._like.values()])
        awaited = set(opened.selected)
        for user, reply in replies:
            if user not in awaited:
                gathered.problems.append((user, "not selected in this round, or heard already"))
                continue
            awaited.remove(user)
            try:
                if isinstance(reply, Failure):
                    raise DataError(reply.reason)
                update, weight = admit(reply, self._like, self._rounds.weight_cap)
            except DataError as problem:
                gathered.problems.append((user, str(problem)))
                continue
            except Exception as problem:  # a reply can be anything; none may stop the round
                gathered.problems.append((user, f"its reply cannot be read: {type(problem).__name__}"))
                continue
            gathered.shortened += self._is_too_long(user, update, opened)
            torch._foreach_add_(gathered.sums, list(shorten(update, opened.style).values()), alpha=weight)
            if reply.within is not None:
                gathered.within += 0.5 if reply.within else -0.5
            gathered.used += 1
        gathered.problems += [(user, "no reply") for user in sorted(awaited)]
        for user, reason in gathered.problems:
            _LOG.warning("round %d continues without user %s: %s", opened.number, user, reason)
        return gathered

    def _is_too_long(self, user: int, update: Mapping[str, Tensor], opened: Round) -> bool:
        for group, norm in norms(update, opened.style).items():
            allowed = opened.style.rule_of(group).sensitivity
            if norm > allowed * (1 + _ROUNDING):
                _LOG.warning(
                    "round %d: the update of user %s has norm %.3g and was shortened to %.3g; its client does not clip",
                    *(opened.number, user, norm, allowed),
                )
                return True
        return False

    def state_dict(self) -> dict[str, Any]:
        """Rounds made, ledger, adaptive norm and, for a seeded run only, the seed. Never a sum or a key of noise."""
        return self._state.capture()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`, in a server that has made no round yet, with the same plan and seed.

        The saved ledger comes with it, so the server must not have been given one.
        Rounds made after `state_dict()` was called are not known here. `save` and `resume` count those too.
        """
        self._state.check(saved)
        self._state.restore(saved)

    def save(
        self, path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None, extra: Any = None
    ) -> None:
        """Write the run, the model and the server's optimizer to one file that a crash cannot damage.

        From then on the file is this run's alone, and every round is counted in it before its noise is drawn (unseeded
        runs).
        """
        save_checkpoint(path, self._state, self._state.capture(), model, optimizer, extra)

    def resume(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        changed_data: bool = False,
    ) -> Any:
        """Continue from `save`, in a server that has made no round yet; model and optimizer are filled.

        A seeded run makes the rounds after the last save again, bit for bit, given the same users and examples; a
        round for which other updates come gets other noise, and is charged again. An unseeded one draws fresh noise,
        and the rounds begun since stay charged. `changed_data=True` says that users have other examples than when the
        run was begun: the ledger then names it at every further round. Returns `extra`.
        """
        saved = read_checkpoint(path, self._state.kind)
        saved.continue_in(self._state, model, optimizer, changed_data=changed_data)
        return saved.extra


def _start(plan: Plan, model: nn.Module) -> bytes:
    """What a seeded run is begun with: the plan and the initial values."""
    return joined([b"federated", label_of_plan(plan), label_of_values(model)])


@torch.no_grad()
def apply(model: nn.Module, update: Mapping[str, Tensor], optimizer: Optimizer | None = None) -> None:
    """Add a round's update to the model: as it is, or through an optimizer of `torch.optim` over its parameters.

    The optimizer gets the update as a gradient, with its sign turned, so `SGD(lr=1)` is plain addition, a smaller
    rate goes in smaller steps, and momentum or Adam average over rounds. None of that costs privacy.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.zeros_(model.weight)
    >>> apply(model, {"weight": torch.ones(1, 1)})
    >>> apply(model, {"weight": torch.ones(1, 1)}, torch.optim.SGD(model.parameters(), lr=0.5))
    >>> model.weight.item()
    1.5
    """
    parameters = dict(model.named_parameters())
    if optimizer is not None:
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [name for name in update if id(parameters[name]) not in known]
        if missing:
            raise InvalidPlan(f"the server's optimizer lacks parameters of the model: {missing[:5]}. Add them.")
    for name, change in update.items():
        parameter = parameters[name]
        if optimizer is None:
            parameter.add_(change.to(parameter.dtype))
        else:
            parameter.grad = -change.to(parameter.dtype)
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def _sums_like(model: nn.Module) -> dict[str, Tensor]:
    """An empty sum for each trainable parameter, in at least float32."""
    if not isinstance(model, nn.Module):
        raise InvalidPlan(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training and module.track_running_stats:
            raise InvalidPlan(
                f"{name!r} ({type(module).__name__}) gathers statistics of the users' inputs in its buffers, which are "
                "neither clipped nor sent. Use GroupNorm or LayerNorm, or put it in eval mode."
            )
    like = {
        name: torch.zeros_like(p, dtype=torch.float32 if p.dtype.itemsize < 4 else p.dtype).detach()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    if not like:
        raise InvalidPlan("the model has no trainable parameter.")
    return like
