/* The flags of a transfer: a model for Spin. tests/protocol_test.py checks it, and that the check fails
 * when any one wait or signal is taken out.
 *
 * RANKS ranks run the same calls in the same order, whatever that order is. A call is one kernel of
 * BLOCKS blocks on each rank, which take tickets: first those that store, then those that read (combine
 * mixes them; what it may read and overwrite when is the same, and it has less time for it). Ranks
 * know of each other by flags alone, 64-bit epochs (call e is epoch e) that a peer writes into my
 * control block and that I compare by >=:
 *
 *   ready    the peer has entered call e; its line (fingerprint, poisoned, addresses) is there
 *   chunk    the peer has stored its partial rows of this chunk of my tokens (combine)
 *   done     the peer neither reads nor writes anything of call e any more
 *   abort    sticky: this call and all later ones end, with safe results
 *
 * What is checked
 *   - Nothing is read before it is there or after it was overwritten: what is stored is tagged with its
 *     epoch and operation, and every read asserts the tag.
 *   - No deadlock: Spin reports states in which nobody can go on.
 *   - For any number of calls: with CALLS 0 the ranks never stop. Epochs then count from the slowest
 *     rank (`rebase`), so there are finitely many states.
 *   - Progress needs one resident block: RESIDENT 1 runs the blocks of a kernel one after another.
 *   - TIMEOUTS 1: any one wait of any rank may give up. MISMATCH 1: rank 0 runs a program of its own.
 *
 * Memory order. Spin interleaves whole steps, one after another. That is what the kernels do because
 *   - a signal is st.release.sys, after the stores that it announces in program order, and a wait is
 *     ld.acquire.sys, before the reads that it permits: who sees the epoch sees the data;
 *   - a block counts itself by atom.add.acq_rel.gpu after fence.acq_rel.sys, so that the release of the
 *     last finisher covers what all blocks stored, and its `done` what they read: causality is transitive;
 *   - a verdict is written by atom.cas.acq_rel.gpu: who follows another block's verdict has acquired what
 *     that block had acquired;
 *   - an abort word is st.release.sys. A wait loads it after the flags, and it counts more than they do.
 * All that one ticket stores is one step here, and all that it reads: each assertion is about one datum,
 * and in some order that datum is stored as early, or read as late, as waits and signals allow. */

#ifndef RANKS
#define RANKS 2 /* or 3 */
#endif
#ifndef RESIDENT
#define RESIDENT 2 /* blocks that run at the same time on rank 0 */
#endif
#ifndef RESIDENT_ELSEWHERE
#define RESIDENT_ELSEWHERE 1
#endif
#ifndef FIRST
#define FIRST 1 /* of the operations that calls are chosen from, by the numbers below */
#endif
#ifndef LAST
#define LAST 5
#endif
#ifndef CALLS
#define CALLS 0 /* of each rank; 0 for no end */
#endif
#ifndef TIMEOUTS
#define TIMEOUTS 0
#endif
#ifndef MISMATCH
#define MISMATCH 0
#endif
#define BLOCKS 2 /* of a kernel */
#define CHUNKS 2 /* of a combine */
#define PARTS 2  /* tickets that share what a dispatch, or a chunk of a combine, stores */

/* ---- Mutations: -DBROKEN=NAME breaks the protocol in one place. */

#define NOTHING 0
#define NO_WAIT_FREE 1
#define NO_WAIT_READY 2
#define NO_WAIT_CHUNK 3
#define NO_WAIT_LOCAL 4 /* for lower tickets of the same device */
#define NO_WAIT_DONE 5
#define NO_SIGNAL_READY 6
#define NO_SIGNAL_CHUNK 7
#define NO_SIGNAL_DONE 8
#define EARLY_SIGNAL_READY 9 /* before the ticket's data */
#define EARLY_SIGNAL_CHUNK 10
#define EARLY_SIGNAL_DONE 11   /* before the ticket's reads */
#define EARLY_EPOCH 12         /* of `ready`, before the line */
#define FIRST_SIGNAL_READY 13  /* by the first finisher instead of the last */
#define FIRST_SIGNAL_CHUNK 14
#define FIRST_SIGNAL_DONE 15
#define ONE_PEER_FREE 16       /* WAIT_FREE waits for the right neighbor alone */
#define NO_FINGERPRINT 17      /* not compared */
#define NO_POISONED 18         /* not looked at */
#define NO_VERDICT 19          /* every block decides for itself */
#define NO_ABORT 20            /* who gives up does not tell the peers */
#define NO_PASSING_ON 21       /* who sees an abort does not tell the peers */
#define NO_LAST_LOOK 22        /* rows read in place are believed whatever became of their owner */
#define NO_RESET 23            /* of the local counters */
#define READS_FIRST 24         /* tickets that read come before those that store */
#define EARLY_STORE 25         /* data before WAIT_FREE, line and signals after it */
#define FLAGS_FIRST 26         /* a wait whose flags have come does not look at the abort word */
#ifndef BROKEN
#define BROKEN NOTHING
#endif

/* ---- Operations. A tag is an epoch with an operation. */

#define IN_PLACE 1 /* dispatch: peers read x itself, which others overwrite when the call has ended */
#define COPIED 2   /* dispatch: x is copied into the workspace before */
#define COMBINE 3
#define MIXED 4    /* dispatch: rank 0 in place, the others copied; the line says which */
#define POISONED 5 /* combine: rank 0 has a plan whose status is not 0, and stores nothing */

#define IS_COMBINE (operation == COMBINE || operation == POISONED)
#define IS_POISONED(rank) (operation == POISONED && rank == 0)
#define IS_IN_PLACE(rank) (operation == IN_PLACE || (operation == MIXED && rank == 0))
#define ANY_IN_PLACE (operation == IN_PLACE || operation == MIXED)
#define TAG(epoch, operation) ((epoch) * 8 + (operation))
#define MY_TAG TAG(MY_EPOCH, operation)

/* ---- Control blocks. What peers write, by rank and peer: */

#define PEER(distance) ((me + distance) % RANKS)
#define FROM(peer) (me * RANKS + peer) /* at me */
#define TO(peer) ((peer) * RANKS + me) /* at the peer */
byte ready[RANKS * RANKS];
byte line[RANKS * RANKS]; /* a tag */
byte done[RANKS * RANKS];
byte chunk[CHUNKS * RANKS * RANKS];
bool abort[RANKS];

#define READY_FROM(peer) ready[FROM(peer)]
#define DONE_FROM(peer) done[FROM(peer)]
#define CHUNK_FROM(peer) chunk[ticket * RANKS * RANKS + FROM(peer)]
#define EVERY(flag, target) (flag(PEER(1)) >= target && (RANKS == 2 || flag(PEER(2)) >= target))
#define ALL_FREE \
  (BROKEN == NO_WAIT_FREE || EVERY(DONE_FROM, MY_EPOCH - 1) || \
   (BROKEN == ONE_PEER_FREE && DONE_FROM(PEER(1)) >= MY_EPOCH - 1))
#define ALL_READY (BROKEN == NO_WAIT_READY || EVERY(READY_FROM, MY_EPOCH))
#define ALL_CHUNKS (BROKEN == NO_WAIT_CHUNK || EVERY(CHUNK_FROM, MY_EPOCH))
#define ALL_DONE (BROKEN == NO_WAIT_DONE || EVERY(DONE_FROM, MY_EPOCH))

/* What the rank's own blocks write: */

byte epoch[RANKS]; /* calls completed; the running one is one more */
#define MY_EPOCH (epoch[me] + 1)
byte to_start[RANKS] = BLOCKS; /* of the running kernel; the stream starts the next when this has ended */
byte next_ticket[RANKS];
byte stored[RANKS * CHUNKS]; /* finished tickets of a dispatch ([0]), of a chunk of a combine */
byte blocks_finished[RANKS];

/* The outcome of every wait of the call: the first that a block writes down, for all blocks. The kernels
 * keep its epoch beside it; here the end of the call clears it. */
#define FREE 0
#define READY 1
#define DONE 2
#define CHUNK(c) (3 + c)
#define GATES CHUNK(CHUNKS)
mtype = { unknown, arrived, poisoned, aborted };
mtype verdicts[RANKS * GATES] = unknown;
#define VERDICT(gate) verdicts[me * GATES + gate]
bool gave_up[RANKS]; /* a verdict is `aborted`: the call has safe results, and sends no signal */

/* What the call's results hold: */

byte reads[RANKS]; /* tickets that have read */
bool torn[RANKS];  /* a row was read in place, after its owner's call had ended */

/* ---- Workspaces. One memory, which every operation lays out anew: a store of one call may hit any datum
 * of another call. So what is read must be of the workspace's latest call, and nobody may store for an
 * earlier one. In a call every writer has pieces of its own:
 *   dispatch   in its own workspace its routes, and its rows if copied; in the peers' its counts
 *   combine    in the owner's workspace its partial rows, a piece for each chunk and part */

#define PIECES (CHUNKS * PARTS)
byte latest[RANKS];                  /* epoch of the latest store, by owner */
byte pieces[RANKS * RANKS * PIECES]; /* tags, by owner and writer */
#define PIECE(owner, writer, piece) pieces[((owner) * RANKS + writer) * PIECES + piece]

/* ---- The calls: chosen one by one by the rank that comes first, for all. */

#define WINDOW 5 /* epochs that are remembered */
byte program[(1 + MISMATCH) * WINDOW];
byte timeouts_left = TIMEOUTS;
#define CHOICE program[(MISMATCH && me == 0 -> WINDOW : 0) + MY_EPOCH]

/* ---- Steps of a block. */

#define NO_TICKET 255

/* Fewer states: what follows a wait is one step with it, unless somebody may give up in between. A block
 * that comes later finds the same flags. */
#define SEPARATE (TIMEOUTS + MISMATCH > 0 || BROKEN == EARLY_SIGNAL_DONE)

#define STORES (IS_COMBINE -> CHUNKS * PARTS : PARTS)
#define TICKETS (STORES + (IS_COMBINE -> CHUNKS : PARTS))

/* Where a block stands: between two of these it does one step, and others may come between. */
mtype = { idle, take, wait_free, store, wait_ready, wait_chunk, read, wait_done, end, abort_all };

/* What a block has to send; one step for each peer. */
mtype = { none, late_line, SIGNAL_READY, SIGNAL_CHUNK, SIGNAL_DONE };

inline send_to(peer) {
  if
  :: signal == SIGNAL_READY && BROKEN != NO_SIGNAL_READY -> ready[TO(peer)] = MY_EPOCH
  :: signal == SIGNAL_CHUNK && BROKEN != NO_SIGNAL_CHUNK ->
     chunk[ticket / PARTS * RANKS * RANKS + TO(peer)] = MY_EPOCH
  :: signal == SIGNAL_DONE && BROKEN != NO_SIGNAL_DONE -> done[TO(peer)] = MY_EPOCH
  :: signal == late_line -> line[TO(peer)] = MY_TAG
  :: else
  fi
}
#if RANKS == 2
#define TO_EACH(step) step(PEER(1))
#else
#define TO_EACH(step) step(PEER(1)) } atomic { step(PEER(2))
#endif

/* What the release of `ready` announces besides the data. */
inline store_line() {
  if
  :: BROKEN != EARLY_EPOCH -> line[TO(PEER(1))] = MY_TAG; line[TO(PEER(RANKS - 1))] = MY_TAG
  :: else
  fi
}

/* Into all workspaces, mine included. */
inline store_data() {
  for (p : 0 .. RANKS - 1) {
    assert(latest[p] <= MY_EPOCH);
    latest[p] = MY_EPOCH;
    PIECE(p, me, ticket) = MY_TAG
  }
  p = 0
}

inline take_ticket() {
  if
  :: next_ticket[me] < TICKETS ->
     ticket = (BROKEN == READS_FIRST -> (next_ticket[me] + STORES) % TICKETS : next_ticket[me]);
     next_ticket[me]++;
     at = (ticket < STORES -> wait_free : wait_ready);
     if
     :: BROKEN == EARLY_STORE && at == wait_free -> store_data()
     :: else
     fi
  :: else -> /* none left */
     blocks_finished[me]++;
     is_last = blocks_finished[me] == BLOCKS;
     if
     :: !gave_up[me] && (BROKEN == FIRST_SIGNAL_DONE -> blocks_finished[me] == 1 : is_last) ->
        signal = SIGNAL_DONE
     :: else
     fi;
     if
     :: is_last -> at = (IS_IN_PLACE(me) && !gave_up[me] -> wait_done : end)
     :: else -> at = idle; operation = 0
     fi
  fi
}

/* Forgets all that was of this ticket: fewer states, too. */
inline drop_ticket() {
  ticket = NO_TICKET; outcome = unknown; signal = none; i = 0; p = 0;
  at = take
}

/* What a ticket that stores does. The last finisher has a signal for the peers. */
inline store_pieces() {
  if
  :: outcome == arrived && !IS_POISONED(me) ->
     store_data()
  :: else
  fi;
  stored[me * CHUNKS + ticket / PARTS]++;
  is_last = stored[me * CHUNKS + ticket / PARTS] ==
      (BROKEN == (IS_COMBINE -> FIRST_SIGNAL_CHUNK : FIRST_SIGNAL_READY) -> 1 : PARTS);
  if
  :: outcome != arrived || !is_last || IS_POISONED(me) -> drop_ticket()
  :: else ->
     at = take;
     signal = (IS_COMBINE -> SIGNAL_CHUNK : SIGNAL_READY);
     if
     :: signal == SIGNAL_READY -> store_line()
     :: else
     fi
  fi;
  is_last = false
}

inline read_piece(owner, writer, piece) {
  assert(latest[owner] == MY_EPOCH);
  assert(PIECE(owner, writer, piece) == MY_TAG)
}

inline read_pieces() {
  for (p : 0 .. RANKS - 1) {
    if
    :: IS_COMBINE -> /* what p stored here of this chunk */
       for (i : 0 .. PARTS - 1) {
         read_piece(me, p, ticket * PARTS + i)
       }
    :: else -> /* the counts that p stored here; its routes; its rows, where its line says */
       read_piece(me, p, ticket);
       read_piece(p, p, ticket);
       assert(p == me || line[FROM(p)] == MY_TAG);
       torn[me] = torn[me] || (IS_IN_PLACE(p) && epoch[p] != epoch[me])
    fi
  }
  reads[me]++;
  drop_ticket()
}
inline then_read() {
  if
  :: SEPARATE -> at = read
  :: else -> read_pieces()
  fi
}

/* The lines that came with `ready`. They are of this call and not of a later one: a peer enters the next
 * only after my own `done` of this one. */
inline compare_lines() {
  for (p : 0 .. RANKS - 1) {
    if
    :: p != me && BROKEN != NO_WAIT_READY ->
       assert(line[FROM(p)] / TAG(1, 0) == MY_EPOCH);
       must_abort = must_abort || (line[FROM(p)] != MY_TAG && BROKEN != NO_FINGERPRINT);
       outcome = (IS_POISONED(p) && BROKEN != NO_POISONED -> poisoned : outcome)
    :: else
    fi
  }
  outcome = (IS_POISONED(me) -> poisoned : outcome); /* its own status it has from its plan */
  abort[me] = abort[me] || must_abort
}

/* WAIT_LOCAL, for lower tickets of this rank, which a block took that is at work: no deadlock. */
#define LOCAL(counter) (BROKEN == NO_WAIT_LOCAL || stored[me * CHUNKS + counter] == PARTS)

/* Another wait ends when its outcome is known: another block's verdict, an abort, or the peers' flags. */
#define KNOWN(gate, condition) \
  (!must_abort && ((VERDICT(gate) != unknown && BROKEN != NO_VERDICT) || abort[me] || (condition)))

inline decide(gate, condition) {
  if
  :: abort[me] && !(BROKEN == FLAGS_FIRST && (condition)) -> outcome = aborted
  :: else -> outcome = arrived
  fi;
  if
  :: gate == READY && outcome == arrived && (VERDICT(gate) == unknown || BROKEN == NO_VERDICT) ->
     compare_lines()
  :: else
  fi;
  if
  :: must_abort -> skip /* the abort words first, then it comes here again */
  :: else ->
     if
     :: VERDICT(gate) == unknown ->
        VERDICT(gate) = outcome;
        gave_up[me] = gave_up[me] || outcome == aborted
     :: else
     fi;
     if
     :: BROKEN != NO_VERDICT -> outcome = VERDICT(gate)
     :: else
     fi
  fi
}

inline abort_rank(rank) {
  abort[rank] = abort[rank] || BROKEN != NO_ABORT
}
inline pass_on(rank) {
  abort[rank] = abort[rank] || (BROKEN != NO_ABORT && BROKEN != NO_PASSING_ON)
}

/* Epochs count from the slowest rank's, which always has 1 or more calls behind it once all had two: so
 * all targets and tags to come are above 1, and comparisons by >= and by == come out as before. What is
 * too old for them becomes 0. */
#define LESS(flag) flag = (flag > 0 -> flag - 1 : 0)
#define LESS_TAG(tag) tag = (tag >= TAG(3, 0) -> tag - TAG(1, 0) : 0)
inline rebase() {
  for (p : 0 .. RANKS - 1) {
    epoch[p]--;
    LESS(latest[p])
  }
  for (p : 0 .. RANKS * RANKS - 1) {
    LESS(ready[p]);
    LESS(done[p]);
    LESS_TAG(line[p])
  }
  for (p : 0 .. CHUNKS * RANKS * RANKS - 1) {
    LESS(chunk[p])
  }
  for (p : 0 .. RANKS * RANKS * PIECES - 1) {
    LESS_TAG(pieces[p])
  }
  for (p : 2 .. WINDOW - 2) {
    program[p] = program[p + 1]
  }
  program[1] = 0;
  program[WINDOW - 1] = 0
}

inline end_call() {
  assert(gave_up[me] || !torn[me]);                /* results are right or marked, */
  assert(IS_COMBINE || reads[me] % PARTS == 0);    /* a dispatch's all or none, */
  assert(TIMEOUTS + MISMATCH > 0 || !gave_up[me]); /* and marked for a reason */
  gave_up[me] = false;
  reads[me] = 0;
  torn[me] = false;
  for (i : 0 .. GATES - 1) {
    VERDICT(i) = unknown
  }
  if
  :: BROKEN != NO_RESET ->
     next_ticket[me] = 0;
     stored[me * CHUNKS] = 0;
     stored[me * CHUNKS + 1] = 0;
     blocks_finished[me] = 0
  :: else
  fi;
  to_start[me] = BLOCKS;
  at = idle;
  is_last = false;
  operation = 0;
  epoch[me]++;
  if
  :: CALLS == 0 && epoch[0] > 1 && epoch[1] > 1 && epoch[RANKS - 1] > 1 -> rebase()
  :: else
  fi
}

/* A place where a block can be resident: runs blocks of the rank's kernels, one after another. */
proctype Resident(byte me) {
  mtype at = idle;
  byte operation, i, p;
  byte ticket = NO_TICKET;
  mtype outcome = unknown; /* of the latest wait of this ticket */
  mtype signal = none;     /* to be sent */
  bool must_abort, is_last;

  do
  :: atomic { at == idle && signal == none && to_start[me] > 0 && (CALLS == 0 || epoch[me] < CALLS) ->
       to_start[me]--;
       if
       :: CHOICE == 0 -> select (i : FIRST .. LAST); CHOICE = i; i = 0
       :: else
       fi;
       operation = CHOICE;
       take_ticket()
     }
  :: at == idle && CALLS > 0 && epoch[me] == CALLS -> break

  :: d_step { at == take && signal == none -> take_ticket() }

  /* WAIT_FREE: everybody is done with the last call, so that all workspaces may be overwritten, and
   * lines. The first ticket of a combine tells at once that the call is entered. */
  :: d_step { at == wait_free && KNOWN(FREE, ALL_FREE) ->
       decide(FREE, ALL_FREE);
       if
       :: outcome == arrived && (IS_COMBINE -> ticket == 0 : BROKEN == EARLY_SIGNAL_READY) ->
          store_line();
          signal = SIGNAL_READY
       :: outcome == arrived && IS_COMBINE && BROKEN == EARLY_SIGNAL_CHUNK -> signal = SIGNAL_CHUNK
       :: else
       fi;
       if
       :: SEPARATE || signal != none -> at = store
       :: else -> store_pieces()
       fi
     }

  :: d_step { at == store && signal == none -> store_pieces() }

  /* SIGNAL_READY, SIGNAL_CHUNK, SIGNAL_DONE */
  :: atomic { signal != none -> TO_EACH(send_to);
       signal = (BROKEN == EARLY_EPOCH && signal == SIGNAL_READY -> late_line : none);
       if
       :: at == take && signal == none -> drop_ticket()
       :: else
       fi
     }

  /* WAIT_READY: everybody is in this call, the same call; in a dispatch their data is there. */
  :: d_step { at == wait_ready && (IS_COMBINE || LOCAL(0)) && KNOWN(READY, ALL_READY) ->
       decide(READY, ALL_READY);
       p = 0;
       if
       :: must_abort -> skip
       :: !must_abort && outcome == arrived ->
          ticket = ticket - STORES;
          signal = (BROKEN == EARLY_SIGNAL_DONE -> SIGNAL_DONE : none);
          if
          :: IS_COMBINE -> at = wait_chunk
          :: else -> then_read()
          fi
       :: else -> drop_ticket()
       fi
     }

  /* WAIT_CHUNK: everybody's partial rows of this chunk are here. */
  :: d_step { at == wait_chunk && LOCAL(ticket) && KNOWN(CHUNK(ticket), ALL_CHUNKS) ->
       decide(CHUNK(ticket), ALL_CHUNKS);
       if
       :: outcome == arrived -> then_read()
       :: else -> drop_ticket()
       fi
     }

  :: d_step { at == read && signal == none -> read_pieces() }

  /* WAIT_DONE: nobody reads x any more, so the call may end. */
  :: d_step { at == wait_done && signal == none && KNOWN(DONE, ALL_DONE) ->
       decide(DONE, ALL_DONE);
       at = end
     }

  /* The end. Rows that were read in place are what they were if nobody has given up: who does tells all
   * the others before its own call ends and its x is overwritten. Who hears of it tells them, too. */
  :: d_step { at == end && signal == none ->
       if
       :: gave_up[me] || (abort[me] && ANY_IN_PLACE && BROKEN != NO_LAST_LOOK) ->
          gave_up[me] = true;
          at = abort_all
       :: else -> end_call()
       fi
     }
  :: atomic { at == abort_all -> TO_EACH(pass_on);
       end_call()
     }

  /* Giving up: a wait takes too long, or a peer is in another call. */
  :: atomic { TIMEOUTS > 0 && timeouts_left > 0 && !abort[me] && !must_abort && signal == none &&
         (at == wait_free || at == wait_ready || at == wait_chunk || at == wait_done) ->
       timeouts_left--;
       abort[me] = true;
       must_abort = true
     }
  :: atomic { must_abort -> TO_EACH(abort_rank);
       must_abort = false
     }
  od
}

init {
  byte i, r;
  bool differ;
  atomic {
    for (r : 0 .. RANKS - 1) {
      for (i : 1 .. (r == 0 -> RESIDENT : RESIDENT_ELSEWHERE)) {
        run Resident(r)
      }
    }
  }
  (_nr_pr == 1); /* all calls have ended */
  for (i : 1 .. WINDOW - 1) {
    differ = differ || (i <= CALLS && program[i] != program[MISMATCH * WINDOW + i])
  }
  for (r : 0 .. RANKS - 1) {
    assert(abort[r] == (differ || timeouts_left < TIMEOUTS))
  }
}
