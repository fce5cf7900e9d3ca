/* The flags of a transfer: a model for Spin. tests/protocol_test.py checks it, and that the check fails
 * when any one wait or signal is taken out.
 *
 * RANKS ranks run the same calls in the same order, whatever that order is. A call is one kernel of
 * BLOCKS blocks on each rank, which take tickets: parts of what comes first, then those that send rows,
 * then those that read rows. Nobody reads a peer's memory: what a peer needs is stored into its workspace.
 * Ranks know of each other by flags alone, 64-bit epochs (call e is epoch e) that a peer writes into my
 * control block and that I compare by >=:
 *
 *   ready    the peer has entered call e; its line (fingerprint, poisoned) is there. Two for each peer, by
 *            the parity of e: it may be sent while I am in e - 1
 *   chunk    the peer has stored its rows of this chunk: a combine's partial rows of my tokens, or those
 *            of a dispatch's tokens that visit me; and in a dispatch all that its parts store here
 *   brought  in a windowed dispatch: the peer has read all that was sent to it of this chunk, by any rank
 *   abort    sticky: this call and all later ones end, with safe results
 *
 * Who has ticket 0 tells at once that the call is entered. The parts of a dispatch count and number tiles
 * of choices, or invert the plan, in this rank's workspace; then each waits for `ready` and stores its
 * routes and weights into all workspaces. Those of a combine invert the plan, and that is all. Each block
 * waits for `ready` once more before it takes other tickets. The last sender of a chunk tells the peers,
 * of a dispatch all of them, when all parts of this rank are finished.
 *
 * A reader of a dispatch waits for this rank's parts, then for chunk 0 of all peers: then all counts and
 * routes are there. It goes on chunk by chunk. A dispatch without tokens has no chunks: it stores nothing
 * for peers but counts, which nobody reads.
 *
 * A windowed dispatch has places in a receiver's workspace for WINDOW chunks of each peer's tokens alone:
 * chunk c has those of chunk c - WINDOW. Who sends a token of it waits first, WAIT_CREDIT, until all peers
 * have brought that one to their rows. Readers of a chunk count what they have read; the last one tells all
 * peers, SIGNAL_CREDIT, if there is a chunk that waits for it. Each reader has waited for that chunk of all
 * peers, so one flag does for all of them. It is an epoch, too: what a call has left is too old for the next
 * one. Whose window is as long as its tokens waits for nothing and tells nothing: that is DISPATCH.
 *
 * There a rank that sends waits for its peers to read, which wait for what all ranks send. Nobody waits for
 * ever: take the first chunk that some rank has not sent. Its senders wait at most for peers to read an
 * earlier chunk. That has come from all ranks, so its readers need nothing more, if they run, and hold no
 * earlier ticket that waits; and a warp's tickets are in order, those asked for ahead, too. So nobody has a
 * ticket to read before its block is resident; sending and reading have tickets and warps of their own in
 * each block, and go on without each other; and who waits for a chunk has counted before all it has read.
 *
 * No call waits before it stores into this rank's own part of its workspace: when a call has ended here,
 * all has come that goes to this rank, and nobody needs anything of it here. So no rank says that it is
 * done. A peer's workspace may be overwritten when the peer has entered this very call: then parts and
 * rows are sent. A dispatch's counts are sent before. They go to where small calls store, as packets: 16
 * bytes that are stored at once, with a tag of this very call. Who finds the tag may read, also before the
 * peer is ready. (If another peer runs a different call, what it stores may be in the same place. Then
 * this call fails.)
 *
 * Whoever waits goes by what it sees itself: flags, or an abort. So some blocks of a kernel may pass where
 * others fail. Who fails passes the abort on, notes it for this rank, and reads and sends no more. The
 * last block of the kernel makes all results safe if there is a note, also what other blocks have read.
 *
 * A part that fails at its gate stores nothing to peers, but counts as finished, or others of this rank
 * would wait for ever. So `chunk` may say that routes are there which are not. Who sees that flag sees the
 * abort, too: it was passed on before the part was finished. A poisoned plan is in the line: there all
 * ranks' gates fail alike, and nobody sends. And a reader looks at the abort word after it has waited for
 * its own rank's parts: if it waited for `chunk` before, its own counts might have been left out since.
 *
 * Who has given up a call cannot know that nobody stores for it any more. In its own workspace it stores
 * all the same, and reads nothing: this rank passes no gate any more. For its peers it stores nothing: a
 * block looks at the abort word before it sends counts or pieces or tells that the call is entered, and
 * passes a gate before it sends all else.
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
 * A block is one sequence here, and all tickets that send come before those that read. In the kernels a
 * combine mixes them, and in a dispatch other warps of a block read while some send. That is no less safe:
 * what a reader finds does not depend on what its rank has yet to send, once it has waited, and what peers
 * find does not depend on reads. The one wait of a sender after the gate is that of the last one of a
 * chunk, for parts. Here its block goes on, and reads, while that is due. And it makes no less progress:
 * who reads in a dispatch keeps no warp from sending, and combine_tickets.h says why a combine's order is
 * right.
 *
 * Of a windowed dispatch that is not so: there what peers find depends on reads. So its blocks are two
 * sequences each, with tickets of their own, which may come in any order: a block that reads, and its warps
 * that send, from when it has no more parts. (In the kernels these may have passed the gate before; here
 * some block that has no parts may.) The block ends when both have ended, and only then comes the
 * next one to its place. Who sends holds its ticket while it waits, and who reads has its own. What is read
 * is counted at once: a warp that counts it later, but before it waits, has been slow. More warps of a block
 * do what more resident blocks do. All tokens visit all ranks: who has none for anybody would wait for less.
 * A wait for `brought` that fails is noted like any other, though nobody here reads less because of it.
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
 *   - a part, a sender and a block count themselves by atom.add.acq_rel.gpu, and who waits for parts loads
 *     that by ld.acquire.gpu: so `chunk` of the last sender covers what all senders and parts stored,
 *     counts and aborts among it. Causality is transitive. The last block sees all blocks' notes, too;
 *   - a reader counts itself by atom.add.relaxed.gpu, when what it has read has arrived in registers or
 *     shared memory: so `brought` of the last one comes after all reads of the chunk. PTX would have a
 *     release for that; but a value that has come does not change any more, and a release waits for all
 *     that is on its way from the multiprocessor;
 *   - kernels of a rank run one after another: `ready` of a call covers what the rank did in all before,
 *     and what a kernel stores comes after what an earlier one has acquired;
 *   - an abort word is st.release.sys. A wait loads it after the flags, and it counts more than they do;
 *     but for WAIT_SEGMENT, which does not look at it once the flags have come. Who loads it after another
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
#ifndef AND_WINDOWED
#define AND_WINDOWED 0 /* 1: or from WINDOWED and these */
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
#ifndef CHUNKS
#define CHUNKS 2 /* of a rank's tokens; or 1 or 3 */
#endif
#ifndef WINDOW
#define WINDOW 1 /* chunks of each peer that have places in a windowed dispatch */
#endif
#define BLOCKS 2 /* of a kernel */
#ifndef PARTS
#define PARTS 2 /* tickets that share what comes first in a call, or what a chunk or a small call sends; in a
                 * windowed dispatch also what is read of a chunk; or 1 */
#endif

/* ---- Mutations: -DBROKEN=NAME breaks the protocol in one place; -DBROKEN=broken in the one whose number
 * the checker finds in its environment, as BROKEN. */

#define NOTHING 0
#define NO_WAIT_ENTRY 1
#define NO_WAIT_CHUNK 2
#define NO_WAIT_SEGMENT 3
#define NO_WAIT_LOCAL 4 /* for this rank's parts, before what they left is used here */
#define NO_WAIT_TILES 5 /* for lower tiles, before the counts are sent */
#define NO_WAIT_PARTS 6 /* for this rank's parts, before a dispatch's SIGNAL_CHUNK */
#define LOCAL_LAST 7    /* WAIT_CHUNK before WAIT_LOCAL */
#define NO_SIGNAL_ENTRY 8
#define NO_SIGNAL_CHUNK 9
#define NO_SIGNAL_SEGMENT 10
#define EARLY_SIGNAL_CHUNK 11 /* before the ticket's data */
#define EARLY_SIGNAL_SEGMENT 12
#define EARLY_SEQUENCE 13        /* of `ready`, before the line */
#define FIRST_SIGNAL_CHUNK 14 /* by the first sender of a chunk instead of the last */
#define NO_FINGERPRINT 15     /* not compared */
#define NO_POISONED 16        /* not looked at */
#define NO_NOTE 17            /* what failed is not told to the last block */
#define NO_ABORT 18           /* who gives up does not tell the peers */
#define NO_PASSING_ON 19      /* who sees an abort does not tell the peers */
#define NO_LOOK 20            /* a block sends counts or pieces whatever became of the last call */
#define ENTER_ANYWAY 21       /* it tells that the call is entered, likewise */
#define NO_LINE_LOOK 22       /* who waits for a piece does not look at its owner's line */
#define ENTRY_BY_BLOCK 23     /* in a small call, by the first block instead of the first ticket */
#define ENTRY_LAST 24         /* by the last part of a dispatch that is finished */
#define NO_RESET 25           /* of the local counters */
#define READS_FIRST 26        /* a combine's tickets that read come before those that send */
#define EARLY_STORE 27        /* rows before WAIT_ENTRY */
#define EARLY_PARTS 28        /* a dispatch's parts before WAIT_ENTRY */
#define EARLY_READ 29         /* of counts and routes, before WAIT_CHUNK */
#define CHUNK_0_ALONE 30      /* is waited for, whatever chunk is read */
#define FAILED_STORES 31      /* a part whose gate has failed stores to the peers all the same */
#define FAILED_NOT_COUNTED 32 /* it is not counted as finished */
#define FAILED_COUNTED 33     /* it is, before the peers are told to abort */
#define EMPTY_STORES 34       /* what a dispatch without tokens stores, nobody waits for */
#define FLAGS_FIRST 35        /* a wait whose flags have come does not look at the abort word */
#define ONE_LINE 36           /* of each peer, for all epochs */
#define ONE_HALF 37           /* of the memory of small calls, for all epochs */
#define ONE_COUNTS_HALF 38    /* the same, for a dispatch's counts alone */
#define COUNTS_AMONG_ROWS 39  /* a dispatch's counts go to the peers' other memory */
#define NO_WAIT_CREDIT 40
#define NO_SIGNAL_CREDIT 41
#define EARLY_SIGNAL_CREDIT 42 /* before what the ticket reads is read */
#define FIRST_SIGNAL_CREDIT 43 /* by the first reader of a chunk instead of the last */
#define ONE_TOLD_CREDIT 44     /* one peer is told alone */
#define ONE_CREDIT 45          /* one peer is waited for alone */
#define CREDIT_0_ALONE 46      /* chunk 0 is waited for, whatever chunk is sent */
#define ANY_SEQUENCE_CREDIT 47    /* of an earlier call will do */
#define NO_RESET_CREDIT 48     /* of the counters of what has been brought */
#define LATE_CREDIT 49         /* what has been read is counted when the reader's next chunk has come */
#define CREDIT_UNHEARD 50      /* the wait for it does not end when there is an abort */
#define FAILED_SENDS 51         /* if there is an abort, who has waited for it sends all the same */
#define FAILED_SENT 52          /* that ticket counts as sent, before the peers are told to abort */
#define SENDS_FIRST 53          /* a block brings nothing before it has sent */
#define OWN_TICKETS 54          /* a block's first ticket to read is its own, before it is resident */
#ifndef BROKEN
#define BROKEN NOTHING
#endif
hidden byte broken; /* of no state */
hidden byte spare;
hidden byte there;   /* a piece, where rows are */
hidden byte content; /* its tag */

/* ---- Operations. A tag is an epoch with an operation. */

#define BY_PLAN 1 /* dispatch by plan; with a plan that has a status, too: then all tokens are sent */
#define COMBINE 2
#define DISPATCH 3       /* not by plan */
#define SMALL 4          /* dispatch, by plan or not, or combine, of few tokens */
#define SMALL_POISONED 5 /* combine: rank 0 has a plan whose status is not 0, and stores nothing */
#define POISONED 6       /* combine, not small, likewise */
#define EMPTY 7          /* dispatch, not by plan, without tokens */
#define WINDOWED 8       /* dispatch, not by plan, with places for a window of chunks */
#define HAS_WINDOWED (AND_WINDOWED || LAST >= WINDOWED)

#define IS_COMBINE (operation == COMBINE || operation == POISONED)
#define IS_SMALL (operation == SMALL || operation == SMALL_POISONED)
#define IS_DISPATCH (!IS_COMBINE && !IS_SMALL)
#define IS_EMPTY (operation == EMPTY)
#define IS_WINDOWED (HAS_WINDOWED && operation == WINDOWED)
#define HAS_COUNTS (operation == DISPATCH || IS_EMPTY || IS_WINDOWED)
#define IS_POISONED(rank) ((operation == POISONED || operation == SMALL_POISONED) && rank == 0)
#define TAG(epoch, operation) ((epoch) * 16 + (operation))
#define MY_TAG TAG(MY_SEQUENCE, operation)
#define ROWS_TAG(chunk) (MY_TAG + (IS_WINDOWED -> (chunk) : 0)) /* those of a window have places in common */

/* ---- Control blocks. What peers write, by rank and peer: */

#define PEER(distance) ((me + distance) % RANKS)
#define FROM(peer) (me * RANKS + peer) /* at me */
#define TO(peer) ((peer) * RANKS + me) /* at the peer */
#define PAIRS (RANKS * RANKS)
byte entry[2 * PAIRS]; /* by parity, too */
byte line[2 * PAIRS];  /* a tag */
byte chunk[CHUNKS * PAIRS];
#if HAS_WINDOWED
byte credits[CHUNKS * PAIRS];
#endif
bool abort[RANKS];

#define PARITY(broken) ((BROKEN != broken) * (MY_SEQUENCE % 2))
#define LINES (PARITY(ONE_LINE) * PAIRS) /* of this epoch */
#define ENTRY_FROM(peer) entry[LINES + FROM(peer)]
#define LINE_FROM(peer) line[LINES + FROM(peer)]
#define CHUNK_FROM(peer) chunk[(BROKEN != CHUNK_0_ALONE) * READ_CHUNK * PAIRS + FROM(peer)]
#define EVERY(flag, target) (flag(PEER(1)) >= target && (RANKS == 2 || flag(PEER(2)) >= target))
#define ALL_ENTRY (BROKEN == NO_WAIT_ENTRY || EVERY(ENTRY_FROM, MY_SEQUENCE))
#define ALL_CHUNKS (BROKEN == NO_WAIT_CHUNK || EVERY(CHUNK_FROM, MY_SEQUENCE))
#define CREDIT_FROM(peer) credits[(BROKEN != CREDIT_0_ALONE) * (SENT_CHUNK - WINDOW) * PAIRS + FROM(peer)]
#define ALL_CREDIT \
  (BROKEN == ONE_CREDIT -> CREDIT_FROM(PEER(1)) >= MY_SEQUENCE : \
                            EVERY(CREDIT_FROM, (BROKEN == ANY_SEQUENCE_CREDIT -> 1 : MY_SEQUENCE)))
#define ALL_SEGMENTS (BROKEN == NO_WAIT_SEGMENT || (SEGMENT_FROM(me) && EVERY(SEGMENT_FROM, true)))

/* What the rank's own blocks write: */

byte epoch[RANKS]; /* calls completed; the running one is one more */
#define MY_SEQUENCE (epoch[me] + 1)
#define ALL_BLOCKS ((1 << BLOCKS) - 1)
byte to_start[RANKS] = ALL_BLOCKS; /* a bit for each of the kernel; the next kernel starts at its end */
byte next_ticket[RANKS];
#define STORED(counter) stored[me * (1 + CHUNKS) + (counter)]
byte stored[RANKS * (1 + CHUNKS)]; /* finished tickets: the parts, those that send each chunk */
#if HAS_WINDOWED
byte next_sent[RANKS]; /* of tickets that send, in a windowed dispatch */
#define READERS(chunk) readers[me * CHUNKS + (chunk)]
byte readers[RANKS * CHUNKS]; /* that have brought their part of this chunk */
#endif
byte blocks_finished[RANKS];
byte due[RANKS]; /* a bit for each chunk that is sent, when parts are not finished: signals to come */

/* What failed on this rank in this call, for the last block, and for readers of pieces. */
mtype = { unknown, arrived, poisoned, aborted };
mtype failure[RANKS] = unknown;
#define FAILURE failure[me]

/* What the call's results hold: */

byte reads[RANKS]; /* tickets that have read, and blocks that know a dispatch's counts and routes */
#define ALL_READS (IS_SMALL -> BLOCKS : (HAS_CHUNKS -> CHUNKS * SHARES + IS_DISPATCH * BLOCKS : 0))

/* ---- Workspaces. One memory, which every operation lays out anew: a store of one call may hit any datum
 * of another call. So what is read must be of the memory's latest call, and nobody may have stored for an
 * earlier one since. In a call every writer has pieces of its own:
 *   parts      in its own workspace what its tiles of choices or its parts of the inverted plan leave
 *              there for its own blocks; in a dispatch also its routes and weights, in the peers'
 *   rows       in the owner's workspace, for each chunk: partial rows (combine), or tokens (dispatch;
 *              those of this rank stay where they are)
 * For small calls, and a dispatch's counts, there are two memories more, for even epochs and odd ones.
 * What protects these: who has ended call e - 1, and has not given up, knows that all have entered it, so
 * all have ended call e - 2. */

#define HALF PARITY(ONE_HALF)
#define ROWS 2 /* the other memory */
#define COUNTS (BROKEN == COUNTS_AMONG_ROWS -> ROWS : PARITY(ONE_COUNTS_HALF))
#define FIRST_PART (CHUNKS * PARTS) /* of the pieces there; the others are rows */
#define SEGMENTS (FIRST_PART + PARTS)
byte latest[3 * RANKS]; /* epoch of the latest call that stored, by memory and owner */
bool damaged[RANKS];    /* an earlier call has stored since, by owner; not in halves */
byte pieces[PAIRS * (2 * PARTS + SEGMENTS)]; /* tags, by memory, owner and writer; PARTS in halves */
byte flags[2 * PAIRS * PARTS];             /* likewise, in small calls */
#define LATEST(memory, owner) latest[(memory) * RANKS + (owner)]
#define PLACE(memory, owner, writer, piece) \
  (((memory) * PAIRS + (owner) * RANKS + (writer)) * PARTS + \
   ((memory) == ROWS) * ((owner) * RANKS + (writer)) * (SEGMENTS - PARTS) + (piece))
#define SEGMENT(memory, owner, writer, piece) pieces[PLACE(memory, owner, writer, piece)]
#define SEGMENT_FROM(peer) (flags[PLACE(HALF, me, peer, ticket)] == MY_TAG)

/* ---- The calls: chosen one by one by the rank that comes first, for all. */

#define REMEMBERED 5 /* epochs that are remembered */
byte program[(1 + MISMATCH) * REMEMBERED];
byte timeouts_left = TIMEOUTS;
#define CHOICE program[(MISMATCH && me == 0 -> REMEMBERED : 0) + MY_SEQUENCE]

/* ---- Steps of a block. */

#define NO_TICKET 255

/* Fewer states: what follows a wait is one step with it, unless somebody may give up in between; likewise
 * what follows a look. A block that comes later finds the same flags. (What follows WAIT_SEGMENT always is:
 * a piece is overwritten before its flag, and a block that comes between reads it.) And what waits for
 * nobody is done when the ticket is taken. */
#define SEPARATE (TIMEOUTS + MISMATCH > 0)

/* Blocks of a small call differ, by what they read and by the gate, and start in any order: where they run
 * one after another, so that it matters. Fewer states: elsewhere the first to start is the first. */
#define ANY_ORDER (RESIDENT == 1)

/* Tickets: the parts, those that send rows, those that read rows; in a small call the first alone. Those of
 * a windowed dispatch that send have numbers of their own, as if nothing came after them. */
#define HAS_CHUNKS (!IS_SMALL && !IS_EMPTY)
#define STORES (PARTS + (HAS_CHUNKS && !IS_WINDOWED) * CHUNKS * PARTS)
#define SHARES (IS_WINDOWED -> PARTS : 1) /* tickets that read a chunk */
#define TICKETS (STORES + HAS_CHUNKS * CHUNKS * SHARES)
#define IS_PART (!IS_SMALL && ticket < PARTS)
#define SENT_CHUNK ((ticket - PARTS) / PARTS)
#define SENT_PLACE ((ticket - PARTS) % ((IS_WINDOWED -> WINDOW : CHUNKS) * PARTS))
#define READ_CHUNK (ticket == NO_TICKET -> 0 : (ticket - STORES) / SHARES) /* chunk 0, without a ticket */
#define READ_PLACE(part) ((READ_CHUNK % (IS_WINDOWED -> WINDOW : CHUNKS)) * PARTS + (part))
#define IS_SHARE(part) (!IS_WINDOWED || (ticket - STORES) % SHARES == (part))

/* Where a block stands: between two of these it does one step, and others may come between. */
mtype = {
  idle, take, look, store, wait_ready, compare, send, wait_chunk, wait_piece, wait_brought, wait_senders,
  read, note, end
};
#if HAS_WINDOWED
mtype at_of[4 * RANKS] = idle; /* two for each place: a block, and its warps that send */
#define at at_of[2 * place + sends]
#define SENDERS at_of[2 * place + 1]
#else
#define SENDERS idle
#endif
#define SENDS (HAS_WINDOWED && sends)

/* What a block has to send; one step for each peer. */
mtype = { none, lines, late_lines, SIGNAL_ENTRY, SIGNAL_CHUNK, SIGNAL_SEGMENT, SIGNAL_CREDIT };

inline send_to(peer) {
  if
  :: signal == SIGNAL_ENTRY && BROKEN != NO_SIGNAL_ENTRY -> entry[LINES + TO(peer)] = MY_SEQUENCE
  :: signal == SIGNAL_CHUNK && BROKEN != NO_SIGNAL_CHUNK ->
     for (i : 0 .. CHUNKS - 1) {
       chunk[i * PAIRS + TO(peer)] = ((told & (1 << i)) -> MY_SEQUENCE : chunk[i * PAIRS + TO(peer)])
     }
  :: signal == SIGNAL_SEGMENT && BROKEN != NO_SIGNAL_SEGMENT ->
     flags[PLACE(HALF, peer, me, ticket)] = MY_TAG;
     flags[PLACE(HALF, me, me, ticket)] = MY_TAG /* the same for all readers */
  :: signal == lines || signal == late_lines -> line[LINES + TO(peer)] = MY_TAG
#if HAS_WINDOWED
  :: signal == SIGNAL_CREDIT && BROKEN != NO_SIGNAL_CREDIT &&
     !(BROKEN == ONE_TOLD_CREDIT && peer != PEER(1)) ->
     credits[told * PAIRS + TO(peer)] = MY_SEQUENCE
#endif
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
  :: BROKEN != EARLY_SEQUENCE -> line[LINES + TO(PEER(1))] = MY_TAG;
     line[LINES + TO(PEER(RANKS - 1))] = MY_TAG
  :: else
  fi
}

/* A store of an earlier call than the owner is in: the owner has given up. */
inline store_at(memory, owner, piece, tag) {
  if
  :: LATEST(memory, owner) < MY_SEQUENCE ->
     LATEST(memory, owner) = MY_SEQUENCE;
     damaged[owner] = damaged[owner] && memory != ROWS
  :: LATEST(memory, owner) > MY_SEQUENCE ->
     assert(memory == ROWS && owner != me && abort[owner]);
     damaged[owner] = true
  :: else
  fi;
  SEGMENT(memory, owner, me, piece) = tag
}

/* Into all workspaces, or all but mine. */
inline store_at_all(where, number_there, and_mine, what) {
  for (p : 0 .. RANKS - 1) {
    if
    :: p != me || and_mine -> store_at(where, p, number_there, what)
    :: else
    fi
  }
  p = 0
}

inline read_piece(memory, owner, writer, piece, what) {
  assert(LATEST(memory, owner) == MY_SEQUENCE && (memory != ROWS || !damaged[owner]));
  assert(SEGMENT(memory, owner, writer, piece) == what)
}

/* Forgets all that was of this ticket: fewer states, too. */
inline drop_ticket() {
  ticket = NO_TICKET; signal = none; told = 0; i = 0; p = 0;
  at = take
}

/* A block is done, or its warps that send: it ends when these have. */
inline finish_block() {
  outcome = unknown; ticket = NO_TICKET;
  if
  :: SENDS -> at = idle
  :: !SENDS && IS_WINDOWED && SENDERS != idle -> at = wait_senders
  :: !SENDS && !(IS_WINDOWED && SENDERS != idle) ->
     blocks_finished[me]++;
     knows = false; number = 0; late = 0;
     if
     :: blocks_finished[me] == BLOCKS -> at = end
     :: else -> at = idle; operation = 0
     fi
  fi
}

/* What a ticket of a small call does: its piece goes to all. */
inline push_piece() {
  if
  :: (outcome != arrived && BROKEN != NO_LOOK) || IS_POISONED(me) -> drop_ticket()
  :: else ->
     store_at_all(HALF, ticket, true, MY_TAG);
     at = take;
     signal = SIGNAL_SEGMENT
  fi
}

/* The counts of a dispatch add up all tiles: who has the last waits for the lower one. */
#define TILE_COUNTED \
  (!HAS_COUNTS || ticket == 0 || BROKEN == NO_WAIT_TILES || SEGMENT(ROWS, me, me, FIRST_PART) == MY_TAG)

/* A part of a dispatch, when its gate is passed. */
inline push_part() {
  if
  :: !IS_EMPTY || BROKEN == EMPTY_STORES -> store_at_all(ROWS, FIRST_PART + ticket, false, MY_TAG)
  :: else
  fi
}

/* A part is finished; the last one brings the signals that are due. */
inline count_part() {
  STORED(0)++;
  told = (STORED(0) == PARTS -> due[me] : 0);
  due[me] = due[me] - told;
  signal = (told -> SIGNAL_CHUNK : none);
  signal = (BROKEN == ENTRY_LAST && IS_DISPATCH && STORED(0) == PARTS -> SIGNAL_ENTRY : signal)
}
inline finish_part() {
  count_part();
  outcome = unknown;
  if
  :: signal != none -> at = take
  :: else -> drop_ticket()
  fi
}

/* What a part stores before its gate: in this rank's workspace, whatever became of the last call; the
 * counts, by the last one, to all. */
inline store_part() {
  store_at(ROWS, me, FIRST_PART + ticket, MY_TAG);
  if
  :: HAS_COUNTS && ticket == PARTS - 1 && (outcome == arrived || BROKEN == NO_LOOK) &&
     BROKEN != NO_SIGNAL_SEGMENT ->
     read_piece(ROWS, me, me, FIRST_PART, MY_TAG); /* the lower tile's */
     store_at_all(COUNTS, 0, true, MY_TAG) /* SIGNAL_SEGMENT */
  :: else
  fi;
  outcome = unknown;
  if
  :: IS_COMBINE -> finish_part()
  :: else -> at = wait_ready;
     if
     :: BROKEN == EARLY_PARTS -> push_part()
     :: else
     fi
  fi
}
inline store_first() {
  if
  :: IS_SMALL -> push_piece()
  :: else -> store_part()
  fi
}

/* A look before anything goes to peers: by who has ticket 0, which tells at once that the call is entered,
 * and the last tile, which sends the counts; in a small call by every block, once. Who has ticket 0 is a
 * block that runs. If it were the first block, the last block of a small call might keep the gate before
 * that one is resident, on all ranks. */
#define HAS_LOOK (IS_SMALL -> outcome == unknown : ticket == 0 || HAS_COUNTS)
#define ENTERS \
  (ticket == 0 && (outcome == arrived || BROKEN == ENTER_ANYWAY) && (BROKEN != ENTRY_LAST || IS_SMALL))
inline look_at_abort() {
  outcome = (abort[me] -> aborted : arrived);
  if
  :: ENTERS && SEPARATE -> signal = lines
  :: ENTERS && !SEPARATE && !(BROKEN == ENTRY_BY_BLOCK && IS_SMALL) ->
     store_lines();
     signal = SIGNAL_ENTRY
  :: ticket > 0 && BROKEN == EARLY_SIGNAL_SEGMENT && IS_SMALL -> signal = SIGNAL_SEGMENT
  :: else
  fi;
  if
  :: (SEPARATE && outcome == arrived) || signal != none || HAS_COUNTS -> at = store
  :: else -> store_first()
  fi
}

/* By the last sender of a chunk. In a dispatch it waits, WAIT_LOCAL, until all parts of this rank are
 * finished, and the readers of its block do not wait for it. Here the block goes on, and the signal is
 * left to who finishes the last part. */
inline signal_chunk() {
  told = 1 << SENT_CHUNK;
  if
  :: IS_DISPATCH && STORED(0) < PARTS && BROKEN != NO_WAIT_PARTS ->
     due[me] = due[me] | told;
     drop_ticket()
  :: else -> at = take; signal = SIGNAL_CHUNK
  fi
}

/* What a ticket does for its part of a chunk: it goes to the peers; partial rows, which need the inverted
 * plan, also to this rank. */
inline send_rows() {
  if
  :: IS_COMBINE ->
     for (i : 0 .. PARTS - 1) {
       read_piece(ROWS, me, me, FIRST_PART + i, MY_TAG)
     }
  :: else
  fi;
  there = SENT_PLACE;
  content = ROWS_TAG(SENT_CHUNK);
  store_at_all(ROWS, there, IS_COMBINE, content);
  STORED(1 + SENT_CHUNK)++;
  if
  :: STORED(1 + SENT_CHUNK) == (BROKEN == FIRST_SIGNAL_CHUNK -> 1 : PARTS) ->
     signal_chunk()
  :: else -> drop_ticket()
  fi
}

/* Counts may be read as soon as their tag is there. */
#define IS_WRONG(peer) (SEGMENT(COUNTS, me, peer, 0) == MY_TAG && LATEST(COUNTS, me) != MY_SEQUENCE)
#define ANY_IS_WRONG (IS_WRONG(me) || IS_WRONG(PEER(1)) || IS_WRONG(PEER(RANKS - 1)))

/* A part of a chunk has been read. The last reader tells the peers, if they use its places once more. */
#if HAS_WINDOWED
inline count_brought(read_chunk) {
  if
  :: read_chunk + WINDOW < CHUNKS ->
     READERS(read_chunk)++;
     told = read_chunk;
     signal = (READERS(read_chunk) == (BROKEN == FIRST_SIGNAL_CREDIT -> 1 : PARTS) -> SIGNAL_CREDIT : none)
  :: else
  fi
}
inline count_read() {
  if
  :: !IS_WINDOWED || ticket == NO_TICKET || BROKEN == EARLY_SIGNAL_CREDIT -> skip
  :: IS_WINDOWED && ticket != NO_TICKET && BROKEN == LATE_CREDIT ->
     if
     :: late > 0 -> count_brought(late - 1)
     :: else
     fi;
     late = READ_CHUNK + 1
  :: else -> count_brought(READ_CHUNK)
  fi
}
#else
#define count_read() skip
#endif

/* A chunk's rows, and in a dispatch all counts and routes; without a ticket these alone. */
inline read_pieces() {
  for (p : 0 .. RANKS - 1) {
    for (i : 0 .. PARTS - 1) {
      if
      :: ticket != NO_TICKET && (IS_COMBINE || p != me) && IS_SHARE(i) ->
         there = READ_PLACE(i);
         content = ROWS_TAG(READ_CHUNK);
         read_piece(ROWS, me, p, there, content)
      :: else
      fi;
      if
      :: IS_DISPATCH -> read_piece(ROWS, me, p, FIRST_PART + i, MY_TAG)
      :: else
      fi
    }
    if
    :: HAS_COUNTS -> read_piece(COUNTS, me, p, 0, MY_TAG)
    :: else
    fi
  }
  reads[me]++;
  knows = IS_DISPATCH;
  count_read();
  if
  :: signal != none -> at = take
  :: else -> drop_ticket()
  fi
}
inline then_read() {
  if
#if HAS_WINDOWED
  :: IS_WINDOWED && ticket != NO_TICKET && BROKEN == EARLY_SIGNAL_CREDIT ->
     count_brought(READ_CHUNK);
     at = read
#endif
  :: else ->
     if
     :: SEPARATE -> at = read
     :: else -> read_pieces()
     fi
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

/* In a windowed dispatch, by a block's warps that send: a chunk whose places are in use waits until the peers
 * have brought what is there. */
#if HAS_WINDOWED
inline take_ticket_to_send() {
  if
  :: next_sent[me] >= CHUNKS * PARTS -> finish_block()
  :: else ->
     ticket = PARTS + next_sent[me];
     next_sent[me]++;
     if
     :: SENT_CHUNK >= WINDOW && BROKEN != NO_WAIT_CREDIT -> at = wait_brought
     :: else -> send_rows()
     fi
  fi
}
#endif

/* In a call that is not small a block passes the gate before it takes other tickets than parts. Before it
 * takes those of a dispatch that read, it finds out what goes where. In a windowed dispatch its warps that
 * send pass the gate, too, and begin. */
#define IS_OWN_DUE (BROKEN == OWN_TICKETS && IS_WINDOWED && late == 0)
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
#if HAS_WINDOWED
     SENDERS = (IS_WINDOWED -> wait_ready : idle);
#endif
     if
     :: BROKEN == EARLY_STORE -> store_at_all(ROWS, 0, IS_COMBINE, MY_TAG)
     :: else
     fi
  :: IS_DISPATCH && HAS_CHUNKS && next_ticket[me] >= STORES && outcome != unknown && !knows ->
     at = (BROKEN == EARLY_READ -> read : wait_chunk)
  :: !IS_SMALL && next_ticket[me] >= TICKETS && outcome != unknown &&
     (knows || !IS_DISPATCH || !HAS_CHUNKS) && !IS_OWN_DUE ->
     finish_block()
  :: else ->
     if
     :: IS_OWN_DUE && knows -> ticket = PARTS + number; late = 1
     :: else ->
        ticket = next_ticket[me];
        next_ticket[me] = ticket + 1 + (IS_OWN_DUE && ticket == PARTS - 1 -> BLOCKS : 0)
     fi;
     if
     :: ticket < PARTS && HAS_LOOK && SEPARATE -> at = look
     :: ticket < PARTS && HAS_LOOK && !SEPARATE -> look_at_abort()
     :: ticket < PARTS && !HAS_LOOK && SEPARATE -> at = store
     :: ticket < PARTS && !HAS_LOOK && !SEPARATE -> store_first()
     :: else ->
        ticket = (BROKEN == READS_FIRST ->
                      PARTS + (ticket + STORES - 2 * PARTS) % (TICKETS - PARTS) : ticket);
        if
        :: ticket < STORES && BROKEN == EARLY_SIGNAL_CHUNK ->
           at = send;
           told = 1 << SENT_CHUNK;
           signal = SIGNAL_CHUNK
        :: ticket < STORES && BROKEN != EARLY_SIGNAL_CHUNK -> send_rows()
        :: else -> at = wait_chunk
        fi
     fi
  fi
}

/* The lines that came with `ready`. They are of this call and not of a later one: a peer enters the next
 * but one only when I have entered the next, or else it has given up and sends none. */
#define IS_ELSEWHERE(peer) (LINE_FROM(peer) != MY_TAG && BROKEN != NO_FINGERPRINT)
#define SAYS_POISONED(peer) (IS_POISONED(peer) && BROKEN != NO_POISONED)
#define SENDS_NOTHING(peer) (ENTRY_FROM(peer) >= MY_SEQUENCE && (IS_ELSEWHERE(peer) || SAYS_POISONED(peer)))
inline compare_lines() {
  for (p : 0 .. RANKS - 1) {
    if
    :: p != me && ENTRY_FROM(p) >= MY_SEQUENCE && (BROKEN != NO_WAIT_ENTRY || at == wait_piece) ->
       assert(LINE_FROM(p) / TAG(1, 0) == MY_SEQUENCE);
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

/* WAIT_LOCAL, for lower tickets of this rank. A block took these that is at work, or at the gate, which
 * peers open with their first tickets: no deadlock. */
#define LOCAL(counter) (BROKEN == NO_WAIT_LOCAL || STORED(counter) == PARTS)
#define LOCAL_BEFORE_ENTRY (!IS_COMBINE || LOCAL(0))
#define LOCAL_BEFORE_CHUNK \
  ((BROKEN == LOCAL_LAST || LOCAL(IS_COMBINE -> 1 + READ_CHUNK : 0)) && \
   !(BROKEN == SENDS_FIRST && IS_WINDOWED && SENDERS != idle))

/* Another wait ends when there is an abort, or the peers' flags; the abort is looked for last. */
#define HEARD (abort[me] && !(BROKEN == CREDIT_UNHEARD && at == wait_brought))
#define KNOWN(condition) (signal == none && (HEARD || (condition)))
#define SEEN(condition) (abort[me] && !(BROKEN == FLAGS_FIRST && (condition)) -> aborted : arrived)

/* What failed, for the last block: an abort is not forgotten for what some peer said. A part is finished
 * all the same. */
#define NOT_COUNTED (BROKEN == FAILED_NOT_COUNTED || (BROKEN == FAILED_COUNTED && at == note))
inline note_failure() {
  FAILURE = (FAILURE == aborted || BROKEN == NO_NOTE -> FAILURE : outcome);
  if
  :: IS_PART && BROKEN == FAILED_STORES -> push_part()
  :: else
  fi;
  if
  :: IS_SMALL -> end_part()
  :: IS_PART && NOT_COUNTED -> outcome = unknown; drop_ticket()
  :: IS_PART && !NOT_COUNTED -> finish_part()
  :: !IS_SMALL && !IS_PART -> finish_block()
  fi
}

/* The peers are told first. */
inline give_up() {
  if
  :: must_abort ->
     at = note;
     if
     :: BROKEN == FAILED_COUNTED && IS_PART -> count_part()
     :: BROKEN == FAILED_SENT && SENDS && ticket != NO_TICKET ->
        STORED(1 + SENT_CHUNK)++;
        told = 1 << SENT_CHUNK;
        signal = (STORED(1 + SENT_CHUNK) == PARTS && STORED(0) == PARTS -> SIGNAL_CHUNK : none)
     :: else
     fi
  :: else -> note_failure()
  fi
}

/* An abort is passed on before others of this rank hear of it, and before the call ends. */
inline fail() {
  must_abort = outcome == aborted && BROKEN != NO_PASSING_ON &&
      !(abort[PEER(1)] && abort[PEER(RANKS - 1)]); /* else it would change nothing */
  give_up()
}

/* The gate is passed, or what the lines say is why not. */
inline pass_gate() {
  compare_lines();
  if
  :: outcome != arrived -> give_up()
  :: IS_SMALL && outcome == arrived -> end_part()
  :: IS_PART && outcome == arrived -> push_part(); finish_part()
  :: SENDS && outcome == arrived -> at = take
  :: !SENDS && !IS_SMALL && !IS_PART && outcome == arrived -> take_ticket()
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
    SWAP(LESS, entry[p], entry[PAIRS + p]);
    SWAP(LESS_TAG, line[p], line[PAIRS + p])
  }
  for (p : 0 .. CHUNKS * PAIRS - 1) {
    LESS(chunk[p]);
#if HAS_WINDOWED
    LESS(credits[p])
#endif
  }
  for (p : 0 .. PAIRS * PARTS - 1) {
    SWAP(LESS_TAG, pieces[p], pieces[PAIRS * PARTS + p]);
    SWAP(LESS_TAG, flags[p], flags[PAIRS * PARTS + p])
  }
  for (p : 0 .. PAIRS * SEGMENTS - 1) {
    LESS_TAG(pieces[2 * PAIRS * PARTS + p])
  }
  for (p : 2 .. REMEMBERED - 2) {
    program[p] = program[p + 1]
  }
  program[1] = 0;
  program[REMEMBERED - 1] = 0
}

inline end_call() {
  /* Results are whole, or safe for a reason. */
  assert(FAILURE != unknown || reads[me] == ALL_READS);
  assert(FAILURE == unknown || FAILURE == (TIMEOUTS + MISMATCH > 0 -> FAILURE : poisoned));
  FAILURE = unknown;
  reads[me] = 0;
  if
  :: BROKEN != NO_RESET ->
     next_ticket[me] = 0;
     for (i : 0 .. CHUNKS) {
       STORED(i) = 0
     }
     blocks_finished[me] = 0
  :: else
  fi;
#if HAS_WINDOWED
  next_sent[me] = 0;
  for (i : 0 .. CHUNKS - 1) {
    READERS(i) = (BROKEN == NO_RESET_CREDIT -> READERS(i) : 0)
  }
#endif
  to_start[me] = ALL_BLOCKS;
  at = idle;
  outcome = unknown;
  operation = 0;
  epoch[me]++;
  if
  :: CALLS == 0 && epoch[0] > 1 && epoch[1] > 1 && epoch[RANKS - 1] > 1 -> rebase()
  :: else
  fi;
  i = 0; p = 0
}

/* A place where a block can be resident: runs blocks of the rank's kernels, one after another. Or what sends
 * there, of each block that runs a windowed dispatch. */
proctype Resident(byte me, place; bool sends) {
#if !HAS_WINDOWED
  mtype at = idle;
#endif
  byte operation = (sends -> WINDOWED : 0);
  byte i, p;
  byte number; /* of the block, in a small call */
  byte ticket = NO_TICKET;
  mtype outcome = unknown; /* of its latest look or wait */
  mtype signal = none;     /* to be sent */
  byte told;               /* by SIGNAL_CHUNK: a bit for each chunk */
  bool knows;              /* a dispatch's counts and routes */
  bool must_abort;
  byte late; /* LATE_CREDIT: a chunk, and 1; OWN_TICKETS: it has been taken */

  do
  :: atomic { !SENDS && at == idle && signal == none && to_start[me] > 0 &&
         (CALLS == 0 || epoch[me] < CALLS) ->
       if
       :: CHOICE == 0 -> select (i : FIRST .. LAST + AND_WINDOWED);
          CHOICE = (i > LAST -> WINDOWED : i);
          i = 0
       :: else
       fi;
       operation = CHOICE;
       if
       :: to_start[me] & 1 -> number = 0
       :: !(to_start[me] & 1) || (IS_SMALL && ANY_ORDER && to_start[me] == ALL_BLOCKS) -> number = 1
       fi;
       to_start[me] = to_start[me] - (1 << number);
       number = number * (IS_SMALL || BROKEN == OWN_TICKETS);
       if
       :: BROKEN == ENTRY_BY_BLOCK && IS_SMALL && number == 0 && !abort[me] ->
          at = take;
          store_lines();
          signal = SIGNAL_ENTRY
       :: else -> take_ticket()
       fi
     }
  :: at == idle && CALLS > 0 && epoch[me] == CALLS -> break

  :: d_step { !SENDS && at == take && signal == none -> take_ticket() }
#if HAS_WINDOWED
  :: d_step { SENDS && at == take && signal == none -> take_ticket_to_send() }
#endif

  :: d_step { at == look -> look_at_abort() }

  :: d_step { at == store && signal == none && TILE_COUNTED -> store_first() }

  :: d_step { at == send && signal == none -> send_rows() }

  /* SIGNAL_ENTRY, SIGNAL_CHUNK, SIGNAL_SEGMENT */
  :: atomic { signal != none -> TO_EACH(send_to);
       if
       :: signal == lines -> signal = SIGNAL_ENTRY
       :: signal == SIGNAL_ENTRY && BROKEN == EARLY_SEQUENCE -> signal = late_lines
       :: else -> signal = none
       fi;
       if
       :: at == take && signal == none -> drop_ticket()
       :: else
       fi
     }

  /* WAIT_ENTRY, the gate: everybody is in this call, the same call. The lines are read after the abort
   * word. */
  :: d_step { at == wait_ready && LOCAL_BEFORE_ENTRY && KNOWN(ALL_ENTRY) ->
       outcome = SEEN(ALL_ENTRY);
       if
       :: outcome != arrived -> fail()
       :: outcome == arrived && SEPARATE -> at = compare
       :: outcome == arrived && !SEPARATE -> pass_gate()
       fi
     }
  :: d_step { at == compare -> pass_gate() }

  /* Meanwhile some counts may be there. */
  :: d_step { (at == wait_ready || at == wait_chunk) && HAS_COUNTS && ANY_IS_WRONG ->
       assert(false)
     }

  /* WAIT_CHUNK: everybody's rows of this chunk are here, and in a dispatch all routes and counts. */
  :: d_step { at == wait_chunk && LOCAL_BEFORE_CHUNK && KNOWN(ALL_CHUNKS) ->
       outcome = SEEN(ALL_CHUNKS);
       if
       :: outcome == arrived -> then_read()
       :: else -> fail()
       fi
     }

#if HAS_WINDOWED
  /* WAIT_CREDIT: everybody has read what was in the places for this chunk. */
  :: d_step { at == wait_brought && KNOWN(ALL_CREDIT) ->
       outcome = (HEARD && BROKEN != FAILED_SENDS -> aborted : arrived);
       if
       :: outcome != arrived -> fail()
       :: outcome == arrived && SEPARATE -> at = send
       :: outcome == arrived && !SEPARATE -> send_rows()
       fi
     }
  :: d_step { at == wait_senders && SENDERS == idle -> finish_block() }
#endif

  /* WAIT_SEGMENT: what this block reads of everybody is here, of this rank, too. */
  :: d_step { at == wait_piece && ALL_SEGMENTS ->
       for (p : 0 .. RANKS - 1) {
         read_piece(HALF, me, p, ticket, MY_TAG)
       }
       reads[me]++;
       end_part()
     }

  /* Or it is not: there is an abort, something else has failed on this rank, or the piece's owner sends
   * none. A piece may come between that look and this one; the wait is over all the same. */
  :: d_step { at == wait_piece && abort[me] -> outcome = aborted; fail() }
  :: d_step { at == wait_piece && FAILURE != unknown -> outcome = FAILURE; give_up() }
  :: d_step { at == wait_piece && BROKEN != NO_LINE_LOOK &&
         (SENDS_NOTHING(PEER(1)) || SENDS_NOTHING(PEER(RANKS - 1))) ->
       compare_lines();
       give_up()
     }

  :: d_step { at == note && !must_abort && signal == none -> note_failure() }

  :: d_step { at == read && (IS_COMBINE || LOCAL(0)) -> read_pieces() }

  :: d_step { at == end && !due[me] -> end_call() }

  /* Giving up: a wait takes too long, or a peer is in another call. */
  :: atomic { TIMEOUTS > 0 && timeouts_left > 0 && !abort[me] && !must_abort && signal == none &&
         (at == wait_piece || at == wait_brought || (at == wait_chunk && LOCAL_BEFORE_CHUNK) ||
          (at == wait_ready && LOCAL_BEFORE_ENTRY)) ->
       timeouts_left--;
       abort[me] = true;
       must_abort = true;
       outcome = aborted;
       give_up() /* also if what it waits for comes now */
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
        run Resident(r, 2 * r + i - 1, false);
#if HAS_WINDOWED
        run Resident(r, 2 * r + i - 1, true)
#endif
      }
    }
  }
  (_nr_pr == 1); /* all calls have ended */
  for (i : 1 .. REMEMBERED - 1) {
    differ = differ || (i <= CALLS && program[i] != program[MISMATCH * REMEMBERED + i])
  }
  for (r : 0 .. RANKS - 1) {
    assert(abort[r] == (differ || timeouts_left < TIMEOUTS))
  }
}
