"""One timeline per transfer kernel: which warps do what, what they wait for, what they signal."""

from __future__ import annotations

import style
from matplotlib.figure import Figure
from style import Lane, Timeline

LEGEND = {
    "plan": "plan",
    "send": "store to peers",
    "expand": "copy within the GPU",
    "sum": "add rows in float32",
    "wait": "wait",
}
HEIGHT, ROWS = 4.2, 46.0
TOP, MIDDLE, BOTTOM = 34.5, 21.5, 9.0
PEERS = "Peers"


def timeline(title: str, upper: Lane, lower: Lane, kinds: str, note: str) -> Timeline:
    """An empty timeline: the peers between two kinds of warps of this rank."""
    peers = Lane(PEERS, "the same kernel", MIDDLE, height=3.4)
    drawn = Timeline(title, [upper, peers, lower], height=HEIGHT, rows=ROWS)
    drawn.band(PEERS, "")
    drawn.legend(ROWS - 5.2, [(kind, LEGEND[kind]) for kind in kinds.split()])
    drawn.time_axis(4.6)
    drawn.note(note)
    return drawn


def outgoing(t: Timeline, source: str, at: float, words: str, side: str = "right") -> None:
    """A signal of this rank to all peers."""
    t.signal(source, at, PEERS, at + 1.2, words, side=side)


def incoming(t: Timeline, target: str, at: float, words: str, side: str = "left") -> None:
    """Signals of all peers, which end a wait."""
    t.signal(PEERS, at - 1.2, target, at, words, side=side, color=style.INCOMING)


def dispatch() -> Figure:
    """The dispatch of many tokens."""
    warps, senders = "Warps 0 to 7", "Send warps"
    t = timeline(
        "dispatch: one kernel, one block per SM",
        Lane(warps, "of each block", TOP),
        Lane(senders, "1 to 4 per block", BOTTOM),
        "plan send expand wait",
        "A block with a work item, and a receive ring of two chunks. Own tokens are expanded four "
        "chunks ahead of the peers' (not drawn).",
    )
    t.span(warps, 17, 26, "count own\nassignments", "plan")
    t.span(warps, 26, 34, "WAIT_\nENTRY", "wait")
    t.span(warps, 34, 41, "routes and\nweights", "send")
    t.span(warps, 41, 50, "WAIT_LOCAL\nWAIT_CHUNK 0", "wait")
    t.span(warps, 50, 56, "quotas,\noffsets", "plan")
    t.span(warps, 56, 64, "chunk 0\nto rows", "expand")
    t.span(warps, 64, 71, "WAIT_\nCHUNK 1", "wait")
    t.span(warps, 71, 79, "chunk 1\nto rows", "expand")
    t.span(warps, 79, 83, "...", "wait")
    t.span(warps, 83, 90, "last\nchunk", "expand")
    t.span(warps, 90, 95, "zero\nrows", "expand")
    t.span(warps, 95, 99, "end", "end")

    t.span(senders, 17, 34, "WAIT_ENTRY", "wait")
    t.span(senders, 34, 41, "block\nbarrier", "wait")
    t.span(senders, 41, 50, "own tokens\nof chunk 0", "send")
    t.span(senders, 50, 59, "chunk 1", "send")
    t.span(senders, 59, 70, "WAIT_CREDIT\nfor chunk 2", "wait")
    t.span(senders, 70, 78, "chunk 2", "send")
    t.span(senders, 78, 82, "...", "wait")
    t.span(senders, 82, 90, "last chunk", "send")
    t.span(senders, 90, 99, "end", "end")

    outgoing(t, warps, 17.6, "SIGNAL_\nENTRY")
    outgoing(t, warps, 25.6, "SIGNAL_\nSEGMENT\n(counts)")
    incoming(t, warps, 34, "entry of\nall peers", side="right")
    incoming(t, senders, 34, "entry of\nall peers")
    outgoing(t, warps, 41, "routes,\nweights", side="right")
    incoming(t, warps, 50, "chunk 0 of\nall peers", side="right")
    outgoing(t, warps, 64, "SIGNAL_\nCREDIT 0", side="left")
    incoming(t, warps, 71, "chunk 1 of\nall peers", side="right")
    outgoing(t, warps, 79, "SIGNAL_\nCREDIT 1")
    outgoing(t, senders, 50, "SIGNAL_\nCHUNK 0", side="left")
    outgoing(t, senders, 59, "SIGNAL_\nCHUNK 1", side="left")
    incoming(t, senders, 70, "credit 0 of\nall peers", side="right")
    outgoing(t, senders, 78, "SIGNAL_\nCHUNK 2")
    outgoing(t, senders, 90, "SIGNAL_\nCHUNK, last")
    return t.figure


def redispatch() -> Figure:
    """The redispatch of many tokens."""
    warps, senders = "Warps 0 to 7", "Send warps"
    t = timeline(
        "redispatch: the same rows along a plan; no ids, no counts",
        Lane(warps, "of each block", TOP),
        Lane(senders, "1 to 4 per block", BOTTOM),
        "plan send expand wait",
        "Work items: first parts of the weights, then parts of the plan. Without weights nobody "
        "waits before the plan is inverted.",
    )
    t.span(warps, 17, 28, "WAIT_ENTRY", "wait")
    t.span(warps, 28, 35, "weights", "send")
    t.span(warps, 35, 44, "invert\nthe plan", "plan")
    t.span(warps, 44, 54, "WAIT_LOCAL\nWAIT_CHUNK 0", "wait")
    t.span(warps, 54, 63, "chunk 0\nto rows", "expand")
    t.span(warps, 63, 70, "WAIT_\nCHUNK 1", "wait")
    t.span(warps, 70, 79, "chunk 1\nto rows", "expand")
    t.span(warps, 79, 83, "...", "wait")
    t.span(warps, 83, 90, "last\nchunk", "expand")
    t.span(warps, 90, 95, "zero\nrows", "expand")
    t.span(warps, 95, 99, "end", "end")

    t.span(senders, 17, 28, "WAIT_ENTRY", "wait")
    t.span(senders, 28, 35, "block\nbarrier", "wait")
    t.span(senders, 35, 45, "own tokens\nof chunk 0", "send")
    t.span(senders, 45, 55, "chunk 1", "send")
    t.span(senders, 55, 69, "WAIT_CREDIT\nfor chunk 2", "wait")
    t.span(senders, 69, 78, "chunk 2", "send")
    t.span(senders, 78, 82, "...", "wait")
    t.span(senders, 82, 90, "last chunk", "send")
    t.span(senders, 90, 99, "end", "end")

    outgoing(t, warps, 17.6, "SIGNAL_\nENTRY")
    incoming(t, warps, 28, "entry of\nall peers", side="right")
    incoming(t, senders, 28, "entry of\nall peers")
    outgoing(t, warps, 35, "weights")
    incoming(t, warps, 54, "chunk 0 of\nall peers")
    outgoing(t, warps, 63, "SIGNAL_\nCREDIT 0", side="left")
    incoming(t, warps, 70, "chunk 1 of\nall peers", side="right")
    outgoing(t, warps, 79, "SIGNAL_\nCREDIT 1")
    outgoing(t, senders, 45, "SIGNAL_\nCHUNK 0", side="left")
    outgoing(t, senders, 55, "SIGNAL_\nCHUNK 1", side="left")
    incoming(t, senders, 69, "credit 0 of\nall peers", side="left")
    outgoing(t, senders, 78, "SIGNAL_\nCHUNK 2")
    outgoing(t, senders, 90, "SIGNAL_\nCHUNK, last")
    return t.figure


def combine() -> Figure:
    """The combine of many tokens."""
    one, other = "One warp", "Another warp"
    t = timeline(
        "combine: one kernel, 12 warps per block, two blocks per SM",
        Lane(one, "draws work items", TOP),
        Lane(other, "at the same time", BOTTOM),
        "plan send sum wait",
        "A partial sum adds a token's rows here and goes to the token's rank. Chunk 0 is added up "
        "some items later, so that warps seldom wait.",
    )
    for lane in (one, other):
        t.span(lane, 17, 26, "invert\nthe plan", "plan")
        t.span(lane, 26, 35, "WAIT_LOCAL\nWAIT_ENTRY", "wait")
    t.span(one, 35, 44, "partial sum\nof chunk 0", "send")
    t.span(one, 44, 53, "partial sum\nof chunk 1", "send")
    t.span(one, 53, 62, "partial sum\nof chunk 2", "send")
    t.span(one, 62, 72, "WAIT_LOCAL\nWAIT_CHUNK 0", "wait")
    t.span(one, 72, 80, "add up\nchunk 0", "sum")
    t.span(one, 80, 84, "...", "wait")
    t.span(one, 84, 94, "add up\nlast chunk", "sum")
    t.span(one, 94, 99, "end", "end")

    t.span(other, 35, 41, "chunk 0", "send")
    t.span(other, 41, 47, "chunk 0", "send")
    t.span(other, 47, 56, "chunk 1", "send")
    t.span(other, 56, 65, "chunk 2", "send")
    t.span(other, 65, 74, "chunk 3", "send")
    t.span(other, 74, 80, "add up\nchunk 0", "sum")
    t.span(other, 80, 84, "...", "wait")
    t.span(other, 84, 94, "add up\nlast chunk", "sum")
    t.span(other, 94, 99, "end", "end")

    outgoing(t, one, 17.6, "SIGNAL_\nENTRY")
    incoming(t, one, 35, "entry of\nall peers")
    incoming(t, other, 35, "entry of\nall peers")
    outgoing(t, other, 47, "SIGNAL_CHUNK 0,\nby the last sender", side="left")
    outgoing(t, one, 53, "SIGNAL_\nCHUNK 1")
    outgoing(t, other, 65, "SIGNAL_\nCHUNK 2")
    incoming(t, one, 72, "chunk 0 of\nall peers", side="right")
    return t.figure


def low_latency_dispatch() -> Figure:
    """The dispatch of few tokens."""
    push, count = "Warps 0 to 7", "Warps 8 to 15"
    t = timeline(
        "low-latency dispatch: stores first, one wait at the end",
        Lane(push, "of each block", TOP),
        Lane(count, "of each block", BOTTOM),
        "plan send expand wait",
        "All stores go to eager buffers, so nobody waits before sending. Only the last warp of the "
        "last block waits for WAIT_ENTRY.",
    )
    t.span(push, 17, 27, "ids, weights\nto all ranks", "send")
    t.span(push, 27, 40, "token segments\nto their ranks", "send")
    t.span(push, 40, 50, "block barrier", "wait")
    t.span(count, 17, 35, "WAIT_SEGMENT: ids\nof all ranks", "wait")
    t.span(count, 35, 50, "count all ranks'\nassignments", "plan")
    for lane in (push, count):
        t.span(lane, 50, 58, "quotas,\noffsets", "plan")
        t.span(lane, 58, 68, "WAIT_\nSEGMENT", "wait")
        t.span(lane, 68, 78, "segments\nto rows", "expand")
        t.span(lane, 78, 84, "zero\nrows", "expand")
    t.span(push, 84, 99, "end", "end")
    t.span(count, 84, 94, "WAIT_ENTRY\n(one warp)", "wait")
    t.span(count, 94, 99, "end", "end")

    outgoing(t, push, 19.5, "SIGNAL_\nENTRY", side="right")
    outgoing(t, push, 27, "SIGNAL_SEGMENT\n(ids, weights)")
    outgoing(t, push, 40, "SIGNAL_SEGMENT\n(flags)")
    incoming(t, count, 35, "ids of\nall ranks", side="left")
    incoming(t, push, 68, "flag of the\nsegment", side="right")
    incoming(t, count, 68, "flag of the\nsegment", side="right")
    incoming(t, count, 94, "entry of\nall peers")
    return t.figure


def low_latency_redispatch() -> Figure:
    """The redispatch of few tokens."""
    warps, last = "Warps 0 to 15", "Last warp"
    t = timeline(
        "low-latency redispatch: the plan says where each segment goes",
        Lane(warps, "of each block", TOP),
        Lane(last, "of the last block", BOTTOM),
        "send expand wait",
        "Each warp reads the plan for 32 rows at once and waits for two segments at a time.",
    )
    for lane in (warps, last):
        t.span(lane, 17, 27, "weights to\nall ranks", "send")
        t.span(lane, 27, 43, "token segments\nto the plan's ranks", "send")
        t.span(lane, 43, 56, "WAIT_SEGMENT", "wait")
        t.span(lane, 56, 73, "segments to rows,\ntwo at a time", "expand")
        t.span(lane, 73, 81, "zero rows", "expand")
    t.span(warps, 81, 99, "end", "end")
    t.span(last, 81, 92, "WAIT_ENTRY", "wait")
    t.span(last, 92, 99, "end", "end")

    outgoing(t, warps, 19.5, "SIGNAL_\nENTRY")
    outgoing(t, warps, 27, "SIGNAL_SEGMENT\n(weights)")
    outgoing(t, warps, 43, "SIGNAL_SEGMENT\n(flags)")
    incoming(t, warps, 56, "flags of the\nsegments", side="right")
    incoming(t, last, 92, "entry of\nall peers")
    return t.figure


def low_latency_combine() -> Figure:
    """The combine of few tokens."""
    warps, last = "Warps 0 to 15", "Last warp"
    t = timeline(
        "low-latency combine: partial sums in segments, then one sum per token",
        Lane(warps, "of each block", TOP),
        Lane(last, "of the last block", BOTTOM),
        "plan send sum wait",
        "Each block inverts the plan in its shared memory, so that no block waits for another.",
    )
    for lane in (warps, last):
        t.span(lane, 17, 30, "invert the plan", "plan")
        t.span(lane, 30, 48, "partial sums, in\nsegments, to all ranks", "send")
        t.span(lane, 48, 60, "WAIT_SEGMENT", "wait")
        t.span(lane, 60, 80, "add up segments\nof own tokens", "sum")
    t.span(warps, 80, 99, "end", "end")
    t.span(last, 80, 92, "WAIT_ENTRY", "wait")
    t.span(last, 92, 99, "end", "end")

    outgoing(t, warps, 32.5, "SIGNAL_\nENTRY")
    outgoing(t, warps, 48, "SIGNAL_SEGMENT\n(flags)")
    incoming(t, warps, 60, "flags of\nall ranks", side="right")
    incoming(t, last, 92, "entry of\nall peers")
    return t.figure
