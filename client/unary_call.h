// Runs one unary RPC on gRPC's threads and repeats it as NextDelay says.
#ifndef WEFT_CLIENT_UNARY_CALL_H_
#define WEFT_CLIENT_UNARY_CALL_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/call_metadata.h"
#include "client/connection.h"
#include "client/retry.h"
#include "grpcpp/alarm.h"
#include "grpcpp/grpcpp.h"

namespace weft::client {

// The result of a call.
template <typename Response>
struct Reply {
  Response message;
  // True if the server sent a stored reply, because the step ran before.
  bool replayed = false;
};

struct CallOptions {
  absl::Duration timeout;
  RetryPolicy retry;
  std::string token;  // The bearer token; empty: none.
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

// One call with its repetitions. Start begins the call. After Start, the caller
// may only call Cancel, and gRPC's callbacks keep this object alive until the
// call ends.
// Threads: any; `done` runs once, on a thread of gRPC.
template <typename Request, typename Response>
class UnaryCall final
    : public std::enable_shared_from_this<UnaryCall<Request, Response>> {
 public:
  // Starts one attempt: calls a method of a stub's async() interface. Holds a
  // reference to the connection.
  using Method =
      std::function<void(grpc::ClientContext*, const Request*, Response*,
                         std::function<void(grpc::Status)>)>;
  using Done = std::function<void(absl::StatusOr<Reply<Response>>)>;

  UnaryCall(Method method, Request request, CallOptions options, Done done)
      : method_(std::move(method)),
        request_(std::move(request)),
        options_(std::move(options)),
        deadline_(absl::Now() + options_.timeout),
        done_(std::move(done)) {}

  void Start() ABSL_LOCKS_EXCLUDED(mu_) {
    grpc::ClientContext* context = nullptr;
    {
      absl::MutexLock lock(&mu_);
      context_ = std::make_unique<grpc::ClientContext>();
      context = context_.get();
      if (cancelled_) context->TryCancel();
    }
    context->set_deadline(absl::ToChronoTime(deadline_));
    AddCallMetadata(*context, options_.token, AdapterOf(request_));
    // Makes a copy, because End may clear method_ before the method returns.
    const Method method = method_;
    method(
        context, &request_, &response_,
        [self = this->shared_from_this()](const grpc::Status& status) mutable {
          const CallbackScope scope;
          const auto call = std::move(self);
          call->OnAttempt(status);
        });
  }

  // Ends the call early, normally with CANCELLED.
  void Cancel() ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    cancelled_ = true;
    if (context_ != nullptr) context_->TryCancel();
    alarm_.Cancel();
  }

 private:
  void OnAttempt(const grpc::Status& status) ABSL_LOCKS_EXCLUDED(mu_) {
    if (status.ok()) {
      const bool replayed =
          context_->GetServerTrailingMetadata().count("weft-replayed") > 0;
      End(Reply<Response>{std::move(response_), replayed});
      return;
    }
    const Failure failure = ReadFailure(status, *context_);
    unanswered_ = failure.retry_after ? 0 : unanswered_ + 1;
    const auto delay = NextDelay(options_.retry, unanswered_, failure,
                                 deadline_ - absl::Now(), DrawJitter());
    {
      absl::MutexLock lock(&mu_);
      if (delay && !cancelled_) {
        // Clears parts of a reply that the failed attempt may have left.
        response_ = Response();
        alarm_.Set(absl::ToChronoTime(absl::Now() + *delay),
                   [self = this->shared_from_this()](bool) mutable {
                     const CallbackScope scope;
                     const auto call = std::move(self);
                     call->Start();
                   });
        return;
      }
    }
    End(failure.status);
  }

  // Releases the connection before the caller gets the result. So if the caller
  // then destroys its client, the channel closes in the client's destructor and
  // not on this callback's thread.
  void End(absl::StatusOr<Reply<Response>> result) ABSL_LOCKS_EXCLUDED(mu_) {
    {
      absl::MutexLock lock(&mu_);
      context_ = nullptr;
    }
    method_ = nullptr;
    done_(std::move(result));
  }

  Method method_;  // Null after the last attempt.
  const Request request_;
  const CallOptions options_;
  const absl::Time deadline_;
  const Done done_;
  // The buffer of the reply. Only one attempt at a time uses it.
  Response response_;
  // Attempts in a row that failed without a retry hint from the server.
  int unanswered_ = 0;

  absl::Mutex mu_;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  // Replaced only between attempts and after the last one, because callbacks of
  // an attempt may read this pointer.
  std::unique_ptr<grpc::ClientContext> context_;
  grpc::Alarm alarm_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft::client

#endif  // WEFT_CLIENT_UNARY_CALL_H_
