// Runs one unary RPC on gRPC's threads and repeats it as NextDelay says.
#ifndef WEFT_CLIENT_UNARY_CALL_H_
#define WEFT_CLIENT_UNARY_CALL_H_

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/connection.h"
#include "client/retry.h"
#include "client/route.h"
#include "grpcpp/alarm.h"
#include "grpcpp/grpcpp.h"
#include "src/base/clock.h"

namespace weft::client {

// The options of a call.
struct CallOptions {
  absl::Duration timeout;
  RetryPolicy retry;
  std::string token;  // The bearer token; empty: none.
  // Whether the client has had an answer, which the call sets; null: yes.
  std::shared_ptr<std::atomic<bool>> answered = nullptr;
};

// The result of a call.
template <typename Response>
struct Reply {
  Response message;
  // True if the server sent a stored reply, because the step ran before.
  bool replayed = false;
  // The address of the server, if the call has a trip.
  std::string server = {};
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

// Returns the checkpoint from which a request samples; empty if there is none.
template <typename Request>
std::string CheckpointOf(const Request& request) {
  if constexpr (requires { std::string(request.checkpoint()); }) {
    return request.checkpoint();
  } else {
    return std::string();
  }
}

// One call with its repetitions, and with attempts at other servers, which are
// no repetitions (Trip). Start begins the call. After Start, the caller
// may only call Cancel, and gRPC's callbacks keep this object alive until the
// call ends.
// Threads: any; `done` runs once, on a thread of gRPC.
template <typename Request, typename Response>
class UnaryCall final
    : public std::enable_shared_from_this<UnaryCall<Request, Response>> {
 public:
  // Starts an attempt by a stub's async() interface.
  using Method =
      std::function<void(grpc::ClientContext*, const Request*, Response*,
                         std::function<void(grpc::Status)>)>;
  using Done = std::function<void(absl::StatusOr<Reply<Response>>)>;

  // `trip` decides where `method` makes an attempt; null: `method` does.
  UnaryCall(Method method, Request request, CallOptions options, Done done,
            std::shared_ptr<Trip> trip = nullptr)
      : trip_(std::move(trip)),
        method_(std::move(method)),
        request_(std::move(request)),
        options_(std::move(options)),
        deadline_(SteadyNow() + options_.timeout),
        done_(std::move(done)) {}

  void Start() ABSL_LOCKS_EXCLUDED(mu_) {
    grpc::ClientContext* context = nullptr;
    {
      absl::MutexLock lock(&mu_);
      context_ = std::make_unique<grpc::ClientContext>();
      context = context_.get();
      if (cancelled_) context->TryCancel();
    }
    context->set_deadline(ToGrpcTime(deadline_));
    AddCallMetadata(*context, options_.token, AdapterOf(request_),
                    CheckpointOf(request_));
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
  bool IsCancelled() ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    return cancelled_;
  }

  void StartLater(absl::Time when) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    // The alarm that runs this call cannot be set again.
    alarm_ = grpc::Alarm();
    alarm_.Set(ToGrpcTime(when),
               [self = this->shared_from_this()](bool) mutable {
                 const CallbackScope scope;
                 const auto call = std::move(self);
                 call->Start();
               });
  }

  void OnAttempt(const grpc::Status& status) ABSL_LOCKS_EXCLUDED(mu_) {
    if (status.ok()) {
      NoteAnswer();
      const bool replayed =
          context_->GetServerTrailingMetadata().count("weft-replayed") > 0;
      End(Reply<Response>{std::move(response_), replayed,
                          trip_ == nullptr ? "" : trip_->asked()});
      return;
    }
    Failure failure = ReadFailure(status, *context_);
    if (absl::IsCancelled(failure.status) && !failure.from_server &&
        !IsCancelled()) {
      // No service has said so: gRPC cut the call off because the server's
      // process ends.
      failure.status = absl::UnavailableError(failure.status.message());
    }
    if (failure.retry_after || !absl::IsUnavailable(failure.status)) {
      NoteAnswer();
    }
    const absl::StatusOr<bool> elsewhere =
        trip_ == nullptr ? false : trip_->GoesOn(failure);
    if (!elsewhere.ok()) {
      End(elsewhere.status());
      return;
    }
    const auto delay = *elsewhere ? absl::ZeroDuration() : DelayAfter(failure);
    {
      absl::MutexLock lock(&mu_);
      if (delay && !cancelled_) {
        // Clears parts of a reply that the failed attempt may have left.
        response_ = Response();
        StartLater(SteadyNow() + *delay);
        return;
      }
    }
    End(failure.status);
  }

  std::optional<absl::Duration> DelayAfter(Failure& failure) {
    failure.answered = options_.answered == nullptr || *options_.answered;
    unanswered_ = failure.retry_after ? 0 : unanswered_ + 1;
    return NextDelay(options_.retry, unanswered_, failure,
                     deadline_ - SteadyNow(), DrawJitter());
  }

  void NoteAnswer() {
    if (options_.answered != nullptr) *options_.answered = true;
  }

  // Releases the connections before the caller gets the result. So if the
  // caller then destroys its client, no channel closes on this thread.
  void End(absl::StatusOr<Reply<Response>> result) ABSL_LOCKS_EXCLUDED(mu_) {
    {
      absl::MutexLock lock(&mu_);
      context_ = nullptr;
    }
    method_ = nullptr;
    trip_ = nullptr;
    done_(std::move(result));
  }

  // Both are null after the last attempt.
  std::shared_ptr<Trip> trip_;
  Method method_;
  const Request request_;
  const CallOptions options_;
  const absl::Time deadline_;
  const Done done_;
  Response response_;   // Only one attempt at a time uses it.
  int unanswered_ = 0;  // Attempts in a row that failed without a hint.

  absl::Mutex mu_;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  // Replaced between attempts and after the last one: callbacks may read it.
  std::unique_ptr<grpc::ClientContext> context_;
  grpc::Alarm alarm_ ABSL_GUARDED_BY(mu_);
};

// A method of a stub's async() interface.
template <typename Methods, typename Request, typename Response>
using AsyncMethod = void (Methods::*)(grpc::ClientContext*, const Request*,
                                      Response*,
                                      std::function<void(grpc::Status)>);

// Returns a call of `method`, which holds the route until its end.
template <typename Methods, typename Request, typename Response>
std::shared_ptr<UnaryCall<Request, Response>> MakeCall(
    std::shared_ptr<Route> route,
    AsyncMethod<Methods, Request, Response> method, Request request,
    CallOptions options, typename UnaryCall<Request, Response>::Done done) {
  const std::shared_ptr<Trip> trip =
      std::make_shared<Trip>(std::move(route), AdapterOf(request));
  auto start = [trip, method](grpc::ClientContext* context, const Request* sent,
                              Response* response,
                              std::function<void(grpc::Status)> end) {
    (trip->Next().async<Methods>()->*method)(context, sent, response,
                                             std::move(end));
  };
  return std::make_shared<UnaryCall<Request, Response>>(
      std::move(start), std::move(request), std::move(options), std::move(done),
      trip);
}

template <typename T>
using Future = std::future<absl::StatusOr<T>>;

// Starts a call of `method` that is no step, and returns its result.
template <typename Methods, typename Request, typename Response>
Future<Reply<Response>> Send(std::shared_ptr<Route> route,
                             AsyncMethod<Methods, Request, Response> method,
                             Request request, CallOptions options) {
  // The callback shares the promise, because the future's owner may go on
  // before set_value returns.
  const auto promise =
      std::make_shared<std::promise<absl::StatusOr<Reply<Response>>>>();
  MakeCall(std::move(route), method, std::move(request), std::move(options),
           [promise](absl::StatusOr<Reply<Response>> reply) {
             promise->set_value(std::move(reply));
           })
      ->Start();
  return promise->get_future();
}

}  // namespace weft::client

#endif  // WEFT_CLIENT_UNARY_CALL_H_
