/* A Spin model of the network between NVLink domains. low_latency.pml has the low-latency calls. tests/tools/
 * protocol_test.py checks that it holds, and that the check fails when any one rule is broken.
 *
 * A rank is (domain, index). Its rail partners are the ranks with its index in other domains. A rail leads from a rank
 * to one of its partners; nothing else crosses the network. Ranks of one domain store to each other as in transfer.pml:
 * in order. Here such a store and its flag are one step.
 *
 *   dispatch  a rank packs its tokens for a remote domain into chunks, and puts each to its partner there. The partner
 *             places the rows that are its own, and forwards the chunk to the domain's other rank, which places its
 *             rows. The first message on each rail has counts. The partner spreads them in its domain. No row is placed
 *             before the counts of all ranks are there
 *   combine   a rank pushes its partial sums to the rank of its domain that has the owner's index. That rank adds them,
 *             and puts chunks of sums to the owner. The owner adds the domains in order
 *
 * The target of a rail has a ring of SLOTS slots. The source has a staging buffer for each slot; the network reads it
 * when the payload arrives. A slot has a data word at the target and a credit word at the source. A message is one put
 * with one signal:
 *
 *   NETWORK_SIGNAL_DATA    sets the slot's data word to the message's number, after the payload
 *   NETWORK_WAIT_DATA      until this word has the number of the next message
 *   NETWORK_SIGNAL_CREDIT  sets the slot's credit word to the number of a message that was read for the last time
 *   NETWORK_WAIT_CREDIT    until this word has the number of the slot's previous message
 *   NETWORK_WAIT_COUNTS    until the counts of all ranks are there
 *   NETWORK_WAIT_LOCAL     until the domain's other rank has stored partial sums, has freed the slot of a forwarded
 *                          chunk, or has entered the call
 *   NETWORK_PUT_ABORT      sets the partner's abort word
 *
 * The network promises that a payload arrives before its own signal, and nothing else: all that is in flight arrives at
 * any time, in any order.
 *
 * A rail's messages are numbered over all calls of the generation; number n uses slot n modulo SLOTS. So every wait is
 * for a larger number than the word had, and nobody resets a word. Waits compare by >=, as in transfer.pml. By == they
 * would do the same: a word gets its next value after somebody has waited for this one, so it is never ahead of who
 * waits. The model asserts that. For the same reason a provider may add SLOTS to a word instead of setting it.
 *
 * The ring overlaps no other buffer. So a message may arrive before its receiver has entered the call, and the network
 * needs no wait for entry. An empty destination gets one message, too: the counts, or in a combine a header. So a call
 * ends when the ranks of the domain and the rail partners have entered it; other ranks may be one call further back.
 * For the double buffer of counts the domain suffices, because only its ranks store there.
 *
 * The roles of a rank (one process per rail and role) progress independently. They wait only where it is written below.
 *
 * Each wait loads the abort word after its flags. A rank that finds it set tells the domain, puts the abort on all its
 * rails, and then fails. It puts the abort even if another rank has failed: the partners of that rank may have ended
 * their calls, while its own partners wait for it. A role whose wait has failed puts nothing and returns no credit. A
 * role that has passed its wait may put its message although another role of the rank fails meanwhile. This message is
 * whole, so it does no harm. A failed push inside a domain is still flagged, as in transfer.pml: the rank that adds
 * knows of the abort by then. Later calls of the generation end at once, and send nothing.
 *
 * What is checked
 *   - nothing is read before it is there or after it was overwritten: contents are tagged by call and index, and what
 *     was read for the last time is deleted;
 *   - no signal is sent to a word while another one is in flight to it;
 *   - a call ends without a failure only if all was read;
 *   - nobody waits for ever. With DEADLINES 0 one wait times out, and all others must hear of it. Otherwise abort puts
 *     may be lost, and every wait has a deadline;
 *   - any number of calls and wraps: with CALLS 0 the ranks never stop. `rebase` keeps the numbers small. */

#ifndef DOMAINS
#define DOMAINS 2 /* or 3 */
#endif
#ifndef INDICES
#define INDICES 1 /* ranks of a domain; or 2 */
#endif
#ifndef SLOTS
#define SLOTS 1 /* a rail's ring has as many; or 2 or 3 */
#endif
#ifndef FIRST
#define FIRST 1 /* operations to choose calls from: 1 dispatch, 2 combine */
#endif
#ifndef LAST
#define LAST 2
#endif
#ifndef CALLS
#define CALLS 0 /* calls per rank; 0: endless */
#endif
#ifndef LEAST
#define LEAST 0 /* chunks of rows on a rail in one call: LEAST to MOST */
#endif
#ifndef MOST
#define MOST 2 /* up to 6 */
#endif
#ifndef VARIED
#define VARIED RAILS /* rails with LEAST to MOST chunks; the others have LEAST */
#endif
#ifndef TIMEOUTS
#define TIMEOUTS 0 /* 1: any one wait times out */
#endif
#ifndef DEADLINES
#define DEADLINES 0 /* 1: then others may, too, and abort puts may be lost. 2: all of them are lost */
#endif
#ifndef SEPARATE
#define SEPARATE (TIMEOUTS > 0) /* 1: a wait of a sender and its put are two steps */
#endif
#ifndef WITH_PAYLOAD
#define WITH_PAYLOAD 0 /* 1: a signal arrives with its payload, and a credit at once, to save states */
#endif

/* ---- Mutations */

#define NOTHING 0
#define NO_WAIT_DATA 1
#define NO_WAIT_CREDIT 2
#define NO_WAIT_COUNTS 3
#define NO_WAIT_PARTIALS 4          /* the domain's partial sums are not awaited */
#define NO_WAIT_FORWARDED 5         /* a chunk is forwarded to a slot that is not free */
#define NO_WAIT_ENTRY 6             /* a combine ends before the domain's other rank has entered it */
#define NO_SIGNAL_DATA 7
#define NO_SIGNAL_CREDIT 8
#define EARLY_SIGNAL_DATA 9         /* the data word is set before the payload arrives */
#define EARLY_CREDIT 10             /* the credit is sent before the chunk is forwarded and placed */
#define CREDIT_BEFORE_PLACED 11     /* it is sent when the chunk is forwarded */
#define CREDIT_BEFORE_FORWARDED 12  /* it is sent when the chunk is placed */
#define ONE_DATA_WORD 13            /* one word for the ring: signals are taken to arrive in order */
#define ONE_CREDIT_WORD 14          /* likewise */
#define EARLY_PACK 15               /* a staging buffer is packed anew before the slot's credit is there */
#define ANY_CREDIT 16               /* a credit of any earlier message suffices */
#define COUNTS_LAST 17              /* counts are the last message of a call */
#define NO_SPREAD 18                /* the rail partner keeps the counts to itself */
#define SINGLE_COUNT_BUFFER 19      /* counts are not double-buffered */
#define NO_HEADER 20                /* an empty destination gets nothing */
#define SHARED_RING 21              /* two rails share the slots of one ring */
#define RAILS_IN_ORDER 22           /* a rank sends all to one domain before it sends to the next */
#define NO_ABORT 23                 /* a rank that times out tells nobody */
#define NO_LOCAL_ABORT 24           /* an abort is not passed on inside a domain */
#define NO_ABORT_PUT 25             /* an abort is not put on rails */
#define ABORT_PUT_ONCE 26           /* only the rank that has timed out puts the abort on its rails */
#define NO_DEADLINE 27              /* abort puts may be lost, but the other ranks have no deadline */
#define CREDIT_IGNORES_ABORT 28     /* the wait for a credit does not end at an abort */
#define FLAGS_FIRST 29              /* a sender whose flags have come does not load the abort word */
#define FAILED_SENDS 30             /* a message whose wait has failed is put all the same */
#define FAILED_COUNTED 31           /* a failed push is flagged before the domain knows of the abort */
#define FAILED_ENTERS 32            /* a rank that has failed sends in its next call */
#define NEW_NUMBERS 33              /* numbers begin anew in each call */
#ifndef BROKEN
#define BROKEN NOTHING
#endif
/* Hidden: not part of the state. */
hidden byte broken;
hidden byte at;
hidden byte p;
hidden byte q;

/* ---- Ranks and rails */

#define RANKS (DOMAINS * INDICES)
#define RAILS (RANKS * (DOMAINS - 1))
#define DOMAIN(rank) ((rank) / INDICES)
#define OTHER(rank) ((rank) + INDICES - 1 - 2 * ((rank) % INDICES)) /* in the same domain */
#define SOURCE(rail) ((rail) / (DOMAINS - 1))
#define TARGET(rail) \
  (((DOMAIN(SOURCE(rail)) + 1 + (rail) % (DOMAINS - 1)) % DOMAINS) * INDICES + SOURCE(rail) % INDICES)
/* In three domains: the other rail from the same source, and the other one to the same target. */
#define OTHER_OUT(rail) ((rail) ^ 1)
#define OTHER_IN(rail) (((SOURCE(rail) + 2 - (rail) % 2) % 3) * 2 + 1 - (rail) % 2)

/* ---- Calls, chosen one by one, for all ranks, by the rank that is first. */

#define DISPATCH 1
#define COMBINE 2
#define REMEMBERED 4
byte operation[REMEMBERED];
byte chunks[REMEMBERED * RAILS]; /* counts and headers are not among them */
byte call[RANKS]; /* the running call or the next one; modulo REMEMBERED if they are endless */
bool in_call[RANKS];
byte pending[RANKS]; /* roles of the call that are not finished */
#define NEXT(number) (CALLS > 0 -> (number) + 1 : ((number) + 1) % REMEMBERED)
#define AHEAD(number, of) ((REMEMBERED + (number) - (of)) % REMEMBERED)
#define OPERATION(rank) operation[call[rank] % REMEMBERED]
#define CHUNKS(rank, rail) chunks[(call[rank] % REMEMBERED) * RAILS + (rail)]
#define TAG(rank, index) ((call[rank] % REMEMBERED) * 8 + (index) + 1)
#define GARBAGE 255

/* An empty destination gets one message, too: the counts, or a header. */
#define MESSAGES(rank, rail) \
  (OPERATION(rank) == DISPATCH -> CHUNKS(rank, rail) + 1 : (CHUNKS(rank, rail) == 0 -> 1 : CHUNKS(rank, rail)))
#define TO_SEND(rail) (BROKEN == NO_HEADER && CHUNKS(me, rail) == 0 -> 0 : MESSAGES(me, rail))
#define IS_COUNTS(rail, index) \
  (OPERATION(me) == DISPATCH && (index) == (BROKEN == COUNTS_LAST -> CHUNKS(me, rail) : 0))

/* ---- Numbers of messages */

byte number_out[RAILS] = SLOTS; /* the next message's, at the source */
byte number_in[RAILS] = SLOTS;  /* at the target */
byte sent[RAILS];     /* messages of the call, at the source */
byte received[RAILS]; /* likewise, at the target */
#define SLOT(rail, number) ((rail) * SLOTS + (number) % SLOTS)
#define DATA_WORD(rail, number) (BROKEN == ONE_DATA_WORD -> (rail) * SLOTS : SLOT(rail, number))
#define CREDIT_WORD(rail, number) (BROKEN == ONE_CREDIT_WORD -> (rail) * SLOTS : SLOT(rail, number))

/* ---- Memory, by slot */

byte staged[RAILS * SLOTS]; /* tags, at the source */
byte ring[RAILS * SLOTS];   /* at the target */
byte data[RAILS * SLOTS];
byte credit[RAILS * SLOTS];

/* In flight: */

bool payload[RAILS * SLOTS];
bool signal[RAILS * SLOTS];
byte signal_number[RAILS * SLOTS];
bool credit_signal[RAILS * SLOTS];
byte credit_number[RAILS * SLOTS];
bool abort_put[RAILS];

/* ---- Memory inside domains */

byte counts[2 * RANKS * RANKS]; /* eager, so double-buffered: tags, by rank and source */
#define COUNTS(rank, source) \
  counts[(BROKEN == SINGLE_COUNT_BUFFER -> 0 : call[me] % 2) * RANKS * RANKS + (rank) * RANKS + (source)]
#define HAS_COUNTS(distance) (COUNTS(me, (me + distance) % RANKS) == TAG(me, 0))
#define ALL_COUNTS \
  (HAS_COUNTS(1) && (RANKS < 3 || HAS_COUNTS(2)) && (RANKS < 4 || HAS_COUNTS(3)))
#define MAY_PLACE (BROKEN == NO_WAIT_COUNTS || ALL_COUNTS)
bool has_placed[RAILS];    /* the message that the target reads */
bool has_forwarded[RAILS];
byte forwarded[RAILS];     /* a slot at the target's other rank: a tag */
bool is_forwarded[RAILS];  /* this slot is full */
byte num_placed[RAILS];    /* forwarded chunks of the call that this rank has placed */
byte partial[RAILS];       /* a slot at the source, written by its other rank: a tag */
bool has_partial[RAILS];
byte pushed[RAILS];        /* chunks of the call, by the source's other rank */
bool is_packed[RAILS];     /* the next message of the source: its waits have passed */
bool has_credited[RAILS];  /* too early, in a mutation */

/* ---- Failures */

bool abort[RANKS];
bool has_told[RANKS]; /* it has passed the abort on */
bool is_first[RANKS]; /* its own wait has timed out */
byte timeouts_left = TIMEOUTS;

/* ---- The network */

inline arrive() {
  signal[here] = false;
  data[DATA_WORD(here / SLOTS, signal_number[here])] = signal_number[here];
  signal_number[here] = 0
}
/* Subtracts SLOTS from a rail's numbers once they allow it. Else there would be infinitely many states. */
#define LESS(number) number = (number == 0 -> 0 : number - SLOTS)
inline rebase(which) {
  q = number_out[which] >= 2 * SLOTS && number_in[which] >= 2 * SLOTS;
  for (p : (which) * SLOTS .. (which) * SLOTS + SLOTS - 1) {
    q = q && data[p] >= SLOTS && credit[p] >= SLOTS
  }
  if
  :: q ->
     number_out[which] = number_out[which] - SLOTS;
     number_in[which] = number_in[which] - SLOTS;
     for (p : (which) * SLOTS .. (which) * SLOTS + SLOTS - 1) {
       data[p] = data[p] - SLOTS;
       credit[p] = credit[p] - SLOTS;
       LESS(signal_number[p]);
       LESS(credit_number[p])
     }
  :: else
  fi;
  p = 0
}
inline credit_arrives(where) {
  credit_signal[where] = false;
  credit[CREDIT_WORD((where) / SLOTS, credit_number[where])] = credit_number[where];
  credit_number[where] = 0;
  rebase((where) / SLOTS)
}

proctype Slot(byte here) {
end:
  do
  :: d_step { payload[here] ->
       payload[here] = false;
       ring[here] = staged[here];
       staged[here] = 0; /* it is packed anew before the network reads it again */
       if
       :: WITH_PAYLOAD && signal[here] -> arrive()
       :: else
       fi
     }
  :: d_step { signal[here] && (!payload[here] || BROKEN == EARLY_SIGNAL_DATA) -> arrive() }
  :: d_step { credit_signal[here] -> credit_arrives(here) }
  od
}

/* Sets a rank's abort word. The rank reads nothing that arrives from now on, so that is forgotten, to save states. */
inline set_abort(whose) {
  abort[whose] = true;
  for (p : 0 .. RAILS * SLOTS - 1) {
    if
    :: TARGET(p / SLOTS) == whose ->
       staged[p] = (payload[p] -> 0 : staged[p]);
       payload[p] = false;
       signal[p] = false;
       signal_number[p] = 0;
       ring[p] = 0;
       data[p] = 0;
       has_placed[p / SLOTS] = false;
       has_forwarded[p / SLOTS] = false;
       received[p / SLOTS] = 0;
       number_in[p / SLOTS] = SLOTS
    :: SOURCE(p / SLOTS) == whose ->
       credit_signal[p] = false;
       credit_number[p] = 0
    :: INDICES == 2 && TARGET(p / SLOTS) == OTHER(whose) ->
       forwarded[p / SLOTS] = 0;
       is_forwarded[p / SLOTS] = false;
       num_placed[p / SLOTS] = 0
    :: else
    fi
  }
  for (p : 0 .. RANKS - 1) {
    counts[(whose) * RANKS + p] = 0;
    counts[(RANKS + whose) * RANKS + p] = 0
  }
  pending[whose] = 0;
  p = 0
}
proctype Abort(byte rail) {
end:
  do
  :: d_step { abort_put[rail] -> abort_put[rail] = false; set_abort(TARGET(rail)) }
  :: d_step { DEADLINES && abort_put[rail] -> abort_put[rail] = false }
  od
}

/* ---- The source of a rail */

#define HAS_CREDIT \
  (BROKEN == NO_WAIT_CREDIT || \
   credit[CREDIT_WORD(rail, number_out[rail])] >= (BROKEN == ANY_CREDIT -> 0 : number_out[rail] - SLOTS))
#define NEEDS_PARTIAL \
  (INDICES == 2 && OPERATION(me) == COMBINE && CHUNKS(me, rail) > 0 && BROKEN != NO_WAIT_PARTIALS)
#define RING_IS_FREE \
  (BROKEN != SHARED_RING || credit[OTHER_OUT(rail)] == number_out[OTHER_OUT(rail)] - 1)
#define IS_ITS_TURN \
  (BROKEN != RAILS_IN_ORDER || rail % 2 == 0 || sent[OTHER_OUT(rail)] == MESSAGES(me, OTHER_OUT(rail)))
#define MAY_SEND \
  (!abort[me] || BROKEN == FLAGS_FIRST || (BROKEN == FAILED_ENTERS && call[me] > 0 && sent[rail] == 0))

inline pack() {
  if
  :: NEEDS_PARTIAL -> staged[at] = (partial[rail] == TAG(me, sent[rail]) -> TAG(me, sent[rail]) : GARBAGE);
     has_partial[rail] = false; partial[rail] = 0
  :: INDICES == 2 && OPERATION(me) == COMBINE && BROKEN == NO_WAIT_PARTIALS ->
     staged[at] = (has_partial[rail] -> TAG(me, sent[rail]) : GARBAGE);
     has_partial[rail] = false; partial[rail] = 0
  :: else -> staged[at] = TAG(me, sent[rail])
  fi;
  is_packed[rail] = true
}

/* NETWORK_SIGNAL_DATA */
inline put() {
  assert(!payload[at] && !signal[at]);
  payload[at] = !abort[TARGET(rail)];
  staged[at] = (payload[at] -> staged[at] : 0);
  signal[at] = payload[at] && BROKEN != NO_SIGNAL_DATA;
  signal_number[at] = (signal[at] -> number_out[rail] : 0);
  is_packed[rail] = false;
  sent[rail]++;
  number_out[rail]++;
  pending[me] = pending[me] - (!abort[me] && sent[rail] == MESSAGES(me, rail))
}

proctype Sender(byte rail) {
  byte me = SOURCE(rail);
end:
  do
  /* NETWORK_WAIT_CREDIT, and for partial sums NETWORK_WAIT_LOCAL */
  :: d_step { in_call[me] && !is_packed[rail] && sent[rail] < TO_SEND(rail) && MAY_SEND &&
         (HAS_CREDIT || BROKEN == EARLY_PACK) && (!NEEDS_PARTIAL || has_partial[rail]) &&
         RING_IS_FREE && IS_ITS_TURN ->
       at = SLOT(rail, number_out[rail]);
       assert(BROKEN != NOTHING || credit[at] == number_out[rail] - SLOTS);
       pack();
       if
       :: !SEPARATE && BROKEN != EARLY_PACK -> put()
       :: else
       fi
     }
  :: d_step { is_packed[rail] && (BROKEN != EARLY_PACK || HAS_CREDIT) ->
       at = SLOT(rail, number_out[rail]);
       put()
     }
  :: d_step { BROKEN == FAILED_SENDS && in_call[me] && abort[me] && has_told[me] && !is_packed[rail] &&
         sent[rail] < TO_SEND(rail) && HAS_CREDIT -> is_packed[rail] = true }
  od
}

/* Pushes partial sums to the rail's source, from the domain's other rank. */
proctype Pusher(byte rail) {
  byte me = OTHER(SOURCE(rail));
end:
  do
  /* NETWORK_WAIT_LOCAL */
  :: d_step { in_call[me] && OPERATION(me) == COMBINE && pushed[rail] < CHUNKS(me, rail) && !has_partial[rail] &&
         (!abort[me] || has_told[me] || BROKEN == FAILED_COUNTED) ->
       partial[rail] = (abort[me] -> GARBAGE : TAG(me, pushed[rail]));
       has_partial[rail] = true;
       pushed[rail]++;
       pending[me] = pending[me] - (!abort[me] && pushed[rail] == CHUNKS(me, rail))
     }
  od
}

/* ---- The target of a rail */

#define HAS_DATA \
  (in_call[me] && !abort[me] && received[rail] < MESSAGES(me, rail) && \
   (BROKEN == NO_WAIT_DATA || data[DATA_WORD(rail, number_in[rail])] >= number_in[rail]))
#define HAS_ROWS (HAS_DATA && OPERATION(me) == DISPATCH && !IS_COUNTS(rail, received[rail]))
#define IS_NEXT_DOMAIN /* the owner adds domains in order */ \
  (DOMAINS == 2 || SOURCE(rail) < SOURCE(OTHER_IN(rail)) || received[OTHER_IN(rail)] > received[rail] || \
   received[OTHER_IN(rail)] == MESSAGES(me, OTHER_IN(rail)))

inline read_slot() {
  at = SLOT(rail, number_in[rail]);
  assert(ring[at] == TAG(me, received[rail]));
  assert(BROKEN != NOTHING || data[at] == number_in[rail])
}

/* NETWORK_SIGNAL_CREDIT */
inline return_credit() {
  at = SLOT(rail, number_in[rail]);
  assert(!credit_signal[at]);
  ring[at] = 0; /* whatever follows: nobody reads it again */
  credit_signal[at] = !abort[SOURCE(rail)] && BROKEN != NO_SIGNAL_CREDIT;
  credit_number[at] = (credit_signal[at] -> number_in[rail] : 0);
  if
  :: WITH_PAYLOAD && credit_signal[at] -> credit_arrives(at)
  :: else
  fi
}
inline next_message() {
  has_placed[rail] = false; has_forwarded[rail] = false; has_credited[rail] = false;
  received[rail]++;
  number_in[rail]++;
  pending[me] = pending[me] - (received[rail] == MESSAGES(me, rail))
}

/* Ends a message of rows. Its slot is free when all of it was read. */
#define CREDIT_IS_DUE \
  (BROKEN == EARLY_CREDIT || ((has_placed[rail] || BROKEN == CREDIT_BEFORE_PLACED) && \
                              (has_forwarded[rail] || BROKEN == CREDIT_BEFORE_FORWARDED)))
inline end_rows() {
  if
  :: CREDIT_IS_DUE && !has_credited[rail] -> return_credit(); has_credited[rail] = true
  :: else
  fi;
  if
  :: has_placed[rail] && has_forwarded[rail] -> next_message()
  :: else -> skip
  fi
}

/* Spreads the counts of a rail's source in the domain, this rank included. */
inline store_counts(rank, source) {
  assert(AHEAD(call[me], call[rank]) != 2 || abort[rank]); /* nobody reads the buffer's previous counts any more */
  COUNTS(rank, source) = (abort[rank] -> 0 : TAG(me, 0))
}

proctype Receiver(byte rail) {
  byte me = TARGET(rail);
end:
  do
  /* NETWORK_WAIT_DATA */
  :: d_step { HAS_DATA && IS_COUNTS(rail, received[rail]) ->
       read_slot();
       store_counts(me, SOURCE(rail));
       if
       :: INDICES == 2 && BROKEN != NO_SPREAD -> store_counts(OTHER(me), SOURCE(rail))
       :: else
       fi;
       return_credit();
       next_message()
     }
  :: d_step { HAS_DATA && OPERATION(me) == COMBINE && IS_NEXT_DOMAIN -> read_slot(); return_credit(); next_message() }
  :: d_step { BROKEN == EARLY_CREDIT && HAS_ROWS && !has_credited[rail] -> end_rows() }

  /* NETWORK_WAIT_COUNTS; the chunk may be forwarded before */
  :: d_step { HAS_ROWS && !has_placed[rail] && MAY_PLACE ->
       read_slot();
       assert(ALL_COUNTS);
       has_placed[rail] = true;
       has_forwarded[rail] = has_forwarded[rail] || INDICES == 1;
       end_rows()
     }
  /* NETWORK_WAIT_LOCAL */
  :: d_step { INDICES == 2 && HAS_ROWS && !has_forwarded[rail] &&
         (!is_forwarded[rail] || BROKEN == NO_WAIT_FORWARDED) ->
       read_slot();
       is_forwarded[rail] = !abort[OTHER(me)];
       forwarded[rail] = (is_forwarded[rail] -> TAG(me, received[rail]) : 0);
       has_forwarded[rail] = true;
       end_rows()
     }
  od
}

/* Places rows that were forwarded by the rail's target, its domain's other rank. */
proctype Placer(byte rail) {
  byte me = OTHER(TARGET(rail));
end:
  do
  /* NETWORK_WAIT_LOCAL, NETWORK_WAIT_COUNTS */
  :: d_step { in_call[me] && !abort[me] && OPERATION(me) == DISPATCH && num_placed[rail] < CHUNKS(me, rail) &&
         is_forwarded[rail] && MAY_PLACE ->
       assert(ALL_COUNTS && forwarded[rail] == TAG(me, num_placed[rail] + 1));
       forwarded[rail] = 0;
       is_forwarded[rail] = false;
       num_placed[rail]++;
       pending[me] = pending[me] - (num_placed[rail] == CHUNKS(me, rail))
     }
  od
}

/* ---- Calls of a rank */

#define OUT(me, k) ((me) * (DOMAINS - 1) + (k))
#define HAS_PUT(me) (!is_packed[OUT(me, 0)] && !is_packed[OUT(me, DOMAINS - 2)])
#define HAS_SENT(k) (sent[OUT(me, k)] == MESSAGES(me, OUT(me, k)))

/* NETWORK_WAIT_LOCAL: a call ends when all ranks of the domain have entered it. */
#define HAS_ENTERED \
  (INDICES == 1 || BROKEN == NO_WAIT_ENTRY || \
   (AHEAD(call[OTHER(me)], call[me]) == 0 -> in_call[OTHER(me)] : AHEAD(call[OTHER(me)], call[me]) == 1))
#define HAS_ALL \
  (pending[me] == 0 && (OPERATION(me) == DISPATCH -> ALL_COUNTS : HAS_ENTERED) && !abort[me])

inline begin_call() {
  in_call[me] = true;
  pending[me] = 0;
  for (p : 0 .. RAILS - 1) {
    if
    :: SOURCE(p) == me -> pending[me] = pending[me] + (TO_SEND(p) > 0)
    :: TARGET(p) == me -> pending[me]++
    :: INDICES == 2 && SOURCE(p) == OTHER(me) ->
       pending[me] = pending[me] + (OPERATION(me) == COMBINE && CHUNKS(me, p) > 0)
    :: INDICES == 2 && TARGET(p) == OTHER(me) ->
       pending[me] = pending[me] + (OPERATION(me) == DISPATCH && CHUNKS(me, p) > 0)
    :: else
    fi
  }
  if
  :: INDICES == 2 && OPERATION(me) == DISPATCH -> store_counts(OTHER(me), me)
  :: else
  fi;
  p = 0
}

/* The last rank that leaves a call forgets it. */
#define IS_IN(rank, c) (rank < RANKS && rank != me && call[(rank) % RANKS] == c)
inline leave_call() {
  p = call[me];
  call[me] = NEXT(call[me]);
  if
  :: !IS_IN(0, p) && !IS_IN(1, p) && !IS_IN(2, p) && !IS_IN(3, p) && (CALLS == 0 || call[me] < CALLS) ->
     operation[p % REMEMBERED] = 0;
     at = (p % REMEMBERED) * RAILS;
     for (p : 0 .. RAILS - 1) {
       chunks[at + p] = 0
     }
  :: else
  fi
}

inline end_call() {
  for (p : 0 .. RANKS - 1) {
    COUNTS(me, p) = 0
  }
  for (p : 0 .. RAILS - 1) {
    if
    :: SOURCE(p) == me ->
       number_out[p] = (BROKEN == NEW_NUMBERS -> SLOTS : number_out[p]);
       sent[p] = 0
    :: TARGET(p) == me ->
       number_in[p] = (BROKEN == NEW_NUMBERS -> SLOTS : number_in[p]);
       received[p] = 0; has_placed[p] = false; has_forwarded[p] = false; has_credited[p] = false
    :: INDICES == 2 && SOURCE(p) == OTHER(me) -> pushed[p] = 0
    :: INDICES == 2 && TARGET(p) == OTHER(me) -> num_placed[p] = 0
    :: else
    fi
  }
  pending[me] = 0;
  in_call[me] = false;
  leave_call();
  p = 0
}

/* Passes an abort on: to the domain, then NETWORK_PUT_ABORT. */
inline tell() {
  has_told[me] = true;
  if
  :: INDICES == 2 && BROKEN != NO_LOCAL_ABORT && BROKEN != NO_ABORT -> set_abort(OTHER(me))
  :: else
  fi;
  if
  :: DEADLINES < 2 && BROKEN != NO_ABORT_PUT && BROKEN != NO_ABORT && (BROKEN != ABORT_PUT_ONCE || is_first[me]) ->
     abort_put[OUT(me, 0)] = !abort[TARGET(OUT(me, 0))];
     abort_put[OUT(me, DOMAINS - 2)] = !abort[TARGET(OUT(me, DOMAINS - 2))]
  :: else
  fi
}

proctype Rank(byte me) {
  byte i, k;
  do
  :: atomic { !in_call[me] && (!abort[me] || BROKEN == FAILED_ENTERS) && (CALLS == 0 || call[me] < CALLS) ->
       if
       :: OPERATION(me) == 0 ->
          select (k : FIRST .. LAST);
          OPERATION(me) = k;
          i = 0;
          do
          :: i < RAILS ->
             select (k : LEAST .. (i < VARIED -> MOST : LEAST));
             CHUNKS(me, i) = k;
             i++
          :: else -> break
          od;
          i = 0; k = 0
       :: else
       fi;
       begin_call()
     }
  :: d_step { in_call[me] && HAS_ALL -> end_call() }

  /* A call of a generation that has failed ends at once. */
  :: d_step { !in_call[me] && abort[me] && call[me] < CALLS && BROKEN != FAILED_ENTERS ->
       if
       :: !has_told[me] -> tell()
       :: else
       fi;
       leave_call();
       p = 0
     }

  /* A wait times out. */
  :: d_step { in_call[me] && !HAS_ALL && !abort[me] &&
         (timeouts_left > 0 || (TIMEOUTS > 0 && DEADLINES && BROKEN != NO_DEADLINE)) ->
       is_first[me] = true;
       set_abort(me);
       timeouts_left = 0
     }
  :: d_step { in_call[me] && abort[me] && !has_told[me] -> tell() }

  /* All roles end, and the call's results are poisoned. */
  :: d_step { in_call[me] && abort[me] && has_told[me] && HAS_PUT(me) &&
         (BROKEN != CREDIT_IGNORES_ABORT || (HAS_SENT(0) && HAS_SENT(DOMAINS - 2))) ->
       assert(timeouts_left < TIMEOUTS);
       end_call()
     }
  :: !in_call[me] && CALLS > 0 && call[me] == CALLS -> break
  od
}

init {
  byte i;
  c_code {
    if (getenv("BROKEN")) broken = atoi(getenv("BROKEN"));
  };
  atomic {
    for (i : 0 .. RAILS * SLOTS - 1) { /* a ring begins with all its credits */
      data[i] = i % SLOTS;
      credit[i] = i % SLOTS;
      run Slot(i)
    }
    for (i : 0 .. RAILS - 1) {
      run Sender(i);
      run Receiver(i);
#if INDICES == 2
      run Pusher(i);
      run Placer(i);
#endif
#if TIMEOUTS
      run Abort(i)
#endif
    }
    for (i : 0 .. RANKS - 1) {
      run Rank(i)
    }
    i = 0
  }
}
