"""FSDP2 on CPUs: one thread computes, copies, posts collectives and waits for them; the wire works beside it.

Every collective of a rank goes through one connection to each peer, so the wire takes them one after the other as they
were posted. What is not in the background is waited for where it is posted. A separate group has connections of its
own, but the same link: what one gains the other loses, so it is the same lane here.
"""

from __future__ import annotations

from shardwise.predict.schedule.costs import StepCosts, UnitCosts
from shardwise.spec.timeline import ROOT, Lane, Span, Timeline, Wait, What

ROOT_PLACE = -1


def simulate_gloo(step: StepCosts, *, brief: bool = False) -> Timeline:
    """Return the timeline of a step whose rules are `gloo`; `brief`: without spans and waits."""
    run = _Run(step)
    update = step.update
    run.blocking("all_reduce", "exchange", "", update.agree)
    for number in range(step.micro_batches):
        run.micro_batch = number
        run.forward()
        run.backward(last=number == step.micro_batches - 1)
        if number:
            run.compute("update", "", step.adding)
    run.compute("clip", "", update.clip)
    run.blocking("all_reduce", "exchange", "", update.clip_exchange)
    run.compute("update", "", update.update + update.host_update)
    return run.timeline(brief)


class _Run:
    """The state of one rank: how far its main thread and its wire are."""

    def __init__(self, step: StepCosts) -> None:
        self.step = step
        self.micro_batch = 0
        self.now = 0.0
        self.wire_free = 0.0
        self.spans: list[Span] = []
        self.waits: list[Wait] = []
        self._held: tuple[float, Span] | None = None
        self._gathers: dict[int, Span] = {}
        self._reductions: list[tuple[Span, UnitCosts, str]] = []

    def compute(self, what: What, unit: str, seconds: float) -> None:
        """Do something on the main thread; slower while the wire works."""
        if seconds <= 0:
            return
        start, slow = self.now, self.step.slowdown
        beside = max(0.0, self.wire_free - start)
        end = start + seconds * slow if seconds * slow <= beside else start + seconds + beside * (1 - 1 / slow)
        span = Span("compute", what, unit, self.micro_batch, start, end)
        self.spans.append(span)
        self.now = end
        if self._held is not None:
            since, by = self._held
            self.waits.append(Wait(since, start, span, by))
            self._held = None

    def post(self, lane: Lane, what: What, unit: str, seconds: float) -> Span:
        """Give the wire something to do after all it has."""
        self.compute("issue", unit, self.step.post)
        start = max(self.now, self.wire_free)
        span = Span(lane, what, unit, self.micro_batch, start, start + seconds)
        self.spans.append(span)
        self.wire_free = span.end
        return span

    def wait_for(self, span: Span) -> None:
        """Stand still until it is done."""
        if span.end > self.now:
            since = self.now if self._held is None else self._held[0]
            self._held = (since, span)
            self.now = span.end

    def blocking(self, lane: Lane, what: What, unit: str, seconds: float) -> None:
        """Do a collective and wait for it."""
        if seconds > 0:
            self.wait_for(self.post(lane, what, unit, seconds))

    def forward(self) -> None:
        """Run one forward."""
        step, root = self.step, self.step.root
        self.compute("issue", ROOT, root.unit.forward_issue)
        self._arrive(ROOT_PLACE, again=False)
        self._gather_ahead(step.ahead[-1], again=False)
        self.compute("forward", ROOT, root.embed)
        for place, unit in enumerate(step.units):
            self.compute("issue", step.names[place], unit.forward_issue)
            self._arrive(place, again=False)
            self._gather_ahead(step.ahead[place], again=False)
            self.compute("forward", step.names[place], unit.forward)
        self.compute("forward", ROOT, root.head)

    def backward(self, *, last: bool) -> None:
        """Run one backward; reductions are done when it returns."""
        step, root = self.step, self.step.root
        self.compute("issue", ROOT, root.unit.backward_issue)
        self._gather_ahead(step.behind[-1], again=True)
        self.compute("backward", ROOT, root.head_backward)
        for place in range(len(step.units) - 1, -1, -1):
            unit = step.units[place]
            self.compute("issue", step.names[place], unit.backward_issue)
            self._arrive(place, again=True)
            self._gather_ahead(step.behind[place], again=True)
            self.compute("backward", step.names[place], unit.backward)
            if place != step.late:
                self._reduce(unit, step.names[place], last=last)
        self.compute("backward", ROOT, root.embed_backward)
        self._reduce(root.unit, ROOT, last=last)
        if step.late is not None:
            self._reduce(step.units[step.late], step.names[step.late], last=last)
        while self._reductions:
            self._finish_oldest()
        self._gathers.clear()

    def _unit(self, place: int) -> tuple[UnitCosts, str]:
        if place == ROOT_PLACE:
            return self.step.root.unit, ROOT
        return self.step.units[place], self.step.names[place]

    def _gather(self, place: int, *, again: bool) -> None:
        """Start the gather of a unit, unless it has been started or is not needed."""
        unit, name = self._unit(place)
        seconds = unit.regather if again else unit.gather
        if place in self._gathers or seconds <= 0:
            return
        self.compute("copy_in", name, unit.recopy_in if again and self.step.regather_group else unit.copy_in)
        self._gathers[place] = self.post("all_gather", "all_gather", name, seconds)
        if not self.step.background_gathers:
            self.wait_for(self._gathers[place])

    def _gather_ahead(self, places: tuple[int, ...], *, again: bool) -> None:
        for place in places:
            self._gather(place, again=again)

    def _arrive(self, place: int, *, again: bool) -> None:
        """Wait for a unit's weights and copy them out."""
        self._gather(place, again=again)
        if place in self._gathers:
            self.wait_for(self._gathers.pop(place))
        unit, name = self._unit(place)
        self.compute("copy_out", name, unit.recopy_out if again else unit.copy_out)

    def _reduce(self, unit: UnitCosts, name: str, *, last: bool) -> None:
        """Reduce a unit's gradients as the accumulation mode says."""
        step = self.step
        if not unit.trains or (step.mode == "defer_all" and not last):
            return
        self.compute("reduce_copy_in", name, unit.reduce_copy_in)
        if unit.reduce > 0:
            self._reductions.append((self.post("reduce_scatter", "reduce_scatter", name, unit.reduce), unit, name))
            in_flight = step.buffers if step.background_reductions else 0
            while len(self._reductions) > in_flight:
                self._finish_oldest()
        if last or step.mode == "reduce_each":
            self.blocking("all_reduce", "all_reduce", name, unit.all_reduce)

    def _finish_oldest(self) -> None:
        span, unit, name = self._reductions.pop(0)
        self.wait_for(span)
        self.compute("reduce_sum", name, unit.reduce_sum)

    def timeline(self, brief: bool) -> Timeline:
        """Return what has happened."""
        if self._held is not None:
            since, by = self._held
            end = Span("compute", "update", "", self.micro_batch, self.now, self.now)
            self.waits.append(Wait(since, self.now, end, by))
        busy: dict[Lane, float] = {}
        for span in self.spans:
            busy[span.lane] = busy.get(span.lane, 0.0) + span.end - span.start
        exposed = self._exposed()
        shown = sum(exposed.values())
        return Timeline(
            step_s=self.now,
            spans=() if brief else tuple(self.spans),
            waits=() if brief else tuple(self.waits),
            busy=busy,
            exposed=exposed,
            exposed_s=shown,
            tensor_s=self.step.micro_batches * self.step.tensor,
            hidden_s=sum(seconds for lane, seconds in busy.items() if lane != "compute") - shown,
        )

    def _exposed(self) -> dict[Lane, float]:
        """Return, by lane, how long the wire works while the main thread waits; both lists are in order."""
        exposed: dict[Lane, float] = {}
        wire = [span for span in self.spans if span.lane != "compute"]
        place = 0
        for wait in self.waits:
            while place < len(wire) and wire[place].end <= wait.start:
                place += 1
            at = place
            while at < len(wire) and wire[at].start < wait.end:
                span = wire[at]
                under = min(span.end, wait.end) - max(span.start, wait.start)
                exposed[span.lane] = exposed.get(span.lane, 0.0) + under
                at += 1
        return exposed
