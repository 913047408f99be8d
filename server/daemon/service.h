// The functions of weftd.so that weftd calls. Only weftd.so links LibTorch, so
// that weftd can answer --help within milliseconds.
#ifndef WEFT_SERVER_DAEMON_SERVICE_H_
#define WEFT_SERVER_DAEMON_SERVICE_H_

#include "server/flags/flags.h"
#include "server/flags/local_ranks.h"
#include "src/base/options/world.h"

// Calls RunDaemon for rank 0 and RunWorkerProcess for any other rank. Returns
// their result, which is the exit status of the process.
// `others` are the ranks that rank 0 started. Threads: the main thread, once.
extern "C" int WeftServe(const weft::server::Settings* settings,
                         const weft::World* world,
                         weft::server::LocalRanks* others);

// Checks what a start checks before it reads weights. With
// settings->device_memory_bytes, prints how the device's memory would be
// divided, and asks no device. Prints why a start would fail. Returns the exit
// status: 0, 2 for a refused value, 1 for any other failure.
extern "C" int WeftCheckStart(const weft::server::Settings* settings);

#endif  // WEFT_SERVER_DAEMON_SERVICE_H_
