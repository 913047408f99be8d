// The records of the log in --state-dir: every change of an adapter, in the
// order in which the engine thread made it. A start that loads the snapshot and
// replays the log restores the same adapters.
//
// A training step has a BeginRecord with its payload, and a BatchRecord for
// each micro-batch with its data. If the last batch is missing, the request did
// not happen. It is replayed nevertheless, so that other requests in its
// batches compute the same numbers. Any other step is a DoneRecord.
#ifndef WEFT_SRC_RECORDS_RECORD_H_
#define WEFT_SRC_RECORDS_RECORD_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "src/request/adapter_key.h"
#include "src/request/step.h"
#include "src/sched/work.h"

namespace weft::records {

// The file in the state folder that holds an adapter's tensors: gradient, first
// and second moment, then the weights of each version.
struct ImageRecord {
  std::string file;
  uint64_t optim_steps = 0;
  std::vector<uint64_t> versions;             // Version numbers, latest first.
  std::map<std::string, uint64_t> snapshots;  // Maps a name to a version.
};

// The blocks of an image other than weights: gradient and two moments.
inline constexpr size_t kStateBlocks = 3;

struct ReplyRecord {
  uint64_t step = 0;
  std::string digest;
  StepResult result;
};

// A new adapter, with initial weights or with the state of a checkpoint or of
// an imported folder. In a snapshot it is an existing adapter.
struct AdapterRecord {
  AdapterKey key = AdapterKey::kBaseModel;
  std::string adapter_id;
  std::string tenant;
  LoraConfig config;
  uint64_t epoch = 0;
  uint64_t last_step = 0;
  absl::Time created_at;
  std::optional<ImageRecord> image;   // None: initial weights, as in
                                      // CreateAdapter.
  std::vector<ReplyRecord> replies;   // By step.
  std::optional<ReplyRecord> origin;  // The load that began the epoch.
  // The adapter has durability checkpoint: a start loads it as `restore` says.
  // The log has no steps of it but saves and loads.
  bool from_checkpoint = false;
  std::optional<LoadCheckpointRequest> restore;  // None: it has no checkpoint.
};

struct RemovedRecord {
  AdapterKey key = AdapterKey::kBaseModel;
};

// A training request. The record precedes those of the request's micro-batches.
struct BeginRecord {
  uint64_t work = 0;  // The request's id in later batches.
  AdapterKey key = AdapterKey::kBaseModel;
  uint64_t step = 0;
  std::string digest;
  StepRequest request;
};

// A request that began and will not complete.
struct GivenUpRecord {
  uint64_t work = 0;
};

// A micro-batch with gradients that succeeded. A request without gradients has
// a DoneRecord instead.
struct BatchRecord {
  std::vector<sched::TrainSlice> slices;
};

// A completed step.
struct DoneRecord {
  AdapterKey key = AdapterKey::kBaseModel;
  uint64_t step = 0;  // 0 if the step has no number.
  std::string digest;
  std::optional<StepRequest> request;  // Set only if the step must run again.
  StepResult result;
};

// A load replaced the state of an existing adapter. The file holds a copy of
// the checkpoint as an image of one version; there is none if the adapter has
// durability checkpoint.
struct LoadedRecord {
  AdapterKey key = AdapterKey::kBaseModel;
  uint64_t step = 0;
  std::string digest;
  StepRequest request;
  std::string file;
  uint64_t optim_steps = 0;
  uint64_t last_step = 0;  // Steps count on from this number.
  uint64_t epoch = 0;
};

struct ReleaseRecord {
  AdapterKey key = AdapterKey::kBaseModel;
  std::string name;
};

// The settings on which the bits of later results depend, besides the requests:
// threads, instructions, sizes of pieces. It is the first record of every
// segment.
struct SettingsRecord {
  std::string settings;
};

using Record = std::variant<AdapterRecord, RemovedRecord, BeginRecord,
                            GivenUpRecord, BatchRecord, DoneRecord,
                            LoadedRecord, ReleaseRecord, SettingsRecord>;

// Says which record is the adapter's latest one before the marked record.
struct Mark {
  AdapterKey key = AdapterKey::kBaseModel;
  uint64_t last = 0;  // Its sequence; 0 = none.
  std::string name;   // The adapter's id; only in a census.
};

// What a record tells about earlier ones. If some of those are lost, the trails
// of later records tell whose they were (damage.h).
struct Trail {
  std::vector<Mark> marks;                  // The adapters that it changes.
  std::optional<std::vector<Mark>> census;  // All adapters before the record.
};

// All adapters at one point of the log.
struct Snapshot {
  uint64_t next_key = 1;
  uint64_t last_epoch = 0;
  std::vector<AdapterRecord> adapters;
};

// Returns the adapter that the record changes; none for records that name no
// adapter.
[[nodiscard]] std::optional<AdapterKey> KeyOf(const Record& record);

[[nodiscard]] std::string Encode(const Record& record);
// Returns bytes that, after those of a record, give the record this trail.
[[nodiscard]] std::string Encode(const Trail& trail);
// Errors: RESOURCE_EXHAUSTED beyond 2 GiB, the limit of a Protobuf message.
[[nodiscard]] absl::StatusOr<std::string> Encode(const Snapshot& snapshot);
// Encodes a BeginRecord without copying the request.
[[nodiscard]] std::string EncodeBegin(uint64_t work, AdapterKey key,
                                      uint64_t step, const std::string& digest,
                                      const StepRequest& request);
// Stores the record's trail in `trail` unless it is null. Errors: DATA_LOSS for
// bytes that are not a record of this version.
[[nodiscard]] absl::StatusOr<Record> DecodeRecord(absl::string_view bytes,
                                                  Trail* trail = nullptr);
[[nodiscard]] absl::StatusOr<Snapshot> DecodeSnapshot(absl::string_view bytes);

}  // namespace weft::records

#endif  // WEFT_SRC_RECORDS_RECORD_H_
