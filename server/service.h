// The one symbol between weftd, which must answer --help within milliseconds,
// and weftd.so beside it, which brings LibTorch.
#ifndef WEFT_SERVER_SERVICE_H_
#define WEFT_SERVER_SERVICE_H_

#include "server/flags.h"
#include "server/local_ranks.h"
#include "src/config/world.h"

// Serves until a signal, or computes for rank 0 until it ends; returns the exit
// status of the process (see RunDaemon and RunFollower). `others` are those
// that rank 0 has started. Threads: the main thread, once.
extern "C" int WeftServe(const weft::Settings* settings,
                         const weft::World* world, weft::LocalRanks* others);

#endif  // WEFT_SERVER_SERVICE_H_
