#include "src/log/record.h"

#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/log/field_codec.h"
#include "src/log/log.pb.h"
#include "src/request/step_fields.h"

namespace weft::log {

void Fields(const auto& f, Is<LoraOverride> auto& layer) {
  f("layer", layer.layer);
  f("module", layer.module);
  f("rank", layer.shape.rank);
  f("alpha", layer.shape.alpha);
}

void Fields(const auto& f, Is<LoraConfig> auto& config) {
  f("rank", config.rank);
  f("alpha", config.alpha);
  f("target_modules", config.target_modules);
  f("seed", config.seed);
  f("overrides", config.overrides);
}

void Fields(const auto& f, Is<DatumResult> auto& datum) {
  f.Raw("logprobs", datum.logprobs);
  f.Raw("losses", datum.losses);
  f.Raw("entropies", datum.entropies);
  f.Raw("routing", datum.routing);
  f("targets_per_token", datum.targets_per_token);
}

void Fields(const auto& f, Is<TrainResult> auto& result) {
  f("data", result.data);
  f("metrics", result.metrics);
  f("step", result.step);
}

void Fields(const auto& f, Is<OptimStepResult> auto& result) {
  f("grad_norm", result.grad_norm);
  f("version", result.version);
  f("step", result.step);
  f("accumulated_tokens", result.accumulated_tokens);
}

void Fields(const auto& f, Is<CheckpointInfo> auto& info) {
  f("adapter_id", info.adapter_id);
  f("name", info.name);
  f("last_step", info.last_step);
  f("optim_steps", info.optim_steps);
  f("optimizer", info.optimizer);
  f("accumulated_tokens", info.accumulated_tokens);
  f("size_bytes", info.size_bytes);
  f("created_at_us", info.created_at);
  f("config", info.config);
  f("kind", info.kind);
  f("metadata", info.metadata);
  f("expires_at_us", info.expires_at);
  f("tenant", info.tenant);
  f("base_model", info.base_model);
  f("base_fingerprint", info.base_fingerprint);
}

void Fields(const auto& f, Is<AdapterInfo> auto& info) {
  f("adapter_id", info.adapter_id);
  f("tenant", info.tenant);
  f("config", info.config);
  f("epoch", info.epoch);
  f("last_step", info.last_step);
  f("next_step", info.next_step);
  f("durable_step", info.durable_step);
  f("optim_steps", info.optim_steps);
  f("optimizer", info.optimizer);
  f("accumulated_tokens", info.accumulated_tokens);
  f("version", info.version);
  f("num_parameters", info.num_parameters);
  f("resident_bytes", info.resident_bytes);
  f("snapshots", info.snapshots);
  f("created_at_us", info.created_at);
  f("last_used_at_us", info.last_used_at);
  f("location", info.location);
}

void Fields(const auto& f, Is<PublishedSnapshot> auto& result) {
  f("name", result.name);
  f("version", result.version);
}

void Fields(const auto& f, Is<StepFailure> auto& failure) {
  absl::StatusCode code = failure.status.code();
  std::string message(failure.status.message());
  f("code", code);
  f("message", message);
  if constexpr (std::decay_t<decltype(f)>::kReads) {
    failure.status = absl::Status(code, message);
  }
}

void Fields(const auto& f, Is<StepResult> auto& result) {
  f.OneOf({"train", "optim", "checkpoint", "adapter", "published", "failure"},
          result);
}

void Fields(const auto& f, Is<StepResultPtr> auto& result) {
  if constexpr (std::decay_t<decltype(f)>::kReads) {
    StepResult read;
    Fields(f, read);
    result = std::make_shared<const StepResult>(std::move(read));
  } else {
    Fields(f, *result);
  }
}

void Fields(const auto& f, Is<StoredReply> auto& reply) {
  f("step", reply.step);
  f("digest", reply.digest);
  f("result", reply.result);
}

void Fields(const auto& f, Is<ImageRecord> auto& image) {
  f("file", image.file);
  f("optim_steps", image.optim_steps);
  f("optimizer", image.optimizer);
  f("accumulated_tokens", image.accumulated_tokens);
  f("versions", image.versions);
  f("snapshots", image.snapshots);
}

void Fields(const auto& f, Is<StoredAdapter> auto& adapter) {
  f("key", adapter.key);
  f("adapter_id", adapter.adapter_id);
  f("tenant", adapter.tenant);
  f("config", adapter.config);
  f("epoch", adapter.epoch);
  f("last_step", adapter.last_step);
  f("next_step", adapter.next_step);
  f("created_at_us", adapter.created_at);
  f("optimizer", adapter.optimizer);
  f("image", adapter.image);
  f("replies", adapter.replies);
}

void Fields(const auto& f, Is<RemovedRecord> auto& removed) {
  f("removed", removed.key);
}

// What the records of steps share.
void StepFields(const auto& f, auto& key, auto& step, auto& digest,
                auto& request) {
  f("adapter", key);
  f("step", step);
  f("digest", digest);
  f("request", request);
}

void Fields(const auto& f, Is<BeginRecord> auto& begin) {
  f("work", begin.work);
  StepFields(f, begin.key, begin.step, begin.digest, begin.request);
}

void Fields(const auto& f, Is<AcceptedRecord> auto& accepted) {
  f("work", accepted.work);
  StepFields(f, accepted.key, accepted.step, accepted.digest, accepted.request);
  f("refused", accepted.refused);
  f("note", accepted.note);
}

void Fields(const auto& f, Is<GivenUpRecord> auto& given_up) {
  f("given_up", given_up.work);
}

void Fields(const auto& f, Is<TrainSlice> auto& slice) {
  f("work", slice.work_id);
  f("first_datum", slice.first_datum);
  f("num_data", slice.num_data);
  f("last", slice.last);
}

void Fields(const auto& f, Is<BatchRecord> auto& batch) {
  f("slices", batch.slices);
}

void Fields(const auto& f, Is<DoneRecord> auto& done) {
  StepFields(f, done.key, done.step, done.digest, done.request);
  f("result", done.result);
  f("accepted", done.accepted);
  f("again", done.again);
}

void Fields(const auto& f, Is<LoadedRecord> auto& loaded) {
  StepFields(f, loaded.key, loaded.step, loaded.digest, loaded.request);
  f("file", loaded.file);
  f("optim_steps", loaded.optim_steps);
  f("last_step", loaded.last_step);
  f("accepted", loaded.accepted);
  f("optimizer", loaded.optimizer);
  f("accumulated_tokens", loaded.accumulated_tokens);
}

void Fields(const auto& f, Is<ReleaseRecord> auto& release) {
  f("adapter", release.key);
  f("name", release.name);
}

void Fields(const auto& f, Is<NoteRecord> auto& note) {
  f("name", note.name);
  f("value", note.value);
}

void Fields(const auto& f, Is<SettingsRecord> auto& settings) {
  f("settings", settings.settings);
}

void Fields(const auto& f, Is<ArrivingRecord> auto& arriving) {
  f("adapters", arriving.adapters);
  f("from", arriving.from);
  f("entry", arriving.entry);
  f("unit", arriving.unit);
  f("notes", arriving.notes);
}

void Fields(const auto& f, Is<MoveRecord> auto& move) {
  f("unit", move.unit);
  f("stage", move.stage);
  f("to", move.to);
  f("entry", move.entry);
}

void Fields(const auto& f, Is<Record> auto& record) {
  f.OneOf({"adapter", "removed", "begin", "given_up", "batch", "done", "loaded",
           "release", "settings", "note", "accepted", "arriving", "moving"},
          record);
}

namespace {

// Protobuf stores the size of a message in an int.
constexpr size_t kMaxMessageBytes = std::numeric_limits<int>::max();

bool Parse(absl::string_view bytes, google::protobuf::MessageLite* out) {
  return bytes.size() <= kMaxMessageBytes &&
         out->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
}

}  // namespace

std::optional<AdapterKey> KeyOf(const Record& record) {
  return std::visit(
      [](const auto& kind) -> std::optional<AdapterKey> {
        if constexpr (requires { kind.key; }) return kind.key;
        return std::nullopt;
      },
      record);
}

std::string Encode(const Record& record) {
  proto::Record out;
  Fields(Writer(&out), record);
  return out.SerializeAsString();
}

std::string EncodeBegin(uint64_t work, AdapterKey key, uint64_t step,
                        const std::string& digest, const StepRequest& request) {
  proto::Record out;
  const Writer begin(out.mutable_begin());
  begin("work", work);
  StepFields(begin, key, step, digest, request);
  return out.SerializeAsString();
}

std::string EncodePlace(uint64_t work, AdapterKey key) {
  proto::Record out;
  out.mutable_accepted()->set_work(work);
  out.mutable_accepted()->set_adapter(static_cast<uint64_t>(key));
  return out.SerializeAsString();
}

std::string EncodeNote(const std::string& name, const std::string* value) {
  proto::Record out;
  out.mutable_note()->set_name(name);
  if (value != nullptr) out.mutable_note()->set_value(*value);
  return out.SerializeAsString();
}

absl::StatusOr<std::string> Encode(const Snapshot& snapshot) {
  proto::Snapshot out;
  out.set_next_key(snapshot.next_key);
  out.set_last_epoch(snapshot.last_epoch);
  for (const StoredAdapter& adapter : snapshot.adapters) {
    Fields(Writer(out.add_adapters()), adapter);
  }
  for (const AcceptedRecord& accepted : snapshot.accepted) {
    Fields(Writer(out.add_accepted()), accepted);
  }
  for (const auto& [name, value] : snapshot.notes) {
    proto::Note* const note = out.add_notes();
    note->set_name(name);
    note->set_value(*value);
  }
  if (out.ByteSizeLong() > kMaxMessageBytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "stored replies and notes make a snapshot of ", out.ByteSizeLong(),
        " bytes, the limit is ", kMaxMessageBytes,
        "; lower --max-stored-reply-bytes or --sample-record-bytes, or let "
        "accepted steps end"));
  }
  return out.SerializeAsString();
}

absl::StatusOr<Record> DecodeRecord(absl::string_view bytes) {
  proto::Record in;
  if (!Parse(bytes, &in)) {
    return absl::DataLossError("cannot decode a record");
  }
  Record record;
  absl::Status status;
  Fields(Reader(in, &status), record);
  if (!status.ok()) return status;
  return record;
}

absl::StatusOr<Snapshot> DecodeSnapshot(absl::string_view bytes) {
  proto::Snapshot in;
  if (!Parse(bytes, &in)) {
    return absl::DataLossError("cannot decode the snapshot");
  }
  Snapshot snapshot{.next_key = in.next_key(),
                    .last_epoch = in.last_epoch(),
                    .adapters = {},
                    .notes = {},
                    .accepted = {}};
  absl::Status status;
  const Reader reader(in, &status);
  reader("adapters", snapshot.adapters);
  reader("accepted", snapshot.accepted);
  if (!status.ok()) return status;
  for (proto::Note& note : *in.mutable_notes()) {
    snapshot.notes[note.name()] =
        std::make_shared<const std::string>(std::move(*note.mutable_value()));
  }
  return snapshot;
}

}  // namespace weft::log
