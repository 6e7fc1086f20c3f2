"""What a recorded run says of data parallelism: buckets with their reasons, a backward beside its prediction."""

from __future__ import annotations

import atexit
import weakref
from contextlib import ExitStack
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from gradsplit.bucketing.simulate import simulate
from gradsplit.bucketing.timeline import Timeline
from gradsplit.compile_core.interface.module_compilers import CompileRequest
from gradsplit.compile_core.observe import measure_steps
from gradsplit.compile_core.run_record import is_recording, record
from gradsplit.distributed.compile_ddp import CompiledDDP
from gradsplit.distributed.explaining.record_timeline import TimelineRecorder, record_timeline

# The plan is settled by then, or is not going to be; and the step that is profiled is over.
_FIRST_STEP, _LAST_STEP = 8, 20


def compile_recorded(ddp: DistributedDataParallel, request: CompileRequest) -> CompiledDDP:
    """``CompiledDDP``, which is recorded where the run is."""
    compiled = CompiledDDP(ddp, request)
    if is_recording():
        run = _RecordedRun(compiled)
        measure_steps.listeners.append(run.at_step)
        atexit.register(run.finish)
    return compiled


class _RecordedRun:
    """Records one backward of a module once its plan is settled."""

    def __init__(self, compiled: CompiledDDP) -> None:
        self._compiled = weakref.ref(compiled)
        self._names = [name for name, _ in compiled.ddp.module.named_parameters()]
        self._recording: ExitStack | None = None
        self._recorder: TimelineRecorder | None = None
        self._is_done = False

    def at_step(self, step: int) -> None:
        compiled = self._compiled()
        if self._is_done or compiled is None or step < _FIRST_STEP:
            return
        if self._recording is not None:
            self._end()
        elif compiled.buckets is not None and (compiled.merge_plan is not None or step >= _LAST_STEP):
            self._recording = ExitStack()
            self._recorder = self._recording.enter_context(record_timeline(compiled))

    def _end(self) -> None:
        assert self._recording is not None and self._recorder is not None
        self._recording.close()
        self._write(self._recorder.timeline())

    def finish(self) -> None:
        """The process ends."""
        if not self._is_done:
            self._write(None)

    def _write(self, measured: Timeline | None) -> None:
        self._is_done = True
        compiled = self._compiled()
        if compiled is None:
            return
        plan, chosen, costs = compiled.plan, compiled.merge_plan, compiled.costs
        predicted = None if plan is None or costs is None else simulate(plan, costs)
        record(
            "ddp",
            lambda: {
                "reason_for_reducer": compiled.reason_for_reducer or "",
                "parameters": self._names,
                "buckets": [
                    {
                        "bytes": bucket.bytes,
                        "parameters": [parameter.name for parameter in bucket.parameters],
                        "reason": chosen.reasons[bucket.index] if chosen is not None else "",
                    }
                    for bucket in (() if plan is None else plan.buckets)
                ],
                "measured": _described(measured),
                "predicted": _described(predicted),
            },
        )


def _described(timeline: Timeline | None) -> dict[str, Any] | None:
    if timeline is None:
        return None
    return {
        "all_reduce_ms": timeline.all_reduce_ms,
        "exposed_ms": timeline.exposed_ms,
        "backward_ms": 1e3 * (timeline.end_s - timeline.start_s),
        "intervals": [
            {
                "kind": each.kind,
                "label": each.label,
                "start_ms": 1e3 * (each.start_s - timeline.start_s),
                "end_ms": 1e3 * (each.end_s - timeline.start_s),
                "bytes": each.bytes,
            }
            for each in sorted(timeline.intervals, key=lambda each: each.start_s)
        ],
    }
