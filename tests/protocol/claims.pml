/* A Spin model of the claim of a control block (ffi/device/protocol/claim.cuh): two streams of a device make calls, and
 * start generations, at the same time. tests/tools/protocol_test.py checks that it holds, and that each mutation fails.
 *
 * Each stream runs KERNELS kernels, one after another: a call of two blocks, or (STARTS in all) a kernel that starts a
 * generation. All calls of a stream have one tag. Every block of a call loads the generation's number, sets the tag
 * and looks at what was there. With the claim it works, and waits for peers, who have always come: the wait only
 * loads the abort word. The last block resets the work counters and ends the claim: it stores the call's sequence
 * number as that of the last one that has ended, and frees the claim unless it is contested. It waits for neither, so
 * they may happen in any order. A block without the claim sets the abort word, and fails.
 *
 * As in a low-latency call, a block loads the abort word and draws a ticket before it looks at the claim. The first ticket
 * is for what the call sends. The last block waits until it is sent, as peers do, or for an abort. In a release's
 * generation there is no workspace, and nothing is sent. Here a block claims, loads and draws in one step. In three steps
 * there are more states, and the model holds, too.
 *
 * What is checked
 *   - blocks that have the claim are of one call, and work in the generation that they have claimed;
 *   - a call finds no work counters of another call, and goes by the abort word of its own generation;
 *   - a call that has passed its wait in all blocks had a sequence number of its own;
 *   - a call without the claim in some block is recorded as a failure;
 *   - nobody waits for ever. */

#ifndef KERNELS
#define KERNELS 3
#endif
#ifndef STARTS
#define STARTS 1
#endif
#ifndef DRAINED
#define DRAINED 0 /* 1: start kernels are release's: they run when the other stream is idle, and end a contest */
#endif
#define BLOCKS 2

/* ---- Mutations */

#define NOTHING 0
#define NO_CLAIM 1          /* a block goes on, whatever tag it finds */
#define CLAIM_ENDED_FIRST 2 /* the claim ends before the work counters are reset */
#define CONTESTED_FREED 3   /* a contested claim becomes free when a call ends */
#define NO_OWNER 4          /* nobody finds out whose a contested claim is */
#define OWNER_STAYS 5       /* a contested claim is still its owner's when that call has ended */
#define END_UNSEEN 6        /* a block that finds its own tag as the owner's does not ask whether that call has ended */
#define HOST_ANY_TIME 7     /* a generation starts while a call runs */
#define HOST_CONTESTED 8    /* a generation starts while the owner of a contested claim runs */
#define HOST_AT_ONCE 9      /* the host's claim ends before blocks claim that have loaded the old number */
#define NO_HOST_CLAIM 10    /* a block does not wait for the end of the host's claim */
#define CONTEST_FORGOTTEN 11 /* a contested claim is free in the next generation, without a release */
#define NO_RECORD 12        /* a block without the claim sets no abort word */
#define END_OF_ANY 13       /* sequence numbers of calls that have ended lack the generation */
#define OLD_WORD 14         /* a call that has met the host's claim keeps the abort word */
#define NEW_TICKET 15       /* it draws another ticket in place of its first one */
#ifndef BROKEN
#define BROKEN NOTHING
#endif
hidden byte broken;

/* ---- The control block. Tags are 1 and 2; a contested claim has both. */

byte generation = 1;
byte tags;
bool host;      /* whether the host has the claim */
byte completed; /* calls of the generation */
byte owner;     /* the tag that has a contested claim, or 0 */
byte last_ended; /* the sequence number of the last call that has ended */
#define SEQUENCE(of_generation, number) ((BROKEN == END_OF_ANY -> 0 : (of_generation) * 8) + (number))
byte counters;  /* work items drawn */
bool drawn;     /* the first ticket of those that are drawn before the claim is known */
byte finished;  /* blocks */
byte aborted;   /* generations with the abort word set, by bit */

/* ---- What the model knows of the calls */

byte loading;     /* blocks between their load of the generation's number and that of the abort word */
byte running[3];  /* blocks with the claim, by tag */
byte used[4];     /* sequence numbers of calls that have passed, a bit each, by generation */
byte starts_left = STARTS;
mtype = { none, call, start };
mtype kind[3] = none; /* the stream's kernel */
byte to_run[3] = 3;   /* its blocks, a bit each */
byte made[3];         /* kernels */
bool lost[3];         /* a block had no claim */
bool passed[3];       /* a block has passed its wait */
bool sent[3];         /* the call has sent its items */

#define HAS_ENDED (tags == 3 && (last_ended >= SEQUENCE(generation, completed + 1) || BROKEN == HOST_CONTESTED)) /* a contested call */

inline record_end() {
  d_step { last_ended = (BROKEN != OWNER_STAYS && SEQUENCE(seen, sequence) > last_ended -> SEQUENCE(seen, sequence) : last_ended) }
}

inline free_claim() { /* a compare-and-swap */
  d_step {
    if
    :: (tags == tag && completed + 1 == sequence && !host) || BROKEN == CONTESTED_FREED -> tags = 0; completed++
    :: else
    fi;
    running[tag]-- }
}

inline end_block() {
  to_run[tag] = to_run[tag] & ~block;
  if
  :: to_run[tag] == 0 ->
     assert(!lost[tag] || aborted != 0);
     to_run[tag] = 3;
     kind[tag] = none;
     lost[tag] = false;
     passed[tag] = false;
     sent[tag] = false;
     made[tag]++
  :: else
  fi;
  seen = 0; sequence = 0; before = 0; has_failed = false; is_last = false; met_host = false; sends = false;
  word_of = 0
}

proctype Block(byte tag, block) {
  byte seen, sequence, before;
  byte word_of;         /* the generation whose abort word the block has loaded */
  bool met_host, sends; /* the block has met the host's claim; it has drawn the first ticket */
  bool has_failed, is_last;
  do
  :: made[tag] == KERNELS -> break
  :: atomic { made[tag] < KERNELS && kind[tag] == none ->
       if
       :: kind[tag] = call
       :: starts_left > 0 -> kind[tag] = start; to_run[tag] = block; starts_left--
       fi }

  :: kind[tag] == call && (to_run[tag] & block) ->
request:
     skip;
     d_step { seen = generation; loading++ }
     d_step { /* CLAIM_CALL */
       before = (host && BROKEN != NO_HOST_CLAIM -> 4 : tags);
       sequence = completed + 1;
       tags = tags | tag;
       loading--;
       if
       :: !met_host -> word_of = generation; sends = !drawn; drawn = true
       :: else
       fi }
     if
     :: before == 4 -> (!host); met_host = true; goto request
     :: before == 3 - tag && BROKEN != NO_CLAIM ->
        owner = before; /* CLAIM_CONTEST */
        goto fail
     :: before == 3 && BROKEN != NO_CLAIM ->
        if
        :: last_ended >= SEQUENCE(seen, sequence) && BROKEN != END_UNSEEN && BROKEN != NO_OWNER -> goto fail
        :: else
        fi;
        if
        :: owner == tag || BROKEN == NO_OWNER
        :: owner != 0 && owner != tag && BROKEN != NO_OWNER -> goto fail
        :: last_ended >= SEQUENCE(seen, sequence) && BROKEN != END_UNSEEN && BROKEN != NO_OWNER -> goto fail
        fi
     :: before == 0 || before == tag || BROKEN == NO_CLAIM
     fi;
     d_step { running[tag]++; counters++;
       word_of = (met_host && BROKEN != OLD_WORD -> generation : word_of);
       if
       :: met_host && BROKEN == NEW_TICKET -> sends = !drawn; drawn = true
       :: else
       fi;
       sent[tag] = sent[tag] || sends;
       assert(running[3 - tag] == 0 && seen == generation && counters <= BLOCKS && word_of == seen);
       word_of = 0; sends = false; met_host = false }
     /* WAIT_ENTRY */
     d_step { assert(seen == generation);
       has_failed = (aborted >> seen) & 1;
       if
       :: !has_failed && !passed[tag] ->
          assert(((used[seen] >> sequence) & 1) == 0);
          used[seen] = used[seen] | (1 << sequence);
          passed[tag] = true
       :: else
       fi }
     d_step { finished + 1 < BLOCKS || sent[tag] || ((aborted >> seen) & 1) || DRAINED ->
       assert(seen == generation);
       finished++;
       is_last = finished == BLOCKS;
       running[tag] = running[tag] - !is_last }
     if
     :: is_last ->
        d_step { finished = 0; drawn = false; counters = (BROKEN == CLAIM_ENDED_FIRST -> counters : 0) }
        if /* CLAIM_END */
        :: record_end(); free_claim()
        :: free_claim(); record_end()
        fi;
        if
        :: BROKEN == CLAIM_ENDED_FIRST -> counters = 0
        :: else
        fi
     :: else
     fi;
     d_step { end_block() }
     goto ended;
fail:
     skip;
     d_step { lost[tag] = true;
       aborted = aborted | ((BROKEN != NO_RECORD) << generation);
       end_block() }
ended:
     skip

  :: kind[tag] == start && (to_run[tag] & block) ->
     /* CLAIM_HOST */
     d_step { (tags == 0 || HAS_ENDED || BROKEN == HOST_ANY_TIME) && (!DRAINED || kind[3 - tag] == none) ->
       before = (DRAINED || BROKEN == CONTEST_FORGOTTEN -> 0 : tags);
       host = true }
     d_step { generation++; completed = 0; counters = 0; drawn = false; finished = 0 }
     d_step { loading == 0 || BROKEN == HOST_AT_ONCE ->
       host = false;
       tags = before;
       owner = 0;
       last_ended = (before == 0 -> last_ended : SEQUENCE(generation, 1));
       end_block() }
  od
}

init {
  c_code {
    if (getenv("BROKEN")) broken = atoi(getenv("BROKEN"));
  };
  atomic {
    run Block(1, 1);
    run Block(1, 2);
    run Block(2, 1);
    run Block(2, 2)
  }
}
