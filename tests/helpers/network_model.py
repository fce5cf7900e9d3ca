"""The settings and mutations of tests/protocol/network.pml, a model of the network between NVLink domains."""

from __future__ import annotations

from spin_model import STUCK, WRONG, Settings

# Defaults: an endless sequence of dispatches and combines on two domains of one rank, rings of one slot, and
# 0 to 2 chunks on each rail.
DISPATCHES, COMBINES = {"LAST": 1}, {"FIRST": 2}
TWO_SLOTS = {"SLOTS": 2}
DOMAINS_OF_TWO = {"INDICES": 2, "WITH_PAYLOAD": 1}
THREE_DOMAINS = {"DOMAINS": 3, "WITH_PAYLOAD": 1}
FULL_RINGS = THREE_DOMAINS | DISPATCHES | {"LEAST": 2, "CALLS": 1}
RANK_TIMES_OUT = {"TIMEOUTS": 1, "CALLS": 2}
DOMAIN_TIMES_OUT = DOMAINS_OF_TWO | {"TIMEOUTS": 1, "CALLS": 1, "MOST": 1}
ONE_OF_THREE_TIMES_OUT = THREE_DOMAINS | {"TIMEOUTS": 1, "CALLS": 1, "MOST": 1, "VARIED": 1}
SETTINGS: dict[str, Settings] = {
    "network_of_two_domains": {},
    "network_with_rings_of_two_slots": TWO_SLOTS,
    "network_with_long_calls_on_one_rail": TWO_SLOTS | {"MOST": 4, "VARIED": 1},
    "network_with_long_calls_on_both_rails": {"SLOTS": 3, "LEAST": 4, "MOST": 4, "CALLS": 2},
    "network_between_domains_of_two": DOMAINS_OF_TWO | {"MOST": 1, "VARIED": 2},
    "network_between_domains_of_two_with_late_signals": {"INDICES": 2, "MOST": 1, "VARIED": 1, "CALLS": 2},
    "network_between_domains_of_two_with_two_slots": DOMAINS_OF_TWO | TWO_SLOTS | {"VARIED": 1, "CALLS": 2},
    "network_of_three_domains": THREE_DOMAINS | {"VARIED": 1, "CALLS": 2},
    "network_of_three_domains_with_full_rings": THREE_DOMAINS | DISPATCHES | {"LEAST": 2},
    "network_of_three_domains_with_late_signals": {"DOMAINS": 3, "LEAST": 1, "MOST": 1, "CALLS": 1},
    "network_rank_times_out": RANK_TIMES_OUT,
    "network_rank_with_two_slots_times_out": RANK_TIMES_OUT | TWO_SLOTS | {"VARIED": 1},
    "network_rank_times_out_in_three_calls": RANK_TIMES_OUT | {"CALLS": 3, "MOST": 1},
    "network_rank_times_out_and_aborts_are_lost": RANK_TIMES_OUT | {"DEADLINES": 1},
    "network_domain_of_two_times_out": DOMAIN_TIMES_OUT | {"VARIED": 1},
    "network_domain_of_two_times_out_in_two_calls": DOMAIN_TIMES_OUT | DISPATCHES | {"MOST": 0, "CALLS": 2},
    "network_domain_of_two_with_four_full_rails_times_out": DOMAIN_TIMES_OUT | {"LEAST": 1, "SEPARATE": 0},
    "network_domain_of_two_times_out_and_aborts_are_lost": DOMAIN_TIMES_OUT | {"VARIED": 1, "DEADLINES": 2},
    "network_domain_of_three_times_out": ONE_OF_THREE_TIMES_OUT | {"SEPARATE": 0},
    "network_domain_of_three_times_out_and_aborts_are_lost": ONE_OF_THREE_TIMES_OUT | {"DEADLINES": 2},
}  # fmt: skip
MUTATIONS: tuple[tuple[str, str, Settings], ...] = (
    ("NO_WAIT_DATA", WRONG, {}),
    ("NO_WAIT_CREDIT", WRONG, {}),
    ("NO_WAIT_COUNTS", WRONG, THREE_DOMAINS | DISPATCHES),
    ("NO_WAIT_COUNTS", WRONG, DOMAINS_OF_TWO | DISPATCHES),
    ("NO_WAIT_PARTIALS", WRONG, DOMAINS_OF_TWO | COMBINES),
    ("NO_WAIT_FORWARDED", WRONG, DOMAINS_OF_TWO | DISPATCHES),
    ("NO_WAIT_ENTRY", WRONG, DOMAINS_OF_TWO | {"MOST": 0}),
    ("NO_SIGNAL_DATA", STUCK, {}),
    ("NO_SIGNAL_CREDIT", STUCK, {}),
    ("EARLY_SIGNAL_DATA", WRONG, {}),
    ("EARLY_CREDIT", WRONG, DISPATCHES),
    ("CREDIT_BEFORE_PLACED", WRONG, DOMAINS_OF_TWO | DISPATCHES),
    ("CREDIT_BEFORE_FORWARDED", WRONG, DOMAINS_OF_TWO | DISPATCHES),
    ("ONE_DATA_WORD", WRONG, TWO_SLOTS),
    ("ONE_CREDIT_WORD", WRONG, TWO_SLOTS),
    ("EARLY_PACK", WRONG, {}),
    ("ANY_CREDIT", WRONG, {}),
    ("COUNTS_LAST", STUCK, DISPATCHES),
    ("NO_SPREAD", STUCK, DOMAINS_OF_TWO),
    ("SINGLE_COUNT_BUFFER", STUCK, DOMAINS_OF_TWO | DISPATCHES | {"MOST": 0}),
    ("NO_HEADER", STUCK, DISPATCHES),
    ("NO_HEADER", STUCK, COMBINES),
    ("SHARED_RING", STUCK, FULL_RINGS),
    ("RAILS_IN_ORDER", STUCK, FULL_RINGS),
    ("NO_ABORT", STUCK, RANK_TIMES_OUT),
    ("NO_LOCAL_ABORT", STUCK, DOMAIN_TIMES_OUT),
    ("NO_ABORT_PUT", STUCK, RANK_TIMES_OUT),
    ("ABORT_PUT_ONCE", STUCK, DOMAIN_TIMES_OUT),
    ("NO_DEADLINE", STUCK, RANK_TIMES_OUT | {"DEADLINES": 1}),
    ("CREDIT_IGNORES_ABORT", STUCK, RANK_TIMES_OUT),
    ("FLAGS_FIRST", WRONG, DOMAIN_TIMES_OUT | COMBINES),
    ("FAILED_SENDS", WRONG, RANK_TIMES_OUT),
    ("FAILED_COUNTED", WRONG, DOMAIN_TIMES_OUT | COMBINES),
    ("FAILED_ENTERS", WRONG, RANK_TIMES_OUT),
    ("NEW_NUMBERS", WRONG, {}),
)  # fmt: skip
