/* A Spin model of the flags of a transfer. tests/tools/protocol_test.py checks that it holds, and that the
 * check fails when any one wait or signal is removed.
 *
 * RANKS ranks run the same calls in the same order. A call is one kernel of BLOCKS blocks on each rank.
 * Blocks take tickets in order: first prologue items, then items that send rows, then items that read rows.
 * No rank reads a peer's memory: every rank stores what its peers need into their workspaces. Ranks
 * synchronize by flags alone. A flag holds the 64-bit sequence number of a call (call n has number n). A
 * peer writes it into my control block, and I compare it by >=:
 *
 *   entry    the peer has entered call n, and its entry flags (fingerprint, poisoned) are written. They
 *            are double-buffered by the parity of n: a peer may enter while I am still in n - 1
 *   chunk    the peer has stored its rows of this chunk: in a combine the partial sums of my tokens, in a
 *            dispatch its tokens for me. In a dispatch also everything that its prologue stores here
 *   credit   in a dispatch with a receive ring: the peer has read all that was sent to it of this chunk,
 *            by every rank, so the slots may be overwritten
 *   abort    sticky: this call and all later ones end with safe results
 *
 * The block with ticket 0 signals at once that the call is entered. The prologue items of a dispatch count
 * and number tiles of assignments, or invert the plan, in this rank's workspace. Each then waits for `entry`
 * and stores its routes and weights into all workspaces. The prologue items of a combine only invert the
 * plan. Each block waits for `entry` once more before it takes other tickets. The last sender of a chunk
 * signals the chunk: in a dispatch to all peers, once all prologue items of this rank are finished.
 *
 * A reader of a dispatch waits for this rank's prologue, then for chunk 0 of all peers: then all counts and
 * routes have arrived. It continues chunk by chunk. A dispatch without tokens has no chunks: it stores
 * nothing for its peers but counts, which are never read.
 *
 * A ring dispatch has slots in a receiver's workspace for only RING_CHUNKS chunks of each peer: chunk c uses
 * the slots of chunk c - RING_CHUNKS. A sender of chunk c first waits (WAIT_CREDIT) until all peers have
 * expanded that earlier chunk into their rows. Readers count what they have read of a chunk. The last one
 * returns the credit to all peers (SIGNAL_CREDIT), if a later chunk needs it. Each reader has waited for
 * that chunk of all peers, so one flag serves all of them. Credits carry sequence numbers, too: a credit of
 * an earlier call is too old for this one. A ring as long as the tokens needs neither: that is DISPATCH.
 *
 * In a ring dispatch a sender waits for its peers to read, and they wait for what all ranks send. There is no
 * deadlock. Take the first chunk that some rank has not sent. Its senders wait at most for peers to read an
 * earlier chunk, which has arrived from all ranks. The readers of that chunk need nothing more, provided that
 * they run and hold no earlier ticket that waits. Hence these rules:
 *   - a warp's tickets are in order, prefetched ones included;
 *   - no block holds a ticket to read before it is resident;
 *   - senders and readers of a block have tickets and warps of their own, and progress independently;
 *   - a reader counts everything that it has read before it waits for a chunk.
 *
 * A call stores into this rank's own part of its workspace without waiting. When a call has ended here,
 * everything sent to this rank has arrived, and nobody needs anything of it here. So no rank signals that it
 * is done. A peer's workspace may be overwritten once the peer has entered this very call: then prologue
 * items and rows are sent. A dispatch sends its counts earlier. They go to the eager buffers as packets:
 * 16 bytes that are stored at once and carry a tag of this very call. A reader that finds the tag may read,
 * even before the peer has entered. (If another peer runs a different call, its stores may hit the same
 * buffer. Then this call fails.)
 *
 * A waiter decides by what it sees itself: flags, or an abort. So some blocks of a kernel may pass a wait
 * where others fail. A block that fails forwards the abort, records the failure for this rank, and neither
 * reads nor sends any more. If a failure is recorded, the last block of the kernel makes all results safe,
 * including what other blocks have read.
 *
 * A prologue item whose entry wait fails stores nothing to peers, but it counts as finished: otherwise the
 * rank would wait forever. So `chunk` may announce routes that were never stored. A peer that sees this flag
 * also sees the abort, which was forwarded before the item was finished. A poisoned plan is announced in the
 * entry flags: then the entry waits of all ranks fail alike, and nobody sends. A reader loads the abort word
 * after it has waited for the prologue of its own rank: if it waited for `chunk` first, its own counts might
 * have been left out since.
 *
 * A rank that has aborted a call cannot know when peers stop storing for it. It still stores to its own
 * workspace, and reads nothing: it passes no entry wait any more. It stores nothing for its peers: a block
 * loads the abort word before it sends counts or segments or signals entry, and waits for `entry` before it
 * sends anything else.
 *
 * A low-latency call stores everything without waiting. Each of its segments has a flag in
 * the workspace, beside the data. I compare it by == with a tag of this very call:
 *
 *   segment  the peer has stored this segment
 *
 * Its blocks take tickets to store; then each reads a share of its own. A segment that has arrived is valid,
 * whatever became of its owner. A reader that misses one loads the abort word, the failure that other readers
 * of this rank have recorded, and the owner's entry flags: the owner may be in another call, or have nothing
 * to send. After its reads the last block waits until all ranks have entered the call. (In a dispatch some
 * warps read while others store, which is earlier and no less safe. Flags are batched over some segments, and
 * tickets are prefetched: nobody waits in between.)
 *
 * Here a block is one sequence of steps, and all tickets that send come before those that read. In the kernels
 * a combine interleaves them, and in a dispatch other warps of a block read while some send. That is no less
 * safe: after its wait, what a reader finds does not depend on what its rank has yet to send, and what peers
 * find does not depend on reads. After its entry wait a sender waits only as the last sender of a chunk, for
 * the prologue. Here its block goes on, and reads, while that signal is pending. The kernels make no less
 * progress: readers of a dispatch never keep a warp from sending, and combine/schedule.h says why the order
 * of a combine is safe.
 *
 * A ring dispatch is different: there what peers find depends on reads. So each of its blocks is two
 * sequences with tickets of their own, in any order: the reading warps, and the sending warps, which start
 * when the block has no more prologue items. (In the kernels the sending warps may have passed the entry wait
 * before; here a block without prologue items may.) The block ends when both have ended, and only then does
 * the next block become resident. A sender holds its ticket while it waits, and a reader holds its own. A
 * read is counted at once: a warp that counts it later, but before it waits, is a slow warp. More warps in a
 * block behave like more resident blocks. All tokens go to all ranks: a rank with fewer would wait for less.
 * A failed wait for a credit is recorded like any other, although nobody here reads less because of it.
 *
 * What is checked
 *   - Nothing is read before it is there or after it was overwritten: every store is tagged with its sequence
 *     number and operation, and every read asserts the tag.
 *   - No deadlock: Spin reports states from which no step is possible.
 *   - Any number of calls: with CALLS 0 the ranks never stop. Sequence numbers then count from the slowest
 *     rank (`rebase`), so the number of states is finite.
 *   - Progress needs one resident block: RESIDENT 1 runs the blocks of a kernel one after another, those of a
 *     low-latency call in any order.
 *   - TIMEOUTS 1: any one wait of any rank may time out. MISMATCH 1: rank 0 runs a program of its own.
 *
 * Memory order. Spin interleaves whole steps. The kernels behave the same because
 *   - a signal is st.release.sys, after the stores that it announces in program order. A wait is
 *     ld.acquire.sys, before the reads that it permits. A rank that sees the flag sees the data;
 *   - prologue items, senders and blocks are counted by atom.add.acq_rel.gpu, and waits for prologue items
 *     are ld.acquire.gpu. So the last sender's `chunk` covers what all senders and prologue items stored,
 *     counts and aborts among it, because causality is transitive. The last block sees all recorded failures;
 *   - a reader counts itself by atom.add.relaxed.gpu, after its data has arrived in registers or shared
 *     memory. So the last reader's credit follows all reads of the chunk. PTX would require a release for
 *     that. But a loaded value does not change any more, and a release waits for everything in flight from
 *     the SM;
 *   - kernels of a rank run one after another: the entry flag of a call covers what the rank did in all
 *     earlier calls, and a kernel's stores follow what an earlier kernel has acquired;
 *   - an abort word is st.release.sys. A wait loads it after the flags, and it overrides them, except at
 *     WAIT_SEGMENT, which does not load it once the flags have come. A block that has acquired another
 *     block's count sees the abort word that the other block saw: loads of one word are coherent. So these
 *     loads need no more than ld.relaxed.
 * All that one ticket stores is one step here, and so is all that it reads. Each assertion is about one datum,
 * and some order of steps stores that datum as early, or reads it as late, as waits and signals allow. */

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
#define FIRST 1 /* operations to choose calls from: FIRST to LAST, by the numbers below */
#endif
#ifndef LAST
#define LAST 7
#endif
#ifndef AND_RING
#define AND_RING 0 /* 1: and RING */
#endif
#ifndef CALLS
#define CALLS 0 /* calls per rank; 0: endless */
#endif
#ifndef TIMEOUTS
#define TIMEOUTS 0
#endif
#ifndef MISMATCH
#define MISMATCH 0
#endif
#ifndef CHUNKS
#define CHUNKS 2 /* chunks of a rank's tokens; or 1 or 3 */
#endif
#ifndef RING_CHUNKS
#define RING_CHUNKS 1 /* chunks of each peer that have slots in a ring dispatch */
#endif
#define BLOCKS 2 /* blocks of a kernel */
#ifndef ITEMS
#define ITEMS 2 /* tickets that share the prologue of a call, the sends of a chunk, the sends of a low-latency
                 * call, or the reads of a chunk in a ring dispatch; or 1 */
#endif

/* ---- Mutations: -DBROKEN=NAME breaks the protocol in one place. -DBROKEN=broken takes the number of the
 * mutation from the checker's environment variable BROKEN. */

#define NOTHING 0
#define NO_WAIT_ENTRY 1
#define NO_WAIT_CHUNK 2
#define NO_WAIT_SEGMENT 3
#define NO_WAIT_LOCAL 4             /* the prologue of this rank, before its results are used here */
#define NO_WAIT_TILES 5             /* the counts of lower tiles, before the sums are sent */
#define NO_WAIT_ITEMS 6             /* the prologue of this rank, before a dispatch's SIGNAL_CHUNK */
#define LOCAL_LAST 7                /* WAIT_CHUNK comes before WAIT_LOCAL */
#define NO_SIGNAL_ENTRY 8
#define NO_SIGNAL_CHUNK 9
#define NO_SIGNAL_SEGMENT 10
#define EARLY_SIGNAL_CHUNK 11       /* it comes before the ticket's data */
#define EARLY_SIGNAL_SEGMENT 12
#define EARLY_SEQUENCE 13           /* the entry flag comes before the fingerprint */
#define FIRST_SIGNAL_CHUNK 14       /* the first sender of a chunk signals instead of the last */
#define NO_FINGERPRINT 15           /* fingerprints are not compared */
#define NO_POISONED 16              /* `poisoned` is ignored */
#define NO_FAILURE_RECORD 17        /* a failure is not recorded for the last block */
#define NO_ABORT 18                 /* a rank that times out does not tell its peers */
#define NO_FORWARD_ABORT 19         /* a rank that sees an abort does not forward it */
#define NO_ABORT_CHECK 20           /* a block sends counts or segments although an earlier call was aborted */
#define ENTER_ABORTED 21            /* a block signals entry although an earlier call was aborted */
#define NO_PEER_CHECK 22            /* a wait for a segment ignores the entry flags of its owner */
#define ENTRY_BY_BLOCK 23           /* in a low-latency call the first block signals entry, not ticket 0 */
#define ENTRY_LAST 24               /* the last finished prologue item of a dispatch signals entry */
#define NO_RESET 25                 /* local counters are not reset */
#define READS_FIRST 26              /* a combine's tickets that read come before those that send */
#define EARLY_STORE 27              /* rows are stored before WAIT_ENTRY */
#define EARLY_ITEMS 28              /* a dispatch's prologue stores to peers before WAIT_ENTRY */
#define EARLY_READ 29               /* counts and routes are read before WAIT_CHUNK */
#define ONLY_CHUNK_0 30             /* chunk 0 is waited for, whatever chunk is read */
#define FAILED_STORES 31            /* a prologue item whose entry wait has failed stores to the peers */
#define FAILED_NOT_COUNTED 32       /* such an item is not counted as finished */
#define FAILED_COUNTED 33           /* such an item is counted before the peers are told to abort */
#define EMPTY_STORES 34             /* a dispatch without tokens stores routes, for which nobody waits */
#define FLAGS_FIRST 35              /* a wait whose flags have come does not load the abort word */
#define SINGLE_ENTRY_BUFFER 36      /* entry flags are not double-buffered */
#define SINGLE_EAGER_BUFFER 37      /* the eager buffers are not double-buffered */
#define SINGLE_COUNT_BUFFER 38      /* the eager buffers of a dispatch's counts are not double-buffered */
#define COUNTS_WITH_ROWS 39         /* a dispatch's counts do not go to the eager buffers */
#define NO_WAIT_CREDIT 40
#define NO_SIGNAL_CREDIT 41
#define EARLY_SIGNAL_CREDIT 42      /* it comes before the ticket's reads */
#define FIRST_SIGNAL_CREDIT 43      /* the first reader of a chunk signals instead of the last */
#define CREDIT_TO_ONE_PEER 44       /* only one peer gets the credit */
#define CREDIT_FROM_ONE_PEER 45     /* the credit of one peer suffices */
#define ONLY_CREDIT_0 46            /* the credit of chunk 0 is waited for, whatever chunk is sent */
#define ANY_SEQUENCE_CREDIT 47      /* a credit of an earlier call suffices */
#define NO_RESET_CREDIT 48          /* the counters of expanded chunks are not reset */
#define LATE_CREDIT 49              /* a read is counted when the reader's next chunk has come */
#define CREDIT_IGNORES_ABORT 50     /* the wait for a credit does not end at an abort */
#define FAILED_SENDS 51             /* a sender whose wait for a credit has failed sends */
#define FAILED_SENT 52              /* such a ticket counts as sent, before the peers are told to abort */
#define SENDS_FIRST 53              /* a block reads nothing before it has sent everything */
#define OWN_TICKETS 54              /* a block holds its first ticket to read before it is resident */
#ifndef BROKEN
#define BROKEN NOTHING
#endif
/* Hidden: not part of the state. */
hidden byte broken;
hidden byte spare;
hidden byte there;   /* the index of a datum among rows */
hidden byte content; /* the tag of that datum */

/* ---- Operations. A tag is a sequence number with an operation. */

#define REDISPATCH 1           /* also with a poisoned plan: then all tokens are sent */
#define COMBINE 2
#define DISPATCH 3             /* not redispatch */
#define LOW_LATENCY 4          /* low-latency dispatch, redispatch or combine */
#define LOW_LATENCY_POISONED 5 /* low-latency combine: rank 0 has a poisoned plan, and stores nothing */
#define POISONED 6             /* combine: rank 0 has a poisoned plan, and stores nothing */
#define EMPTY 7                /* dispatch without tokens */
#define RING 8                 /* dispatch with a receive ring of RING_CHUNKS chunks */
#define HAS_RING (AND_RING || LAST >= RING)

#define IS_COMBINE (operation == COMBINE || operation == POISONED)
#define IS_LOW_LATENCY (operation == LOW_LATENCY || operation == LOW_LATENCY_POISONED)
#define IS_DISPATCH (!IS_COMBINE && !IS_LOW_LATENCY)
#define IS_EMPTY (operation == EMPTY)
#define IS_RING (HAS_RING && operation == RING)
#define HAS_COUNTS (operation == DISPATCH || IS_EMPTY || IS_RING)
#define IS_POISONED(rank) ((operation == POISONED || operation == LOW_LATENCY_POISONED) && rank == 0)
#define TAG(sequence, operation) ((sequence) * 16 + (operation))
#define MY_TAG TAG(MY_SEQUENCE, operation)
#define ROWS_TAG(chunk) (MY_TAG + (IS_RING -> (chunk) : 0)) /* chunks of a ring share slots */

/* ---- Control blocks. Written by peers, indexed by rank and peer: */

#define PEER(distance) ((me + distance) % RANKS)
#define FROM(peer) (me * RANKS + peer) /* at me */
#define TO(peer) ((peer) * RANKS + me) /* at the peer */
#define PAIRS (RANKS * RANKS)
byte entry[2 * PAIRS];       /* double-buffered */
byte fingerprint[2 * PAIRS]; /* a tag; likewise */
byte chunk[CHUNKS * PAIRS];
#if HAS_RING
byte credits[CHUNKS * PAIRS];
#endif
bool abort[RANKS];

#define PARITY(broken) ((BROKEN != broken) * (MY_SEQUENCE % 2))
#define ENTRY_BASE (PARITY(SINGLE_ENTRY_BUFFER) * PAIRS) /* this call's */
#define ENTRY_FROM(peer) entry[ENTRY_BASE + FROM(peer)]
#define FINGERPRINT_FROM(peer) fingerprint[ENTRY_BASE + FROM(peer)]
#define CHUNK_FROM(peer) chunk[(BROKEN != ONLY_CHUNK_0) * READ_CHUNK * PAIRS + FROM(peer)]
#define EVERY(flag, target) (flag(PEER(1)) >= target && (RANKS == 2 || flag(PEER(2)) >= target))
#define ALL_ENTRY (BROKEN == NO_WAIT_ENTRY || EVERY(ENTRY_FROM, MY_SEQUENCE))
#define ALL_CHUNKS (BROKEN == NO_WAIT_CHUNK || EVERY(CHUNK_FROM, MY_SEQUENCE))
#define CREDIT_FROM(peer) credits[(BROKEN != ONLY_CREDIT_0) * (SENT_CHUNK - RING_CHUNKS) * PAIRS + FROM(peer)]
#define ALL_CREDIT \
  (BROKEN == CREDIT_FROM_ONE_PEER -> CREDIT_FROM(PEER(1)) >= MY_SEQUENCE : \
                            EVERY(CREDIT_FROM, (BROKEN == ANY_SEQUENCE_CREDIT -> 1 : MY_SEQUENCE)))
#define ALL_SEGMENTS (BROKEN == NO_WAIT_SEGMENT || (SEGMENT_FROM(me) && EVERY(SEGMENT_FROM, true)))

/* Written by the rank's own blocks: */

byte completed[RANKS]; /* calls; the running call has the next number */
#define MY_SEQUENCE (completed[me] + 1)
#define ALL_BLOCKS ((1 << BLOCKS) - 1)
byte to_start[RANKS] = ALL_BLOCKS; /* a bit for each block of the kernel */
byte next_ticket[RANKS];
#define STORED(counter) stored[me * (1 + CHUNKS) + (counter)]
byte stored[RANKS * (1 + CHUNKS)]; /* finished tickets: of the prologue, and of the sends of each chunk */
#if HAS_RING
byte next_sent[RANKS]; /* next ticket to send, in a ring dispatch */
#define READERS(chunk) readers[me * CHUNKS + (chunk)]
byte readers[RANKS * CHUNKS]; /* tickets that have read their share of this chunk */
#endif
byte blocks_finished[RANKS];
byte due[RANKS]; /* a bit for each chunk whose signal waits for the prologue */

/* The failure of this call on this rank, for the last block and for readers of segments. */
mtype = { unknown, arrived, poisoned, aborted };
mtype failure[RANKS] = unknown;
#define FAILURE failure[me]

/* The contents of the call's results: */

byte reads[RANKS]; /* tickets that have read, and blocks that have read a dispatch's counts and routes */
#define ALL_READS (IS_LOW_LATENCY -> BLOCKS : (HAS_CHUNKS -> CHUNKS * SHARES + IS_DISPATCH * BLOCKS : 0))

/* ---- Workspaces. Every operation lays out the same memory anew, so a store of one call may hit any datum of
 * another call. So a read must find the memory's latest call, with no store of an earlier call since. Within a
 * call every writer has data of its own:
 *   items      in its own workspace: the counts of its tiles of assignments, or its range of the inverted
 *              plan, for its own blocks. In a dispatch also its routes and weights, in the peers' workspaces
 *   rows       in the receiver's workspace, per chunk: partial sums (combine) or tokens (dispatch; a rank's
 *              own tokens stay where they are)
 * Low-latency calls, and the counts of a dispatch, use the eager buffers: two more memories, for even and odd
 * sequence numbers. They are safe for this reason: a rank that has ended call n - 1 without a failure knows
 * that all ranks have entered it, so all have ended call n - 2. */

#define EAGER PARITY(SINGLE_EAGER_BUFFER)
#define ROWS 2 /* the memory that is not double-buffered */
#define COUNTS (BROKEN == COUNTS_WITH_ROWS -> ROWS : PARITY(SINGLE_COUNT_BUFFER))
#define FIRST_ITEM (CHUNKS * ITEMS) /* the first datum there of prologue items; rows come before */
#define ROW_DATA (FIRST_ITEM + ITEMS)
byte latest[3 * RANKS]; /* sequence number of the latest call that stored, by memory and owner */
bool damaged[RANKS];    /* an earlier call has stored since, by owner; not in eager buffers */
byte data[PAIRS * (2 * ITEMS + ROW_DATA)]; /* tags, by memory, owner and writer; eager buffers have ITEMS */
byte segment_flags[2 * PAIRS * ITEMS];     /* likewise, in low-latency calls */
#define LATEST(memory, owner) latest[(memory) * RANKS + (owner)]
#define DATUM_INDEX(memory, owner, writer, datum) \
  (((memory) * PAIRS + (owner) * RANKS + (writer)) * ITEMS + \
   ((memory) == ROWS) * ((owner) * RANKS + (writer)) * (ROW_DATA - ITEMS) + (datum))
#define DATUM(memory, owner, writer, datum) data[DATUM_INDEX(memory, owner, writer, datum)]
#define SEGMENT_FROM(peer) (segment_flags[DATUM_INDEX(EAGER, me, peer, ticket)] == MY_TAG)

/* ---- The calls: chosen one by one, for all ranks, by the rank that is first. */

#define REMEMBERED 5 /* calls whose operation is remembered */
byte program[(1 + MISMATCH) * REMEMBERED];
byte timeouts_left = TIMEOUTS;
#define NEXT_OPERATION program[(MISMATCH && me == 0 -> REMEMBERED : 0) + MY_SEQUENCE]

/* ---- Steps of a block. */

#define NO_TICKET 255

/* To save states, a wait and what follows it are one step, unless a timeout may come in between; likewise a
 * check of the abort word and what follows it. A block that comes later finds the same flags. (WAIT_SEGMENT and
 * what follows are always one step: a segment is overwritten before its flag, and a block in between would read
 * it.) A ticket that waits for nothing is done when it is taken. */
#define SEPARATE (TIMEOUTS + MISMATCH > 0)

/* The blocks of a low-latency call differ in what they read and in the entry wait, and start in any order. That
 * matters where blocks run one after another. Elsewhere, to save states, they start in order. */
#define ANY_ORDER (RESIDENT == 1)

/* Tickets: prologue, then sends of rows, then reads of rows; a low-latency call has only the first kind. In a
 * ring dispatch the sends have tickets of their own, numbered as if nothing came after them. */
#define HAS_CHUNKS (!IS_LOW_LATENCY && !IS_EMPTY)
#define STORES (ITEMS + (HAS_CHUNKS && !IS_RING) * CHUNKS * ITEMS)
#define SHARES (IS_RING -> ITEMS : 1) /* tickets that read a chunk */
#define TICKETS (STORES + HAS_CHUNKS * CHUNKS * SHARES)
#define IS_PROLOGUE (!IS_LOW_LATENCY && ticket < ITEMS)
#define SENT_CHUNK ((ticket - ITEMS) / ITEMS)
#define SENT_SLOT ((ticket - ITEMS) % ((IS_RING -> RING_CHUNKS : CHUNKS) * ITEMS))
#define READ_CHUNK (ticket == NO_TICKET -> 0 : (ticket - STORES) / SHARES) /* chunk 0 without a ticket */
#define READ_SLOT(share) ((READ_CHUNK % (IS_RING -> RING_CHUNKS : CHUNKS)) * ITEMS + (share))
#define IS_SHARE(share) (!IS_RING || (ticket - STORES) % SHARES == (share))

/* The state of a block: each transition is one step, and steps of other blocks may come in between. */
mtype = {
  idle, take, check, store, wait_entry, compare, send, wait_chunk, wait_segment, wait_credit, wait_senders,
  read, record, end
};
#if HAS_RING
mtype at_of[4 * RANKS] = idle; /* two per resident block: its reading and its sending warps */
#define at at_of[2 * resident + sends]
#define SENDERS at_of[2 * resident + 1]
#else
#define SENDERS idle
#endif
#define SENDS (HAS_RING && sends)

/* The signal that a block has to send: one step per peer. */
mtype = { none, fingerprints, late_fingerprints, SIGNAL_ENTRY, SIGNAL_CHUNK, SIGNAL_SEGMENT, SIGNAL_CREDIT };

inline send_to(peer) {
  if
  :: signal == SIGNAL_ENTRY && BROKEN != NO_SIGNAL_ENTRY -> entry[ENTRY_BASE + TO(peer)] = MY_SEQUENCE
  :: signal == SIGNAL_CHUNK && BROKEN != NO_SIGNAL_CHUNK ->
     for (i : 0 .. CHUNKS - 1) {
       chunk[i * PAIRS + TO(peer)] = ((told & (1 << i)) -> MY_SEQUENCE : chunk[i * PAIRS + TO(peer)])
     }
  :: signal == SIGNAL_SEGMENT && BROKEN != NO_SIGNAL_SEGMENT ->
     segment_flags[DATUM_INDEX(EAGER, peer, me, ticket)] = MY_TAG;
     segment_flags[DATUM_INDEX(EAGER, me, me, ticket)] = MY_TAG /* one flag here serves all readers */
  :: signal == fingerprints || signal == late_fingerprints -> fingerprint[ENTRY_BASE + TO(peer)] = MY_TAG
#if HAS_RING
  :: signal == SIGNAL_CREDIT && BROKEN != NO_SIGNAL_CREDIT &&
     !(BROKEN == CREDIT_TO_ONE_PEER && peer != PEER(1)) ->
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

inline store_fingerprints() {
  if
  :: BROKEN != EARLY_SEQUENCE -> fingerprint[ENTRY_BASE + TO(PEER(1))] = MY_TAG;
     fingerprint[ENTRY_BASE + TO(PEER(RANKS - 1))] = MY_TAG
  :: else
  fi
}

/* A store of an earlier call than the owner's latest: the owner has aborted that call. */
inline store_at(memory, owner, datum, tag) {
  if
  :: LATEST(memory, owner) < MY_SEQUENCE ->
     LATEST(memory, owner) = MY_SEQUENCE;
     damaged[owner] = damaged[owner] && memory != ROWS
  :: LATEST(memory, owner) > MY_SEQUENCE ->
     assert(memory == ROWS && owner != me && abort[owner]);
     damaged[owner] = true
  :: else
  fi;
  DATUM(memory, owner, me, datum) = tag
}

/* Stores into all workspaces, or all but mine. */
inline store_at_all(where, number_there, and_mine, what) {
  for (p : 0 .. RANKS - 1) {
    if
    :: p != me || and_mine -> store_at(where, p, number_there, what)
    :: else
    fi
  }
  p = 0
}

inline read_datum(memory, owner, writer, datum, what) {
  assert(LATEST(memory, owner) == MY_SEQUENCE && (memory != ROWS || !damaged[owner]));
  assert(DATUM(memory, owner, writer, datum) == what)
}

/* Forgets everything about this ticket, to save states. */
inline drop_ticket() {
  ticket = NO_TICKET; signal = none; told = 0; i = 0; p = 0;
  at = take
}

/* Ends the reading or the sending warps of a block. The block ends when both have. */
inline finish_block() {
  outcome = unknown; ticket = NO_TICKET;
  if
  :: SENDS -> at = idle
  :: !SENDS && IS_RING && SENDERS != idle -> at = wait_senders
  :: !SENDS && !(IS_RING && SENDERS != idle) ->
     blocks_finished[me]++;
     has_counts = false; number = 0; late = 0;
     if
     :: blocks_finished[me] == BLOCKS -> at = end
     :: else -> at = idle; operation = 0
     fi
  fi
}

/* Stores the segment of a low-latency ticket to all ranks. */
inline push_segment() {
  if
  :: (outcome != arrived && BROKEN != NO_ABORT_CHECK) || IS_POISONED(me) -> drop_ticket()
  :: else ->
     store_at_all(EAGER, ticket, true, MY_TAG);
     at = take;
     signal = SIGNAL_SEGMENT
  fi
}

/* The counts of a dispatch are totals over all tiles: the last tile waits for the lower one. */
#define TILE_COUNTED \
  (!HAS_COUNTS || ticket == 0 || BROKEN == NO_WAIT_TILES || DATUM(ROWS, me, me, FIRST_ITEM) == MY_TAG)

/* Stores the results of a prologue item to the peers, after its entry wait. */
inline push_item() {
  if
  :: !IS_EMPTY || BROKEN == EMPTY_STORES -> store_at_all(ROWS, FIRST_ITEM + ticket, false, MY_TAG)
  :: else
  fi
}

/* Counts a finished prologue item. The last one sends the pending signals. */
inline count_item() {
  STORED(0)++;
  told = (STORED(0) == ITEMS -> due[me] : 0);
  due[me] = due[me] - told;
  signal = (told -> SIGNAL_CHUNK : none);
  signal = (BROKEN == ENTRY_LAST && IS_DISPATCH && STORED(0) == ITEMS -> SIGNAL_ENTRY : signal)
}
inline finish_item() {
  count_item();
  outcome = unknown;
  if
  :: signal != none -> at = take
  :: else -> drop_ticket()
  fi
}

/* Runs a prologue item up to its entry wait: it stores into this rank's workspace, even after an aborted call.
 * The last item sends the counts to all ranks. */
inline store_item() {
  store_at(ROWS, me, FIRST_ITEM + ticket, MY_TAG);
  if
  :: HAS_COUNTS && ticket == ITEMS - 1 && (outcome == arrived || BROKEN == NO_ABORT_CHECK) &&
     BROKEN != NO_SIGNAL_SEGMENT ->
     read_datum(ROWS, me, me, FIRST_ITEM, MY_TAG); /* the lower tile's */
     store_at_all(COUNTS, 0, true, MY_TAG) /* SIGNAL_SEGMENT */
  :: else
  fi;
  outcome = unknown;
  if
  :: IS_COMBINE -> finish_item()
  :: else -> at = wait_entry;
     if
     :: BROKEN == EARLY_ITEMS -> push_item()
     :: else
     fi
  fi
}
inline store_first() {
  if
  :: IS_LOW_LATENCY -> push_segment()
  :: else -> store_item()
  fi
}

/* The check of the abort word before anything goes to peers. It is made by ticket 0, which signals entry at
 * once; by the last tile, which sends the counts; and once by every block of a low-latency call. The holder of
 * ticket 0 is a running block. If instead the first block signaled entry, the last block of a low-latency call
 * might wait for entry before the first block is resident, on all ranks. */
#define HAS_ABORT_CHECK (IS_LOW_LATENCY -> outcome == unknown : ticket == 0 || HAS_COUNTS)
#define ENTERS \
  (ticket == 0 && (outcome == arrived || BROKEN == ENTER_ABORTED) && (BROKEN != ENTRY_LAST || IS_LOW_LATENCY))
inline check_abort() {
  outcome = (abort[me] -> aborted : arrived);
  if
  :: ENTERS && SEPARATE -> signal = fingerprints
  :: ENTERS && !SEPARATE && !(BROKEN == ENTRY_BY_BLOCK && IS_LOW_LATENCY) ->
     store_fingerprints();
     signal = SIGNAL_ENTRY
  :: ticket > 0 && BROKEN == EARLY_SIGNAL_SEGMENT && IS_LOW_LATENCY -> signal = SIGNAL_SEGMENT
  :: else
  fi;
  if
  :: (SEPARATE && outcome == arrived) || signal != none || HAS_COUNTS -> at = store
  :: else -> store_first()
  fi
}

/* Called by the last sender of a chunk. In a dispatch it waits (WAIT_LOCAL) until the prologue of this rank is
 * finished, and the readers of its block do not wait for it. Here the block goes on, and the block that
 * finishes the last prologue item sends the signal. */
inline signal_chunk() {
  told = 1 << SENT_CHUNK;
  if
  :: IS_DISPATCH && STORED(0) < ITEMS && BROKEN != NO_WAIT_ITEMS ->
     due[me] = due[me] | told;
     drop_ticket()
  :: else -> at = take; signal = SIGNAL_CHUNK
  fi
}

/* Sends a ticket's share of a chunk to the peers. Partial sums need the inverted plan, and also go to this
 * rank. */
inline send_rows() {
  if
  :: IS_COMBINE ->
     for (i : 0 .. ITEMS - 1) {
       read_datum(ROWS, me, me, FIRST_ITEM + i, MY_TAG)
     }
  :: else
  fi;
  there = SENT_SLOT;
  content = ROWS_TAG(SENT_CHUNK);
  store_at_all(ROWS, there, IS_COMBINE, content);
  STORED(1 + SENT_CHUNK)++;
  if
  :: STORED(1 + SENT_CHUNK) == (BROKEN == FIRST_SIGNAL_CHUNK -> 1 : ITEMS) ->
     signal_chunk()
  :: else -> drop_ticket()
  fi
}

/* Counts may be read as soon as their tag is there. */
#define IS_WRONG(peer) (DATUM(COUNTS, me, peer, 0) == MY_TAG && LATEST(COUNTS, me) != MY_SEQUENCE)
#define ANY_IS_WRONG (IS_WRONG(me) || IS_WRONG(PEER(1)) || IS_WRONG(PEER(RANKS - 1)))

/* Counts a share of a chunk as read. The last reader signals the peers, if they use the slots once more. */
#if HAS_RING
inline count_expanded(read_chunk) {
  if
  :: read_chunk + RING_CHUNKS < CHUNKS ->
     READERS(read_chunk)++;
     told = read_chunk;
     signal = (READERS(read_chunk) == (BROKEN == FIRST_SIGNAL_CREDIT -> 1 : ITEMS) -> SIGNAL_CREDIT : none)
  :: else
  fi
}
inline count_read() {
  if
  :: !IS_RING || ticket == NO_TICKET || BROKEN == EARLY_SIGNAL_CREDIT -> skip
  :: IS_RING && ticket != NO_TICKET && BROKEN == LATE_CREDIT ->
     if
     :: late > 0 -> count_expanded(late - 1)
     :: else
     fi;
     late = READ_CHUNK + 1
  :: else -> count_expanded(READ_CHUNK)
  fi
}
#else
#define count_read() skip
#endif

/* Reads the rows of a chunk, and in a dispatch all counts and routes; without a ticket only the latter. */
inline read_data() {
  for (p : 0 .. RANKS - 1) {
    for (i : 0 .. ITEMS - 1) {
      if
      :: ticket != NO_TICKET && (IS_COMBINE || p != me) && IS_SHARE(i) ->
         there = READ_SLOT(i);
         content = ROWS_TAG(READ_CHUNK);
         read_datum(ROWS, me, p, there, content)
      :: else
      fi;
      if
      :: IS_DISPATCH -> read_datum(ROWS, me, p, FIRST_ITEM + i, MY_TAG)
      :: else
      fi
    }
    if
    :: HAS_COUNTS -> read_datum(COUNTS, me, p, 0, MY_TAG)
    :: else
    fi
  }
  reads[me]++;
  has_counts = IS_DISPATCH;
  count_read();
  if
  :: signal != none -> at = take
  :: else -> drop_ticket()
  fi
}
inline then_read() {
  if
#if HAS_RING
  :: IS_RING && ticket != NO_TICKET && BROKEN == EARLY_SIGNAL_CREDIT ->
     count_expanded(READ_CHUNK);
     at = read
#endif
  :: else ->
     if
     :: SEPARATE -> at = read
     :: else -> read_data()
     fi
  fi
}

/* Ends a block of a low-latency call after its reads or a failure. The last block then waits for entry. */
inline end_low_latency() {
  outcome = unknown; p = 0;
  if
  :: number == BLOCKS - 1 && ticket != NO_TICKET -> at = wait_entry
  :: else -> finish_block()
  fi;
  ticket = NO_TICKET
}

/* Called by the sending warps of a ring dispatch. A chunk whose slots are in use waits until the peers have
 * expanded the chunk before it. */
#if HAS_RING
inline take_ticket_to_send() {
  if
  :: next_sent[me] >= CHUNKS * ITEMS -> finish_block()
  :: else ->
     ticket = ITEMS + next_sent[me];
     next_sent[me]++;
     if
     :: SENT_CHUNK >= RING_CHUNKS && BROKEN != NO_WAIT_CREDIT -> at = wait_credit
     :: else -> send_rows()
     fi
  fi
}
#endif

/* Except in a low-latency call, a block waits for entry before it takes tickets after the prologue. Before it
 * takes a dispatch's tickets to read, it reads counts and routes. In a ring dispatch its sending warps start
 * here, with an entry wait of their own. */
#define IS_OWN_DUE (BROKEN == OWN_TICKETS && IS_RING && late == 0)
inline take_ticket() {
  if
  :: IS_LOW_LATENCY && (next_ticket[me] >= STORES || (outcome == aborted && BROKEN != NO_ABORT_CHECK)) ->
     ticket = number;
     outcome = unknown;
     if
     :: IS_POISONED(me) -> end_low_latency()
     :: else -> at = wait_segment
     fi
  :: !IS_LOW_LATENCY && next_ticket[me] >= ITEMS && outcome == unknown ->
     at = wait_entry;
#if HAS_RING
     SENDERS = (IS_RING -> wait_entry : idle);
#endif
     if
     :: BROKEN == EARLY_STORE -> store_at_all(ROWS, 0, IS_COMBINE, MY_TAG)
     :: else
     fi
  :: IS_DISPATCH && HAS_CHUNKS && next_ticket[me] >= STORES && outcome != unknown && !has_counts ->
     at = (BROKEN == EARLY_READ -> read : wait_chunk)
  :: !IS_LOW_LATENCY && next_ticket[me] >= TICKETS && outcome != unknown &&
     (has_counts || !IS_DISPATCH || !HAS_CHUNKS) && !IS_OWN_DUE ->
     finish_block()
  :: else ->
     if
     :: IS_OWN_DUE && has_counts -> ticket = ITEMS + number; late = 1
     :: else ->
        ticket = next_ticket[me];
        next_ticket[me] = ticket + 1 + (IS_OWN_DUE && ticket == ITEMS - 1 -> BLOCKS : 0)
     fi;
     if
     :: ticket < ITEMS && HAS_ABORT_CHECK && SEPARATE -> at = check
     :: ticket < ITEMS && HAS_ABORT_CHECK && !SEPARATE -> check_abort()
     :: ticket < ITEMS && !HAS_ABORT_CHECK && SEPARATE -> at = store
     :: ticket < ITEMS && !HAS_ABORT_CHECK && !SEPARATE -> store_first()
     :: else ->
        ticket = (BROKEN == READS_FIRST ->
                      ITEMS + (ticket + STORES - 2 * ITEMS) % (TICKETS - ITEMS) : ticket);
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

/* Compares the fingerprints that came with the entry flags. They are of this call and not of a later one: a
 * peer enters the next but one only after I have entered the next, or else it was aborted and sends none. */
#define IS_MISMATCH(peer) (FINGERPRINT_FROM(peer) != MY_TAG && BROKEN != NO_FINGERPRINT)
#define SAYS_POISONED(peer) (IS_POISONED(peer) && BROKEN != NO_POISONED)
#define SENDS_NOTHING(peer) (ENTRY_FROM(peer) >= MY_SEQUENCE && (IS_MISMATCH(peer) || SAYS_POISONED(peer)))
inline compare_fingerprints() {
  for (p : 0 .. RANKS - 1) {
    if
    :: p != me && ENTRY_FROM(p) >= MY_SEQUENCE && (BROKEN != NO_WAIT_ENTRY || at == wait_segment) ->
       assert(FINGERPRINT_FROM(p) / TAG(1, 0) == MY_SEQUENCE);
       must_abort = must_abort || IS_MISMATCH(p);
       outcome = (SAYS_POISONED(p) -> poisoned : outcome)
    :: else
    fi
  }
  outcome = (IS_POISONED(me) -> poisoned : outcome); /* a rank knows its own status from its plan */
  outcome = (must_abort -> aborted : outcome);
  abort[me] = abort[me] || must_abort;
  p = 0
}

/* WAIT_LOCAL, for lower tickets of this rank. Their blocks are running, or wait for entry, which peers signal
 * with their first tickets: no deadlock. */
#define LOCAL(counter) (BROKEN == NO_WAIT_LOCAL || STORED(counter) == ITEMS)
#define LOCAL_BEFORE_ENTRY (!IS_COMBINE || LOCAL(0))
#define LOCAL_BEFORE_CHUNK \
  ((BROKEN == LOCAL_LAST || LOCAL(IS_COMBINE -> 1 + READ_CHUNK : 0)) && \
   !(BROKEN == SENDS_FIRST && IS_RING && SENDERS != idle))

/* Any other wait ends at an abort or at the peers' flags; the abort word is loaded last. */
#define ABORT_SEEN (abort[me] && !(BROKEN == CREDIT_IGNORES_ABORT && at == wait_credit))
#define ENDS_WAITING(condition) (signal == none && (ABORT_SEEN || (condition)))
#define OUTCOME_OF_WAIT(condition) (abort[me] && !(BROKEN == FLAGS_FIRST && (condition)) -> aborted : arrived)

/* Records a failure for the last block. An abort is not replaced by a peer's poisoned plan. A prologue item
 * counts as finished all the same. */
#define NOT_COUNTED (BROKEN == FAILED_NOT_COUNTED || (BROKEN == FAILED_COUNTED && at == record))
inline record_failure() {
  FAILURE = (FAILURE == aborted || BROKEN == NO_FAILURE_RECORD -> FAILURE : outcome);
  if
  :: IS_PROLOGUE && BROKEN == FAILED_STORES -> push_item()
  :: else
  fi;
  if
  :: IS_LOW_LATENCY -> end_low_latency()
  :: IS_PROLOGUE && NOT_COUNTED -> outcome = unknown; drop_ticket()
  :: IS_PROLOGUE && !NOT_COUNTED -> finish_item()
  :: !IS_LOW_LATENCY && !IS_PROLOGUE -> finish_block()
  fi
}

/* Tells the peers first, if this rank aborts the call. */
inline report_failure() {
  if
  :: must_abort ->
     at = record;
     if
     :: BROKEN == FAILED_COUNTED && IS_PROLOGUE -> count_item()
     :: BROKEN == FAILED_SENT && SENDS && ticket != NO_TICKET ->
        STORED(1 + SENT_CHUNK)++;
        told = 1 << SENT_CHUNK;
        signal = (STORED(1 + SENT_CHUNK) == ITEMS && STORED(0) == ITEMS -> SIGNAL_CHUNK : none)
     :: else
     fi
  :: else -> record_failure()
  fi
}

/* Forwards an abort before others of this rank can see it, and before the call ends. */
inline see_abort() {
  must_abort = outcome == aborted && BROKEN != NO_FORWARD_ABORT &&
      !(abort[PEER(1)] && abort[PEER(RANKS - 1)]); /* else it would change nothing */
  report_failure()
}

/* Continues after an entry wait, or fails because of what the entry flags say. */
inline pass_entry() {
  compare_fingerprints();
  if
  :: outcome != arrived -> report_failure()
  :: IS_LOW_LATENCY && outcome == arrived -> end_low_latency()
  :: IS_PROLOGUE && outcome == arrived -> push_item(); finish_item()
  :: SENDS && outcome == arrived -> at = take
  :: !SENDS && !IS_LOW_LATENCY && !IS_PROLOGUE && outcome == arrived -> take_ticket()
  fi
}

inline abort_rank(rank) {
  abort[rank] = abort[rank] || BROKEN != NO_ABORT
}

/* Counts sequence numbers from the slowest rank's. Once all ranks have completed two calls, that rank always
 * has completed one or more. So later targets and tags are above 1, and comparisons by >= and by == have the
 * same results. What is too old for them becomes 0. Double buffers are swapped: SINGLE_ENTRY_BUFFER,
 * SINGLE_EAGER_BUFFER and SINGLE_COUNT_BUFFER need CALLS. */
#define LESS(flag) flag = (flag > 2 -> flag - 1 : 0)
#define LESS_TAG(tag) tag = (tag >= TAG(3, 0) -> tag - TAG(1, 0) : 0)
#define SWAP(less, even, odd) less(even); less(odd); spare = even; even = odd; odd = spare
inline rebase() {
  for (p : 0 .. RANKS - 1) {
    completed[p]--;
    SWAP(LESS, latest[p], latest[RANKS + p]);
    LESS(latest[2 * RANKS + p])
  }
  for (p : 0 .. PAIRS - 1) {
    SWAP(LESS, entry[p], entry[PAIRS + p]);
    SWAP(LESS_TAG, fingerprint[p], fingerprint[PAIRS + p])
  }
  for (p : 0 .. CHUNKS * PAIRS - 1) {
    LESS(chunk[p]);
#if HAS_RING
    LESS(credits[p])
#endif
  }
  for (p : 0 .. PAIRS * ITEMS - 1) {
    SWAP(LESS_TAG, data[p], data[PAIRS * ITEMS + p]);
    SWAP(LESS_TAG, segment_flags[p], segment_flags[PAIRS * ITEMS + p])
  }
  for (p : 0 .. PAIRS * ROW_DATA - 1) {
    LESS_TAG(data[2 * PAIRS * ITEMS + p])
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
#if HAS_RING
  next_sent[me] = 0;
  for (i : 0 .. CHUNKS - 1) {
    READERS(i) = (BROKEN == NO_RESET_CREDIT -> READERS(i) : 0)
  }
#endif
  to_start[me] = ALL_BLOCKS;
  at = idle;
  outcome = unknown;
  operation = 0;
  completed[me]++;
  if
  :: CALLS == 0 && completed[0] > 1 && completed[1] > 1 && completed[RANKS - 1] > 1 -> rebase()
  :: else
  fi;
  i = 0; p = 0
}

/* A resident block: runs blocks of the rank's kernels, one after another. With `sends`: the sending warps of
 * those blocks that run a ring dispatch. */
proctype Resident(byte me, resident; bool sends) {
#if !HAS_RING
  mtype at = idle;
#endif
  byte operation = (sends -> RING : 0);
  byte i, p;
  byte number; /* the block's, in a low-latency call */
  byte ticket = NO_TICKET;
  mtype outcome = unknown; /* its latest check's or wait's */
  mtype signal = none;     /* the next to send */
  byte told;               /* set by SIGNAL_CHUNK: a bit for each chunk */
  bool has_counts;         /* whether it has read a dispatch's counts and routes */
  bool must_abort;
  byte late; /* LATE_CREDIT: a chunk plus 1; OWN_TICKETS: whether its ticket is taken */

  do
  :: atomic { !SENDS && at == idle && signal == none && to_start[me] > 0 &&
         (CALLS == 0 || completed[me] < CALLS) ->
       if
       :: NEXT_OPERATION == 0 -> select (i : FIRST .. LAST + AND_RING);
          NEXT_OPERATION = (i > LAST -> RING : i);
          i = 0
       :: else
       fi;
       operation = NEXT_OPERATION;
       if
       :: to_start[me] & 1 -> number = 0
       :: !(to_start[me] & 1) || (IS_LOW_LATENCY && ANY_ORDER && to_start[me] == ALL_BLOCKS) -> number = 1
       fi;
       to_start[me] = to_start[me] - (1 << number);
       number = number * (IS_LOW_LATENCY || BROKEN == OWN_TICKETS);
       if
       :: BROKEN == ENTRY_BY_BLOCK && IS_LOW_LATENCY && number == 0 && !abort[me] ->
          at = take;
          store_fingerprints();
          signal = SIGNAL_ENTRY
       :: else -> take_ticket()
       fi
     }
  :: at == idle && CALLS > 0 && completed[me] == CALLS -> break

  :: d_step { !SENDS && at == take && signal == none -> take_ticket() }
#if HAS_RING
  :: d_step { SENDS && at == take && signal == none -> take_ticket_to_send() }
#endif

  :: d_step { at == check -> check_abort() }

  :: d_step { at == store && signal == none && TILE_COUNTED -> store_first() }

  :: d_step { at == send && signal == none -> send_rows() }

  /* SIGNAL_ENTRY, SIGNAL_CHUNK, SIGNAL_SEGMENT */
  :: atomic { signal != none -> TO_EACH(send_to);
       if
       :: signal == fingerprints -> signal = SIGNAL_ENTRY
       :: signal == SIGNAL_ENTRY && BROKEN == EARLY_SEQUENCE -> signal = late_fingerprints
       :: else -> signal = none
       fi;
       if
       :: at == take && signal == none -> drop_ticket()
       :: else
       fi
     }

  /* WAIT_ENTRY: all ranks are in this call, and it is the same call. Fingerprints are compared after the abort
   * word is loaded. */
  :: d_step { at == wait_entry && LOCAL_BEFORE_ENTRY && ENDS_WAITING(ALL_ENTRY) ->
       outcome = OUTCOME_OF_WAIT(ALL_ENTRY);
       if
       :: outcome != arrived -> see_abort()
       :: outcome == arrived && SEPARATE -> at = compare
       :: outcome == arrived && !SEPARATE -> pass_entry()
       fi
     }
  :: d_step { at == compare -> pass_entry() }

  /* Meanwhile some counts may be there. */
  :: d_step { (at == wait_entry || at == wait_chunk) && HAS_COUNTS && ANY_IS_WRONG ->
       assert(false)
     }

  /* WAIT_CHUNK: all ranks' rows of this chunk are here, and in a dispatch all routes and counts. */
  :: d_step { at == wait_chunk && LOCAL_BEFORE_CHUNK && ENDS_WAITING(ALL_CHUNKS) ->
       outcome = OUTCOME_OF_WAIT(ALL_CHUNKS);
       if
       :: outcome == arrived -> then_read()
       :: else -> see_abort()
       fi
     }

#if HAS_RING
  /* WAIT_CREDIT: all ranks have read the previous contents of this chunk's slots. */
  :: d_step { at == wait_credit && ENDS_WAITING(ALL_CREDIT) ->
       outcome = (ABORT_SEEN && BROKEN != FAILED_SENDS -> aborted : arrived);
       if
       :: outcome != arrived -> see_abort()
       :: outcome == arrived && SEPARATE -> at = send
       :: outcome == arrived && !SEPARATE -> send_rows()
       fi
     }
  :: d_step { at == wait_senders && SENDERS == idle -> finish_block() }
#endif

  /* WAIT_SEGMENT: the segments of all ranks that this block reads are here, including this rank's. */
  :: d_step { at == wait_segment && ALL_SEGMENTS ->
       for (p : 0 .. RANKS - 1) {
         read_datum(EAGER, me, p, ticket, MY_TAG)
       }
       reads[me]++;
       end_low_latency()
     }

  /* A missing segment ends the wait if there is an abort, if this rank has recorded a failure, or if the owner
   * sends none. The segment may come after that check; the wait ends all the same. */
  :: d_step { at == wait_segment && abort[me] -> outcome = aborted; see_abort() }
  :: d_step { at == wait_segment && FAILURE != unknown -> outcome = FAILURE; report_failure() }
  :: d_step { at == wait_segment && BROKEN != NO_PEER_CHECK &&
         (SENDS_NOTHING(PEER(1)) || SENDS_NOTHING(PEER(RANKS - 1))) ->
       compare_fingerprints();
       report_failure()
     }

  :: d_step { at == record && !must_abort && signal == none -> record_failure() }

  :: d_step { at == read && (IS_COMBINE || LOCAL(0)) -> read_data() }

  :: d_step { at == end && !due[me] -> end_call() }

  /* Aborts the call: a wait times out. */
  :: atomic { TIMEOUTS > 0 && timeouts_left > 0 && !abort[me] && !must_abort && signal == none &&
         (at == wait_segment || at == wait_credit || (at == wait_chunk && LOCAL_BEFORE_CHUNK) ||
          (at == wait_entry && LOCAL_BEFORE_ENTRY)) ->
       timeouts_left--;
       abort[me] = true;
       must_abort = true;
       outcome = aborted;
       report_failure() /* also if its flags come now */
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
#if HAS_RING
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
