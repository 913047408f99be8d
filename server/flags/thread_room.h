// Checks at the start that the process may have the threads that it needs.
// Where a thread cannot be made later, LibTorch, gRPC or the C++ library end
// the process without naming the limit.
#ifndef WEFT_SERVER_FLAGS_THREAD_ROOM_H_
#define WEFT_SERVER_FLAGS_THREAD_ROOM_H_

#include "absl/status/status.h"

namespace weft::server {

// Starts `count` threads, which end when all have started. Errors: those of
// pthread_create; the message names the limits that an operator may raise.
absl::Status CheckThreads(int count);

}  // namespace weft::server

#endif  // WEFT_SERVER_FLAGS_THREAD_ROOM_H_
