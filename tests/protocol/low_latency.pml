/* A Spin model of the low-latency transfers over NVLink domains (ffi/device/transfer/hierarchical/low_latency/).
 * network.pml has the other calls over domains. tests/tools/protocol_test.py checks that the model holds, and that the
 * check fails when any one rule is broken.
 *
 * A rank is (domain, index). A rail leads from a rank to a rank with its index in another domain, its partner. Every
 * call sends two messages on each rail, metadata and one chunk of rows:
 *
 *   dispatch    metadata are counts and routes, which the rank also stores to its domain
 *   redispatch  metadata are weights, sent when the domain has entered the call
 *   combine     metadata tell that the domain has entered the call. Ranks store their partial sums to the rank of their
 *               domain that has the index of the owner; that rank adds them, and the chunk has the sums
 *   general     any other call, as in network.pml: as many messages as the ring has slots, each of which is read, and
 *               its credit returned, when it arrives
 *
 * The partner spreads metadata in its domain, and sends rows on. Stores inside a domain go to eager buffers, two of
 * each rank, by the parity of the call. They wait for nobody. A rail's ring holds the messages of two calls. Credits
 * are returned when a call ends, which is when all of these have come:
 *
 *   EAGER_WAIT_CREDIT     until the slot of a message is free
 *   EAGER_WAIT_MESSAGE    until a message has arrived, before it is spread or sent on
 *   EAGER_WAIT_COUNTS     dispatch: until the counts of all ranks are in the eager buffer
 *   EAGER_WAIT_SEGMENT    until rows or weights of a rank of the domain, or what it sends on, are there
 *   EAGER_WAIT_PARTIALS   combine: until all ranks of the domain have stored partial sums, before they are added
 *   EAGER_WAIT_ENTRY      until the domain has entered the call: at the end, and before metadata but a dispatch's
 *   EAGER_WAIT_ALL        until all messages of all rails have arrived, at the end, whether or not somebody needs them
 *   EAGER_SIGNAL_MESSAGE  puts a message that is packed, with its number
 *   EAGER_SIGNAL_CREDIT   returns the credits of a call, at its end, if it has not failed
 *   EAGER_SIGNAL_ABORT    tells the partners of an abort, at the end of a call that has failed
 *   EAGER_CHECK_ABORT     a rank that has been aborted stores nothing of its own in later calls
 *
 * The network delivers a message before its number, and everything else in any order, at any time. Aborts are told to a
 * domain by stores, and to partners by a put.
 *
 * Waits for segments, messages and credits look at the abort word only if they have to go on waiting; so a rank whose
 * calls fail still sends on what it has got. Only waits for entry, and a dispatch before its metadata, look at the
 * word in any case. Some warps of a rank go on when another one's wait has failed; the model lets them do so until the
 * call ends.
 *
 * What is checked
 *   - nothing is read before it is there;
 *   - a store to an eager buffer replaces data of a call that the buffer's rank has ended, and none of a later call; a
 *     message replaces only one that was read; none is packed where one is in flight;
 *   - a rank ends no call well after one that another rank has failed in. So all hear of an abort, one call later;
 *   - nobody waits for ever: with TIMEOUTS 1 one wait times out, and all others hear of it. A rank may never make a
 *     call (ABSENT). With TIMEOUTS 2 puts of aborts are lost, and every wait has a deadline;
 *   - the deadline of progress, which is short, does not run while a wait is for a rank that has not entered the call,
 *     or for what such a rank is to send on (PROGRESS). */

#ifndef DOMAINS
#define DOMAINS 2 /* or 3 */
#endif
#ifndef INDICES
#define INDICES 2 /* ranks of a domain; or 1 */
#endif
#ifndef SLOTS
#define SLOTS 4 /* a rail's ring has as many: of two calls. Two are enough for a call */
#endif
#ifndef CALLS
#define CALLS 3 /* calls per rank */
#endif
#ifndef FIRST
#define FIRST 1 /* operations to choose calls from */
#endif
#ifndef LAST
#define LAST 4
#endif
#ifndef TIMEOUTS
#define TIMEOUTS 0
#endif
#ifndef EMPTY
#define EMPTY 0 /* 1: in redispatches no rank gets rows, and there are no weights */
#endif
#ifndef PROGRESS
#define PROGRESS 0 /* 1: checks the deadlines of progress, too */
#endif
#ifndef ABSENT
#define ABSENT 0 /* 1: the last rank may stop to make calls */
#endif
#ifndef LATE
#define LATE RAILS /* rails with late messages and credits; on others they arrive at once, to save states */
#endif
#ifndef GOES_ON
#define GOES_ON 0 /* 1: when a wait has failed, other warps of the rank go on, also in its later calls */
#endif
#ifndef IN_ORDER
#define IN_ORDER 0 /* 1: a rank has one warp, which sends, then sends on, and then reads; and one that counts */
#endif

/* ---- Mutations */

#define NOTHING 0
#define NO_WAIT_CREDIT 1
#define NO_WAIT_MESSAGE 2
#define NO_WAIT_COUNTS 3
#define NO_WAIT_SEGMENT 4
#define NO_WAIT_PARTIALS 5
#define NO_WAIT_ENTRY 6          /* neither before metadata nor at the end */
#define NO_WAIT_ALL 7
#define NO_SIGNAL_ENTRY 8
#define NO_SIGNAL_MESSAGE 9
#define NO_SIGNAL_CREDIT 10
#define NO_SPREAD 11             /* the partner keeps metadata to itself */
#define NO_FORWARD 12            /* and rows */
#define EARLY_SIGNAL_MESSAGE 13  /* the number comes before the message */
#define EARLY_SIGNAL_SEGMENT 14  /* a row's flag is stored before the row */
#define EARLY_CREDIT 15          /* credits are returned when messages arrive */
#define EARLY_METADATA 16        /* before the domain has entered the call, not only in a dispatch */
#define SINGLE_EAGER_BUFFER 17   /* one for all calls */
#define NO_TAG 18                /* flags in the eager buffers do not say of which call they are */
#define SMALL_RING 19            /* a ring is taken to hold a call whose messages it does not hold */
#define NO_HEADER 20             /* empty chunks are not sent */
#define NO_ABORT 21              /* a rank that times out tells nobody */
#define NO_LOCAL_ABORT 22        /* or nobody in its domain */
#define NO_SIGNAL_ABORT 23       /* or no partner */
#define ABORT_PUT_ONCE 24        /* a rank that hears of an abort does not tell its partners */
#define NO_DEADLINE 25           /* puts of aborts are lost, but only one wait has a deadline */
#define NO_CHECK_ABORT 26        /* an aborted rank sends in later calls */
#define ENTRY_IGNORES_ABORT 27   /* the wait for entry does not look at the abort word, if all have entered */
#define FAILED_CREDITS 28        /* a failed call returns its credits */
#define NEW_NUMBERS 29           /* numbers begin anew in each call */
#define PARTNER_ENTERED 30       /* progress: a partner's metadata stand for its whole domain, and for this one */
#ifndef BROKEN
#define BROKEN NOTHING
#endif
/* Hidden: not part of the state. */
hidden byte broken;
hidden byte at;
hidden byte p;

/* ---- Ranks and rails */

#define RANKS (DOMAINS * INDICES)
#define RAILS (RANKS * (DOMAINS - 1))
#define DOMAIN(rank) ((rank) / INDICES)
#define OTHER(rank) ((rank) + INDICES - 1 - 2 * ((rank) % INDICES)) /* in the same domain; itself if INDICES is 1 */
#define SOURCE(rail) ((rail) / (DOMAINS - 1))
#define TARGET(rail) \
  (((DOMAIN(SOURCE(rail)) + 1 + (rail) % (DOMAINS - 1)) % DOMAINS) * INDICES + SOURCE(rail) % INDICES)
/* The rails of a rank, k from 0 to DOMAINS - 2. */
#define OUT(rank, k) ((rank) * (DOMAINS - 1) + (k))
#define PARTNER(rank, k) (((DOMAIN(rank) + 1 + (k)) % DOMAINS) * INDICES + (rank) % INDICES)
#define IN(rank, k) OUT(PARTNER(rank, k), DOMAINS - 2 - (k))
#define K (DOMAINS - 2) /* the last rail; rails 0 and K are all */

/* ---- Calls, chosen one by one, for all ranks, by the rank that is first. */

#define DISPATCH 1
#define REDISPATCH 2
#define COMBINE 3
#define DROPPED 4 /* a dispatch in which no rank keeps a row that it gets, so that nobody waits for rows */
#define GENERAL 5
byte operation[CALLS];
byte call[RANKS]; /* the running one or the next one */
bool in_call[RANKS];
byte entered[RANKS]; /* calls whose entry the rank has signaled to its domain */
#define KIND(rank) operation[call[rank]]
#define IS_DISPATCH(rank) (KIND(rank) == DISPATCH || KIND(rank) == DROPPED)
#define TAG(rank) (call[rank] + 1)
#define RUNS(rank) (in_call[rank] && (GOES_ON || !failed[rank]))
#define FORGETS(rank) (!GOES_ON && failed[rank]) /* nothing reads what it gets, which is not kept, to save states */
#define DOMAIN_HAS_ENTERED(rank) (INDICES == 1 || entered[OTHER(rank)] >= TAG(rank))

/* Done in the call, by a rank or at an end of a rail. */
bool has_pushed[RANKS]; /* its own rows to the domain */
bool has_told[RANKS];   /* metadata */
bool has_passed[RANKS]; /* the wait for entry at the end, which may look at the abort word long before the end */
#define METADATA 1
#define CHUNK 2
byte sent[RAILS]; /* a bit for each, by the source; general: how many */
byte done[RAILS]; /* spread and sent on, by the target; general: how many are read */

/* ---- Failures */

bool abort[RANKS];      /* the abort word */
bool failed[RANKS];     /* a wait of the running call has failed; without GOES_ON, or of an earlier one */
bool muted[RANKS];      /* the call has begun after an abort */
byte failed_call[RANKS]; /* the first one, from 1 */
bool abort_put[RAILS];
byte timeouts_left = TIMEOUTS;

/* ---- Eager buffers, two of each rank: of which call they have data, and bits for the ranks these come from */

byte last[2 * RANKS];
byte packets[2 * RANKS]; /* counts or weights */
byte rows[2 * RANKS];
byte flags[2 * RANKS];   /* those of rows */
#define BUFFER(to, c) (2 * (to) + (BROKEN == SINGLE_EAGER_BUFFER -> 0 : (c) % 2))
#define HERE(me) BUFFER(me, call[me])
#define BIT(rank) (1 << (rank))
#define IS_OF_CALL(me) (last[HERE(me)] == TAG(me))
#define HAS(area, me, rank) (IS_OF_CALL(me) && (area[HERE(me)] >> (rank)) & 1)
#define ALL_RANKS ((1 << RANKS) - 1)

inline open_buffer(to) {
  at = BUFFER(to, call[me]);
  if
  :: FORGETS(to) -> skip
  :: !FORGETS(to) && last[at] != TAG(me) ->
     assert(last[at] < TAG(me) && call[to] >= last[at]);
     last[at] = TAG(me); packets[at] = 0; rows[at] = 0;
     flags[at] = (BROKEN == NO_TAG -> flags[at] : 0)
  :: else
  fi
}
inline store_packets(to, from) {
  open_buffer(to);
  packets[at] = (FORGETS(to) -> 0 : packets[at] | BIT(from))
}
inline store_rows(to, from) {
  open_buffer(to);
  rows[at] = (FORGETS(to) -> 0 : rows[at] | BIT(from));
  flags[at] = (FORGETS(to) -> 0 : flags[at] | BIT(from))
}

/* ---- Rings: numbers of messages, by slot. A message is in flight while `staged` and `data` differ; so are credits. */

byte first[RANKS]; /* messages of earlier calls on each rail */
byte staged[RAILS * SLOTS];
byte data[RAILS * SLOTS];
byte ring[RAILS * SLOTS];
byte freed[RAILS * SLOTS];
byte credit[RAILS * SLOTS];
#define NUMBER(rank, j) ((BROKEN == NEW_NUMBERS -> 0 : first[rank]) + (j) + 1)
#define RING (BROKEN == SMALL_RING -> SLOTS / 2 : SLOTS)
#define SLOT(rail, rank, j) ((rail) * SLOTS + (NUMBER(rank, j) - 1) % RING)
#define MAY_PACK(rail, j) \
  (NUMBER(SOURCE(rail), j) <= SLOTS || BROKEN == NO_WAIT_CREDIT || \
   credit[SLOT(rail, SOURCE(rail), j)] >= NUMBER(SOURCE(rail), j) - SLOTS)
#define HAS_ARRIVED(rail, j) (data[SLOT(rail, TARGET(rail), j)] >= NUMBER(TARGET(rail), j))
#define MESSAGES(rank) (KIND(rank) == GENERAL -> SLOTS : 2)

inline arrive(slot) {
  assert(staged[slot] <= SLOTS || freed[slot] >= staged[slot] - SLOTS);
  data[slot] = staged[slot];
  ring[slot] = (BROKEN == EARLY_SIGNAL_MESSAGE -> ring[slot] : staged[slot])
}
inline put(rail, j) { /* EAGER_SIGNAL_MESSAGE */
  at = SLOT(rail, SOURCE(rail), j);
  assert(staged[at] == data[at]);
  staged[at] = (BROKEN == NO_SIGNAL_MESSAGE || FORGETS(TARGET(rail)) -> data[at] : NUMBER(SOURCE(rail), j));
  if
  :: rail >= LATE && staged[at] != data[at] -> arrive(at)
  :: else
  fi
}
inline read_message(rail, j) {
  assert(ring[SLOT(rail, TARGET(rail), j)] == NUMBER(TARGET(rail), j))
}
inline return_credit(rail, j) { /* EAGER_SIGNAL_CREDIT */
  at = SLOT(rail, TARGET(rail), j);
  assert(freed[at] == credit[at] || BROKEN == EARLY_CREDIT);
  freed[at] = (BROKEN == NO_SIGNAL_CREDIT -> freed[at] : NUMBER(TARGET(rail), j));
  credit[at] = (rail >= LATE -> freed[at] : credit[at])
}

proctype Slot(byte here) {
end:
  do
  :: d_step { staged[here] != data[here] -> arrive(here) }
  :: d_step { ring[here] != data[here] && staged[here] == data[here] -> ring[here] = data[here] }
  :: d_step { credit[here] != freed[here] -> credit[here] = freed[here] }
  od
}

/* ---- A rail: what its source packs, and what its target does with messages */

/* EAGER_WAIT_PARTIALS */
#define HAS_PARTIALS(me) \
  (BROKEN == NO_WAIT_PARTIALS || (HAS(flags, me, me) && HAS(flags, me, OTHER(me))))
#define MAY_PACK_CHUNK(me) \
  (KIND(me) == COMBINE && INDICES == 2 -> HAS_PARTIALS(me) : !muted[me] || BROKEN == NO_CHECK_ABORT)
#define ARRIVES(rail, j) (BROKEN == NO_WAIT_MESSAGE || HAS_ARRIVED(rail, j)) /* EAGER_WAIT_MESSAGE */
#define SENDS_ON(me) (INDICES == 2 && KIND(me) != COMBINE && KIND(me) != GENERAL && BROKEN != NO_FORWARD)
#define HAS_CHUNKS(me) ((sent[OUT(me, 0)] & sent[OUT(me, K)] & CHUNK) == CHUNK)
#define HAS_SENT(me) ((sent[OUT(me, 0)] & sent[OUT(me, K)]) == (METADATA | CHUNK))

proctype Rail(byte rail) {
  byte me;
end:
  do
  /* EAGER_WAIT_CREDIT */
  :: d_step { RUNS(SOURCE(rail)) && KIND(SOURCE(rail)) != GENERAL && !(sent[rail] & CHUNK) &&
         MAY_PACK_CHUNK(SOURCE(rail)) && MAY_PACK(rail, 1) ->
       me = SOURCE(rail);
       if
       :: KIND(me) == COMBINE && INDICES == 2 ->
          assert(last[HERE(me)] == TAG(me) && (rows[HERE(me)] & BIT(me)) && (rows[HERE(me)] & BIT(OTHER(me))))
       :: else
       fi;
       if
       :: BROKEN == NO_HEADER && KIND(me) == DROPPED
       :: else -> put(rail, 1)
       fi;
       sent[rail] = sent[rail] | CHUNK;
       me = 0
     }
  /* Spreads metadata. */
  :: d_step { RUNS(TARGET(rail)) && KIND(TARGET(rail)) != GENERAL && !(done[rail] & METADATA) &&
         ARRIVES(rail, 0) && (!IN_ORDER || has_pushed[TARGET(rail)] || muted[TARGET(rail)]) ->
       me = TARGET(rail);
       read_message(rail, 0);
       if
       :: KIND(me) != COMBINE ->
          store_packets(me, SOURCE(rail));
          if
          :: INDICES == 2 && BROKEN != NO_SPREAD -> store_packets(OTHER(me), SOURCE(rail))
          :: else
          fi
       :: else
       fi;
       if
       :: BROKEN == EARLY_CREDIT -> return_credit(rail, 0)
       :: else
       fi;
       done[rail] = done[rail] | METADATA;
       me = 0
     }
  /* Sends rows on in the domain. The last message to be known says to whom. */
  :: d_step { RUNS(TARGET(rail)) && SENDS_ON(TARGET(rail)) && !(done[rail] & CHUNK) &&
         ARRIVES(rail, 0) && ARRIVES(rail, 1) && (!IN_ORDER || done[rail] & METADATA) ->
       me = TARGET(rail);
       read_message(rail, 0);
       read_message(rail, 1);
       store_rows(OTHER(me), SOURCE(rail));
       done[rail] = done[rail] | CHUNK;
       me = 0
     }
  /* A general call. */
  :: d_step { RUNS(SOURCE(rail)) && KIND(SOURCE(rail)) == GENERAL && sent[rail] < SLOTS && has_told[SOURCE(rail)] &&
         MAY_PACK(rail, sent[rail]) -> put(rail, sent[rail]); sent[rail]++ }
  :: d_step { RUNS(TARGET(rail)) && KIND(TARGET(rail)) == GENERAL && done[rail] < SLOTS && !abort[TARGET(rail)] &&
         HAS_ARRIVED(rail, done[rail]) ->
       read_message(rail, done[rail]);
       return_credit(rail, done[rail]);
       done[rail]++
     }

  :: d_step { abort_put[rail] -> abort_put[rail] = false; abort[TARGET(rail)] = true }
  :: d_step { TIMEOUTS == 2 && abort_put[rail] -> abort_put[rail] = false }
  od
}

/* ---- A rank */

#define MAY_STORE(me) (!muted[me] || BROKEN == NO_CHECK_ABORT) /* EAGER_CHECK_ABORT */
#define HAS_CREDITS(me) (MAY_PACK(OUT(me, 0), 0) && MAY_PACK(OUT(me, K), 0))
#define HAS_SPREAD(me) \
  ((done[IN(me, 0)] & done[IN(me, K)]) == (SENDS_ON(me) -> METADATA | CHUNK : METADATA))
#define ALL_ARRIVED(me) \
  (HAS_ARRIVED(IN(me, 0), 0) && HAS_ARRIVED(IN(me, K), 0) && HAS_ARRIVED(IN(me, 0), 1) && HAS_ARRIVED(IN(me, K), 1))

/* A dispatch checks for aborts after it has counted; others find them when they wait for entry. */
#define MAY_TELL(me) \
  (HAS_CREDITS(me) && \
   (!abort[me] || BROKEN == NO_CHECK_ABORT || (BROKEN == ENTRY_IGNORES_ABORT && !IS_DISPATCH(me))) && \
   (IS_DISPATCH(me) || BROKEN == EARLY_METADATA || BROKEN == NO_WAIT_ENTRY || \
    DOMAIN_HAS_ENTERED(me)) && \
   (!IN_ORDER || IS_DISPATCH(me) || has_pushed[me]))

/* EAGER_WAIT_COUNTS, EAGER_WAIT_SEGMENT */
#define HAS_COUNTS(me) \
  (BROKEN == NO_WAIT_COUNTS || (KIND(me) == REDISPATCH && EMPTY) || (IS_OF_CALL(me) && packets[HERE(me)] == ALL_RANKS))
#define IS_NEEDED(me) (BROKEN == NO_WAIT_SEGMENT -> 0 : ALL_RANKS)
#define OF_PARTNERS(me) ((INDICES == 2 -> BIT(PARTNER(me, 0)) : ALL_RANKS) | BIT(me)) /* need no flags */
#define HAS_ROWS(me) \
  ((INDICES == 1 || IS_OF_CALL(me)) && ((flags[HERE(me)] | OF_PARTNERS(me)) & IS_NEEDED(me)) == IS_NEEDED(me) && \
   HAS_ARRIVED(IN(me, 0), 1) && HAS_ARRIVED(IN(me, K), 1))
#define HAS_SUMS(me) \
  (HAS(flags, me, me) && (BROKEN == NO_WAIT_SEGMENT || HAS(flags, me, OTHER(me))) && \
   HAS_ARRIVED(IN(me, 0), 1) && HAS_ARRIVED(IN(me, K), 1))
#define NEEDS_NO_ROWS(me) (KIND(me) == DROPPED || (KIND(me) == REDISPATCH && EMPTY))
#define MAY_READ(me) \
  (KIND(me) == COMBINE -> HAS_SUMS(me) : \
   (KIND(me) == GENERAL || (HAS_COUNTS(me) && (NEEDS_NO_ROWS(me) || HAS_ROWS(me)))))

#define HAS_PASSED(me) (TIMEOUTS > 0 -> has_passed[me] : DOMAIN_HAS_ENTERED(me) || BROKEN == NO_WAIT_ENTRY)
/* EAGER_WAIT_ALL */
#define HAS_ALL(me) \
  (KIND(me) == GENERAL -> \
   sent[OUT(me, 0)] == SLOTS && sent[OUT(me, K)] == SLOTS && done[IN(me, 0)] == SLOTS && done[IN(me, K)] == SLOTS : \
   (muted[me] || (has_pushed[me] && HAS_SENT(me))) && HAS_SPREAD(me) && (BROKEN == NO_WAIT_ALL || ALL_ARRIVED(me)))
/* Takes as sent what a muted rank does not send. */
#define MAY_END(me) (has_told[me] && HAS_PASSED(me) && HAS_ALL(me) && MAY_READ(me))

inline end_call() {
  for (p : 0 .. RAILS - 1) {
    sent[p] = (SOURCE(p) == me -> 0 : sent[p]);
    done[p] = (TARGET(p) == me -> 0 : done[p])
  }
  first[me] = first[me] + MESSAGES(me);
  has_pushed[me] = false; has_told[me] = false; has_passed[me] = false;
  in_call[me] = false;
  call[me]++;
  p = 0
}
inline return_credits() {
  for (p : 0 .. RAILS - 1) {
    if
    :: TARGET(p) == me && KIND(me) != GENERAL && BROKEN != EARLY_CREDIT -> return_credit(p, 0); return_credit(p, 1)
    :: else
    fi
  }
}
/* EAGER_SIGNAL_ABORT */
inline end_failed_call(is_first) {
  if
  :: BROKEN == FAILED_CREDITS -> return_credits()
  :: else
  fi;
  if
  :: BROKEN != NO_ABORT && BROKEN != NO_SIGNAL_ABORT && (BROKEN != ABORT_PUT_ONCE || is_first) ->
     abort_put[OUT(me, 0)] = !abort[TARGET(OUT(me, 0))];
     abort_put[OUT(me, K)] = !abort[TARGET(OUT(me, K))]
  :: else
  fi;
  failed[me] = !GOES_ON;
  end_call()
}
inline forget() {
  for (p : 0 .. RAILS * SLOTS - 1) {
    if
    :: TARGET(p / SLOTS) == me -> staged[p] = 0; data[p] = 0; ring[p] = 0
    :: SOURCE(p / SLOTS) == me -> credit[p] = freed[p]
    :: else
    fi
  }
  for (p : 2 * me .. 2 * me + 1) {
    last[p] = 0; packets[p] = 0; rows[p] = 0; flags[p] = 0
  }
}
/* One rank stands for all, by symmetry. */
#define MAY_TIME_OUT(me) (me == 0 || ABSENT || TIMEOUTS == 2)
/* The domain hears of the abort before the call ends. */
inline fail_wait(is_first) {
  failed[me] = true;
  failed_call[me] = (failed_call[me] == 0 -> TAG(me) : failed_call[me]);
  abort[OTHER(me)] = abort[OTHER(me)] || (BROKEN != NO_ABORT && BROKEN != NO_LOCAL_ABORT);
  if
  :: !GOES_ON -> forget(); end_failed_call(is_first)
  :: else
  fi
}
inline read_all() {
  if
  :: KIND(me) == COMBINE ->
     assert(last[HERE(me)] == TAG(me) && (rows[HERE(me)] & BIT(me)) && (rows[HERE(me)] & BIT(OTHER(me))));
     read_message(IN(me, 0), 1);
     read_message(IN(me, K), 1)
  :: KIND(me) != COMBINE && KIND(me) != GENERAL ->
     assert((KIND(me) == REDISPATCH && EMPTY) || (last[HERE(me)] == TAG(me) && packets[HERE(me)] == ALL_RANKS));
     if
     :: !NEEDS_NO_ROWS(me) ->
        assert(INDICES == 1 || (last[HERE(me)] == TAG(me) && (rows[HERE(me)] | OF_PARTNERS(me)) == ALL_RANKS));
        read_message(IN(me, 0), 1);
        read_message(IN(me, K), 1)
     :: else
     fi
  :: else
  fi
}

/* The deadline of progress of a wait for counts, weights or rows of `from`, in another domain, which the domain's other
 * rank sends on. In a dispatch a partner's metadata say that it has entered the call, and nothing of its domain; those
 * of others say that when they have been spread. */
#define FAR (OTHER(PARTNER(me, 0)))
#define RUNS_PROGRESS(me) \
  (HAS_ARRIVED(IN(me, 0), 0) && \
   (BROKEN == PARTNER_ENTERED || (DOMAIN_HAS_ENTERED(me) && (!IS_DISPATCH(me) || HAS(packets, me, FAR)))))
#define AWAITS_FAR(me) \
  (INDICES == 2 && KIND(me) != COMBINE && KIND(me) != GENERAL && \
   !(HAS(packets, me, FAR) && HAS(flags, me, FAR)))

proctype Rank(byte me) {
  byte i;
  do
  :: atomic { !in_call[me] && call[me] < CALLS ->
       if
       :: KIND(me) == 0 -> select (i : FIRST .. LAST); KIND(me) = i; i = 0
       :: else
       fi;
       in_call[me] = true;
       muted[me] = abort[me];
       entered[me] = (MAY_STORE(me) && BROKEN != NO_SIGNAL_ENTRY -> TAG(me) : entered[me])
     }
  :: ABSENT && me == RANKS - 1 && !in_call[me] && call[me] < CALLS -> break

  /* Own rows, and weights of a redispatch. In a combine partial sums, some of which stay here. */
  :: d_step { RUNS(me) && !has_pushed[me] && MAY_STORE(me) &&
         (!IN_ORDER || KIND(me) == COMBINE || KIND(me) == GENERAL || HAS_CHUNKS(me)) ->
       if
       :: KIND(me) == COMBINE -> store_rows(me, me)
       :: KIND(me) == REDISPATCH -> store_packets(me, me)
       :: else
       fi;
       if
       :: INDICES == 2 && KIND(me) != GENERAL ->
          store_rows(OTHER(me), me);
          if
          :: BROKEN == EARLY_SIGNAL_SEGMENT -> rows[at] = rows[at] & ~BIT(me)
          :: else
          fi;
          if
          :: KIND(me) == REDISPATCH -> store_packets(OTHER(me), me)
          :: else
          fi
       :: else
       fi;
       has_pushed[me] = true
     }
  :: d_step { BROKEN == EARLY_SIGNAL_SEGMENT && in_call[me] && has_pushed[me] && INDICES == 2 &&
         last[BUFFER(OTHER(me), call[me])] == TAG(me) && !(rows[BUFFER(OTHER(me), call[me])] & BIT(me)) ->
       at = BUFFER(OTHER(me), call[me]);
       rows[at] = rows[at] | BIT(me)
     }
  :: d_step { RUNS(me) && !has_told[me] && MAY_TELL(me) ->
       if
       :: KIND(me) != GENERAL ->
          put(OUT(me, 0), 0);
          sent[OUT(me, 0)] = sent[OUT(me, 0)] | METADATA;
          if
          :: K > 0 -> put(OUT(me, K), 0); sent[OUT(me, K)] = sent[OUT(me, K)] | METADATA
          :: else
          fi
       :: else
       fi;
       if
       :: IS_DISPATCH(me) ->
          store_packets(me, me);
          if
          :: INDICES == 2 -> store_packets(OTHER(me), me)
          :: else
          fi
       :: else
       fi;
       has_told[me] = true
     }
  /* EAGER_WAIT_ENTRY */
  :: d_step { RUNS(me) && !has_passed[me] && (DOMAIN_HAS_ENTERED(me) || BROKEN == NO_WAIT_ENTRY) &&
         (!abort[me] || BROKEN == ENTRY_IGNORES_ABORT) && TIMEOUTS > 0 -> has_passed[me] = true }
  :: d_step { in_call[me] && MAY_END(me) && !failed[me] ->
       for (p : 0 .. RANKS - 1) {
         assert(failed_call[p] == 0 || failed_call[p] >= TAG(me))
       }
       read_all();
       return_credits();
       end_call()
     }

  :: d_step { PROGRESS && in_call[me] && RUNS_PROGRESS(me) && AWAITS_FAR(me) && !abort[me] &&
         (entered[OTHER(me)] < TAG(me) || entered[FAR] < TAG(me)) -> assert(false) }

  /* A wait times out. */
  :: d_step { in_call[me] && !MAY_END(me) && !abort[me] && timeouts_left > 0 && MAY_TIME_OUT(me) ->
       abort[me] = true;
       timeouts_left = (TIMEOUTS == 2 && BROKEN != NO_DEADLINE -> timeouts_left : 0);
       fail_wait(true)
     }
  /* A wait finds the abort word. */
  :: d_step { in_call[me] && abort[me] && !failed[me] -> fail_wait(false) }
  :: d_step { in_call[me] && failed[me] && (GOES_ON || muted[me]) -> end_failed_call(false) }
  :: !in_call[me] && call[me] == CALLS -> break
  od
}

init {
  byte i;
  c_code {
    if (getenv("BROKEN")) broken = atoi(getenv("BROKEN"));
  };
  atomic {
    for (i : 1 .. LATE * SLOTS) {
      run Slot(i - 1)
    }
    for (i : 0 .. RAILS - 1) {
      run Rail(i)
    }
    for (i : 0 .. RANKS - 1) {
      run Rank(i)
    }
    i = 0
  }
}
