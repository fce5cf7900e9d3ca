"""The timeline of the sm_90a grouped matmul: a weight gradient's tile and its neighbors."""

from __future__ import annotations

import style
from matplotlib.figure import Figure
from style import Lane, Timeline

SCHEDULER, PRODUCER = "Scheduler warp", "Producer warp"
FIRST, SECOND, EPILOGUE = "Consumers 0", "Consumers 1", "Epilogue"
NUM_K_BLOCKS = 8
STAGES = 4
STEP = 7.0
START = 34.0  # the middle tile's
LAG = 1.6  # the second warpgroup's
SHIFT = 2.8  # from a stage's release to the copy into it
ROUND = 3.0  # the duration of a tile's end


def draw() -> Figure:
    """The whole timeline."""
    lanes = [
        Lane(SCHEDULER, "one per cluster", 49.0, height=4.6),
        Lane(PRODUCER, "one per block, TMA", 38.5, height=4.6),
        Lane(FIRST, "warpgroup, 64 x 256", 27.0, height=4.6),
        Lane(SECOND, "warpgroup, 64 x 256", 19.0, height=4.6),
        Lane(EPILOGUE, "of both warpgroups", 9.5, height=4.6),
    ]
    t = Timeline(
        "grouped matmul on sm_90a, weight gradient: tile i with 8 k-blocks, in one block",
        lanes,
        height=5.5,
        rows=61.0,
    )
    t.legend(
        55.6,
        [
            ("plan", "find a tile pair"),
            ("send", "TMA load"),
            ("compute", "wgmma, tile i"),
            ("pale", "other tiles"),
            ("sum", "epilogue"),
            ("wait", "wait"),
        ],
    )

    # The producer runs a ring of stages ahead of the consumers.
    ahead = STAGES - 1
    for j in range(NUM_K_BLOCKS + STAGES):
        left = START + STEP * (j - ahead) + SHIFT
        if left < t.first + 1.6:
            continue
        words = f"k{j}" if j < NUM_K_BLOCKS else f"k{j - NUM_K_BLOCKS}\n(i+1)"
        t.span(PRODUCER, left - 1.6, left, "", "wait")
        t.span(PRODUCER, left, left + STEP - 1.6, words, "send")

    for lane, lag in ((FIRST, 0.0), (SECOND, LAG)):
        for j in range(-3, NUM_K_BLOCKS + 1):
            left = START + STEP * j + lag
            if j < 0:
                left -= ROUND
            if j >= NUM_K_BLOCKS:
                left += ROUND
            right = min(left + STEP, 99.0)
            left = max(left, t.first)
            if right - left < 1.0:
                continue
            inside = 0 <= j < NUM_K_BLOCKS
            words = f"k{j}" if inside else "i-1" if j < 0 else ""
            t.span(lane, left, right, words, "compute" if inside else "pale")
        for left in (START - ROUND, START + STEP * NUM_K_BLOCKS):
            t.span(lane, left + lag, left + lag + ROUND, "", "sum")

    # Results that are rounded at a tile's end leave between k-blocks of the next.
    t.span(EPILOGUE, START - ROUND, START + LAG, "round", "sum")
    t.span(EPILOGUE, START + 1.2 * STEP, START + 2.4 * STEP, "store\nfirst half", "sum")
    t.span(EPILOGUE, START + 4.2 * STEP, START + 5.9 * STEP, "stage, store\nsecond half", "sum")
    t.span(EPILOGUE, START + 8 * STEP, START + 8 * STEP + ROUND + LAG, "round", "sum")

    # The next pair is claimed as late as it can be: with the first k-block whose copy leaves a full
    # ring to come.
    copied = START + STEP * (NUM_K_BLOCKS - 1 - STAGES - ahead) + SHIFT + STEP - 1.6
    wanted = copied + 1.4
    found = wanted + 20
    t.span(SCHEDULER, t.first, wanted, "WAIT tile wanted", "wait")
    t.span(SCHEDULER, wanted, found, "claim and find pair i+1", "plan")
    t.span(SCHEDULER, found, 99, "WAIT tile wanted", "wait")
    t.signal(PRODUCER, copied, SCHEDULER, wanted, "wanted", side="left")
    t.signal(SCHEDULER, found, PRODUCER, found + 1.4, "tile i+1, to all warps of both blocks")

    loaded = START + STEP * (2 - ahead) + SHIFT + STEP - 1.6
    t.signal(PRODUCER, loaded, FIRST, START + STEP * 2, "full[2]", side="left", at=0.68)
    read = START + STEP * 3
    words = "empty[2], by all consumers of both blocks"
    t.signal(FIRST, read, PRODUCER, read + SHIFT, words, color=style.INCOMING, at=0.4)
    edge = (START, t.edge(SECOND, above=False))
    style.arrow(t.axes, (START - 1.0, edge[1]), (START - 1.0, t.edge(EPILOGUE, above=True)))
    style.text(
        t.axes,
        START + 0.4,
        14.6,
        "half to shared memory, half in registers",
        size=style.SMALL - 0.4,
        color=style.FAINT,
        align="left",
    )
    t.time_axis(4.8)
    t.note(
        "k0 to k7 are k-blocks of 64. The producer is at most four stages ahead. A stage is "
        "released while the next wgmma is in flight."
    )
    return t.figure
