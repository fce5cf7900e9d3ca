/* A Spin model of two lanes on two GPUs, and of the SMs that they share. tests/tools/protocol_test.py checks that it
 * holds, and that each mutation fails.
 *
 * The kernels of a lane run one after another in a stream of their own. A GPU has SLOTS places for blocks. A kernel
 * has as many blocks as its lane's share (LANE_SHARE) allows; lane 0 may have no limit. Blocks become resident in any order, of one lane or
 * the other, and stay until they have ended. A block claims its lane's control block; the first one signals entry
 * to the peer, and every block waits for the peer's entry. The last block ends the call and frees the claim.
 *
 * What is checked: nobody waits for ever, no call finds the claim of another, and each call finds entries of its own
 * lane only (LANE_GROUP: each lane has a group of its own). */

#define LANES 2
#ifndef SLOTS
#define SLOTS 3
#endif
#ifndef UNLIMITED
#define UNLIMITED 0 /* 1: lane 0 has no share, as beside transfers in flight, which are the other lane's */
#endif
#ifndef CALLS
#define CALLS 3 /* counts the calls of each lane */
#endif

/* ---- Mutations */

#define NOTHING 0
#define NO_SHARE 1     /* a kernel may have as many blocks as the GPU has places */
#define SHARED_CLAIM 2 /* the lanes of a rank have one control block */
#define SHARED_INBOX 3 /* and one inbox: the entries of one lane are those of the other */
#ifndef BROKEN
#define BROKEN NOTHING
#endif
hidden byte broken;

/* The blocks of a lane's kernels. */
#define SHARE(lane) (BROKEN == NO_SHARE || (UNLIMITED && lane == 0) -> SLOTS : SLOTS / LANES)
#define AT(rank, lane) (2 * (rank) + (lane))
#define CONTROL(rank, lane) AT(rank, (BROKEN == SHARED_CLAIM -> 0 : lane))
#define INBOX(rank, lane) AT(rank, (BROKEN == SHARED_INBOX -> 0 : lane))

byte resident[2]; /* blocks on the rank's GPU */
byte claim[4];    /* holds a lane plus 1, or 0, for each control block */
byte entry[4];    /* in an inbox: sequence number of the peer's call */
byte writer[4];   /* the lane of that call */

/* The kernels of a lane on a rank. */
proctype Kernels(byte me, lane) {
  byte made, started, waiting, ended;
  do
  :: made == CALLS -> break
  :: atomic { made < CALLS && started < SHARE(lane) && resident[me] < SLOTS ->
       resident[me]++;
       assert(claim[CONTROL(me, lane)] == 0 || claim[CONTROL(me, lane)] == lane + 1);
       claim[CONTROL(me, lane)] = lane + 1;
       if
       :: started == 0 ->
          entry[INBOX(1 - me, lane)] = made + 1;
          writer[INBOX(1 - me, lane)] = lane
       :: else
       fi;
       started++;
       waiting++ }
  :: atomic { waiting > 0 && entry[INBOX(me, lane)] >= made + 1 ->
       assert(writer[INBOX(me, lane)] == lane);
       waiting--;
       ended++;
       resident[me]--;
       if
       :: ended == SHARE(lane) ->
          claim[CONTROL(me, lane)] = 0;
          started = 0;
          ended = 0;
          made++
       :: else
       fi }
  od
}

init {
  c_code {
    if (getenv("BROKEN")) broken = atoi(getenv("BROKEN"));
  };
  atomic {
    run Kernels(0, 0);
    run Kernels(0, 1);
    run Kernels(1, 0);
    run Kernels(1, 1)
  }
}
