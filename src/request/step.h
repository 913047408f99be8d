// A step: a call that trains or scores data, or that saves, loads or publishes
// an adapter. The alternatives of StepRequest and of StepResult are in the same
// order. The last of StepResult, StepFailure, may answer any request.
//
// `charge` holds the bytes of a request (request_bytes.h) in its caller's
// account of memory, as long as the request exists. Once it is held, the step
// is sure to have a result, whatever becomes of its caller's connection.
#ifndef WEFT_SRC_REQUEST_STEP_H_
#define WEFT_SRC_REQUEST_STEP_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/request/adapter.h"
#include "src/request/checkpoint.h"
#include "src/request/reply.h"
#include "src/request/train.h"

namespace weft {

// The result of a PublishSnapshotRequest.
struct PublishedSnapshot {
  std::string name;
  uint64_t version = 0;
};

// The result of an accepted step that failed. The step keeps its number, and
// `status` is its stored reply.
struct StepFailure {
  absl::Status status;
};

// A step that fails in its turn without running: its request was invalid, or
// its deadline has passed.
struct RefusedStep {
  std::string adapter_id;
  uint64_t step = 0;
  uint64_t epoch = 0;
  absl::Time deadline = absl::InfiniteFuture();
  std::shared_ptr<void> charge = nullptr;
  // PayloadDigest of the payload that was refused, or a text of its own.
  std::string digest;
  absl::Status status;
};

using StepRequest =
    std::variant<TrainRequest, OptimStepRequest, SaveCheckpointRequest,
                 LoadCheckpointRequest, PublishSnapshotRequest, RefusedStep>;
using StepResult = std::variant<TrainResult, OptimStepResult, CheckpointInfo,
                                AdapterInfo, PublishedSnapshot, StepFailure>;

// A step's result, immutable. The stored reply and all callers share it.
using StepResultPtr = std::shared_ptr<const StepResult>;

// Gets the result of a step, exactly once, and whether it is that of an
// earlier, equal call. The result of an accepted step that failed is a
// StepFailure; an error means that the step has no result.
using StepCallback =
    std::function<void(absl::StatusOr<StepResultPtr>, bool replayed)>;

// Has a step kept: its request is on disk before it runs, and if this process
// ends before the step, the next one runs it.
struct KeepStep {
  // What the caller keeps with the step until its end.
  std::string note;
  // Runs once when the step is on disk, before its StepCallback, or when it is
  // accepted if its adapter is not on disk. Does not run if the step is not
  // accepted. Empty: the step is not kept.
  std::function<void()> kept = nullptr;
};

// A kept step of an earlier process.
struct KeptStep {
  std::string adapter_id;
  uint64_t step = 0;
  std::string note;
  int64_t bytes = 0;  // Of the request (request_bytes.h).
};

// Adapts `done`, which gets the alternative of StepResult that it expects, or
// the whole result if it expects a StepResultPtr. If the step failed, it gets
// the status of the StepFailure; if there is no result, the error.
template <typename Result>
StepCallback TypedReply(Callback<StepReply<Result>> done) {
  return [done = std::move(done)](absl::StatusOr<StepResultPtr> result,
                                  bool replayed) {
    if (!result.ok()) return done(result.status());
    if (const auto* failure = std::get_if<StepFailure>(result->get())) {
      absl::Status status = failure->status;
      status.SetPayload(kStepDonePayload, {});
      if (replayed) status.SetPayload(kReplayedPayload, {});
      done(status);
      return;
    }
    if constexpr (std::is_same_v<Result, StepResultPtr>) {
      done(StepReply<Result>{.result = *result, .replayed = replayed});
    } else {
      done(StepReply<Result>{.result = std::get<Result>(**result),
                             .replayed = replayed});
    }
  };
}

const std::string& AdapterIdOf(const StepRequest& request);
// Returns the step number that the caller chose, or 0 if it chose none.
uint64_t StepOf(const StepRequest& request);
// Returns the adapter epoch that the caller named. 0 means the present epoch.
uint64_t EpochOf(const StepRequest& request);
absl::Time DeadlineOf(const StepRequest& request);
const std::shared_ptr<void>& ChargeOf(const StepRequest& request);
// Returns the result of an accepted step that ended with `result`: an error is
// a StepFailure. But UNAVAILABLE, which says that the server stops, stays an
// error: then the step has no result.
absl::StatusOr<StepResult> StoredResult(absl::StatusOr<StepResult> result);
// Returns the index of the request's type (one byte) and the SHA-256 (32 bytes)
// of the fields that decide what a numbered step does. It tells a repeated call
// from another call with the same number. Version 0.1 stored a SHA-256 alone,
// of other bytes. Step, epoch and deadline are not among the fields.
// Floats are hashed by their bits. Takes time linear in the bytes.
std::string PayloadDigest(const StepRequest& request);

// Returns roughly how many bytes of memory the result takes.
int64_t NumBytes(const StepResult& result);

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_STEP_H_
