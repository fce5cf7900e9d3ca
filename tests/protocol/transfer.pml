/* The flags of a transfer: a model for Spin. tests/protocol_test.py checks it, and that the check fails
 * when any one wait or signal is taken out.
 *
 * RANKS ranks run the same calls in the same order, whatever that order is. A call is one kernel of
 * BLOCKS blocks on each rank, which take tickets: first those that store, then those that read (combine
 * mixes them; what it may read and overwrite when is the same, and it has less time for it; the first
 * parts that a dispatch reads are each block's own). Ranks know of each other by flags alone, 64-bit
 * epochs (call e is epoch e) that a peer writes into my control block and that I compare by >=:
 *
 *   ready    the peer has entered call e, and in a dispatch stored what others read; its line
 *            (fingerprint, poisoned, addresses) is there. Two for each peer, by the parity of e: it may be
 *            sent while I am in e - 1
 *   chunk    the peer has stored its partial rows of this chunk of my tokens (combine)
 *   done     the peer reads nothing of call e any more (dispatch)
 *   abort    sticky: this call and all later ones end, with safe results
 *
 * No call waits before it stores into this rank's workspace: when a call has ended here, nobody needs
 * anything of it here. A dispatch ends when all are done with it, a combine when all has come that goes to
 * this rank. A peer's workspace may be overwritten when the peer has entered this very call: then partial
 * rows are sent. A dispatch's counts are sent before. They go to where small calls store, as packets: 16
 * bytes that are stored at once, with a tag of this very call. Who finds the tag may read, also before the
 * peer is ready. (If another peer runs a different call, what it stores may be in the same place. Then
 * this call fails.)
 *
 * Whoever waits goes by what it sees itself: flags, or an abort. So some blocks of a kernel may pass where
 * others fail. Who fails passes the abort on, notes it for this rank, and reads and sends no more. The
 * last block of the kernel makes all results safe if there is a note, also what other blocks have read.
 *
 * Who has given up a call cannot know that nobody needs anything of it. In its own workspace it stores all
 * the same: a peer that still reads there is in a dispatch that has not ended, and sees the abort at
 * WAIT_DONE. For its peers it stores nothing: a block looks at the abort word before it sends counts or
 * pieces, stores lines, or tells that the call is entered. A peer's partial rows may still come late.
 * Nobody reads them: this rank passes no gate any more.
 *
 * A small call, of few tokens, stores all without waiting for anybody. Each of its pieces has a flag in
 * the workspace, beside the data, which I compare by == with a tag of this very call:
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
 *     epoch and operation, and every read asserts the tag. But what a peer has in its own memory may be
 *     another call's by now: then the results have to be made safe.
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
 *   - a block counts itself by atom.add.acq_rel.gpu, so that the release of the last finisher covers what
 *     all blocks stored, the lines among it, and its `done` what they read: causality is transitive. The
 *     last block sees their notes, too;
 *   - kernels of a rank run one after another: `ready` of a call covers what the rank did in all before,
 *     and what a kernel stores comes after what an earlier one has acquired;
 *   - an abort word is st.release.sys. A wait loads it after the flags, and it counts more than they do;
 *     but for WAIT_PIECE, which does not look at it once the flags have come. Who loads it after another
 *     block has counted itself, and has acquired that, sees it if that block saw it: loads of one word are
 *     in order. So looks need no more than ld.relaxed.
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
#define NO_WAIT_READY 1
#define NO_WAIT_CHUNK 2
#define NO_WAIT_PIECE 3
#define NO_WAIT_LOCAL 4 /* for lower tickets of the same device */
#define NO_WAIT_DONE 5
#define NO_SIGNAL_READY 6
#define NO_SIGNAL_CHUNK 7
#define NO_SIGNAL_PIECE 8
#define NO_SIGNAL_DONE 9
#define EARLY_SIGNAL_READY 10 /* before the ticket's data */
#define EARLY_SIGNAL_CHUNK 11
#define EARLY_SIGNAL_PIECE 12
#define EARLY_SIGNAL_DONE 13  /* before the ticket's reads */
#define EARLY_EPOCH 14        /* of `ready`, before the line */
#define FIRST_SIGNAL_READY 15 /* by the first finisher instead of the last */
#define FIRST_SIGNAL_CHUNK 16
#define FIRST_SIGNAL_DONE 17
#define COPIED_NOT_DONE 18   /* who copies its rows does not wait until others have read them */
#define NO_FINGERPRINT 19    /* not compared */
#define NO_POISONED 20       /* not looked at */
#define NO_NOTE 21           /* what failed is not told to the last block */
#define NO_ABORT 22          /* who gives up does not tell the peers */
#define NO_PASSING_ON 23     /* who sees an abort does not tell the peers */
#define NO_LAST_LOOK 24      /* what was read in a peer's memory is believed whatever became of that */
#define NO_LOOK 25           /* a block sends counts or pieces whatever became of the last call */
#define ENTER_ANYWAY 26      /* it stores lines, or tells that the call is entered, likewise */
#define NO_SECOND_LOOK 27    /* the last finisher does not look whether another block saw an abort */
#define NO_LINE_LOOK 28      /* who waits for a piece does not look at its owner's line */
#define READY_BY_BLOCK 29    /* in a small call, by the first block instead of the first ticket */
#define NO_RESET 30          /* of the local counters */
#define READS_FIRST 31       /* a combine's tickets that read come before those that send */
#define EARLY_STORE 32       /* partial rows before WAIT_READY */
#define FLAGS_FIRST 33       /* a wait whose flags have come does not look at the abort word */
#define ONE_LINE 34          /* of each peer, for all epochs */
#define ONE_HALF 35          /* of the memory of small calls, for all epochs */
#define ONE_COUNTS_HALF 36   /* the same, for a dispatch's counts alone */
#define COUNTS_AMONG_ROWS 37 /* a dispatch's counts go to the peers' other memory */
#ifndef BROKEN
#define BROKEN NOTHING
#endif
hidden byte broken; /* of no state */
hidden byte spare;

/* ---- Operations. A tag is an epoch with an operation. */

#define IN_PLACE 1 /* dispatch by plan: peers read x itself, which others overwrite when it has ended */
#define COMBINE 2
#define COPIED 3         /* dispatch, not by plan: x is copied into the workspace before */
#define SMALL 4          /* dispatch, by plan or not, or combine, of few tokens */
#define SMALL_POISONED 5 /* combine: rank 0 has a plan whose status is not 0, and stores nothing */
#define POISONED 6       /* the same, not small */
#define MIXED 7          /* the same, but rank 0 has its x in place; the line says which */

#define IS_COMBINE (operation == COMBINE || operation == POISONED)
#define IS_SMALL (operation == SMALL || operation == SMALL_POISONED)
#define IS_DISPATCH (!IS_COMBINE && !IS_SMALL) /* the only one with SIGNAL_DONE and WAIT_DONE */
#define IS_BY_PLAN (operation == IN_PLACE)
#define HAS_COUNTS (IS_DISPATCH && !IS_BY_PLAN)
#define IS_POISONED(rank) ((operation == POISONED || operation == SMALL_POISONED) && rank == 0)
#define IS_IN_PLACE(rank) (operation == IN_PLACE || (operation == MIXED && rank == 0))
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
#define STORED(counter) stored[me * (1 + CHUNKS) + (counter)]
byte stored[RANKS * (1 + CHUNKS)]; /* finished tickets: those that come first, those of each chunk */
byte counted[RANKS]; /* in a dispatch: its first tile; in a combine: parts of the plan that are inverted */
byte blocks_finished[RANKS];

/* What failed on this rank in this call, for the last block, and for readers of pieces. */
mtype = { unknown, arrived, poisoned, aborted };
mtype failure[RANKS] = unknown;
#define FAILURE failure[me]

/* What the call's results hold: */

byte reads[RANKS]; /* tickets that have read */
bool torn[RANKS];  /* something of a peer was read that is not what it was */
#define ALL_READS (IS_COMBINE -> CHUNKS : PARTS)

/* ---- Workspaces. One memory, which every operation lays out anew: a store of one call may hit any datum
 * of another call. So what is read must be of the memory's latest call, and nobody may have stored for an
 * earlier one since. In a call every writer has pieces of its own:
 *   dispatch   in its own workspace its routes, and its rows if copied; by plan, the inverted plan instead
 *              of routes, for its own blocks (copied, too: as with routes, without the counts)
 *   combine    in its own workspace the inverted plan; in the owner's its partial rows, a piece for each
 *              chunk and part
 * For small calls, and a dispatch's counts, there are two memories more, for even epochs and odd ones.
 * What protects these: who has ended call e - 1, and has not given up, knows that all have entered it, so
 * all have ended call e - 2. */

#define PIECES (CHUNKS * PARTS)
#define HALF PARITY(ONE_HALF)
#define ROWS 2 /* the other memory */
#define COUNTS (BROKEN == COUNTS_AMONG_ROWS -> ROWS : PARITY(ONE_COUNTS_HALF))
byte latest[3 * RANKS];          /* epoch of the latest call that stored, by memory and owner */
bool damaged[RANKS];             /* an earlier call has stored since, by owner; not in halves */
byte pieces[3 * PAIRS * PIECES]; /* tags, by memory, owner and writer */
byte flags[2 * PAIRS * PIECES];  /* likewise, in small calls */
#define LATEST(memory, owner) latest[(memory) * RANKS + (owner)]
#define PLACE(memory, owner, writer, piece) \
  ((((memory) * RANKS + (owner)) * RANKS + (writer)) * PIECES + piece)
#define PIECE(memory, owner, writer, piece) pieces[PLACE(memory, owner, writer, piece)]
#define PIECE_FROM(peer) (flags[PLACE(HALF, me, peer, ticket)] == MY_TAG)
#define WRONG_TAG TAG(MY_EPOCH, 0) /* a packet of this call, whose count is wrong */

/* ---- The calls: chosen one by one by the rank that comes first, for all. */

#define WINDOW 5 /* epochs that are remembered */
byte program[(1 + MISMATCH) * WINDOW];
byte timeouts_left = TIMEOUTS;
#define CHOICE program[(MISMATCH && me == 0 -> WINDOW : 0) + MY_EPOCH]

/* ---- Steps of a block. */

#define NO_TICKET 255

/* Fewer states: what follows a wait is one step with it, unless somebody may give up in between; likewise
 * what follows a look. A block that comes later finds the same flags. (What follows WAIT_PIECE always is:
 * a piece is overwritten before its flag, and a block that comes between reads it.) And what waits for
 * nobody is done when the ticket is taken. */
#define SEPARATE (TIMEOUTS + MISMATCH > 0)

/* Blocks of a small call differ, by what they read and by the gate, and start in any order: where they run
 * one after another, so that it matters. Fewer states: elsewhere the first to start is the first. */
#define ANY_ORDER (RESIDENT == 1)

/* The first PARTS tickets wait for nobody. A combine's others that store send partial rows. */
#define STORES (PARTS + (IS_COMBINE -> CHUNKS * PARTS : 0))
#define TICKETS (STORES + (IS_COMBINE -> CHUNKS : PARTS)) /* in a small call STORES alone */

/* Where a block stands: between two of these it does one step, and others may come between. */
mtype = {
  idle, take, look, store, wait_ready, compare, send, wait_chunk, wait_piece, read, note, wait_done, end
};

/* What a block has to send; one step for each peer. */
mtype = { none, lines, late_lines, SIGNAL_READY, SIGNAL_CHUNK, SIGNAL_PIECE, SIGNAL_DONE };

inline send_to(peer) {
  if
  :: signal == SIGNAL_READY && BROKEN != NO_SIGNAL_READY -> ready[LINES + TO(peer)] = MY_EPOCH
  :: signal == SIGNAL_CHUNK && BROKEN != NO_SIGNAL_CHUNK ->
     chunk[ticket / PARTS * PAIRS + TO(peer)] = MY_EPOCH
  :: signal == SIGNAL_PIECE && BROKEN != NO_SIGNAL_PIECE ->
     flags[PLACE(HALF, peer, me, ticket)] = MY_TAG;
     flags[PLACE(HALF, me, me, ticket)] = MY_TAG /* the same for all readers */
  :: signal == SIGNAL_DONE && BROKEN != NO_SIGNAL_DONE -> done[TO(peer)] = MY_EPOCH
  :: signal == lines || signal == late_lines -> line[LINES + TO(peer)] = MY_TAG
  :: else
  fi
}
#if RANKS == 2
#define TO_EACH(step) step(PEER(1))
#else
#define TO_EACH(step) step(PEER(1)) } atomic { step(PEER(2))
#endif

inline store_lines() {
  if
  :: BROKEN != EARLY_EPOCH -> line[LINES + TO(PEER(1))] = MY_TAG;
     line[LINES + TO(PEER(RANKS - 1))] = MY_TAG
  :: else
  fi
}

/* A store of an earlier call than the owner is in: the owner has given up. */
inline store_at(memory, owner, piece, tag) {
  if
  :: LATEST(memory, owner) < MY_EPOCH ->
     LATEST(memory, owner) = MY_EPOCH;
     damaged[owner] = damaged[owner] && memory != ROWS
  :: LATEST(memory, owner) > MY_EPOCH ->
     assert(memory == ROWS && owner != me && abort[owner]);
     damaged[owner] = true
  :: else
  fi;
  PIECE(memory, owner, me, piece) = tag
}

/* Into all workspaces, mine included. */
inline store_at_all(where, number_there, value) {
  for (p : 0 .. RANKS - 1) {
    store_at(where, p, number_there, value)
  }
  p = 0
}

/* Forgets all that was of this ticket: fewer states, too. */
inline drop_ticket() {
  ticket = NO_TICKET; signal = none; i = 0; p = 0;
  at = take
}

/* A block is done. The last one of a dispatch has a signal for the peers, and waits for theirs. */
#define HAS_DONE (IS_DISPATCH && FAILURE != aborted)
inline finish_block() {
  blocks_finished[me]++;
  is_last = blocks_finished[me] == BLOCKS;
  if
  :: HAS_DONE && (BROKEN == FIRST_SIGNAL_DONE -> blocks_finished[me] == 1 : is_last) ->
     signal = SIGNAL_DONE
  :: else
  fi;
  outcome = unknown;
  if
  :: is_last ->
     at = (HAS_DONE && (IS_IN_PLACE(me) || BROKEN != COPIED_NOT_DONE) -> wait_done : end)
  :: else -> at = idle; operation = 0
  fi;
  number = 0; ticket = NO_TICKET
}

/* What a ticket of a small call does: its piece goes to all. */
inline push_piece() {
  if
  :: (outcome != arrived && BROKEN != NO_LOOK) || IS_POISONED(me) -> drop_ticket()
  :: else ->
     store_at_all(HALF, ticket, MY_TAG);
     at = take;
     signal = SIGNAL_PIECE
  fi
}

/* The counts of a dispatch add up all tiles: who has the last waits for the lower one. */
#define TILE_COUNTED (!HAS_COUNTS || ticket == 0 || counted[me] > 0 || BROKEN == NO_WAIT_LOCAL)

/* What one of the first tickets of another call does: routes and rows, or a part of the inverted plan,
 * into this rank's workspace, whatever became of the last call; the last one's counts, to all. The last
 * finisher of a dispatch has a signal for the peers, if no block of this rank has seen an abort: it looks
 * when it has counted itself. */
inline store_part() {
  spare = (HAS_COUNTS -> MY_TAG : 0); /* parts of a plan are no partial rows */
  store_at(ROWS, me, ticket, spare);
  counted[me] = counted[me] + !HAS_COUNTS;
  if
  :: HAS_COUNTS && ticket == PARTS - 1 && (outcome == arrived || BROKEN == NO_LOOK) ->
     spare = (counted[me] == 0 -> WRONG_TAG : MY_TAG);
     store_at_all(COUNTS, 0, spare)
  :: else
  fi;
  STORED(0)++;
  outcome = unknown;
  if
  :: HAS_COUNTS && (!abort[me] || BROKEN == NO_SECOND_LOOK) &&
     STORED(0) == (BROKEN == FIRST_SIGNAL_READY -> 1 : PARTS) ->
     at = take;
     signal = SIGNAL_READY
  :: else -> drop_ticket()
  fi
}
inline store_first() {
  if
  :: IS_SMALL -> push_piece()
  :: else -> store_part()
  fi
}

/* A look before anything goes to peers: by who has ticket 0, which stores the lines, and the last tile; in
 * a small call by every block, once. Who has ticket 0 of a combine, a dispatch by plan in place or a small
 * call tells at once that the call is entered: it is a block that runs. If it were the first block, the
 * last block of a small call might keep the gate before that one is resident, on all ranks. */
#define HAS_LOOK (IS_SMALL -> outcome == unknown : ticket == 0 || HAS_COUNTS)
inline look_at_abort() {
  outcome = (abort[me] -> aborted : arrived);
  counted[me] = (HAS_COUNTS && ticket == 0 -> 1 : counted[me]);
  if
  :: ticket == 0 && (outcome == arrived || BROKEN == ENTER_ANYWAY) && SEPARATE -> signal = lines
  :: ticket == 0 && (outcome == arrived || BROKEN == ENTER_ANYWAY) && !SEPARATE &&
     !(BROKEN == READY_BY_BLOCK && IS_SMALL) ->
     store_lines();
     signal = (HAS_COUNTS && BROKEN != EARLY_SIGNAL_READY -> none : SIGNAL_READY)
  :: ticket > 0 && BROKEN == EARLY_SIGNAL_PIECE && IS_SMALL -> signal = SIGNAL_PIECE
  :: else
  fi;
  if
  :: SEPARATE || signal != none -> at = store
  :: else -> store_first()
  fi
}

/* What a combine's ticket does for its part of a chunk. The last finisher has a signal for the peers. */
inline send_rows() {
  assert(counted[me] == PARTS && LATEST(ROWS, me) == MY_EPOCH && !damaged[me]); /* the plan */
  store_at_all(ROWS, ticket, MY_TAG);
  STORED(1 + ticket / PARTS)++;
  if
  :: STORED(1 + ticket / PARTS) == (BROKEN == FIRST_SIGNAL_CHUNK -> 1 : PARTS) ->
     at = take;
     signal = SIGNAL_CHUNK
  :: else -> drop_ticket()
  fi
}

inline read_piece(memory, owner, writer, piece) {
  assert(LATEST(memory, owner) == MY_EPOCH && (memory != ROWS || !damaged[owner]));
  assert(PIECE(memory, owner, writer, piece) == MY_TAG)
}

/* Counts are read as soon as their tag is there, if need be before WAIT_READY. */
#define IS_WRONG(peer) \
  (PIECE(COUNTS, me, peer, 0) == WRONG_TAG || \
   (PIECE(COUNTS, me, peer, 0) == MY_TAG && LATEST(COUNTS, me) != MY_EPOCH))
#define ANY_IS_WRONG (IS_WRONG(me) || IS_WRONG(PEER(1)) || IS_WRONG(PEER(RANKS - 1)))

/* What a peer has in its own memory is no more what it was when that has given up. */
#define IS_TORN(peer) \
  ((HAS_COUNTS && (LATEST(ROWS, peer) != MY_EPOCH || damaged[peer] || \
                   PIECE(ROWS, peer, peer, ticket) != MY_TAG)) || \
   (IS_IN_PLACE(peer) && epoch[peer] != epoch[me]))

inline read_pieces() {
  for (p : 0 .. RANKS - 1) {
    if
    :: IS_COMBINE -> /* what p stored here of this chunk */
       for (i : 0 .. PARTS - 1) {
         read_piece(ROWS, me, p, ticket * PARTS + i)
       }
    :: HAS_COUNTS -> /* the counts that p stored here; its routes and its rows */
       read_piece(COUNTS, me, p, 0);
       assert(p != me || !IS_TORN(me));
       torn[me] = torn[me] || IS_TORN(p)
    :: else -> /* this rank's plan; p's rows */
       assert(counted[me] == PARTS && LATEST(ROWS, me) == MY_EPOCH && !damaged[me]);
       torn[me] = torn[me] || IS_TORN(p)
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

/* A block has read its part, or cannot. The last one keeps the gate then. */
inline end_part() {
  outcome = unknown; p = 0;
  if
  :: number == BLOCKS - 1 && ticket != NO_TICKET -> at = wait_ready
  :: else -> finish_block()
  fi;
  ticket = NO_TICKET
}

/* In a call that is not small a block has passed the gate before it takes any but the first tickets. */
inline take_ticket() {
  if
  :: IS_SMALL && (next_ticket[me] >= STORES || (outcome == aborted && BROKEN != NO_LOOK)) ->
     ticket = number;
     outcome = unknown;
     if
     :: IS_POISONED(me) -> end_part()
     :: else -> at = wait_piece
     fi
  :: !IS_SMALL && next_ticket[me] >= PARTS && outcome == unknown ->
     at = wait_ready;
     if
     :: BROKEN == EARLY_STORE && IS_COMBINE -> store_at_all(ROWS, 0, MY_TAG)
     :: else
     fi
  :: !IS_SMALL && next_ticket[me] >= TICKETS && outcome != unknown -> finish_block()
  :: else ->
     ticket = next_ticket[me];
     next_ticket[me]++;
     if
     :: ticket < PARTS && HAS_LOOK && SEPARATE -> at = look
     :: ticket < PARTS && HAS_LOOK && !SEPARATE -> look_at_abort()
     :: ticket < PARTS && !HAS_LOOK && SEPARATE -> at = store
     :: ticket < PARTS && !HAS_LOOK && !SEPARATE -> store_first()
     :: else ->
        ticket = ticket - PARTS;
        ticket = (BROKEN == READS_FIRST -> (ticket + STORES - PARTS) % (TICKETS - PARTS) : ticket);
        if
        :: ticket < STORES - PARTS && BROKEN == EARLY_SIGNAL_CHUNK -> signal = SIGNAL_CHUNK; at = send
        :: ticket < STORES - PARTS && BROKEN != EARLY_SIGNAL_CHUNK -> send_rows()
        :: else ->
           ticket = ticket - (STORES - PARTS);
           if
           :: IS_COMBINE -> at = wait_chunk
           :: !IS_COMBINE && BROKEN == EARLY_SIGNAL_DONE -> signal = SIGNAL_DONE; at = read
           :: else -> read_pieces()
           fi
        fi
     fi
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
  outcome = (must_abort -> aborted : outcome);
  abort[me] = abort[me] || must_abort;
  p = 0
}

/* WAIT_LOCAL, for lower tickets of this rank, which a block took that is at work: no deadlock. */
#define LOCAL(counter) (BROKEN == NO_WAIT_LOCAL || STORED(counter) == PARTS)

/* Another wait ends when there is an abort, or the peers' flags. */
#define KNOWN(condition) (signal == none && (abort[me] || (condition)))
#define SEEN(condition) (abort[me] && !(FLAGS_ALONE && (condition)) -> aborted : arrived)
#define FLAGS_ALONE (BROKEN == (at == wait_done -> NO_LAST_LOOK : FLAGS_FIRST))

/* An abort is passed on before others of this rank hear of it, and before the call ends. */
inline fail() {
  must_abort = outcome == aborted && BROKEN != NO_PASSING_ON &&
      !(abort[PEER(1)] && abort[PEER(RANKS - 1)]); /* else it would change nothing */
  at = note
}

/* The gate is passed, or what the lines say is why not. */
inline pass_gate() {
  compare_lines();
  if
  :: outcome != arrived -> at = note
  :: IS_SMALL && outcome == arrived -> end_part()
  :: !IS_SMALL && outcome == arrived && SEPARATE -> at = take
  :: !IS_SMALL && outcome == arrived && !SEPARATE -> take_ticket()
  fi
}

inline abort_rank(rank) {
  abort[rank] = abort[rank] || BROKEN != NO_ABORT
}

/* Epochs count from the slowest rank's, which always has 1 or more calls behind it once all had two: so
 * targets and tags to come are above 1, and comparisons by >= and by == come out as before. What is too
 * old for them becomes 0. What goes by parity changes places: ONE_LINE, ONE_HALF and ONE_COUNTS_HALF need
 * CALLS. */
#define LESS(flag) flag = (flag > 2 -> flag - 1 : 0)
#define LESS_TAG(tag) tag = (tag >= TAG(3, 0) -> tag - TAG(1, 0) : 0)
#define SWAP(less, even, odd) less(even); less(odd); spare = even; even = odd; odd = spare
inline rebase() {
  for (p : 0 .. RANKS - 1) {
    epoch[p]--;
    SWAP(LESS, latest[p], latest[RANKS + p]);
    LESS(latest[2 * RANKS + p])
  }
  for (p : 0 .. PAIRS - 1) {
    SWAP(LESS, ready[p], ready[PAIRS + p]);
    SWAP(LESS_TAG, line[p], line[PAIRS + p]);
    LESS(done[p])
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
  /* Results are whole, or safe for a reason. */
  assert(FAILURE != unknown || (reads[me] == ALL_READS && !torn[me]));
  assert(FAILURE == unknown || FAILURE == (TIMEOUTS + MISMATCH > 0 -> FAILURE : poisoned));
  FAILURE = unknown;
  reads[me] = 0;
  torn[me] = false;
  if
  :: BROKEN != NO_RESET ->
     next_ticket[me] = 0;
     for (i : 0 .. CHUNKS) {
       STORED(i) = 0
     }
     counted[me] = 0;
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
  fi;
  i = 0; p = 0
}

/* A place where a block can be resident: runs blocks of the rank's kernels, one after another. */
proctype Resident(byte me) {
  mtype at = idle;
  byte operation, i, p;
  byte number; /* of the block, in a small call */
  byte ticket = NO_TICKET;
  mtype outcome = unknown; /* of its latest look or wait */
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
          store_lines();
          signal = SIGNAL_READY
       :: else -> take_ticket()
       fi
     }
  :: at == idle && CALLS > 0 && epoch[me] == CALLS -> break

  :: d_step { at == take && signal == none -> take_ticket() }

  :: d_step { at == look -> look_at_abort() }

  :: d_step { at == store && signal == none && TILE_COUNTED -> store_first() }

  :: d_step { at == send && signal == none -> send_rows() }

  /* SIGNAL_READY, SIGNAL_CHUNK, SIGNAL_PIECE, SIGNAL_DONE */
  :: atomic { signal != none -> TO_EACH(send_to);
       if
       :: signal == lines && !HAS_COUNTS && (!IS_BY_PLAN || !abort[me]) -> /* by plan it looks again */
          signal = SIGNAL_READY
       :: signal == SIGNAL_READY && BROKEN == EARLY_EPOCH -> signal = late_lines
       :: else -> signal = none
       fi;
       if
       :: at == take && signal == none -> drop_ticket()
       :: else
       fi
     }

  /* WAIT_READY, the gate: everybody is in this call, the same call; in a dispatch their data is there. The
   * lines are read after the abort word. */
  :: d_step { at == wait_ready && (IS_SMALL || LOCAL(0)) && KNOWN(ALL_READY) ->
       outcome = SEEN(ALL_READY);
       if
       :: outcome != arrived -> fail()
       :: outcome == arrived && SEPARATE -> at = compare
       :: outcome == arrived && !SEPARATE -> pass_gate()
       fi
     }
  :: d_step { at == compare -> pass_gate() }

  /* Meanwhile some counts may be there. */
  :: d_step { at == wait_ready && HAS_COUNTS && ANY_IS_WRONG -> assert(false) }

  /* WAIT_CHUNK: everybody's partial rows of this chunk are here. */
  :: d_step { at == wait_chunk && LOCAL(1 + ticket) && KNOWN(ALL_CHUNKS) ->
       outcome = SEEN(ALL_CHUNKS);
       if
       :: outcome == arrived -> then_read()
       :: else -> fail()
       fi
     }

  /* WAIT_PIECE: what this block reads of everybody is here, of this rank, too. */
  :: d_step { at == wait_piece && ALL_PIECES ->
       for (p : 0 .. RANKS - 1) {
         read_piece(HALF, me, p, ticket)
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
       at = note
     }

  /* For the last block: an abort is not forgotten for what some peer said. */
  :: d_step { at == note && !must_abort ->
       FAILURE = (FAILURE == aborted || (BROKEN == NO_NOTE && !is_last) -> FAILURE : outcome);
       if
       :: IS_SMALL -> end_part()
       :: !IS_SMALL && is_last -> at = end
       :: !IS_SMALL && !is_last -> finish_block()
       fi
     }

  :: d_step { at == read && signal == none -> read_pieces() }

  /* WAIT_DONE: nobody reads x any more, or what is in this rank's workspace, so the call may end. What was
   * read there of peers is what it was if nobody has given up: who does tells all the others before its
   * own call ends and all that is overwritten. Who hears of it tells them, too. */
  :: d_step { at == wait_done && KNOWN(ALL_DONE) ->
       outcome = SEEN(ALL_DONE);
       if
       :: outcome == arrived -> at = end
       :: else -> fail()
       fi
     }

  :: d_step { at == end && signal == none -> end_call() }

  /* Giving up: a wait takes too long, or a peer is in another call. */
  :: atomic { TIMEOUTS > 0 && timeouts_left > 0 && !abort[me] && !must_abort && signal == none &&
         (at == wait_piece || at == wait_done || (at == wait_chunk && LOCAL(1 + ticket)) ||
          (at == wait_ready && (IS_SMALL || LOCAL(0)))) ->
       timeouts_left--;
       abort[me] = true;
       must_abort = true;
       outcome = aborted;
       at = note /* also if what it waits for comes now */
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
