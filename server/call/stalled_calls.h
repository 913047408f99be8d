// Ends the gRPC calls whose clients make no progress: a client that does not
// read its reply, or that does not go on sending, would hold memory for as long
// as it likes.
#ifndef WEFT_SERVER_CALL_STALLED_CALLS_H_
#define WEFT_SERVER_CALL_STALLED_CALLS_H_

#include <cstdint>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "src/base/threads/mutex.h"

namespace weft::server {

// Threads: any.
class StalledCalls {
 public:
  // A client has this long, and kPatiencePerMiB besides for each MiB.
  static constexpr absl::Duration kPatience = absl::Minutes(1);
  static constexpr absl::Duration kPatiencePerMiB = absl::Seconds(10);

  // From now on waits for the client of this call to read or send `bytes`.
  // REQUIRES: the call's OnDone calls Forget.
  void Await(grpc::CallbackServerContext* context, int64_t bytes)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Waits no longer for the client.
  void Forget(grpc::CallbackServerContext* context) ABSL_LOCKS_EXCLUDED(mu_);

  // Cancels the calls whose clients are late at `now`. Call it periodically, on
  // a thread that is not gRPC's.
  void Cancel(absl::Time now) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  Mutex mu_;
  std::map<grpc::CallbackServerContext*, absl::Time> limits_
      ABSL_GUARDED_BY(mu_);
};

}  // namespace weft::server

#endif  // WEFT_SERVER_CALL_STALLED_CALLS_H_
