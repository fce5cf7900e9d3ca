"""The Spin models of tests/protocol/: the settings in which each holds, and how each of its mutations fails."""

from __future__ import annotations

import low_latency_model
import network_model
from spin_model import STUCK, WRONG, Model, Settings

# ---- transfer.pml: the flags of a transfer

# Defaults: an endless sequence of calls of the first seven operations (CALLS, FIRST, LAST), two resident
# blocks on rank 0 and one elsewhere. AND_RING adds the eighth operation, RING, which has the most states.
TRANSFER_SETTINGS = {
    "two_ranks": {"RESIDENT_ELSEWHERE": 2},
    "one_resident_block": {"RESIDENT": 1, "AND_RING": 1},
    "three_ranks": {"RANKS": 3, "RESIDENT": 1, "LAST": 4, "AND_RING": 1},
    "three_ranks_and_one_has_two_blocks": {"RANKS": 3, "FIRST": 3, "LAST": 3},
    "a_rank_times_out_in_two_calls": {"TIMEOUTS": 1, "CALLS": 2, "FIRST": 2},
    "a_rank_times_out_in_three_calls": {"TIMEOUTS": 1, "CALLS": 3, "FIRST": 3, "LAST": 4},
    "a_rank_times_out_with_one_resident_block": {
        "TIMEOUTS": 1, "CALLS": 3, "FIRST": 3, "LAST": 6, "RESIDENT": 1
    },
    "one_of_three_ranks_times_out": {"TIMEOUTS": 1, "CALLS": 1, "RANKS": 3, "RESIDENT": 1},
    "one_of_three_ranks_times_out_and_one_has_two_blocks": {
        "TIMEOUTS": 1, "CALLS": 1, "RANKS": 3, "CHUNKS": 1, "FIRST": 1, "LAST": 1
    },
    "different_calls": {"MISMATCH": 1, "CALLS": 2, "LAST": 4},
    "different_calls_with_one_resident_block": {
        "MISMATCH": 1, "CALLS": 2, "RESIDENT": 1, "AND_RING": 1
    },
    "three_different_calls": {"MISMATCH": 1, "CALLS": 3, "FIRST": 3, "LAST": 4},
    "different_calls_of_three_ranks": {"MISMATCH": 1, "CALLS": 1, "RANKS": 3, "RESIDENT": 1},
    "receive_rings": {"AND_RING": 1, "FIRST": 2, "LAST": 3, "CHUNKS": 3},
    "a_rank_with_receive_rings_times_out": {
        "TIMEOUTS": 1, "CALLS": 2, "AND_RING": 1, "FIRST": 3, "LAST": 3, "RESIDENT": 1
    },
    "a_rank_with_receive_rings_and_two_blocks_times_out": {
        "TIMEOUTS": 1, "CALLS": 1, "FIRST": 8, "LAST": 8, "ITEMS": 1
    },
}  # fmt: skip

REDISPATCH, COMBINE, DISPATCH, LOW_LATENCY, LOW_LATENCY_POISONED, POISONED, EMPTY, RING = (
    {"FIRST": n, "LAST": n} for n in (1, 2, 3, 4, 5, 6, 7, 8)
)
TIMES_OUT = {"TIMEOUTS": 1, "CALLS": 3}
ONE_BLOCK = {"FIRST": 4, "LAST": 5, "RESIDENT": 1}
RING_TIMES_OUT = RING | TIMES_OUT | {"RESIDENT": 1}
RING_OF_THREE_RANKS = RING | {"RANKS": 3, "RESIDENT": 1}
TRANSFER_MUTATIONS = (
    ("NO_WAIT_ENTRY", WRONG, COMBINE),
    ("NO_WAIT_ENTRY", WRONG, DISPATCH),
    ("NO_WAIT_ENTRY", WRONG, LOW_LATENCY_POISONED | TIMES_OUT),
    ("NO_WAIT_CHUNK", WRONG, COMBINE),
    ("NO_WAIT_CHUNK", WRONG, DISPATCH),
    ("NO_WAIT_SEGMENT", WRONG, LOW_LATENCY),
    ("NO_WAIT_LOCAL", WRONG, COMBINE),
    ("NO_WAIT_LOCAL", WRONG, REDISPATCH),
    ("NO_WAIT_LOCAL", WRONG, DISPATCH),
    ("NO_WAIT_TILES", WRONG, DISPATCH),
    ("NO_WAIT_ITEMS", WRONG, DISPATCH),
    ("LOCAL_LAST", WRONG, DISPATCH | TIMES_OUT),
    ("NO_SIGNAL_ENTRY", STUCK, DISPATCH),
    ("NO_SIGNAL_ENTRY", STUCK, EMPTY),
    ("NO_SIGNAL_ENTRY", STUCK, LOW_LATENCY),
    ("NO_SIGNAL_CHUNK", STUCK, COMBINE),
    ("NO_SIGNAL_CHUNK", STUCK, DISPATCH),
    ("NO_SIGNAL_SEGMENT", STUCK, LOW_LATENCY),
    ("NO_SIGNAL_SEGMENT", WRONG, DISPATCH),
    ("EARLY_SIGNAL_CHUNK", WRONG, COMBINE),
    ("EARLY_SIGNAL_CHUNK", WRONG, DISPATCH),
    ("EARLY_SIGNAL_SEGMENT", WRONG, LOW_LATENCY),
    ("EARLY_SEQUENCE", WRONG, DISPATCH),
    ("EARLY_SEQUENCE", WRONG, LOW_LATENCY),
    ("FIRST_SIGNAL_CHUNK", WRONG, COMBINE),
    ("FIRST_SIGNAL_CHUNK", WRONG, DISPATCH),
    ("NO_FINGERPRINT", WRONG, TRANSFER_SETTINGS["different_calls_with_one_resident_block"]),
    ("NO_POISONED", STUCK, POISONED),
    ("NO_POISONED", STUCK, ONE_BLOCK),
    ("NO_FAILURE_RECORD", WRONG, COMBINE | TIMES_OUT),
    ("NO_FAILURE_RECORD", WRONG, DISPATCH | TIMES_OUT),
    ("NO_FAILURE_RECORD", WRONG, LOW_LATENCY | TIMES_OUT),
    ("NO_ABORT", STUCK, DISPATCH | TIMES_OUT),
    ("NO_ABORT", STUCK, LOW_LATENCY | TIMES_OUT),
    ("NO_FORWARD_ABORT", WRONG, TRANSFER_SETTINGS["one_of_three_ranks_times_out_and_one_has_two_blocks"]),
    ("NO_ABORT_CHECK", WRONG, LOW_LATENCY | TIMES_OUT),
    ("NO_ABORT_CHECK", WRONG, DISPATCH | TIMES_OUT),
    ("ENTER_ABORTED", WRONG, DISPATCH | TIMES_OUT),
    ("ENTER_ABORTED", WRONG, COMBINE | TIMES_OUT),
    ("ENTER_ABORTED", WRONG, LOW_LATENCY | TIMES_OUT),
    ("NO_PEER_CHECK", STUCK, ONE_BLOCK),
    ("NO_PEER_CHECK", STUCK, TRANSFER_SETTINGS["different_calls_with_one_resident_block"]),
    ("ENTRY_BY_BLOCK", STUCK, ONE_BLOCK),
    ("ENTRY_LAST", STUCK, DISPATCH),
    ("NO_RESET", STUCK, DISPATCH),
    ("READS_FIRST", STUCK, COMBINE),
    ("EARLY_STORE", WRONG, COMBINE),
    ("EARLY_STORE", WRONG, DISPATCH),
    ("EARLY_ITEMS", WRONG, DISPATCH),
    ("EARLY_READ", WRONG, DISPATCH),
    ("ONLY_CHUNK_0", WRONG, COMBINE),
    ("ONLY_CHUNK_0", WRONG, DISPATCH),
    ("FAILED_STORES", WRONG, DISPATCH | TIMES_OUT),
    ("FAILED_NOT_COUNTED", STUCK, DISPATCH | TIMES_OUT),
    ("FAILED_COUNTED", WRONG, DISPATCH | TIMES_OUT),
    ("EMPTY_STORES", WRONG, EMPTY),
    ("FLAGS_FIRST", WRONG, DISPATCH | TIMES_OUT),
    ("SINGLE_ENTRY_BUFFER", WRONG, LOW_LATENCY | TIMES_OUT),
    ("SINGLE_ENTRY_BUFFER", WRONG, {"CALLS": 3, "FIRST": 3, "LAST": 4}),
    ("SINGLE_EAGER_BUFFER", WRONG, LOW_LATENCY | TIMES_OUT),
    ("SINGLE_COUNT_BUFFER", WRONG, {"CALLS": 3, "FIRST": 3, "LAST": 4}),
    ("COUNTS_WITH_ROWS", WRONG, {"FIRST": 2, "LAST": 3}),
    ("NO_WAIT_ENTRY", WRONG, RING),
    ("NO_WAIT_CHUNK", WRONG, RING),
    ("NO_SIGNAL_CHUNK", STUCK, RING),
    ("FIRST_SIGNAL_CHUNK", WRONG, RING),
    ("ONLY_CHUNK_0", WRONG, RING),
    ("NO_WAIT_CREDIT", WRONG, RING),
    ("NO_SIGNAL_CREDIT", STUCK, RING),
    ("EARLY_SIGNAL_CREDIT", WRONG, RING),
    ("FIRST_SIGNAL_CREDIT", WRONG, RING),
    ("CREDIT_TO_ONE_PEER", STUCK, RING_OF_THREE_RANKS),
    ("CREDIT_FROM_ONE_PEER", WRONG, RING_OF_THREE_RANKS),
    ("ONLY_CREDIT_0", WRONG, RING | {"CHUNKS": 3}),
    ("ANY_SEQUENCE_CREDIT", WRONG, RING),
    ("NO_RESET_CREDIT", STUCK, RING),
    ("LATE_CREDIT", STUCK, RING),
    ("CREDIT_IGNORES_ABORT", STUCK, RING_TIMES_OUT),
    ("FAILED_SENDS", WRONG, RING_TIMES_OUT),
    ("FAILED_SENT", WRONG, RING_TIMES_OUT),
    ("SENDS_FIRST", STUCK, RING),
    ("OWN_TICKETS", STUCK, RING),
)  # fmt: skip

# ---- generations.pml: what the host and two ranks do while generations change

GROWTH: Settings = {}  # two ranks that begin generations after the same calls
ANY_ORDER: Settings = {"IN_ORDER": 0, "CALLS": 2}
RELEASE = ANY_ORDER | {"RELEASED": 2}
CALL_FAILS = {"CALLS_FAIL": 1, "CALLS_OF_EACH": 1}
DEVICE_FAILS = {"DEVICE_FAILS": 1, "CALLS_OF_EACH": 1}
START_FAILS = {"STARTS_FAIL": 1}
GENERATION_SETTINGS = {
    "growth": GROWTH,
    "generations_that_start_in_any_order": ANY_ORDER | {"CALLS": 3},
    "release": RELEASE | {"CALLS": 3},
    "growth_and_a_call_is_not_launched": CALL_FAILS,
    "growth_and_a_device_fails": DEVICE_FAILS,
    "growth_and_a_generation_starts_on_some_devices": START_FAILS,
    "release_and_a_call_is_not_launched": RELEASE | CALL_FAILS | {"LAST": 2},
    "release_and_a_device_fails": RELEASE | DEVICE_FAILS | {"LAST": 2},
    "release_and_a_generation_starts_on_some_devices": RELEASE | START_FAILS,
}
GENERATION_MUTATIONS = (
    ("FREE_FIRST", WRONG, GROWTH),
    ("FREE_WITH_FIRST_RANK", WRONG, GROWTH),
    ("FREE_PARTLY_STARTED", WRONG, RELEASE | START_FAILS),
    ("FREE_BEFORE_COPIES", WRONG, RELEASE | CALL_FAILS),
    ("NO_REFERENCE", WRONG, RELEASE | CALL_FAILS),
    ("NO_GENERATION_BITS", WRONG, GROWTH),
    ("SHARED_INBOX", WRONG, START_FAILS),
    ("NO_LEAVE", STUCK, ANY_ORDER),
    ("LEAVE_AS_CALL", STUCK, ANY_ORDER),
    ("ABORT_IN_STREAM", STUCK, DEVICE_FAILS),
    ("ABORT_CURRENT", STUCK, DEVICE_FAILS),
    ("ABORT_OUTLIVED", STUCK, DEVICE_FAILS),
    ("START_NOT_ABORTED", STUCK, START_FAILS),
    ("FAILURE_OF_CURRENT", WRONG, ANY_ORDER),
    ("FREE_FAILED", WRONG, ANY_ORDER),
    ("NO_WORKSPACE_CHECK", WRONG, RELEASE),
)

# ---- claims.pml: calls of two streams, and starts of generations, on one control block

TWO_CALLS = {"STARTS": 0}
STARTS_BESIDE_CALLS = {"KERNELS": 2}
CLAIM_SETTINGS = {
    "two_calls_at_once": TWO_CALLS,
    "growth_beside_two_calls": STARTS_BESIDE_CALLS,
    "release_beside_two_calls": STARTS_BESIDE_CALLS | {"DRAINED": 1},
}
CLAIM_MUTATIONS = (
    ("NO_CLAIM", WRONG, TWO_CALLS),
    ("CLAIM_ENDED_FIRST", WRONG, TWO_CALLS),
    ("CONTESTED_FREED", WRONG, TWO_CALLS),
    ("NO_OWNER", WRONG, TWO_CALLS),
    ("OWNER_STAYS", WRONG, TWO_CALLS),
    ("OWNER_STAYS", STUCK, STARTS_BESIDE_CALLS),
    ("END_UNSEEN", WRONG, TWO_CALLS),
    ("HOST_ANY_TIME", WRONG, STARTS_BESIDE_CALLS),
    ("HOST_CONTESTED", WRONG, STARTS_BESIDE_CALLS),
    ("HOST_AT_ONCE", WRONG, STARTS_BESIDE_CALLS),
    ("NO_HOST_CLAIM", WRONG, STARTS_BESIDE_CALLS),
    ("CONTEST_FORGOTTEN", STUCK, STARTS_BESIDE_CALLS),
    ("NO_RECORD", WRONG, TWO_CALLS),
    ("END_OF_ANY", STUCK, STARTS_BESIDE_CALLS),
    ("OLD_WORD", WRONG, STARTS_BESIDE_CALLS),
    ("NEW_TICKET", STUCK, STARTS_BESIDE_CALLS),
)

# ---- lanes.pml: two lanes that share the SMs of two GPUs

LANE_SETTINGS = {
    "two_lanes": {},
    "two_lanes_with_two_blocks_each": {"SLOTS": 4},
    "one_without_a_limit": {"UNLIMITED": 1},
    "one_without_a_limit_beside_two_blocks": {"UNLIMITED": 1, "SLOTS": 4},
}
LANE_MUTATIONS = (
    ("NO_SHARE", STUCK, {}),
    ("SHARED_CLAIM", WRONG, {}),
    ("SHARED_INBOX", WRONG, {}),
)

MODELS = {
    "transfer": Model(r"(?:WAIT|SIGNAL)_[A-Z]+", TRANSFER_SETTINGS, TRANSFER_MUTATIONS),
    "generations": Model(r"(?:GENERATION|HOST)_[A-Z]+", GENERATION_SETTINGS, GENERATION_MUTATIONS),
    "claims": Model(r"CLAIM_[A-Z]+", CLAIM_SETTINGS, CLAIM_MUTATIONS),
    "lanes": Model(r"LANE_[A-Z]+", LANE_SETTINGS, LANE_MUTATIONS),
    "network": Model(
        r"NETWORK_(?:WAIT|SIGNAL|PUT)_[A-Z]+",
        network_model.SETTINGS,
        network_model.MUTATIONS,
    ),
    "low_latency": Model(
        r"EAGER_(?:WAIT|SIGNAL|CHECK)_[A-Z]+",
        low_latency_model.SETTINGS,
        low_latency_model.MUTATIONS,
    ),
}
