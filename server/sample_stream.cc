#include "server/sample_stream.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "server/call.h"
#include "server/cancel_slot.h"
#include "server/response_conversion.h"
#include "src/base/mutex.h"

namespace weft {
namespace {

size_t NumValues(const v1::SampleStreamResponse& message) {
  auto values = static_cast<size_t>(message.tokens_size());
  for (const v1::TopLogprobs& top : message.top_logprobs()) {
    values += static_cast<size_t>(top.tokens_size());
  }
  return values;
}

// Ownership: shared by gRPC (until OnDone) and the engine's two callbacks.
class SampleStreamCall final
    : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  SampleStreamCall(ServiceCore* core, grpc::CallbackServerContext* context)
      : record_(core, context, Rpc::kSampleStream) {}

  static SampleStreamCall* Start(ServiceCore* core,
                                 grpc::CallbackServerContext* context,
                                 const grpc::ByteBuffer* bytes) {
    const auto call = std::make_shared<SampleStreamCall>(core, context);
    call->self_ = call;
    call->record_.CountReceived();
    v1::SampleStreamRequest request;
    const auto charge = call->record_.Parse(bytes, &request);
    if (!charge.ok()) {
      call->End(charge.status());
      return call.get();
    }
    const absl::Status refused = call->record_.Begin(
        request.request(), [&call](Engine& engine, SampleRequest plain) {
          call->cancel_.Set(engine.Sample(
              std::move(plain),
              [call = call](const SampleDelta& delta) { call->Add(delta); },
              [call = call](const absl::StatusOr<SampleResult>& result) {
                call->End(result.status());
              }));
        });
    if (!refused.ok()) call->End(refused);
    return call.get();
  }

 private:
  void Add(const SampleDelta& delta) ABSL_LOCKS_EXCLUDED(mu_) {
    v1::SampleStreamResponse message;
    ToProto(delta, &message);
    bool too_slow = false;
    {
      MutexLock lock(&mu_);
      if (dropped_) return;
      waiting_values_ += NumValues(message);
      const auto same = std::find_if(
          waiting_.begin(), waiting_.end(), [&message](const auto& other) {
            return other.sample_index() == message.sample_index();
          });
      if (same == waiting_.end()) {
        waiting_.push_back(std::move(message));
      } else {
        same->MergeFrom(message);
      }
      too_slow = waiting_values_ > kMaxWaitingValues;
      if (too_slow) Drop();
    }
    // Without TryCancel, a write that the slow client blocks would not end.
    if (too_slow) record_.context()->TryCancel();
    Pump();
  }

  // Ends the call with `status`. If `status` is OK, the waiting messages are
  // sent first. Otherwise they are dropped.
  void End(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_) {
    {
      MutexLock lock(&mu_);
      if (!status.ok()) Drop();
      outcome_ = status;
    }
    Pump();
  }

  // Sends the next message. If no message waits and End has run, sends the
  // status. Does nothing while a write runs.
  void Pump() ABSL_LOCKS_EXCLUDED(mu_) {
    v1::SampleStreamResponse message;
    bool is_last = false;
    absl::Status outcome;
    {
      MutexLock lock(&mu_);
      if (busy_) return;
      is_last = waiting_.empty();
      if (is_last) {
        if (!outcome_.has_value()) return;
        outcome = *outcome_;
      } else {
        message = std::move(waiting_.front());
        waiting_.pop_front();
        waiting_values_ -= NumValues(message);
      }
      busy_ = true;  // Stays true after the status, which is the last write.
    }
    record_.AwaitClient();
    if (is_last) {
      Finish(record_.Close(outcome));
    } else {
      record_.CountSent();
      bytes_ = ToBytes(message);
      StartWrite(&bytes_);
    }
  }

  void Drop() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    dropped_ = true;
    waiting_.clear();
    waiting_values_ = 0;
  }

  void OnWriteDone(bool ok) override {
    record_.StopAwaiting();
    {
      MutexLock lock(&mu_);
      busy_ = false;
      if (!ok) Drop();
    }
    if (!ok) cancel_.Cancel();
    Pump();
  }

  void OnCancel() override { cancel_.Cancel(); }

  void OnDone() override {
    cancel_.Clear();
    record_.Release();
    const std::shared_ptr<SampleStreamCall> self = std::move(self_);
  }

  CallRecord record_;
  CancelSlot cancel_;
  Mutex mu_;
  std::deque<v1::SampleStreamResponse> waiting_ ABSL_GUARDED_BY(mu_);
  size_t waiting_values_ ABSL_GUARDED_BY(mu_) = 0;
  bool dropped_ ABSL_GUARDED_BY(mu_) = false;  // New messages are dropped.
  bool busy_ ABSL_GUARDED_BY(mu_) = false;     // A write or Finish is running.
  std::optional<absl::Status> outcome_ ABSL_GUARDED_BY(mu_);
  grpc::ByteBuffer bytes_;  // Belongs to gRPC while busy_.
  std::shared_ptr<SampleStreamCall> self_;
};

}  // namespace

grpc::ServerWriteReactor<grpc::ByteBuffer>* StartSampleStream(
    ServiceCore* core, grpc::CallbackServerContext* context,
    const grpc::ByteBuffer* request) {
  return SampleStreamCall::Start(core, context, request);
}

}  // namespace weft
