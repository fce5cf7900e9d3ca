/* A Spin model of generations: what the host and two ranks do while workspaces grow, are released, or calls are
 * aborted. tests/tools/protocol_test.py checks that it holds, and that each mutation fails. transfer.pml has
 * the flags of the calls in full, and claims.pml has the calls of one control block at the same time.
 *
 * A rank has one stream. It makes calls and runs start kernels there, one after another. A call has four steps:
 * signal entry and store an eager packet; wait for the peer's entry; store a row to the peer, and signal it;
 * wait for the peer's row. Every access to an inbox or a workspace asserts that its memory is not freed.
 *
 * The host changes the generation: it allocates one, launches a start kernel on each rank, and then shows it to
 * all threads. An older one is freed when all ranks have begun a later one. Memory that is freed is used again
 * for a later generation. Its inbox is zeroed; its workspace keeps what was there. IN_ORDER: both ranks have
 * made the same calls when they begin a generation (a run that grows). Else the two streams are in any order
 * (release, calls of several threads). The first call after the host has stopped at a failure is not made.
 *
 * A launch may fail: of a call on rank 1, or of a start kernel. Then the host writes abort words. Threads take the
 * generations to abort under a lock, and keep them until their copies are issued. Copies run on streams of their
 * own. There are no deadlines here: a wait that nobody ends is a deadlock.
 *
 * What is checked
 *   - no access to freed memory;
 *   - an abort word, a packet or a row that is seen in a generation was written in it;
 *   - nobody waits for ever;
 *   - nothing fails without a cause, and the host finds every failure. */

#ifndef IN_ORDER
#define IN_ORDER 1
#endif
#ifndef CALLS_FAIL
#define CALLS_FAIL 0 /* 1: one call is not launched on rank 1 */
#endif
#ifndef DEVICE_FAILS
#define DEVICE_FAILS 0 /* 1: rank 1 stops for ever */
#endif
#ifndef STARTS_FAIL
#define STARTS_FAIL 0 /* 1: one start kernel is not launched */
#endif
#ifndef RELEASED
#define RELEASED 0 /* the generation that has no workspaces: jax_ep.release() */
#endif
#ifndef LAST
#define LAST 3 /* generations are 1 to LAST, up to 3; the first has begun */
#endif
#ifndef CALLS_OF_EACH
#define CALLS_OF_EACH 2 /* calls of each generation, in order */
#endif
#ifndef CALLS
#define CALLS (CALLS_OF_EACH * LAST) /* counts the calls of each rank */
#endif
#define SLOTS 2 /* generations that fit into memory */

/* ---- Mutations */

#define NOTHING 0
#define FREE_FIRST 1          /* a generation is freed when the next one is allocated */
#define FREE_WITH_FIRST_RANK 2 /* a generation is freed when rank 0 has begun a later one */
#define FREE_PARTLY_STARTED 3 /* a rank whose start kernel was not launched counts as one that has begun */
#define FREE_BEFORE_COPIES 4  /* a generation is freed before the host's copies to it */
#define NO_REFERENCE 5        /* a thread that aborts does not keep the generations */
#define NO_GENERATION_BITS 6  /* sequence numbers begin anew in each generation */
#define SHARED_INBOX 7        /* an inbox serves all generations */
#define NO_LEAVE 8            /* a rank leaves a generation without an entry flag */
#define LEAVE_AS_CALL 9       /* that entry flag has the fingerprint of the next call */
#define ABORT_IN_STREAM 10    /* abort words are written in the stream of the calls */
#define ABORT_CURRENT 11      /* only the current generation is aborted */
#define ABORT_OUTLIVED 12     /* a generation that starts meanwhile is not aborted */
#define START_NOT_ABORTED 13  /* a start kernel that is not launched aborts nothing */
#define FAILURE_OF_CURRENT 14 /* the host looks for failures in the current generation only */
#define FREE_FAILED 15        /* a generation that has failed is freed by a run that grows */
#define NO_WORKSPACE_CHECK 16 /* a call does not look whether there is a workspace */
#ifndef BROKEN
#define BROKEN NOTHING
#endif
hidden byte broken;

/* ---- Memory of generations. Both ranks' memory is allocated and freed together. */

byte slot_of[4];
byte owner[SLOTS]; /* the generation that has the slot, or 0 */
#define IS_ALLOCATED(g) (owner[slot_of[g]] == g)
#define USE(g) assert(IS_ALLOCATED(g) || BROKEN == SHARED_INBOX)
#define HAS_WORKSPACE(g) (g != RELEASED || BROKEN == NO_WORKSPACE_CHECK)

#define IN(g, rank) (2 * (BROKEN == SHARED_INBOX -> SLOTS : slot_of[g]) + rank)
#define ENTRY(g, rank, n) (2 * IN(g, rank) + n % 2)
byte entry[4 * (SLOTS + 1)]; /* double-buffered: a sequence number, and a fingerprint */
byte fingerprint[4 * (SLOTS + 1)];
byte row_flag[2 * (SLOTS + 1)];
byte abort[2 * (SLOTS + 1)]; /* the generation that it is for, or 0 */

#define EAGER(g, rank, n) (2 * (2 * slot_of[g] + rank) + n % 2)
#define ROW(g, rank) (2 * slot_of[g] + rank)
byte tag[4 * SLOTS];    /* tags eager packets, double-buffered */
byte packet[4 * SLOTS]; /* what came with the tag */
byte row[2 * SLOTS];

#define SEQUENCE(g, n) ((BROKEN == NO_GENERATION_BITS -> 0 : 16 * g) + n)
#define DATUM(g) (16 * g + made[me])

/* ---- Ranks */

byte generation[2] = 1; /* copied into the control block */
byte completed[2];      /* calls of the generation; the running call has the next number */
byte made[2];           /* calls of the program */
byte to_start[2];       /* a bit for each generation whose start kernel waits in the stream */
byte begun[2] = 1;      /* the generation whose start kernel has ended, as the host sees it */
bool in_call[2];
bool has_failed;        /* some call has */

/* ---- The host */

byte current = 1;
byte kept = 2;         /* bits: the current and the retired generations */
byte references[4];
byte copies[4]; /* bits of ranks whose abort word is in flight */
byte partly_started;   /* a bit for each generation that a rank will not begin */
byte failed;           /* bits: generations that the host aborts */
byte reported;         /* bits: generations in which a call has reported a failure */
byte to_abort;         /* launches that have failed and have aborted nothing yet */
bool was_aborted;      /* since the start or release */
byte launches_to_fail = CALLS_FAIL + STARTS_FAIL + DEVICE_FAILS;
bool has_stopped;      /* no generation will start any more */
#define HAS(set, g) ((set >> g) & 1)

#define BEGUN_BY(g, rank) (begun[rank] >= g)
#define HAS_BEGUN(g) \
  (HAS(kept, g) && \
   (BROKEN == FREE_PARTLY_STARTED && HAS(partly_started, g) -> BEGUN_BY(g, 0) || BEGUN_BY(g, 1) : \
    !HAS(partly_started, g) && BEGUN_BY(g, 0) && (BROKEN == FREE_WITH_FIRST_RANK || BEGUN_BY(g, 1))))
#define HAS_FAILED(g) (HAS(failed, g) || HAS(reported, g))
#define FOUND_FAILURE \
  (BROKEN == FAILURE_OF_CURRENT -> HAS_FAILED(current) : (kept & (failed | reported)) != 0)

#define CAN_FREE(g) \
  (g > 0 && !HAS(kept, g) && references[g] == 0 && (copies[g] == 0 || BROKEN == FREE_BEFORE_COPIES) && \
   (g <= current))

/* GENERATION_FREE. What is kept no more is freed when no thread has it and its copies have ended. A generation
 * that has failed is kept for its failure, except by release. */
inline free_retired(is_release) {
  for (i : 1 .. LAST) {
    if
    :: HAS_BEGUN(i) && i > 1 ->
       for (j : 1 .. i - 1) {
         if
         :: HAS(kept, j) && (!HAS_FAILED(j) || is_release || BROKEN == FREE_FAILED ||
                             BROKEN == FAILURE_OF_CURRENT) -> kept = kept - (1 << j)
         :: else
         fi
       }
    :: else
    fi
  }
  i = 0; j = 0
}
active proctype Free() {
end:
  do
  :: d_step { CAN_FREE(owner[0]) -> owner[0] = 0 }
  :: d_step { CAN_FREE(owner[1]) -> owner[1] = 0 }
  od
}

/* GENERATION_ALLOCATE */
inline allocate() {
  slot_of[g] = (owner[0] == 0 -> 0 : 1);
  owner[slot_of[g]] = g;
  for (i : 0 .. 1) {
    if
    :: BROKEN != SHARED_INBOX ->
       entry[ENTRY(g, i, 0)] = 0; entry[ENTRY(g, i, 1)] = 0;
       fingerprint[ENTRY(g, i, 0)] = 0; fingerprint[ENTRY(g, i, 1)] = 0;
       row_flag[IN(g, i)] = 0; abort[IN(g, i)] = 0
    :: else
    fi
  }
  i = 0
}

/* The thread that changes the generation. */
proctype Host() {
  byte g = 2, i, j;
  c_code {
    if (getenv("BROKEN")) broken = atoi(getenv("BROKEN"));
  };
  do
  :: g > LAST -> break
  :: g <= LAST ->
     /* A run that finds a failure does not grow. Release forgets what has failed until here. */
     if
     :: d_step { g == RELEASED -> was_aborted = false }
     :: g != RELEASED && FOUND_FAILURE -> break
     :: g != RELEASED && !FOUND_FAILURE
     fi;
     kept = (BROKEN == FREE_FIRST -> 0 : kept);
     if
     :: d_step { owner[0] == 0 || owner[1] == 0 -> allocate() }
     :: owner[0] != 0 && owner[1] != 0 && FOUND_FAILURE -> break
     fi;
     /* GENERATION_START: launches the start kernels, then shows the generation to all threads. */
     for (i : 0 .. 1) {
       if
       :: to_start[i] = to_start[i] | (1 << g)
       :: atomic { STARTS_FAIL && launches_to_fail > 0 ->
            launches_to_fail--;
            partly_started = partly_started | (1 << g) }
       fi
     }
     i = 0;
     /* What was aborted meanwhile is aborted in this generation, too. */
     atomic {
       kept = kept | (1 << g);
       current = g;
       if
       :: (was_aborted && BROKEN != ABORT_OUTLIVED) ||
          (HAS(partly_started, g) && BROKEN != START_NOT_ABORTED) -> to_abort = to_abort + 1
       :: else
       fi
     }
     (to_abort == 0); /* it has written abort words; the thread of a call may, too */
     d_step { free_retired(false) }
     /* The next one needs memory: it waits until all ranks have begun this one, if that will be. */
     if
     :: d_step { (HAS_BEGUN(g) || BROKEN == FREE_FIRST) -> free_retired(g == RELEASED) }
     :: FOUND_FAILURE && (g != RELEASED || HAS(partly_started, g))
     fi;
     g++
  od;
  has_stopped = true
}

/* HOST_ABORT, by any thread. The host's copies wait for no kernel. */
active proctype Abort() {
  byte set, i;
end:
  do
  :: d_step { to_abort > 0 ->
       set = (BROKEN == ABORT_CURRENT -> 1 << current : kept) & ~failed;
       failed = failed | set;
       was_aborted = true;
       for (i : 1 .. LAST) {
         references[i] = references[i] + (HAS(set, i) && BROKEN != NO_REFERENCE)
       }
       i = 1
     }
     do
     :: d_step { i <= LAST && HAS(set, i) -> USE(i); copies[i] = 3; references[i] = 0; i++ }
     :: d_step { i <= LAST && !HAS(set, i) -> i++ }
     :: d_step { i > LAST -> i = 0; set = 0; to_abort-- } break
     od
  od
}
#define COPY(g, rank) \
  d_step { HAS(copies[g], rank) && (BROKEN != ABORT_IN_STREAM || !in_call[rank]) -> \
    USE(g); \
    copies[g] = copies[g] & ~(1 << rank); \
    abort[IN(g, rank)] = (abort[IN(g, rank)] == 0 -> g : abort[IN(g, rank)]) }
active proctype HostStreams() {
end:
  do
  :: COPY(1, 0)
  :: COPY(1, 1)
  :: COPY(2, 0)
  :: COPY(2, 1)
  :: COPY(3, 0)
  :: COPY(3, 1)
  od
}

/* ---- The stream of a rank */

#define NEXT_START (HAS(to_start[me], 2) -> 2 : 3)
#define GENERATION_OF_CALL (made[me] / CALLS_OF_EACH + 1) /* in order: that of the next call */
#define MAY_CALL (current >= GENERATION_OF_CALL && !HAS(partly_started, GENERATION_OF_CALL))
#define IN_GENERATION (MAY_CALL && generation[me] == GENERATION_OF_CALL)
#define IS_ABORTED (abort[IN(g, me)] != 0)
#define MY_SEQUENCE SEQUENCE(g, n)
#define HAS_ENTERED (entry[ENTRY(g, me, n)] >= MY_SEQUENCE)
#define HAS_PACKET (tag[EAGER(g, me, n)] == MY_SEQUENCE)
#define HAS_ROW (row_flag[IN(g, me)] >= MY_SEQUENCE)

/* GENERATION_LEAVE: a peer that makes the next call of the generation finds a fingerprint of no call. */
inline leave() {
  USE(g);
  if
  :: BROKEN != NO_LEAVE ->
     entry[ENTRY(g, peer, n)] = MY_SEQUENCE;
     fingerprint[ENTRY(g, peer, n)] = (BROKEN == LEAVE_AS_CALL -> made[me] + 1 : 0)
  :: else
  fi
}

inline signal_entry() {
  USE(g);
  entry[ENTRY(g, peer, n)] = MY_SEQUENCE;
  fingerprint[ENTRY(g, peer, n)] = made[me] + 1;
  tag[EAGER(g, peer, n)] = MY_SEQUENCE;
  packet[EAGER(g, peer, n)] = DATUM(g)
}

/* A wait has ended. The abort word counts more than the flag. A deadline is for calls that the peer never makes. */
#define IS_LATE (!IN_ORDER && made[peer] == CALLS)
#define ENDS_WAITING(flag) ((flag) || IS_ABORTED || IS_LATE)
inline end_wait(flag) {
  USE(g);
  fails = fails || IS_ABORTED || !(flag);
  assert(!IS_ABORTED || abort[IN(g, me)] == g)
}

proctype Rank(byte me) {
  byte g, n; /* of the running call, or of the generation that the rank leaves */
  bool fails;
  byte peer = 1 - me;
  do
  :: d_step { to_start[me] != 0 && (!IN_ORDER || made[me] >= CALLS_OF_EACH * (NEXT_START - 1)) ->
       g = generation[me];
       n = completed[me] + 1;
       leave() }
     d_step {
       g = NEXT_START;
       to_start[me] = to_start[me] & ~(1 << g);
       generation[me] = g;
       completed[me] = 0 }
     d_step { begun[me] = g; g = 0; n = 0 }

  /* Its launch fails. */
  :: d_step { CALLS_FAIL && me == 1 && launches_to_fail > 0 && made[me] < CALLS && MAY_CALL ->
       launches_to_fail--;
       made[me]++;
       to_abort++ }

  /* It runs no kernel any more, so it has begun every generation. */
  :: d_step { DEVICE_FAILS && me == 1 && launches_to_fail > 0 ->
       launches_to_fail--;
       begun[me] = LAST;
       to_abort++ }
     break

  :: d_step { made[me] < CALLS && (!IN_ORDER || IN_GENERATION) ->
       g = generation[me];
       n = completed[me] + 1;
       in_call[me] = true;
       USE(g) }
     if
     :: d_step { IS_ABORTED -> end_wait(true) }
     :: d_step { !IS_ABORTED && !HAS_WORKSPACE(g) -> fails = true }
     :: d_step { !IS_ABORTED && HAS_WORKSPACE(g) -> skip }
        d_step { signal_entry() }
        d_step { ENDS_WAITING(HAS_ENTERED) -> end_wait(HAS_ENTERED);
          fails = fails || fingerprint[ENTRY(g, me, n)] != made[me] + 1 }
        if
        :: fails
        :: !fails ->
           d_step { ENDS_WAITING(HAS_PACKET) -> end_wait(HAS_PACKET);
             assert(fails || packet[EAGER(g, me, n)] == DATUM(g)) }
           if
           :: fails
           :: !fails ->
              d_step { USE(g); assert(g != RELEASED); row[ROW(g, peer)] = DATUM(g) }
              d_step { USE(g); row_flag[IN(g, peer)] = MY_SEQUENCE }
              d_step { ENDS_WAITING(HAS_ROW) -> end_wait(HAS_ROW) }
              if
              :: fails
              :: d_step { !fails -> USE(g); assert(row[ROW(g, me)] == DATUM(g)) }
              fi
           fi
        fi
     fi;
     if
     :: d_step { fails ->
          has_failed = true;
          USE(g);
          if
          :: !IS_ABORTED -> abort[IN(g, me)] = g; reported = reported | (1 << g)
          :: else
          fi }
        d_step { USE(g);
          abort[IN(g, peer)] = (abort[IN(g, peer)] == 0 -> g : abort[IN(g, peer)]) }
     :: else
     fi;
     d_step { completed[me]++; made[me]++; g = 0; n = 0; fails = false; in_call[me] = false }

  :: d_step { IN_ORDER && made[me] < CALLS && has_stopped && to_start[me] == 0 &&
       !IN_GENERATION -> made[me] = CALLS }
  :: made[me] == CALLS && has_stopped && to_start[me] == 0 -> break
  od
}

init {
  atomic {
    owner[0] = 1;
    run Host();
    run Rank(0);
    run Rank(1)
  }
  (_nr_pr == 4 && to_abort == 0); /* Free, Abort, HostStreams */
  assert(!has_failed || FOUND_FAILURE || RELEASED);
  assert(!has_failed || !IN_ORDER || launches_to_fail < CALLS_FAIL + STARTS_FAIL + DEVICE_FAILS)
}
