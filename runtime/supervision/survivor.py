"""What a rank does in a job that goes on without its dead: train, and after each death take its place in the next generation.

    unwind     the collective that waits for the dead raises, here or because the thread of the membership aborted it
    end        all gradients of a step are there before anybody can have the sums over all ranks: where one survivor has them the
               others end the step with them too, so that all are at the same step
    choose     the latest state of which the survivors hold every part: their live tensors, or copies of an earlier step
    build      the model of the generation's plan, in new groups, and fill it from what the members hold
    go on      with the samples of the step that was cut short, or of those since the copies

What was held before stays until every member has filled its new model: another death meanwhile begins again from the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from ...cost_models.goodput import MTBF_HOURS_PER_DEVICE
from ...profilers.run.processes import exit_now, raise_in
from ...schema import MeshwrightError, TrainingPlan
from ...schema.shares import state_copies
from ..job.events import JobEvent
from ..job.machine import explain_out_of_memory
from ..models.decoder import Decoder, is_adapter
from ..training.checkpoint import TrainingProgress, checkpoint_state, read_states, stored_name
from ..training.memory import MemoryMeter
from ..training.options import TrainOptions, list_checkpoints, prepare_options
from ..training.train import TrainingRun, backend_and_device, build_part, train_to_the_end
from .copies import PeerCopies
from .exchange import Exchange
from .generations import Generation, GenerationOverError
from .holdings import Holding, Piece, SurvivorReader, missing, pieces_of
from .membership import STUCK_S, Membership
from .neighbours import Means, layer_of, means_of_neighbours

_BEGIN_AGAIN_STEPS = 2
"""Until the first copies are complete, a run that lost a part begins again, as it has begun: so few steps are done by then."""


class StatesLostError(MeshwrightError):
    """The survivors do not hold every part of the states."""


def train_through_faults(options: TrainOptions, *, report: str | Path | None, timeout_s: float) -> None:
    """Train as `train` does, in a job that a supervisor watches over; return when the job is done.

    Raises:
        MeshwrightError: as by `train`, or too much is lost to go on.
    """
    membership = Membership.from_environment(timeout_s)
    if membership.is_too_late:
        return
    survivor = Survivor(membership, options, report)
    survivor.membership.begin(survivor.take_over)
    survivor.drive()


class ReplacedError(BaseException):
    """Raised in a thread whose place another one has taken, wherever it comes back to."""


class Survivor:
    """One process of the job, through all generations; the guard of its run.

    Its driver is the main thread, until that does not come back from a collective of a generation that is over (of gloo's, a wait
    for a send that a closed connection never ends). Another thread then drives on from what the process holds. The one before may
    come back after all, if it was only slow: it does nothing more with the run, which is the other's now, and waits for it. If it
    is still inside the collective when the job is done, the process ends without it. No thread is replaced while it changes
    states.

    Attributes:
        run: None before the process has first trained.
    """

    def __init__(self, membership: Membership, options: TrainOptions, report: str | Path | None) -> None:
        self.membership, self._report = membership, report
        self.run: TrainingRun | None = None
        self._generation = -1  # of the model in `run`
        self._live: dict[Piece, torch.Tensor] | None = None
        self._copies: PeerCopies | None = None
        self._retained: list[Holding] = []
        self._past: list[Generation] = []
        self._means: Means = {}
        self._plan, self._begun = membership.plan(), 0
        self._is_current = membership.is_active and not membership.is_new  # it knows how far the run is
        _, self._device = backend_and_device(self._plan)
        self._meter = MemoryMeter(self._device, count=options.count_memory)
        if membership.generation.number and options.checkpoint_dir is not None:  # what it has is this job's
            options = options.replace(resume=True)
        self._options = prepare_options(self._plan, options)
        self._driver, self._is_behind = threading.current_thread(), True
        self._outcome: Future[None] = Future()
        # A driver is not replaced once it follows the job, or ends, by itself, and while it changes states.
        self._handover, self._is_following, self._is_updating = threading.Lock(), False, False

    def drive(self) -> None:
        """Train until the job is done, through all generations, in this thread or one that has taken its place.

        Raises:
            MeshwrightError: as by `train`, or too much is lost to go on.
        """
        with suppress(ReplacedError):
            try:
                self._train()
            except BaseException:
                if self._remains_driver():
                    raise
            if self._remains_driver():
                return
        with nullcontext() if self.run is None else self.run.listening():  # signals come to the main thread
            self._outcome.result()

    def _remains_driver(self) -> bool:
        """Tell whether this thread drives; then no other takes its place until it has followed the job."""
        with self._handover:
            is_driver = self._driver is threading.current_thread()
            self._is_following |= is_driver
        return is_driver

    def _train(self) -> None:
        while True:
            try:
                if self._is_behind:
                    self.take_place()
                    self._is_behind = False
                if self.run is None or not self.membership.is_active:
                    self.membership.stand_by()
                    return
                train_to_the_end(self.run)
                self.membership.finish()
                return
            except StatesLostError:
                raise
            except (Exception, CheckpointException) as error:
                if not self._remains_driver():
                    return
                self.follow(error, has_met=not self._is_behind)
                self._is_behind = True

    def take_over(self) -> bool:
        """Drive on in a new thread, where the driver does not leave a generation; False where it must not be left alone."""

        def drive() -> None:
            error: BaseException | None = None
            try:
                self.follow(GenerationOverError("the thread before did not leave"), has_met=not self._is_behind)
                self._is_behind = True
                self.drive()
            except BaseException as caught:
                error = caught
            if self._driver is threading.current_thread():  # or else who came after it tells
                self._outcome.set_exception(error) if error else self._outcome.set_result(None)
                time.sleep(STUCK_S)  # in which the main thread ends the process, if it can
                exit_now(error)

        with self._handover:
            if self._is_following or self._is_updating:
                return False
            self._is_following = True
            raise_in(self._driver, ReplacedError)
            self._driver = threading.Thread(target=drive, daemon=True, name="driver")
            self._driver.start()
        return True

    def follow(self, error: BaseException, *, has_met: bool) -> None:
        """Enter the generation that explains an error; ask for one where its members, all alive, did not meet.

        Raises:
            BaseException: the error, where there is none.
        """
        if self.run is not None:
            self.run.rest()
        if not has_met and not isinstance(error, MeshwrightError):
            self.membership.request()
        self._past += self.membership.follow(error)
        self._is_following = self._is_updating = False

    # --- the guard of the run ---

    def before_step(self) -> None:
        """Raise where a rank is gone."""
        self.membership.check()

    def before_sums(self) -> None:
        """Wait for the copies on their way: no rank ends the step before."""
        self.membership.check()
        if self._copies is not None:
            self._copies.settle()

    def before_update(self) -> None:
        """Let no other thread take this one's place until the step is done."""
        with self._handover:
            if self._driver is not threading.current_thread():
                raise GenerationOverError("another thread has taken this one's place")
            self._is_updating = True

    def calls_a_halt(self) -> bool:
        """Tell whether this rank asks all others to end the step, because processes come or go."""
        return self.membership.is_invited()

    def after_step(self) -> None:
        """Note what this rank holds from now on, and copy it where that is due.

        Raises:
            GenerationOverError: others are taken in, or let go, after this step.
        """
        assert self.run is not None
        self._is_updating = False
        if self._past:
            self._tell()
        if self._live is None:
            self._capture()
        if self.run.is_halted and not self.run.is_finished:
            self.membership.request()
            raise GenerationOverError("other processes come or go")
        if self._copies is not None:
            self._copies.copy(self.run.progress, self.run.step_times_s[-1])

    # --- a generation ---

    def take_place(self) -> None:
        """Build this rank's part of the generation's plan, with the states that the members hold."""
        membership, generation = self.membership, self.membership.generation
        self._plan = plan = membership.plan()
        if generation.number == 0:
            self._is_current = membership.is_active
            if membership.is_active:
                self._build(plan, None)
            return
        exchange = Exchange(membership, "members", len(generation.members))
        statuses = exchange.tell(self._status())
        self._begun = max(status["begun"] for status in statuses)
        self._end_step(statuses)
        holdings = self._holdings()
        offers = exchange.tell(
            {tag: [holding.progress.model_dump(), _words(holding)] for tag, holding in holdings.items()}
        )
        tag, self._means = self._chosen(plan, offers, statuses)
        self._retained = list(holdings.values())
        if tag is None:
            if membership.is_active:
                self._build(plan, None)
        else:
            parts = [[Piece.read(words) for words in of_member.get(tag, (None, ()))[1]] for of_member in offers]
            progress = next(TrainingProgress(**of_member[tag][0]) for of_member in offers if tag in of_member)
            reader = SurvivorReader(exchange, parts, holdings[tag].tensors if tag in holdings else {}, self._means)
            if membership.is_active:
                self._build(plan, progress, reader)
            else:
                reader.swap(())
        if self._copies is not None:
            self._copies.settle()
        exchange.barrier()
        membership.note_met()
        self._retained, self._is_current = [], membership.is_active
        if self.run is not None and membership.is_active:
            self._save_again(max(status["saved"] for status in statuses))

    def _build(
        self, plan: TrainingPlan, progress: TrainingProgress | None, reader: SurvivorReader | None = None
    ) -> None:
        """Build the model, and fill it where the run has made progress."""
        backend, device = backend_and_device(plan)
        self.membership.join(backend, device)
        with explain_out_of_memory(plan, device):
            part = build_part(plan, self._options, device)
            if reader is not None:
                read_states(part.model, part.optimizer, reader, planner=DefaultLoadPlanner(), is_collective=False)
        number = self.membership.generation.number
        if self.run is None:
            self.run = TrainingRun(part, self._options, self._meter, self._report, self, start=progress)
        else:
            self.run.adopt(part, progress)
        if progress is None:
            self._begun = self.run.steps
        if self.run.steps:
            progress = self.run.progress
        self._generation, self._live, self._copies = number, None, None
        if progress is not None:
            self._capture()
            if self._copies is not None:
                self._copies.copy(progress, 0.0)

    def _capture(self) -> None:
        """Note by reference what this rank holds; optimizer states are there after the first step."""
        assert self.run is not None
        plan = self.run.model.plan
        self._live = pieces_of(checkpoint_state(self.run.model, self.run.optimizer))
        if state_copies(self._plan) > 1 or self.membership.generation.num_active == 1:
            return
        cluster = plan.cluster
        self._copies = PeerCopies(
            Exchange(self.membership, "active", self.membership.generation.num_active),
            generation=self._generation,
            every=self._options.copy_every,
            mtbf_s=3600 * (self._options.mtbf_hours_per_device or MTBF_HOURS_PER_DEVICE) / plan.layout.world_size,
            stride=cluster.groups[0].devices_per_node if cluster.num_nodes > 1 else 1,
            live=self._live,
            on_decided=self._tell_of_copies,
        )

    def _tell_of_copies(self, every: int, share: float) -> None:
        assert self.run is not None
        event = JobEvent(event="copies", every=every, share=share, generation=self._generation)
        self.run.writer.write(event.record())

    def _status(self) -> dict[str, Any]:
        run, folder = self.run, self._options.checkpoint_dir
        common = {
            "generation": self._generation, "is_current": self._is_current, "begun": self._begun,
            "has_checkpoint": folder is not None and bool(list_checkpoints(folder)),
        }  # fmt: skip
        if run is None:
            return {**common, "step": 0, "sums": [], "saved": -1}
        sums = None if run.sums is None else [repr(value) for value in run.sums]  # may be no number
        return {**common, "step": run.steps, "sums": sums, "saved": run.saved}

    def _end_step(self, statuses: Sequence[dict[str, Any]]) -> None:
        """End the step whose gradients are here, where another rank has the sums that this one waited for."""
        run = self.run
        if run is None or run.sums is not None:
            return
        ahead = [s for s in statuses if s["generation"] == self._generation and s["step"] == run.steps + 1]
        if ahead:
            run.complete(torch.tensor([float(value) for value in ahead[0]["sums"]], device=self._device))
            self._is_updating = False
            self._live = self._live or pieces_of(checkpoint_state(run.model, run.optimizer))

    def _holdings(self) -> dict[str, Holding]:
        """Return what this process holds, by the state that it is part of."""
        parts = [*self._retained]
        is_noted = any(part.generation == self._generation for part in parts)
        if self.run is not None and self._live is not None and not is_noted:
            parts.append(Holding(self._generation, self.run.progress, self._live))
        parts += () if self._copies is None else self._copies.holdings()
        holdings = dict[str, Holding]()
        for each in parts:
            holdings[each.tag] = each if each.tag not in holdings else holdings[each.tag].joined(each)
        return holdings

    def _chosen(
        self, plan: TrainingPlan, offers: Sequence[dict[str, Any]], statuses: Sequence[dict[str, Any]]
    ) -> tuple[str | None, Means]:
        """Return the latest state of which every part is held, and what is recovered from neighbours; None: the run begins again.

        Raises:
            StatesLostError: a part is lost.
        """
        needed, lost, pieces = _needed(plan), list[str](), dict[str, list[Piece]]()
        tags = {tag: of_member[tag][0]["step"] for of_member in offers for tag in of_member}
        for tag in sorted(tags, key=lambda tag: (tags[tag], tag), reverse=True):
            pieces[tag] = [Piece.read(words) for of_member in offers for words in of_member.get(tag, (None, ()))[1]]
            lost = missing(needed, pieces[tag])
            if not lost:
                return tag, {}
        steps = [status["step"] for status in statuses if status["is_current"]]
        if steps and max(steps) - self._begun <= _BEGIN_AGAIN_STEPS:
            return None, {}
        if self._options.recover is not None and not any(status["has_checkpoint"] for status in statuses):
            for tag, of_state in pieces.items():
                if means := means_of_neighbours(needed, of_state):
                    return tag, means
        raise StatesLostError(
            "too many ranks are gone to go on: no other rank holds what they held",
            details=(f"{len(lost)} tensors, such as {lost[0]}",) if lost else (),
            help="--max-restarts goes back to the last checkpoint; a layout with dp_replicate >= 2 holds everything twice; "
            "--recover neighbours makes up layers that are lost for good",
        )

    def _save_again(self, saved: int) -> None:
        """Write the checkpoint that a death cut short."""
        assert self.run is not None
        self.run.saved = saved
        if self.run.steps and self.run.steps != saved:
            self.run.checkpoint()

    def _recovered(self) -> list[str]:
        layers = sorted({layer_of(name) for name in self._means} - {None})
        self._means = {}
        listed = ", ".join(map(str, layers))
        return (
            [f"layers {listed} are the mean of their neighbours now: losses are not those without a fault"]
            if layers
            else []
        )

    def _tell(self) -> None:
        """Report that the job went on, once the first step is done."""
        assert self.run is not None
        past, self._past = self._past, []
        event = JobEvent(
            event="went on",
            causes=(*(generation.cause for generation in past), *self._recovered()),
            ranks=past[-1].active,
            generation=past[-1].number,
            layout=str(self._plan.layout),
            after_step=self.run.steps,
            seconds=time.time() - past[0].time_s,
        )
        self.run.writer.write(event.record())


def _words(holding: Holding) -> list[Any]:
    return [[p.name, p.offsets, p.sizes, p.of, p.dtype] for p in holding.tensors]


def _needed(plan: TrainingPlan) -> dict[str, Sequence[int]]:
    """Return the sizes of what a checkpoint has of the model, by name."""
    with torch.device("meta"):
        state = Decoder(plan.model, attention=plan.workload.attention).state_dict()
    adapts = plan.workload.adapters is not None
    return {
        f"model.{stored_name(name, plan.model)}": value.shape
        for name, value in state.items()
        if not adapts or is_adapter(name)
    }
