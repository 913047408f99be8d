// The one symbol between weftd, which must answer --help within milliseconds,
// and weftd.so beside it, which brings LibTorch.
#ifndef WEFT_SERVER_SERVICE_H_
#define WEFT_SERVER_SERVICE_H_

#include "server/flags.h"

// Serves until a signal; returns the exit status of the process (see
// RunDaemon). Threads: the main thread, once.
extern "C" int WeftServe(const weft::Settings* settings);

#endif  // WEFT_SERVER_SERVICE_H_
