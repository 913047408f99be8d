// The records of the log in --state-dir: changes of adapters, in the order in
// which the engine thread made them. To restore the adapters, a starting server
// reads the snapshot and replays the log.
//
// A training request with gradients has a BeginRecord and a BatchRecord for
// each micro-batch. A request without its last BatchRecord has no effect. A
// replay still computes its batches, so that the batches' other requests get
// the same numbers. A completed step of another kind has a DoneRecord, or a
// LoadedRecord if it loads state into an existing adapter.
//
// A step that is accepted before it runs has an AcceptedRecord, which is in the
// place of the request in all later records of the step. If it has not ended at
// the end of the log, the next process runs it.
//
// A unit (src/request/move_unit.h) that goes from one log to another has a
// MoveRecord in the first and an ArrivingRecord in the second, and then in each
// one that says how the move ended there. A move without its end is open: the
// next process ends it, by the unit's entry in the directory. No snapshot
// begins meanwhile.
#ifndef WEFT_SRC_LOG_RECORD_H_
#define WEFT_SRC_LOG_RECORD_H_

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
#include "src/request/note.h"
#include "src/request/step.h"
#include "src/request/step_task.h"

namespace weft::log {

// An image: a file of the state folder with an adapter's gradient, first and
// second moment, and then the weights of each version.
struct ImageRecord {
  std::string file;
  uint64_t optim_steps = 0;
  Optimizer optimizer = Optimizer::kAdamW;
  uint64_t accumulated_tokens = kUncountedTokens;
  std::vector<uint64_t> versions;             // Version numbers, latest first.
  std::map<std::string, uint64_t> snapshots;  // Maps a name to a version.
};

// The blocks of an image before the weights: gradient and two moments.
inline constexpr size_t kStateBlocks = 3;

// A new adapter, with initial weights or with the state of a checkpoint or of
// an imported folder. In a snapshot: an adapter that exists.
struct StoredAdapter {
  AdapterKey key = AdapterKey::kBaseModel;
  std::string adapter_id;
  std::string tenant;
  LoraConfig config;
  uint64_t epoch = 0;
  uint64_t last_step = 0;  // The steps that the state has.
  uint64_t next_step = 1;  // The number of the next new step.
  absl::Time created_at;
  // Without an image: the one for which the adapter was made.
  Optimizer optimizer = Optimizer::kAdamW;
  std::optional<ImageRecord> image;  // None: the weights are initial.
  std::vector<StoredReply> replies;  // Sorted by step.
};

struct RemovedRecord {
  AdapterKey key = AdapterKey::kBaseModel;
};

// The start of a training request with gradients, before its BatchRecords.
struct BeginRecord {
  uint64_t work = 0;  // The request's id in later batches.
  AdapterKey key = AdapterKey::kBaseModel;
  uint64_t step = 0;
  std::string digest;
  StepRequest request;
};

// A numbered step that runs even if this process ends before (KeepStep).
using AcceptedRecord = AcceptedStep;

// A request that has begun and will not complete. An accepted step may begin
// again.
struct GivenUpRecord {
  uint64_t work = 0;
};

// A micro-batch that computed gradients and succeeded.
struct BatchRecord {
  std::vector<TrainSlice> slices;
};

// A completed step, except loads that succeeded and training with gradients.
struct DoneRecord {
  AdapterKey key = AdapterKey::kBaseModel;
  uint64_t step = 0;  // 0 if the step has no number.
  std::string digest;
  std::optional<StepRequest> request;  // None: a replay does not run the step.
  StepResult result;
  // AcceptedRecord::work, or 0. An accepted step has no digest and no request
  // here, but `again` if a replay runs it.
  uint64_t accepted = 0;
  bool again = false;
};

// A load that replaced the state of an existing adapter. The image `file` has
// one version: a copy of the checkpoint.
struct LoadedRecord {
  AdapterKey key = AdapterKey::kBaseModel;
  uint64_t step = 0;
  std::string digest;
  std::optional<StepRequest> request;  // Set unless `accepted` is.
  std::string file;
  uint64_t optim_steps = 0;
  uint64_t last_step = 0;  // The steps that the state has.
  uint64_t accepted = 0;   // As in DoneRecord.
  Optimizer optimizer = Optimizer::kAdamW;
  uint64_t accumulated_tokens = kUncountedTokens;
};

struct ReleaseRecord {
  AdapterKey key = AdapterKey::kBaseModel;
  std::string name;
};

// A note (src/request/note.h). Without a value, the note is erased.
struct NoteRecord {
  std::string name;
  std::optional<std::string> value;
};

// A copy of a unit of the log `from`, whose adapters have keys and images of
// this log. It is this log's if the directory's entry of version `entry` is
// replaced by one of this log.
struct ArrivingRecord {
  std::string unit;
  std::vector<StoredAdapter> adapters;
  std::vector<NoteRecord> notes;
  int from = 0;
  std::string entry;
};

// The stages of a move. The log stores these numbers.
enum class MoveStage : uint8_t {
  kLeaving,  // Of this log's unit to the log `to`. Nothing changes it.
  kStayed,   // The unit has not left.
  kOwn,      // The arriving unit is this log's.
  kDropped,  // The arriving unit has stayed where it was.
  kLeft,     // The unit's adapters and notes are no longer this log's.
};

struct MoveRecord {
  std::string unit;
  MoveStage stage = MoveStage::kLeaving;
  int to = 0;         // Of kLeaving, as is `entry`, the version of the unit's
  std::string entry;  // entry in the directory.
};

// The settings that change the bits of later results, such as the device, the
// number of threads and the CPU's instructions. A SettingsRecord is the first
// record of every segment (file) of the log.
struct SettingsRecord {
  std::string settings;
};

using Record =
    std::variant<StoredAdapter, RemovedRecord, BeginRecord, GivenUpRecord,
                 BatchRecord, DoneRecord, LoadedRecord, ReleaseRecord,
                 SettingsRecord, NoteRecord, AcceptedRecord, ArrivingRecord,
                 MoveRecord>;

// All adapters, notes and accepted steps at one point of the log.
struct Snapshot {
  // The sequence of the first record that the snapshot does not contain. The
  // name of the file has it.
  uint64_t first_sequence = 1;
  uint64_t next_key = 1;
  uint64_t last_epoch = 0;
  std::vector<StoredAdapter> adapters;
  Notes notes;
  std::vector<AcceptedRecord> accepted;
};

// Returns the record's field `key`, or none if records of its kind do not have
// this field.
std::optional<AdapterKey> KeyOf(const Record& record);

std::string Encode(const Record& record);
// Errors: RESOURCE_EXHAUSTED beyond 2 GiB, the limit of a Protobuf message.
absl::StatusOr<std::string> Encode(const Snapshot& snapshot);
// Encodes a BeginRecord with these fields without copying the request.
std::string EncodeBegin(uint64_t work, AdapterKey key, uint64_t step,
                        const std::string& digest, const StepRequest& request);
// Encodes `work` and `key` of an AcceptedRecord. These bytes behind those of a
// record that has neither make the whole record, because Protobuf merges
// messages that follow each other.
std::string EncodePlace(uint64_t work, AdapterKey key);
// Encodes a NoteRecord without copying the value first. Null erases the note.
std::string EncodeNote(const std::string& name, const std::string* value);
// Errors: DATA_LOSS for bytes that are not a record of this version.
absl::StatusOr<Record> DecodeRecord(absl::string_view bytes);
absl::StatusOr<Snapshot> DecodeSnapshot(absl::string_view bytes);

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_RECORD_H_
