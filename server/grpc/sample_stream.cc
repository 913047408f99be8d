#include <algorithm>
#include <deque>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "server/grpc/services.h"
#include "server/wire/response_conversion.h"
#include "src/base/threads/mutex.h"
#include "weft/v1/sampling.pb.h"

namespace weft::server {
namespace {

// The most tokens and top-logprob entries that may wait for a slow client,
// about 8 bytes each.
constexpr size_t kMaxWaitingValues = 1 << 20;

size_t NumValues(const v1::SampleStreamResponse& message) {
  auto values = static_cast<size_t>(message.tokens_size());
  for (const v1::TopLogprobs& top : message.top_logprobs()) {
    values += static_cast<size_t>(top.tokens_size());
  }
  return values;
}

// Appends `more` to `message`. Joins the spans of one version that meet.
void Append(const v1::SampleStreamResponse& more,
            v1::SampleStreamResponse* message) {
  const int end = message->version_spans_size();
  message->MergeFrom(more);
  auto* const spans = message->mutable_version_spans();
  if (end == 0 || end == spans->size() ||
      spans->at(end - 1).version() != spans->at(end).version()) {
    return;
  }
  v1::VersionSpan& last = (*spans)[end - 1];
  last.set_tokens(last.tokens() + spans->at(end).tokens());
  spans->DeleteSubrange(end, 1);
}

class SampleStreamCall final : public RequestReactor<v1::SampleStreamRequest> {
 public:
  using RequestReactor::RequestReactor;

 private:
  void Run(const v1::SampleStreamRequest& request) override {
    const absl::Status refused = record().Begin(
        request.request(), [this](engine::Engine& engine, SampleRequest plain) {
          SetCancel(engine.Sample(
              std::move(plain),
              [this, call = self()](const SampleDelta& delta) { Add(delta); },
              [this,
               call = self()](const absl::StatusOr<SampleResult>& result) {
                Close(result.status());
              }));
        });
    if (!refused.ok()) Close(refused);
  }

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
        Append(message, &*same);
      }
      too_slow = waiting_values_ > kMaxWaitingValues;
      if (too_slow) Drop();
    }
    // Without TryCancel, a write that the slow client blocks would not end.
    if (too_slow) record().context()->TryCancel();
    Pump();
  }

  // Ends the call with `status`. If it is OK, the waiting messages are
  // sent first. Otherwise they are dropped.
  void Close(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_) {
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
    is_last ? End(outcome) : Write(message);
  }

  void Drop() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    dropped_ = true;
    waiting_.clear();
    waiting_values_ = 0;
  }

  void OnWriteDone(bool ok) override {
    record().StopAwaiting();
    {
      MutexLock lock(&mu_);
      busy_ = false;
      if (!ok) Drop();
    }
    if (!ok) Cancel();
    Pump();
  }

  Mutex mu_;
  std::deque<v1::SampleStreamResponse> waiting_ ABSL_GUARDED_BY(mu_);
  size_t waiting_values_ ABSL_GUARDED_BY(mu_) = 0;
  bool dropped_ ABSL_GUARDED_BY(mu_) = false;  // New messages are dropped.
  bool busy_ ABSL_GUARDED_BY(mu_) = false;     // A write or Finish is running.
  std::optional<absl::Status> outcome_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

void AddSampleStream(RawService* service) {
  service->Add<SampleStreamCall>(Rpc::kSampleStream);
}

}  // namespace weft::server
