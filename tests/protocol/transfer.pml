/* The flags of a transfer: a model for Spin. tests/protocol_test.py checks it, and that the check fails
 * when any one wait or signal is taken out.
 *
 * RANKS ranks run the same calls in the same order, whatever that order is. A call is one kernel of
 * BLOCKS blocks on each rank, which take tickets: first those that store, then those that read (combine
 * mixes them; what it may read and overwrite when is the same, and it has less time for it). Ranks
 * know of each other by flags alone, 64-bit epochs (call e is epoch e) that a peer writes into my
 * control block and that I compare by >=:
 *
 *   ready    the peer has entered call e; its line (fingerprint, poisoned, addresses) is there. Two
 *            for each peer, by the parity of e: a small call does not wait until I am done with e - 1
 *   chunk    the peer has stored its partial rows of this chunk of my tokens (combine)
 *   done     the peer neither reads nor writes anything of call e any more
 *   abort    sticky: this call and all later ones end, with safe results
 *
 * A small call, of few tokens, stores without waiting for anybody. Each of its pieces has a flag in the
 * workspace, beside the data, which I compare by == with a tag of this very call:
 *
 *   piece    the peer has stored this piece
 *
 * Its blocks take tickets to store; then each reads a part that is its own. Pieces that are there are
 * right, whatever became of their owner. Who misses one looks at the abort word, at what other readers of
 * this rank have come upon, and at the owner's line: it may be in another call, or have nothing to send.
 * The last block, when it has read, keeps the gate: it waits until all have entered the call. (In a
 * dispatch some read while others store, which is earlier and no less safe. Flags are kept back until some
 * pieces are stored, and tickets are asked for ahead: nobody waits meanwhile.)
 *
 * What is checked
 *   - Nothing is read before it is there or after it was overwritten: what is stored is tagged with its
 *     epoch and operation, and every read asserts the tag.
 *   - No deadlock: Spin reports states in which nobody can go on.
 *   - For any number of calls: with CALLS 0 the ranks never stop. Epochs then count from the slowest
 *     rank (`rebase`), so there are finitely many states.
 *   - Progress needs one resident block: RESIDENT 1 runs the blocks of a kernel one after another, those
 *     of a small call in any order.
 *   - TIMEOUTS 1: any one wait of any rank may give up. MISMATCH 1: rank 0 runs a program of its own.
 *
 * Memory order. Spin interleaves whole steps, one after another. That is what the kernels do because
 *   - a signal is st.release.sys, after the stores that it announces in program order, and a wait is
 *     ld.acquire.sys, before the reads that it permits: who sees the epoch sees the data;
 *   - a block counts itself by atom.add.acq_rel.gpu after fence.acq_rel.sys, so that the release of the
 *     last finisher covers what all blocks stored, and its `done` what they read: causality is transitive;
 *   - a verdict is written by atom.cas.acq_rel.gpu: who follows another block's verdict has acquired what
 *     that block had acquired;
 *   - kernels of a rank run one after another: `ready` of a call covers what the rank did in all before,
 *     and what a kernel stores comes after what an earlier one has acquired;
 *   - an abort word is st.release.sys. A wait loads it after the flags, and it counts more than they do;
 *     but for WAIT_PIECE, which does not look at it once the flags have come.
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
#define LAST 7
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
#define PARTS 2  /* tickets that share what a dispatch, a small call, or a chunk of a combine stores */

/* ---- Mutations: -DBROKEN=NAME breaks the protocol in one place; -DBROKEN=broken in the one whose number
 * the checker finds in its environment, as BROKEN. */

#define NOTHING 0
#define NO_WAIT_FREE 1
#define NO_WAIT_READY 2
#define NO_WAIT_CHUNK 3
#define NO_WAIT_PIECE 4
#define NO_WAIT_LOCAL 5 /* for lower tickets of the same device */
#define NO_WAIT_DONE 6
#define NO_SIGNAL_READY 7
#define NO_SIGNAL_CHUNK 8
#define NO_SIGNAL_PIECE 9
#define NO_SIGNAL_DONE 10
#define EARLY_SIGNAL_READY 11 /* before the ticket's data */
#define EARLY_SIGNAL_CHUNK 12
#define EARLY_SIGNAL_PIECE 13
#define EARLY_SIGNAL_DONE 14  /* before the ticket's reads */
#define EARLY_EPOCH 15        /* of `ready`, before the line */
#define FIRST_SIGNAL_READY 16 /* by the first finisher instead of the last */
#define FIRST_SIGNAL_CHUNK 17
#define FIRST_SIGNAL_DONE 18
#define ONE_PEER_FREE 19  /* WAIT_FREE waits for the right neighbor alone */
#define NO_FINGERPRINT 20 /* not compared */
#define NO_POISONED 21    /* not looked at */
#define NO_VERDICT 22     /* every block decides for itself */
#define NO_ABORT 23       /* who gives up does not tell the peers */
#define NO_PASSING_ON 24  /* who sees an abort does not tell the peers */
#define NO_LAST_LOOK 25   /* rows read in place are believed whatever became of their owner */
#define NO_LOOK 26        /* a small call stores whatever became of the last call */
#define NO_LINE_LOOK 27   /* who waits for a piece does not look at its owner's line */
#define READY_ANYWAY 28   /* a small call tells that it is entered whatever became of the last call */
#define READY_BY_BLOCK 29 /* by the first block instead of the first ticket */
#define NO_RESET 30       /* of the local counters */
#define READS_FIRST 31    /* tickets that read come before those that store */
#define EARLY_STORE 32    /* data before WAIT_FREE, line and signals after it */
#define FLAGS_FIRST 33    /* a wait whose flags have come does not look at the abort word */
#define ONE_LINE 34       /* of each peer, for all epochs */
#define ONE_HALF 35       /* of the memory of small calls, for all epochs */
#ifndef BROKEN
#define BROKEN NOTHING
#endif
hidden byte broken; /* of no state */

/* ---- Operations. A tag is an epoch with an operation. */

#define IN_PLACE 1 /* dispatch: peers read x itself, which others overwrite when the call has ended */
#define COMBINE 2
#define COPIED 3         /* dispatch: x is copied into the workspace before */
#define SMALL 4          /* dispatch or combine, of few tokens */
#define SMALL_POISONED 5 /* combine: rank 0 has a plan whose status is not 0, and stores nothing */
#define POISONED 6       /* the same, not small */
#define MIXED 7          /* dispatch: rank 0 in place, the others copied; the line says which */

#define IS_COMBINE (operation == COMBINE || operation == POISONED)
#define IS_SMALL (operation == SMALL || operation == SMALL_POISONED)
#define IS_POISONED(rank) ((operation == POISONED || operation == SMALL_POISONED) && rank == 0)
#define IS_IN_PLACE(rank) (operation == IN_PLACE || (operation == MIXED && rank == 0))
#define ANY_IN_PLACE (operation == IN_PLACE || operation == MIXED)
#define TAG(epoch, operation) ((epoch) * 8 + (operation))
#define MY_TAG TAG(MY_EPOCH, operation)

/* ---- Control blocks. What peers write, by rank and peer: */

#define PEER(distance) ((me + distance) % RANKS)
#define FROM(peer) (me * RANKS + peer) /* at me */
#define TO(peer) ((peer) * RANKS + me) /* at the peer */
#define PAIRS (RANKS * RANKS)
byte ready[2 * PAIRS]; /* by parity, too */
byte line[2 * PAIRS];  /* a tag */
byte done[PAIRS];
byte chunk[CHUNKS * PAIRS];
bool abort[RANKS];

#define PARITY(broken) ((BROKEN != broken) * (MY_EPOCH % 2))
#define LINES (PARITY(ONE_LINE) * PAIRS) /* of this epoch */
#define READY_FROM(peer) ready[LINES + FROM(peer)]
#define LINE_FROM(peer) line[LINES + FROM(peer)]
#define DONE_FROM(peer) done[FROM(peer)]
#define CHUNK_FROM(peer) chunk[ticket * PAIRS + FROM(peer)]
#define EVERY(flag, target) (flag(PEER(1)) >= target && (RANKS == 2 || flag(PEER(2)) >= target))
#define ALL_FREE \
  (BROKEN == NO_WAIT_FREE || EVERY(DONE_FROM, MY_EPOCH - 1) || \
   (BROKEN == ONE_PEER_FREE && DONE_FROM(PEER(1)) >= MY_EPOCH - 1))
#define ALL_READY (BROKEN == NO_WAIT_READY || EVERY(READY_FROM, MY_EPOCH))
#define ALL_CHUNKS (BROKEN == NO_WAIT_CHUNK || EVERY(CHUNK_FROM, MY_EPOCH))
#define ALL_PIECES (BROKEN == NO_WAIT_PIECE || (PIECE_FROM(me) && EVERY(PIECE_FROM, true)))
#define ALL_DONE (BROKEN == NO_WAIT_DONE || EVERY(DONE_FROM, MY_EPOCH))

/* What the rank's own blocks write: */

byte epoch[RANKS]; /* calls completed; the running one is one more */
#define MY_EPOCH (epoch[me] + 1)
#define ALL_BLOCKS ((1 << BLOCKS) - 1)
byte to_start[RANKS] = ALL_BLOCKS; /* a bit for each of the kernel; the next kernel starts at its end */
byte next_ticket[RANKS];
byte stored[RANKS * CHUNKS]; /* finished tickets of a dispatch ([0]), of a chunk of a combine */
byte blocks_finished[RANKS];

/* The outcome of every wait of the call: the first that a block writes down, for all blocks. The kernels
 * keep its epoch beside it; here the end of the call clears it. In a small call whoever waits goes by what
 * it sees itself, and writes down what failed, over what was there, for the last block and for readers. */
#define FREE 0
#define READY 1
#define DONE 2
#define CHUNK(c) (3 + c)
#define GATES CHUNK(CHUNKS)
mtype = { unknown, arrived, poisoned, aborted };
mtype verdicts[RANKS * GATES] = unknown;
#define VERDICT(gate) verdicts[me * GATES + gate]
#define FAILURE VERDICT(FREE) /* in a small call, which has no such wait */
bool gave_up[RANKS]; /* a verdict is `aborted`: the call has safe results, and sends no signal */

/* What the call's results hold: */

byte reads[RANKS]; /* tickets that have read */
bool torn[RANKS];  /* a row was read in place, after its owner's call had ended */

/* ---- Workspaces. One memory, which every operation lays out anew: a store of one call may hit any datum
 * of another call. So what is read must be of the memory's latest call, and nobody may store for an
 * earlier one. In a call every writer has pieces of its own:
 *   dispatch   in its own workspace its routes, and its rows if copied; in the peers' its counts
 *   combine    in the owner's workspace its partial rows, a piece for each chunk and part
 * Small calls have two memories of their own, for even epochs and odd ones. What protects these: who has
 * ended call e - 1, and has not given up, knows that all have entered it, so all have ended call e - 2. */

#define PIECES (CHUNKS * PARTS)
#define MEMORY (IS_SMALL * PARITY(ONE_HALF) + 2 * !IS_SMALL)
byte latest[3 * RANKS];          /* epoch of the latest store, by memory and owner */
byte pieces[3 * PAIRS * PIECES]; /* tags, by memory, owner and writer */
byte flags[2 * PAIRS * PIECES];  /* likewise, in small calls */
#define LATEST(owner) latest[MEMORY * RANKS + (owner)]
#define PLACE(owner, writer, piece) (((MEMORY * RANKS + (owner)) * RANKS + (writer)) * PIECES + piece)
#define PIECE(owner, writer, piece) pieces[PLACE(owner, writer, piece)]
#define PIECE_FROM(peer) (flags[PLACE(me, peer, ticket)] == MY_TAG)

/* ---- The calls: chosen one by one by the rank that comes first, for all. */

#define WINDOW 5 /* epochs that are remembered */
byte program[(1 + MISMATCH) * WINDOW];
byte timeouts_left = TIMEOUTS;
#define CHOICE program[(MISMATCH && me == 0 -> WINDOW : 0) + MY_EPOCH]

/* ---- Steps of a block. */

#define NO_TICKET 255

/* Fewer states: what follows a wait is one step with it, unless somebody may give up in between. A block
 * that comes later finds the same flags. (What follows WAIT_PIECE always is: a piece is overwritten before
 * its flag, and a block that comes between reads it.) */
#define SEPARATE (TIMEOUTS + MISMATCH > 0 || BROKEN == EARLY_SIGNAL_DONE)

/* Blocks of a small call differ, by what they read and by the gate, and start in any order: where they run
 * one after another, so that it matters. Fewer states: elsewhere the first to start is the first. */
#define ANY_ORDER (RESIDENT == 1)

#define STORES (IS_COMBINE -> CHUNKS * PARTS : PARTS)
#define TICKETS (STORES + (IS_COMBINE -> CHUNKS : PARTS)) /* in a small call STORES alone */

/* Where a block stands: between two of these it does one step, and others may come between. */
mtype = {
  idle, take, look, wait_free, store, wait_ready, wait_chunk, wait_piece, read, note, wait_done, end,
  abort_all
};

/* What a block has to send; one step for each peer. */
mtype = { none, late_line, SIGNAL_READY, SIGNAL_CHUNK, SIGNAL_PIECE, SIGNAL_DONE };

inline send_to(peer) {
  if
  :: signal == SIGNAL_READY && BROKEN != NO_SIGNAL_READY -> ready[LINES + TO(peer)] = MY_EPOCH
  :: signal == SIGNAL_CHUNK && BROKEN != NO_SIGNAL_CHUNK ->
     chunk[ticket / PARTS * PAIRS + TO(peer)] = MY_EPOCH
  :: signal == SIGNAL_PIECE && BROKEN != NO_SIGNAL_PIECE ->
     flags[PLACE(peer, me, ticket)] = MY_TAG;
     flags[PLACE(me, me, ticket)] = MY_TAG /* the same for all readers */
  :: signal == SIGNAL_DONE && BROKEN != NO_SIGNAL_DONE -> done[TO(peer)] = MY_EPOCH
  :: signal == late_line -> line[LINES + TO(peer)] = MY_TAG
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
  :: BROKEN != EARLY_EPOCH -> line[LINES + TO(PEER(1))] = MY_TAG;
     line[LINES + TO(PEER(RANKS - 1))] = MY_TAG
  :: else
  fi
}

/* Into all workspaces, mine included. */
inline store_data() {
  for (p : 0 .. RANKS - 1) {
    assert(LATEST(p) <= MY_EPOCH);
    LATEST(p) = MY_EPOCH;
    PIECE(p, me, ticket) = MY_TAG
  }
  p = 0
}

/* Forgets all that was of this ticket: fewer states, too. What a block of a small call saw when it looked
 * it goes by to the end. */
inline drop_ticket() {
  outcome = (IS_SMALL -> outcome : unknown);
  ticket = NO_TICKET; signal = none; i = 0; p = 0;
  at = take
}

/* A block is done. The last one has a signal for the peers. */
inline finish_block() {
  blocks_finished[me]++;
  is_last = blocks_finished[me] == BLOCKS;
  gave_up[me] = (IS_SMALL -> is_last && FAILURE == aborted : gave_up[me]);
  if
  :: !gave_up[me] && (BROKEN == FIRST_SIGNAL_DONE -> blocks_finished[me] == 1 : is_last) ->
     signal = SIGNAL_DONE
  :: else
  fi;
  if
  :: is_last -> at = (IS_IN_PLACE(me) && !gave_up[me] -> wait_done : end)
  :: else -> at = idle; operation = 0
  fi;
  number = 0
}

/* What a ticket of a small call does: its piece goes to all. */
inline push_piece() {
  if
  :: outcome != arrived || IS_POISONED(me) -> drop_ticket()
  :: else ->
     store_data();
     at = take;
     signal = SIGNAL_PIECE
  fi
}

/* Before a block's first piece. Who has ticket 0 tells that the call is entered: it is a block that runs.
 * If it were the first block, the last might keep the gate before that one is resident, on all ranks. */
inline look_at_abort() {
  outcome = (abort[me] && BROKEN != NO_LOOK -> aborted : arrived);
  if
  :: (outcome == arrived || BROKEN == READY_ANYWAY) && ticket == 0 && BROKEN != READY_BY_BLOCK ->
     store_line();
     signal = SIGNAL_READY
  :: outcome == arrived && BROKEN == EARLY_SIGNAL_PIECE -> signal = SIGNAL_PIECE
  :: else
  fi;
  if
  :: SEPARATE || signal != none -> at = store
  :: else -> push_piece()
  fi
}

/* A block has read its part, or cannot. The last one keeps the gate then. */
inline end_part() {
  outcome = unknown; p = 0;
  if
  :: number == BLOCKS - 1 && ticket != NO_TICKET -> at = wait_ready
  :: else -> finish_block()
  fi;
  ticket = NO_TICKET
}

inline take_ticket() {
  if
  :: IS_SMALL && (next_ticket[me] >= STORES || outcome == aborted) ->
     ticket = number;
     outcome = unknown;
     if
     :: IS_POISONED(me) -> end_part()
     :: else -> at = wait_piece
     fi
  :: !IS_SMALL && next_ticket[me] >= TICKETS -> finish_block()
  :: else ->
     ticket = (BROKEN == READS_FIRST -> (next_ticket[me] + STORES) % TICKETS : next_ticket[me]);
     next_ticket[me]++;
     at = (ticket < STORES -> (IS_SMALL -> store : wait_free) : wait_ready);
     if
     :: BROKEN == EARLY_STORE && at == wait_free -> store_data()
     :: IS_SMALL && outcome == unknown && SEPARATE -> at = look
     :: IS_SMALL && outcome == unknown && !SEPARATE -> look_at_abort()
     :: else
     fi
  fi
}

/* What a ticket that stores does in other calls. The last finisher has a signal for the peers. */
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
  assert(LATEST(owner) == MY_EPOCH);
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
       assert(p == me || LINE_FROM(p) == MY_TAG);
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
 * but one only when I have entered the next, or else it has given up and sends none. */
#define IS_ELSEWHERE(peer) (LINE_FROM(peer) != MY_TAG && BROKEN != NO_FINGERPRINT)
#define SAYS_POISONED(peer) (IS_POISONED(peer) && BROKEN != NO_POISONED)
#define SENDS_NOTHING(peer) (READY_FROM(peer) >= MY_EPOCH && (IS_ELSEWHERE(peer) || SAYS_POISONED(peer)))
inline compare_lines() {
  for (p : 0 .. RANKS - 1) {
    if
    :: p != me && READY_FROM(p) >= MY_EPOCH && (BROKEN != NO_WAIT_READY || at == wait_piece) ->
       assert(LINE_FROM(p) / TAG(1, 0) == MY_EPOCH);
       must_abort = must_abort || IS_ELSEWHERE(p);
       outcome = (SAYS_POISONED(p) -> poisoned : outcome)
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

#define SEEN(condition) (abort[me] && !(BROKEN == FLAGS_FIRST && (condition)) -> aborted : arrived)

inline write_down(gate) {
  if
  :: VERDICT(gate) == unknown ->
     VERDICT(gate) = outcome;
     gave_up[me] = gave_up[me] || outcome == aborted
  :: else
  fi;
  outcome = (BROKEN == NO_VERDICT -> outcome : VERDICT(gate))
}
inline decide(gate, condition) {
  outcome = SEEN(condition);
  write_down(gate)
}

/* In a small call: an abort is passed on before others of this rank hear of it. */
inline fail() {
  must_abort = outcome == aborted && BROKEN != NO_PASSING_ON &&
      !(abort[PEER(1)] && abort[PEER(RANKS - 1)]); /* else it would change nothing */
  at = note
}

inline abort_rank(rank) {
  abort[rank] = abort[rank] || BROKEN != NO_ABORT
}
inline pass_on(rank) {
  abort[rank] = abort[rank] || (BROKEN != NO_ABORT && BROKEN != NO_PASSING_ON)
}

/* Epochs count from the slowest rank's, which always has 1 or more calls behind it once all had two: so
 * targets and tags to come are above 1, those of `done` above 0, and comparisons by >= and by == come out
 * as before. What is too old for them becomes 0. What goes by parity changes places: ONE_LINE and ONE_HALF
 * need CALLS. */
#define LESS(flag) flag = (flag > 2 -> flag - 1 : 0)
#define LESS_TAG(tag) tag = (tag >= TAG(3, 0) -> tag - TAG(1, 0) : 0)
#define SWAP(less, even, odd) less(even); less(odd); spare = even; even = odd; odd = spare
hidden byte spare;
inline rebase() {
  for (p : 0 .. RANKS - 1) {
    epoch[p]--;
    SWAP(LESS, latest[p], latest[RANKS + p]);
    LESS(latest[2 * RANKS + p])
  }
  for (p : 0 .. PAIRS - 1) {
    SWAP(LESS, ready[p], ready[PAIRS + p]);
    SWAP(LESS_TAG, line[p], line[PAIRS + p]);
    done[p] = (done[p] > 1 -> done[p] - 1 : 0)
  }
  for (p : 0 .. CHUNKS * PAIRS - 1) {
    LESS(chunk[p])
  }
  for (p : 0 .. PAIRS * PIECES - 1) {
    SWAP(LESS_TAG, pieces[p], pieces[PAIRS * PIECES + p]);
    SWAP(LESS_TAG, flags[p], flags[PAIRS * PIECES + p]);
    LESS_TAG(pieces[2 * PAIRS * PIECES + p])
  }
  for (p : 2 .. WINDOW - 2) {
    program[p] = program[p + 1]
  }
  program[1] = 0;
  program[WINDOW - 1] = 0
}

inline end_call() {
  /* Results are right or marked, a dispatch's all or none, and marked for a reason. */
  assert(gave_up[me] || !torn[me]);
  assert(reads[me] % PARTS == 0 || (gave_up[me] && IS_COMBINE) || IS_SMALL);
  assert(reads[me] == PARTS || FAILURE != unknown || !IS_SMALL);
  assert(TIMEOUTS + MISMATCH > 0 || !gave_up[me]);
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
  to_start[me] = ALL_BLOCKS;
  at = idle;
  outcome = unknown;
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
  byte number; /* of the block, in a small call */
  byte ticket = NO_TICKET;
  mtype outcome = unknown; /* of the latest wait of this ticket */
  mtype signal = none;     /* to be sent */
  bool must_abort, is_last;

  do
  :: atomic { at == idle && signal == none && to_start[me] > 0 && (CALLS == 0 || epoch[me] < CALLS) ->
       if
       :: CHOICE == 0 -> select (i : FIRST .. LAST); CHOICE = i; i = 0
       :: else
       fi;
       operation = CHOICE;
       if
       :: to_start[me] & 1 -> number = 0
       :: !(to_start[me] & 1) || (IS_SMALL && ANY_ORDER && to_start[me] == ALL_BLOCKS) -> number = 1
       fi;
       to_start[me] = to_start[me] - (1 << number);
       number = number * IS_SMALL;
       if
       :: BROKEN == READY_BY_BLOCK && IS_SMALL && number == 0 && !abort[me] ->
          at = take;
          store_line();
          signal = SIGNAL_READY
       :: else -> take_ticket()
       fi
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

  /* A small call tells and stores at once. But if this rank has given up the last call, others may still
   * read lines and pieces of the one before. */
  :: d_step { at == look -> look_at_abort() }

  :: d_step { at == store && signal == none ->
       if
       :: IS_SMALL -> push_piece()
       :: else -> store_pieces()
       fi
     }

  /* SIGNAL_READY, SIGNAL_CHUNK, SIGNAL_PIECE, SIGNAL_DONE */
  :: atomic { signal != none -> TO_EACH(send_to);
       signal = (BROKEN == EARLY_EPOCH && signal == SIGNAL_READY -> late_line : none);
       if
       :: at == take && signal == none -> drop_ticket()
       :: else
       fi
     }

  /* WAIT_READY: everybody is in this call, the same call; in a dispatch their data is there. In a small
   * call it is the gate. */
  :: d_step { at == wait_ready && (IS_COMBINE || IS_SMALL || LOCAL(0)) && KNOWN(READY, ALL_READY) ->
       outcome = SEEN(ALL_READY);
       if
       :: outcome == arrived && (VERDICT(READY) == unknown || BROKEN == NO_VERDICT) -> compare_lines()
       :: else
       fi;
       p = 0;
       if
       :: must_abort -> skip /* the abort words first, then it comes here again */
       :: else ->
          write_down(READY);
          if
          :: IS_SMALL && outcome == arrived -> end_part()
          :: IS_SMALL && outcome != arrived -> fail()
          :: !IS_SMALL && outcome == arrived ->
             ticket = ticket - STORES;
             signal = (BROKEN == EARLY_SIGNAL_DONE -> SIGNAL_DONE : none);
             if
             :: IS_COMBINE -> at = wait_chunk
             :: else -> then_read()
             fi
          :: else -> drop_ticket()
          fi
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

  /* WAIT_PIECE: what this block reads of everybody is here, of this rank, too. */
  :: d_step { at == wait_piece && ALL_PIECES ->
       for (p : 0 .. RANKS - 1) {
         read_piece(me, p, ticket)
       }
       reads[me]++;
       end_part()
     }

  /* Or it is not: there is an abort, something else has failed on this rank, or the piece's owner sends
   * none. A piece may come between that look and this one; the wait is over all the same. */
  :: d_step { at == wait_piece && abort[me] -> outcome = aborted; fail() }
  :: d_step { at == wait_piece && FAILURE != unknown -> outcome = FAILURE; at = note }
  :: d_step { at == wait_piece && BROKEN != NO_LINE_LOOK &&
         (SENDS_NOTHING(PEER(1)) || SENDS_NOTHING(PEER(RANKS - 1))) ->
       compare_lines();
       p = 0;
       outcome = (must_abort -> aborted : outcome);
       at = note
     }
  :: d_step { at == note && !must_abort ->
       FAILURE = outcome;
       end_part()
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
       :: (gave_up[me] && !IS_SMALL) || (abort[me] && ANY_IN_PLACE && BROKEN != NO_LAST_LOOK) ->
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
         (at == wait_free || at == wait_ready || at == wait_chunk || at == wait_piece ||
          at == wait_done) ->
       timeouts_left--;
       abort[me] = true;
       must_abort = true;
       if
       :: at == wait_piece -> outcome = aborted; at = note /* also if the piece comes now */
       :: else
       fi
     }
  :: atomic { must_abort -> TO_EACH(abort_rank);
       must_abort = false
     }
  od
}

init {
  byte i, r;
  bool differ;
  c_code {
    if (getenv("BROKEN")) broken = atoi(getenv("BROKEN"));
  };
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
