"""The work of one task: shards, claimed one after another, through one engine."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from hpcml.infer import fingerprint
from hpcml.infer.claims import Claims
from hpcml.infer.engine import Answer, Request, batch_size
from hpcml.infer.job import InferenceError, InferenceJob
from hpcml.infer.merge import merge, merged
from hpcml.infer.planning import make_plan
from hpcml.infer.process import EngineDied
from hpcml.infer.progress import Progress
from hpcml.infer.rounds import Plan, Round, current_round
from hpcml.infer.shard import Shard

AGAIN = 75
DONE, FAILED = 0, 1

_WAIT_SECONDS = 0.5
_FLUSH_SECONDS = 2.0
# An engine that dies so often without answering anything in between will never answer.
_DEATHS = 4


class AnyEngine(Protocol):
    """An engine as :class:`hpcml.infer.process.EngineProcess` is one."""

    ready: bool
    limit: int

    def poll(self, timeout: float) -> list[Answer]: ...

    def send(self, requests: Sequence[Request]) -> None: ...

    def close(self) -> None: ...


class Stop(Protocol):
    """Whether somebody asked to leave."""

    @property
    def requested(self) -> bool: ...


class Runner:
    """Works on a cell until nothing of it is left, or somebody asks to leave.

    Args:
        job: the cell.
        stop: whether to leave.
        start_engine: starts an engine; called when the first question is at hand, and again when
            the engine died.
        lease: see :class:`Claims`.
    """

    def __init__(
        self,
        job: InferenceJob,
        stop: Stop,
        start_engine: Callable[[], AnyEngine],
        lease: float | None = None,
    ) -> None:
        self._job = job
        self._stop = stop
        self._start_engine = start_engine
        self._round: Round = current_round(job.cell_dir)
        options = {} if lease is None else {"lease": lease}
        self._claims = Claims(self._round.claims, job.worker, job.cell_dir / "workers", **options)
        self._progress = Progress(job.metrics)
        self._engine: AnyEngine | None = None
        self._shards: dict[int, Shard] = {}
        self._owner: dict[int, Shard] = {}  # of each row that is asked now
        self._asked: dict[int, Request] = {}
        # Rows that were asked when the engine died: they are asked again, each alone.
        self._suspects: collections.deque[tuple[Shard, Request]] = collections.deque()
        self._marked: set[int] = set()
        self._deaths = 0
        self._last = -1
        self._flushed = 0.0

    def run(self) -> int:
        """Work; returns 0, 75 (left before the end) or 1 (too many rows failed).

        Raises:
            InferenceError: the cell cannot be done like this.
        """
        try:
            plan = self._plan()
            if plan is None or not self._answer(plan):
                return AGAIN
            return self._merge(plan)
        finally:
            self._leave()
            self._claims.close()

    # -- the plan ---------------------------------------------------------------------------------

    def _plan(self) -> Plan | None:
        """The plan, made here or by another worker; None when asked to leave."""
        while not self._stop.requested:
            plan = self._round.plan()
            if plan is not None:
                self._check(plan)
                return plan
            claim = self._claims.take(["plan"])
            if claim is None:
                time.sleep(_WAIT_SECONDS)
                continue
            print("reading the input", flush=True)
            try:
                plan = make_plan(self._job, self._round)
            except BaseException:
                self._claims.release(claim)
                raise
            self._claims.forget(claim)
            print(f"{plan.rows} rows, {plan.asked} to answer, in {plan.shards} shards", flush=True)
            return plan
        return None

    def _check(self, plan: Plan) -> None:
        """Refuse to mix answers: see whether anything is another than when the plan was made."""
        stamps = fingerprint.stamps(self._job)
        if stamps == plan.stamps:
            return
        changed = fingerprint.changes(self._job, plan.digests, plan.input)
        if changed:
            raise InferenceError(
                f"{' and '.join(changed)} changed since this run was planned: put back what was "
                "there, or give --rerun, which keeps the answers that are still valid"
            )

    # -- asking -----------------------------------------------------------------------------------

    def _answer(self, plan: Plan) -> bool:
        """Answer until every shard has its part; False when asked to leave."""
        self._progress.begin(plan.asked)
        while True:
            if self._stop.requested:
                return False
            try:
                self._feed(plan)
                if self._engine is not None and (self._asked or not self._engine.ready):
                    self._take(self._engine.poll(_WAIT_SECONDS))
            except EngineDied as death:
                if self._stop.requested:  # what asked this one to leave may have reached the engine
                    return False
                self._bury(str(death))
            self._finish_shards()
            self._flush()
            if self._shards or self._suspects:
                continue
            if len(self._round.done()) == plan.shards:
                return True
            if not self._open(plan):
                # Others have the rest. Should one of them die, its shards are free for this one.
                time.sleep(_WAIT_SECONDS)

    def _feed(self, plan: Plan) -> None:
        """Ask as much as the engine should have."""
        if not self._has_questions():
            self._open(plan)
            if not self._has_questions():
                return
        if self._engine is None:
            self._engine = self._start_engine()
        engine = self._engine
        if not engine.ready:
            return
        if self._suspects:
            if not self._asked:
                shard, request = self._suspects.popleft()
                self._ask(engine, shard, [request])
            return
        while len(self._asked) < engine.limit:
            for shard in self._shards.values():
                if shard.waiting:
                    self._ask(engine, shard, shard.waiting.popleft())
                    break
            else:
                if not self._open(plan):
                    return

    def _has_questions(self) -> bool:
        return bool(self._suspects) or any(shard.waiting for shard in self._shards.values())

    def _ask(self, engine: AnyEngine, shard: Shard, requests: list[Request]) -> None:
        for request in requests:
            self._asked[request.row] = request
            self._owner[request.row] = shard
        engine.send(requests)

    def _open(self, plan: Plan) -> bool:
        """Claim a shard; False if there is none."""
        while True:
            claim = self._claims.take(self._free(plan))
            if claim is None:
                return False
            number = self._last = int(claim.piece)
            size = batch_size(self._job.engine, self._job.arguments)
            try:
                self._shards[number] = Shard(
                    self._round, number, claim, dict(self._job.parameters), size
                )
                return True
            except FileNotFoundError:
                self._claims.forget(claim)

    def _free(self, plan: Plan) -> Iterator[str]:
        """Shards without a part: from the last one on, so that neighbours stay together."""
        done = self._round.done()
        if self._last < 0:
            self._last = self._job.worker % self._job.workers * plan.shards // self._job.workers - 1
        for step in range(1, plan.shards + 1):
            number = (self._last + step) % plan.shards
            if number not in done and number not in self._shards:
                yield f"{number:06}"

    # -- answers ----------------------------------------------------------------------------------

    def _take(self, answers: list[Answer]) -> None:
        by_shard: dict[int, list[Answer]] = {}
        for answer in answers:
            shard = self._owner.pop(answer.row, None)
            if shard is not None:
                del self._asked[answer.row]
                by_shard.setdefault(shard.number, []).append(answer)
        for number, found in by_shard.items():
            self._deaths = 0
            self._progress.add(self._shards[number].take(found))

    def _bury(self, how: str) -> None:
        """The engine died: another one asks what this one had, row by row.

        A row that was asked alone when the engine died, and was there when it died before, is
        what kills it.
        """
        print(f"the engine died ({how}) with {len(self._asked)} rows", flush=True)
        started = self._engine is not None and self._engine.ready
        self._engine = None
        self._deaths += 1
        if not started or self._deaths > _DEATHS:
            raise InferenceError(f"the engine died ({how}); what it said is above")
        if len(self._asked) == 1:
            (row,) = self._asked
            if row in self._marked:
                message = f"the engine died twice with this row, at last by {how}"
                self._take([Answer(row, cause="engine_died", error=message)])
        for row, request in self._asked.items():
            self._marked.add(row)
            self._suspects.append((self._owner[row], request))
        self._asked.clear()
        self._owner.clear()

    def _finish_shards(self) -> None:
        for shard in list(self._shards.values()):
            if shard.complete:
                shard.publish()
                self._claims.forget(shard.claim)
                del self._shards[shard.number]

    def _flush(self) -> None:
        if time.monotonic() - self._flushed < _FLUSH_SECONDS:
            return
        self._flushed = time.monotonic()
        for shard in self._shards.values():
            shard.flush()
        self._progress.report()

    def _leave(self) -> None:
        if self._engine is not None:
            self._engine.close()
        for shard in self._shards.values():
            shard.close()
            self._claims.release(shard.claim)
        self._progress.report()

    # -- the end ----------------------------------------------------------------------------------

    def _merge(self, plan: Plan) -> int:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        while True:
            proof = merged(self._job, self._round)
            if proof is not None:
                return DONE if proof.accepted else FAILED
            claim = self._claims.take(["merge"])
            if claim is None:
                return DONE  # another worker is at it
            try:
                print("merging", flush=True)
                proof = merge(self._job, self._round, plan)
            finally:
                self._claims.release(claim)
            print(
                f"{proof.rows} rows in {proof.output}, {proof.failed} without an answer", flush=True
            )
