// The options, the result and the adapter of a call.
#ifndef WEFT_CLIENT_CALL_OPTIONS_H_
#define WEFT_CLIENT_CALL_OPTIONS_H_

#include <string>

#include "absl/time/time.h"
#include "client/retry.h"

namespace weft::client {

struct CallOptions {
  absl::Duration timeout;
  RetryPolicy retry;
  std::string token;  // The bearer token; empty: none.
};

// The result of a call.
template <typename Response>
struct Reply {
  Response message;
  // True if the server sent a stored reply, because the step ran before.
  bool replayed = false;
};

// Returns the adapter that a request names; empty if it names none.
template <typename Request>
std::string AdapterOf(const Request& request) {
  if constexpr (requires { request.adapter_id(); }) {
    return request.adapter_id();
  } else {
    return std::string();
  }
}

}  // namespace weft::client

#endif  // WEFT_CLIENT_CALL_OPTIONS_H_
