"""The settings and mutations of tests/protocol/low_latency.pml, a model of low-latency calls over NVLink domains."""

from __future__ import annotations

from spin_model import STUCK, WRONG, Settings

# Defaults: three calls of any low-latency operation on two domains of two ranks, rings of two calls, and messages that
# arrive late on all rails.
DISPATCHES, REDISPATCHES, COMBINES, DROPPED = ({"FIRST": n, "LAST": n} for n in (1, 2, 3, 4))
ONE_CALL, TWO_CALLS = {"CALLS": 1}, {"CALLS": 2}
PAIR = {"INDICES": 1} | TWO_CALLS  # two domains of one rank
DOMAINS_OF_TWO = {"LATE": 0}
SMALL_RING = {"SLOTS": 2}  # a ring of one call, so that credits are waited for
BESIDE_GENERAL = PAIR | {"FIRST": 4, "LAST": 5}
ONE_WARP = DOMAINS_OF_TWO | {"IN_ORDER": 1}
EMPTY_REDISPATCHES = DOMAINS_OF_TWO | REDISPATCHES | {"EMPTY": 1}
ENTERS_LATE = DOMAINS_OF_TWO | ONE_CALL | {"PROGRESS": 1}
RANK_TIMES_OUT = PAIR | {"TIMEOUTS": 1}
OTHER_WARPS_GO_ON = RANK_TIMES_OUT | {"GOES_ON": 1}
WITHOUT_ROWS = OTHER_WARPS_GO_ON | REDISPATCHES | {"EMPTY": 1}
DOMAIN_TIMES_OUT = ONE_WARP | ONE_CALL | {"TIMEOUTS": 1}
SETTINGS: dict[str, Settings] = {
    "low_latency_between_two_ranks": PAIR,
    "low_latency_with_rings_of_one_call": PAIR | SMALL_RING,
    "low_latency_beside_general_calls": BESIDE_GENERAL | {"CALLS": 3, "LATE": 1},
    "low_latency_between_domains_of_two": DOMAINS_OF_TWO | ONE_CALL,
    "low_latency_between_domains_of_two_with_late_messages": {"LATE": 1} | ONE_CALL,
    "low_latency_with_one_warp": ONE_WARP,
    "low_latency_redispatches_without_rows": EMPTY_REDISPATCHES,
    "low_latency_of_three_domains": {"INDICES": 1, "DOMAINS": 3, "LATE": 1} | ONE_CALL,
    "low_latency_rank_enters_late": ENTERS_LATE,
    "low_latency_rank_times_out": RANK_TIMES_OUT,
    "low_latency_rank_times_out_and_its_warps_go_on": WITHOUT_ROWS,
    "low_latency_rank_times_out_and_aborts_are_lost": RANK_TIMES_OUT | DISPATCHES | {"TIMEOUTS": 2},
    "low_latency_rank_makes_no_call": RANK_TIMES_OUT | {"ABSENT": 1},
    "low_latency_domain_of_two_times_out": DOMAIN_TIMES_OUT,
    "low_latency_domain_of_two_times_out_in_two_redispatches": DOMAIN_TIMES_OUT | REDISPATCHES | TWO_CALLS,
    "low_latency_domain_of_two_makes_no_call": DOMAIN_TIMES_OUT | REDISPATCHES | {"ABSENT": 1},
}  # fmt: skip
MUTATIONS: tuple[tuple[str, str, Settings], ...] = (
    ("NO_WAIT_CREDIT", WRONG, PAIR | SMALL_RING),
    ("NO_WAIT_CREDIT", WRONG, BESIDE_GENERAL),
    ("NO_WAIT_MESSAGE", WRONG, DOMAINS_OF_TWO | ONE_CALL),
    ("NO_WAIT_COUNTS", WRONG, DOMAINS_OF_TWO | ONE_CALL | DISPATCHES),
    ("NO_WAIT_SEGMENT", WRONG, DOMAINS_OF_TWO | ONE_CALL | DISPATCHES),
    ("NO_WAIT_PARTIALS", WRONG, DOMAINS_OF_TWO | ONE_CALL | COMBINES),
    ("NO_WAIT_ENTRY", WRONG, EMPTY_REDISPATCHES),
    ("NO_WAIT_ALL", WRONG, PAIR | SMALL_RING | DROPPED),
    ("NO_SIGNAL_ENTRY", STUCK, DOMAINS_OF_TWO | ONE_CALL),
    ("NO_SIGNAL_MESSAGE", STUCK, PAIR),
    ("NO_SIGNAL_CREDIT", STUCK, PAIR | DISPATCHES | {"CALLS": 3}),
    ("NO_SPREAD", STUCK, DOMAINS_OF_TWO | ONE_CALL),
    ("NO_FORWARD", STUCK, DOMAINS_OF_TWO | ONE_CALL),
    ("EARLY_SIGNAL_MESSAGE", WRONG, PAIR),
    ("EARLY_SIGNAL_SEGMENT", WRONG, DOMAINS_OF_TWO | ONE_CALL),
    ("EARLY_CREDIT", WRONG, DOMAINS_OF_TWO | TWO_CALLS | SMALL_RING),
    ("EARLY_METADATA", WRONG, ENTERS_LATE | REDISPATCHES),
    ("SINGLE_EAGER_BUFFER", WRONG, DOMAINS_OF_TWO | TWO_CALLS),
    ("NO_TAG", WRONG, DOMAINS_OF_TWO | DISPATCHES),
    ("SMALL_RING", WRONG, PAIR | SMALL_RING),
    ("NO_HEADER", STUCK, PAIR | DROPPED),
    ("NO_ABORT", STUCK, RANK_TIMES_OUT | DISPATCHES),
    ("NO_LOCAL_ABORT", STUCK, DOMAIN_TIMES_OUT | DISPATCHES),
    ("NO_SIGNAL_ABORT", STUCK, RANK_TIMES_OUT | DISPATCHES),
    ("ABORT_PUT_ONCE", STUCK, DOMAIN_TIMES_OUT | DROPPED),
    ("NO_DEADLINE", STUCK, RANK_TIMES_OUT | DISPATCHES | {"TIMEOUTS": 2}),
    ("NO_CHECK_ABORT", WRONG, OTHER_WARPS_GO_ON | DISPATCHES),
    ("ENTRY_IGNORES_ABORT", WRONG, WITHOUT_ROWS),
    ("FAILED_CREDITS", WRONG, OTHER_WARPS_GO_ON | DISPATCHES | SMALL_RING),
    ("NEW_NUMBERS", WRONG, PAIR),
    ("PARTNER_ENTERED", WRONG, ENTERS_LATE | DISPATCHES),
    ("PARTNER_ENTERED", WRONG, ENTERS_LATE | REDISPATCHES),
)  # fmt: skip
